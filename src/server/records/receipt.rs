//! Receipts: signed statements about which model, build and options computed the answers to a request.
//!
//! A receipt is a JSON Web Signature (RFC 7515) in compact form, `HEADER.PAYLOAD.SIGNATURE`.
//! The signature algorithm is Ed25519 (RFC 8037).
//! A receipt contains the token counts and the hashes of prompts and answers, but no token ids,
//! which are only in the record of the request.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use ring::digest::{Context as Hash, SHA256};
use serde::{Deserialize, Serialize};

use super::receipt_key::{PublicKey, ReceiptKey};
use crate::engine::{EngineRecord, GenerationRecord, RecordedAnswer, RecordedRequest, SamplingParams};

/// The JWS header of every receipt. A receipt with any other header, such as one with another algorithm, is rejected.
const HEADER: &str = r#"{"alg":"EdDSA","typ":"inferno-receipt"}"#;

/// The version of the receipt format.
const VERSION: u32 = 1;

/// The payload of a receipt. All hashes are SHA-256 in hexadecimal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    version: u32,
    /// The id of the request. The client can choose the id.
    pub id: String,
    /// The time at which the record was created, after its answers had ended, in the format of RFC 3339.
    pub created: String,
    pub model: String,
    pub revision: Option<String>,
    /// The hash of each model file, computed while the server loaded the model.
    /// The model files are the weights, the tokenizer, the configuration and the chat template.
    pub files: BTreeMap<String, String>,
    /// The chat format: `harmony`, which is built in, or the name of the chat template's file.
    /// `None` if the model has no chat format.
    pub chat_format: Option<String>,
    pub engine: EngineRecord,
    /// One entry for each prompt.
    pub requests: Vec<RequestReceipt>,
    /// The message of the error that ended the request. `None` if the request succeeded or was canceled.
    pub error: Option<String>,
    /// The hash of the record in the JSON form that `GET /v1/records/{id}` returns and `--record` writes.
    /// The record contains the options that affect the choice of tokens, but not `max_tokens` and the stop strings.
    pub record_sha256: String,
}

/// The part of a receipt about one prompt and its answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestReceipt {
    pub prompt: TokensReceipt,
    /// The sampling parameters, including the seed. Answer number i (from 0) uses the seed plus i.
    pub sampling: SamplingParams,
    pub answers: Vec<AnswerReceipt>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AnswerReceipt {
    #[serde(flatten)]
    pub tokens: TokensReceipt,
    pub finish: String,
}

/// The number of token ids, and the SHA-256 of the ids as little-endian 32-bit unsigned integers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokensReceipt {
    pub tokens: usize,
    pub sha256: String,
}

impl Receipt {
    /// Creates the receipt of a record. `files` are the hashes of the model's files.
    pub fn new(
        record: &GenerationRecord,
        files: BTreeMap<String, String>,
        chat_format: Option<String>,
    ) -> Result<Self> {
        let answer = |answer: &RecordedAnswer| AnswerReceipt {
            tokens: TokensReceipt::new(&answer.tokens),
            finish: answer.finish.clone(),
        };
        let request = |recorded: &RecordedRequest| RequestReceipt {
            prompt: TokensReceipt::new(&recorded.request.prompt),
            sampling: recorded.request.sampling.clone(),
            answers: recorded.answers.iter().map(answer).collect(),
        };
        Ok(Self {
            version: VERSION,
            id: record.id.clone(),
            created: record.created.clone(),
            model: record.model.clone(),
            revision: record.revision.clone(),
            files,
            chat_format,
            engine: record.engine.clone(),
            requests: record.requests.iter().map(request).collect(),
            error: record.error.clone(),
            record_sha256: sha256([serde_json::to_vec(record)?]),
        })
    }

    /// Returns the receipt as a signed JWS.
    pub fn sign(&self, key: &ReceiptKey) -> Result<String> {
        let mut text = format!("{}.{}", BASE64.encode(HEADER), BASE64.encode(serde_json::to_vec(self)?));
        let signature = BASE64.encode(key.sign(text.as_bytes()));
        text.push('.');
        text.push_str(&signature);
        Ok(text)
    }

    /// Verifies a signed receipt and returns its payload.
    /// Fails if the receipt was changed, was signed with another key, or has another format or version.
    pub fn verify(signed: &str, key: &PublicKey) -> Result<Self> {
        let parts = || {
            let (message, signature) = signed.rsplit_once('.')?;
            let (header, payload) = message.split_once('.')?;
            Some((message, BASE64.decode(header).ok()?, BASE64.decode(payload).ok()?, BASE64.decode(signature).ok()?))
        };
        let (message, header, payload, signature) = parts().context("the file is not a receipt of inferno")?;
        ensure!(header == HEADER.as_bytes(), "the file is not a receipt of inferno");
        ensure!(key.verifies(message.as_bytes(), &signature), "the receipt was changed, or signed with another key");
        let receipt: Self = serde_json::from_slice(&payload).context("the payload of the receipt is invalid")?;
        match receipt.version {
            VERSION => Ok(receipt),
            other => bail!("the receipt has version {other}, but this build reads version {VERSION}"),
        }
    }

    /// Returns whether the receipt belongs to a record. `record` is the exact JSON of the record.
    pub fn matches_record(&self, record: &[u8]) -> bool {
        sha256([record]) == self.record_sha256
    }
}

impl TokensReceipt {
    fn new(ids: &[u32]) -> Self {
        Self { tokens: ids.len(), sha256: sha256(ids.iter().map(|id| id.to_le_bytes())) }
    }
}

/// Returns the SHA-256 of the concatenated pieces in hexadecimal.
fn sha256(pieces: impl IntoIterator<Item = impl AsRef<[u8]>>) -> String {
    let mut hash = Hash::new(&SHA256);
    pieces.into_iter().for_each(|piece| hash.update(piece.as_ref()));
    hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A receipt in which every field has a value.
    fn receipt() -> Receipt {
        let sampling = serde_json::to_value(SamplingParams::greedy()).unwrap();
        let tokens = json!({ "tokens": 3, "sha256": "ab", "finish": "stop" });
        let value = json!({
            "version": 1, "id": "req-1", "created": "2026-11-24T20:00:00Z", "model": "demo", "revision": "0123",
            "files": { "model.safetensors": "cd" }, "chat_format": "harmony",
            "engine": {
                "build": "0.1.0", "device": "CPU", "dtype": "F32", "quantization": "q", "attention": "a", "executor": "e",
                "context": 1, "chunk": 2, "deterministic": true,
            },
            "requests": [{ "prompt": tokens, "sampling": sampling, "answers": [tokens, tokens] }],
            "error": "none", "record_sha256": "ef",
        });
        serde_json::from_value(value).unwrap()
    }

    fn keys() -> [ReceiptKey; 2] {
        let folder = tempfile::tempdir().unwrap();
        ["a", "b"].map(|name| ReceiptKey::read_or_create(&folder.path().join(name)).unwrap())
    }

    /// Changes one leaf of `root` at a time, and passes each changed JSON to `check`. Returns the number of leaves.
    fn change_leaves(root: &Value, check: &mut dyn FnMut(&Value)) -> usize {
        fn paths(value: &Value, at: String, all: &mut Vec<String>) {
            match value {
                Value::Object(map) => map.iter().for_each(|(key, value)| paths(value, format!("{at}/{key}"), all)),
                Value::Array(items) => {
                    items.iter().enumerate().for_each(|(index, value)| paths(value, format!("{at}/{index}"), all));
                }
                _ => all.push(at),
            }
        }
        let mut all = Vec::new();
        paths(root, String::new(), &mut all);
        for path in &all {
            let mut changed = root.clone();
            let leaf = changed.pointer_mut(path).unwrap();
            *leaf = match &*leaf {
                Value::String(text) => json!(format!("{text}x")),
                Value::Bool(is_set) => json!(!is_set),
                Value::Number(number) if number.is_u64() => json!(number.as_u64().unwrap() + 1),
                number => json!(number.as_f64().unwrap() + 1.0),
            };
            check(&changed);
        }
        all.len()
    }

    #[test]
    fn a_signed_receipt_states_what_was_signed() {
        let [key, other] = keys();
        let signed = receipt().sign(&key).unwrap();
        assert_eq!(Receipt::verify(&signed, &key.public_key()).unwrap(), receipt());
        let error = Receipt::verify(&signed, &other.public_key()).unwrap_err();
        assert_eq!(error.to_string(), "the receipt was changed, or signed with another key");
        let newer = Receipt { version: 2, ..receipt() }.sign(&key).unwrap();
        assert!(Receipt::verify(&newer, &key.public_key()).unwrap_err().to_string().contains("version 2"));
    }

    #[test]
    fn a_changed_field_invalidates_the_receipt() {
        let [key, _] = keys();
        let signed = receipt().sign(&key).unwrap();
        let (_, signature) = signed.rsplit_once('.').unwrap();
        let payload = serde_json::to_value(receipt()).unwrap();
        let with = |header: &str, payload: &Value| {
            let text = format!("{}.{}.{signature}", BASE64.encode(header), BASE64.encode(payload.to_string()));
            Receipt::verify(&text, &key.public_key())
        };
        // The unchanged receipt must be valid, so that only the changes below can make it invalid.
        assert!(with(HEADER, &payload).is_ok());
        let leaves = change_leaves(&payload, &mut |changed| assert!(with(HEADER, changed).is_err(), "{changed}"));
        assert!(leaves > 30, "{leaves}");
        let error = with(&HEADER.replace("EdDSA", "none"), &payload).unwrap_err();
        assert_eq!(error.to_string(), "the file is not a receipt of inferno");
    }

    #[test]
    fn a_changed_or_missing_byte_invalidates_the_receipt() {
        let [key, _] = keys();
        let public = key.public_key();
        let signed = receipt().sign(&key).unwrap();
        for index in 0..signed.len() {
            assert!(Receipt::verify(&signed[..index], &public).is_err(), "{index}");
            for byte in [b'A', b'B', b'.', b'=', b' '] {
                let mut changed = signed.clone().into_bytes();
                if std::mem::replace(&mut changed[index], byte) != byte {
                    let changed = String::from_utf8(changed).unwrap();
                    assert!(Receipt::verify(&changed, &public).is_err(), "{index} {byte}");
                }
            }
        }
        assert!(Receipt::verify(&format!("{signed}="), &public).is_err());
    }
}
