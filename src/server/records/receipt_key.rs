//! The Ed25519 keys that sign and verify receipts.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use tokio_rustls::rustls::pki_types::PrivatePkcs8KeyDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;

use crate::files;

/// The maximum size of a key file in bytes. Typical key files are smaller than 1 KB.
const MAX_KEY_BYTES: u64 = 1 << 20;

/// The PKCS#8 header (RFC 8410) that comes before the 32 bytes of an Ed25519 private key.
/// inferno writes new keys itself, because `ring` uses a newer version of PKCS#8, which OpenSSL 3 rejects.
const PKCS8_START: &[u8] = b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";

/// The private key that signs receipts.
#[derive(Debug)]
pub struct ReceiptKey(Ed25519KeyPair);

/// The public key that verifies receipts. Its JSON form is a JSON Web Key (RFC 8037).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublicKey {
    kty: String,
    crv: String,
    /// The 32 bytes of the public key in base64url.
    pub x: String,
}

impl ReceiptKey {
    /// Reads the private key from a file in PKCS#8 and PEM format.
    /// If the file does not exist, creates a key and writes it to a new file, which on Unix only its owner can read.
    pub fn read_or_create(path: &Path) -> Result<Self> {
        if path.try_exists().with_context(|| cannot("read", path))? {
            Self::read(path).with_context(|| cannot("read", path))
        } else {
            Self::create(path).with_context(|| cannot("create", path))
        }
    }

    fn read(path: &Path) -> Result<Self> {
        let text = files::read_input(path, MAX_KEY_BYTES)?;
        // The error message must not quote the key file, because the file contains a secret.
        let der = PrivatePkcs8KeyDer::from_pem_slice(&text);
        let der = der.map_err(|_| anyhow!("the file has no valid 'BEGIN PRIVATE KEY'; encrypted keys are rejected"))?;
        // `from_pkcs8` would require the public key in the file, which OpenSSL omits.
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der.secret_pkcs8_der());
        Ok(Self(pair.map_err(|_| anyhow!("the key is not an Ed25519 key"))?))
    }

    fn create(path: &Path) -> Result<Self> {
        let mut der = [PKCS8_START, &[0; 32]].concat();
        SystemRandom::new().fill(&mut der[PKCS8_START.len()..]).map_err(|_| anyhow!("no random numbers"))?;
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der).map_err(|_| anyhow!("the new key is invalid"))?;
        let mut file = files::create_private(path)?;
        let text = BASE64_STANDARD.encode(der);
        let text = format!("-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n");
        if let Err(error) = file.write_all(text.as_bytes()).and_then(|()| file.sync_all()) {
            // Remove an incomplete key file, which would cause an error at the next start.
            let _ = std::fs::remove_file(path);
            return Err(error.into());
        }
        Ok(Self(pair))
    }

    /// Returns the key that verifies receipts.
    pub fn public_key(&self) -> PublicKey {
        let x = BASE64_URL_SAFE_NO_PAD.encode(self.0.public_key().as_ref());
        PublicKey { kty: "OKP".to_string(), crv: "Ed25519".to_string(), x }
    }

    /// Returns the 64-byte signature of a message.
    pub(super) fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.0.sign(message).as_ref().to_vec()
    }
}

impl PublicKey {
    /// Reads a public key. `text` is the path of a JSON Web Key file, the JSON, or the value of the JSON's field `x`.
    pub fn read(text: &str) -> Result<Self> {
        let path = Path::new(text);
        let key = match text.trim_start() {
            _ if path.is_file() => files::read_json(path, MAX_KEY_BYTES)?,
            json if json.starts_with('{') => files::parse_json(json.as_bytes()).context("cannot read the key")?,
            x => Self { kty: "OKP".to_string(), crv: "Ed25519".to_string(), x: x.trim_end().to_string() },
        };
        if (key.kty.as_str(), key.crv.as_str()) != ("OKP", "Ed25519") || key.bytes().is_none() {
            bail!(
                "cannot read the key: expected the JSON of GET /v1/receipts/key, a file with this JSON, or its field x"
            );
        }
        Ok(key)
    }

    /// Returns whether `signature` is a signature of `message` with the private key that belongs to this key.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let Some(key) = self.bytes() else { return false };
        UnparsedPublicKey::new(&ED25519, key).verify(message, signature).is_ok()
    }

    fn bytes(&self) -> Option<[u8; 32]> {
        BASE64_URL_SAFE_NO_PAD.decode(&self.x).ok()?.try_into().ok()
    }
}

fn cannot(what: &str, path: &Path) -> String {
    format!("cannot {what} the private key for receipts in '{}'", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_created_once_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key.pem");
        let key = ReceiptKey::read_or_create(&path).unwrap();
        #[cfg(unix)]
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions()) & 0o777, 0o600);
        assert_eq!(ReceiptKey::read_or_create(&path).unwrap().public_key(), key.public_key());
        let other = ReceiptKey::read_or_create(&folder.path().join("other.pem")).unwrap();
        assert_ne!(other.public_key(), key.public_key());
        assert!(ReceiptKey::read_or_create(&folder.path().join("absent/key.pem")).is_err());
        assert!(!format!("{key:?}").contains(&std::fs::read_to_string(&path).unwrap()[28..60]));
    }

    #[test]
    fn keys_of_openssl_are_read_and_others_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key.pem");
        // The example key in RFC 8410, section 10.3.
        let key = "MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC";
        let pem = |key: &str| format!("-----BEGIN PRIVATE KEY-----\n{key}\n-----END PRIVATE KEY-----\n");
        std::fs::write(&path, pem(key)).unwrap();
        let public = ReceiptKey::read_or_create(&path).unwrap().public_key();
        assert_eq!(public.x, "Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE");
        for text in ["", "{}", &pem("AAAA"), &pem(&key[..60]), "-----BEGIN PRIVATE KEY-----\n"] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", ReceiptKey::read_or_create(&path).unwrap_err());
            assert!(error.starts_with("cannot read the private key") && !error.contains("MC4C"), "{error}");
        }
        let json = serde_json::to_string(&public).unwrap();
        std::fs::write(&path, &json).unwrap();
        for text in [public.x.as_str(), &json, path.to_str().unwrap()] {
            assert_eq!(PublicKey::read(text).unwrap(), public);
        }
        for text in ["", "abc", "{}", &json.replace("OKP", "RSA"), &public.x[1..]] {
            assert!(PublicKey::read(text).is_err(), "{text}");
        }
    }
}
