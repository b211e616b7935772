//! Compares tokenizers of published models with llama.cpp's test vectors, with tokenizer.json and with a reference
//! implementation of SentencePiece.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use inferno::tokenizer::{ControlTokens, TextStream, Tokenizer};
use inferno::weights::gguf::{GgufCheckpoint, GgufHeader, vocabulary};

use super::tokenizer;
use crate::support::fixtures;
use crate::support::gguf::vocabulary::{Converted, NORMAL, converted};
use crate::support::gguf::writer::Writer;

fn check_vectors(name: &str, fixtures: &Path, tokenizer: &Tokenizer) {
    let read = |ending: &str| {
        let path = fixtures.join("vectors/llama.cpp").join(format!("ggml-vocab-{name}.gguf.{ending}"));
        fs::read_to_string(path).unwrap()
    };
    let (inputs, outputs) = (read("inp"), read("out"));
    let mut checked = 0;
    for (text, ids) in inputs.split("\n__ggml_vocab_test__\n").zip(outputs.lines()) {
        let want: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
        // llama.cpp's expected ids have no BOS, and `ControlTokens::Text` adds none.
        assert_eq!(tokenizer.encode(text, ControlTokens::Text).unwrap(), want, "{name}: {text:?}");
        checked += 1;
    }
    println!("{name}: {checked} texts");
    assert!(checked > 30, "{name}: {checked} texts");
}

#[test(fixtures)]
fn gguf_vocabulary_agrees_with_llama_cpp() {
    let fixtures = fixtures();
    let file = fixtures.join("vectors/llama.cpp/ggml-vocab-gpt-2.gguf");
    let checkpoint = GgufCheckpoint::open(&file).unwrap();
    assert_eq!(checkpoint.architecture().unwrap(), "gpt2");
    assert_eq!(checkpoint.tensors().count(), 0);
    let vocabulary = vocabulary(&checkpoint.metadata()).unwrap();
    let tokenizer = Tokenizer::from_gguf(&vocabulary).unwrap();
    check_vectors("gpt-2", &fixtures, &tokenizer);
    assert_eq!(tokenizer.vocab_size(), 50257);
    assert!(tokenizer.is_control(50256));
    let special = vocabulary.special_ids().unwrap();
    assert_eq!((special.bos, special.eos, special.stop), (Some(50256), Some(50256), vec![50256]));
}

/// Byte-level BPE models with a tokenizer.json, as (folder, pre-tokenizer, name of llama.cpp's test vectors).
const BYTE_LEVEL: &[(&str, &str, &str)] = &[
    ("gpt2", "gpt-2", "gpt-2"),
    ("Llama-3.1-8B-Instruct", "llama-bpe", "llama-bpe"),
    ("Qwen2.5", "qwen2", "qwen2"),
    ("gpt-oss-20b", "gpt-4o", "gpt-4o"),
];

#[test(fixtures)]
fn converted_vocabularies_agree_with_llama_cpp() {
    let fixtures = fixtures();
    for (model, pre, vectors) in BYTE_LEVEL {
        let tokenizer = tokenizer(&converted(&fixtures.join(model)).byte_level(pre));
        check_vectors(vectors, &fixtures, &tokenizer);
    }
    let tinyllama = converted(&fixtures.join("TinyLlama-1.1B-Chat-v1.0"));
    check_vectors("llama-spm", &fixtures, &tokenizer(&tinyllama.sentencepiece(&llama2_scores(&tinyllama))));
}

/// Computes the scores in Llama 2's tokenizer.model from the token ids, because tokenizer.json has no scores.
/// The score of a piece is 259 minus its id, or -1e9 if the piece consists only of spaces (`▁`).
/// Control tokens and byte tokens have a score of 0.
fn llama2_scores(vocabulary: &Converted) -> Vec<f32> {
    let score = |(id, token): (usize, &String)| match id {
        259.. if token.chars().all(|c| c == '▁') => -1e9,
        _ => -(id.saturating_sub(259) as f32),
    };
    vocabulary.tokens.iter().enumerate().map(score).collect()
}

/// Returns the token ids of `text`, computed by a slow reference implementation of SentencePiece.
/// Each merge joins the adjacent pair whose joined piece has the highest score. Ties go to the leftmost pair.
/// A character that is not a piece becomes one byte token for each of its bytes.
fn sentencepiece_reference(model: &Converted, scores: &[f32], text: &str) -> Vec<u32> {
    let pieces: HashMap<&str, usize> =
        model.tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
    let text = format!(" {text}").replace(' ', "▁");
    let mut ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for (i, window) in ends.windows(3).enumerate() {
            let Some(&id) = pieces.get(&text[window[0]..window[2]]) else { continue };
            if model.types[id] == NORMAL && best.is_none_or(|(score, _)| scores[id] > score) {
                best = Some((scores[id], i));
            }
        }
        let Some((_, i)) = best else { break };
        ends.remove(i + 1);
    }
    let mut ids = Vec::new();
    for window in ends.windows(2) {
        let piece = &text[window[0]..window[1]];
        match pieces.get(piece) {
            Some(&id) => ids.push(id as u32),
            None => ids.extend(piece.bytes().map(|byte| pieces[format!("<0x{byte:02X}>").as_str()] as u32)),
        }
    }
    ids
}

/// Compares the tokenizer's ids with the ids that [`sentencepiece_reference`] computes.
/// Runs of spaces test ties, because pieces that consist of spaces all have the same score in both vocabularies.
#[test(fixtures)]
fn merges_agree_with_sentencepiece() {
    let fixtures = fixtures();
    let tinyllama = converted(&fixtures.join("TinyLlama-1.1B-Chat-v1.0"));
    let scores = llama2_scores(&tinyllama);
    let mistral = fs::read(fixtures.join("Mistral-7B-Instruct-v0.3/tokenizer.model.v3")).unwrap();
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    for (model, scores) in [(tinyllama, scores), sentencepiece_model(&mistral)] {
        let tokenizer = tokenizer(&model.sentencepiece(&scores));
        let runs = (0..80).flat_map(|spaces| {
            let spaces = " ".repeat(spaces);
            [format!("{spaces}x"), format!("x{spaces}"), format!("x{spaces}Hello{spaces}{spaces}world\n{spaces}")]
        });
        let repeated = ["a", "e", "-", "=", "0", ".", "/", "\t", "\n", "é", "界", "ab", "na"];
        let runs = runs.chain((1..40).flat_map(|count| repeated.map(|text| text.repeat(count))));
        let texts = TEXTS.iter().copied().chain(readme.lines()).map(str::to_string).chain(runs);
        let mut wrong = Vec::new();
        for text in texts.filter(|text| !text.is_empty()) {
            let want = sentencepiece_reference(&model, &scores, &text);
            let got = tokenizer.encode(&text, ControlTokens::Text).unwrap();
            if got != want {
                wrong.push((text, got, want));
            }
        }
        assert!(wrong.is_empty(), "{} texts have wrong ids; first (text, ids, expected): {:?}", wrong.len(), wrong[0]);
    }
}

/// Reads the pieces and scores of a SentencePiece model.
/// In the protobuf message, each field 1 is a piece. A piece has a text (field 1), a score (2) and a type (3).
fn sentencepiece_model(bytes: &[u8]) -> (Converted, Vec<f32>) {
    let mut found = Converted { tokens: Vec::new(), types: Vec::new(), merges: Vec::new() };
    let mut scores = Vec::new();
    for (field, piece) in fields(bytes) {
        if field != 1 {
            continue;
        }
        let (mut token, mut score, mut kind) = (String::new(), 0.0, NORMAL);
        for (field, value) in fields(piece) {
            match field {
                1 => token = String::from_utf8(value.to_vec()).unwrap(),
                2 => score = f32::from_le_bytes(value.try_into().unwrap()),
                3 => kind = i32::from(value[0]),
                _ => {}
            }
        }
        found.tokens.push(token);
        scores.push(score);
        found.types.push(kind);
    }
    (found, scores)
}

/// Returns the fields of a protobuf message as (field number, bytes). A varint stays encoded.
fn fields(mut bytes: &[u8]) -> Vec<(u64, &[u8])> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 127) << shift;
            if byte < 128 {
                break;
            }
        }
        value
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let whole = bytes;
        let length = match tag & 7 {
            0 => {
                varint(&mut bytes);
                whole.len() - bytes.len()
            }
            1 => 8,
            5 => 4,
            _ => {
                let length = varint(&mut bytes) as usize;
                found.push((tag >> 3, &bytes[..length]));
                bytes = &bytes[length..];
                continue;
            }
        };
        found.push((tag >> 3, &whole[..length]));
        bytes = &whole[length..];
    }
    found
}

const TEXTS: &[&str] = &[
    "",
    " ",
    "   ",
    "Hello",
    " Hello  World ",
    "I've been to Zürich, don't you know? 12345 + 678 = 13023",
    "naïve Ångström 你好，世界 🦀🏳️‍🌈 अच्छा",
    "fn main() {\n\tprintln!(\"{}\", 1 << 3);\n}\n\n\n",
    "aaaaaaaaaaaaa            bbbbbbbbb\t\t\t\t-----------======",
    "ABCdefGHI İstanbul ﬁnd DON'T don’t 3.14159 https://example.org/a?b=c&d=e",
    "é e\u{301} ｆｕｌｌ \u{200d}\u{feff}\u{0}",
];

/// Converts Mistral's tokenizer.model to GGUF metadata, and compares the tokenizer with Mistral's tokenizer.json.
#[test(fixtures)]
fn sentencepiece_model_agrees_with_tokenizer_json() {
    let fixtures = fixtures();
    let folder = fixtures.join("Mistral-7B-Instruct-v0.3");
    let (model, scores) = sentencepiece_model(&fs::read(folder.join("tokenizer.model.v3")).unwrap());
    assert_eq!(model.tokens.len(), 32768);
    let writer = model.sentencepiece(&scores);
    let (ours, theirs) = (tokenizer(&writer), Tokenizer::from_dir(&folder).unwrap());
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    for text in TEXTS.iter().copied().chain([readme.as_str(), "<s>", "[INST] a", "x</s>y"]) {
        for controls in [ControlTokens::Text, ControlTokens::Default] {
            // Skip texts for which the tokenizers differ. For GGUF files, inferno adds a space after a control token,
            // like llama.cpp. Mistral's tokenizer.json adds none.
            let has_controls =
                controls == ControlTokens::Default && ["<s>", "</s>", "[INST]"].iter().any(|mark| text.contains(mark));
            // For GGUF files, inferno also adds a space before a text that starts with one, like SentencePiece.
            // Mistral's tokenizer.json adds none.
            if has_controls || text.starts_with(' ') {
                continue;
            }
            let want = theirs.encode(text, controls).unwrap();
            assert_eq!(ours.encode(text, controls).unwrap(), want, "{text:?}");
            assert_eq!(ours.decode(&want).unwrap(), theirs.decode(&want).unwrap(), "{text:?}");
        }
    }
    // Check the space that the GGUF tokenizer adds after a control token.
    let ids = ours.encode("x</s>y", ControlTokens::Parse).unwrap();
    assert_eq!(ids.iter().map(|id| ours.token(*id).unwrap()).collect::<Vec<_>>(), ["▁x", "</s>", "▁y"]);
}

/// All added tokens of Phi-3 except three absorb the whitespace that follows. GGUF has no key for this property,
/// so inferno assumes it for GGUF files with the architecture `phi3` and a SentencePiece vocabulary.
#[test(fixtures)]
fn added_tokens_of_phi_3_absorb_whitespace() {
    let folder = fixtures().join("phi-3-mini");
    let model = converted(&folder);
    let phi = model.sentencepiece(&llama2_scores(&model)).string("general.architecture", "phi3");
    let (ours, theirs) = (tokenizer(&phi), Tokenizer::from_dir(&folder).unwrap());
    for text in [
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n",
        "<|user|> \t\n\n  indented<|end|>\u{3000}\n x <|end|>",
        "</s> a</s>\nb",
        "<s> a<s>\n<|endoftext|> b<|endoftext|>\n<unk> c<unk>\n",
    ] {
        let want = theirs.encode(text, ControlTokens::Parse).unwrap();
        assert_eq!(ours.encode(text, ControlTokens::Parse).unwrap(), want, "{text:?}");
        // `ControlTokens::Text` encodes control tokens as ordinary text, so they absorb no whitespace.
        let want = theirs.encode(text, ControlTokens::Text).unwrap();
        assert_eq!(ours.encode(text, ControlTokens::Text).unwrap(), want, "{text:?}");
    }
}

/// A tokenizer from GGUF metadata and one from tokenizer.json must agree on ids, decoded text and control tokens.
#[test(fixtures)]
fn converted_vocabularies_agree_with_tokenizer_json() {
    let fixtures = fixtures();
    let texts =
        ["<|im_start|>user\nHi<|im_end|> <|eot_id|><|begin_of_text|>x <tool_call> <|return|>", "a<|endoftext|>b"];
    for (model, pre, _) in BYTE_LEVEL {
        let folder = fixtures.join(model);
        let (ours, theirs) = (tokenizer(&converted(&folder).byte_level(pre)), Tokenizer::from_dir(&folder).unwrap());
        for text in TEXTS.iter().chain(&texts) {
            for controls in [ControlTokens::Text, ControlTokens::Parse] {
                let want = theirs.encode(text, controls).unwrap();
                assert_eq!(ours.encode(text, controls).unwrap(), want, "{model}: {text:?}");
                assert_eq!(ours.decode(&want).unwrap(), theirs.decode(&want).unwrap(), "{model}: {text:?}");
                let mut stream = TextStream::new();
                let mut streamed: String = want.iter().map(|&id| stream.push(&ours, id).unwrap()).collect();
                streamed.push_str(&stream.finish(&ours).unwrap());
                assert_eq!(streamed, ours.decode(&want).unwrap(), "{model}: {text:?}");
            }
        }
        let controls =
            |tokenizer: &Tokenizer| tokenizer.controls().map(|(c, id)| (c.to_string(), id)).collect::<Vec<_>>();
        assert_eq!(controls(&ours), controls(&theirs), "{model}");
    }
}

#[test(fixtures)]
fn prefixes_and_stop_ids_match_the_models() {
    let fixtures = fixtures();
    let llama = converted(&fixtures.join("Llama-3.1-8B-Instruct")).byte_level("llama-bpe");
    let llama = llama.u32("tokenizer.ggml.bos_token_id", 128_000).u32("tokenizer.ggml.eos_token_id", 128_009);
    let theirs = Tokenizer::from_dir(&fixtures.join("Llama-3.1-8B-Instruct")).unwrap();
    assert_eq!(
        tokenizer(&llama).encode("Hello", ControlTokens::Default).unwrap(),
        theirs.encode("Hello", ControlTokens::Default).unwrap()
    );
    let bare = tokenizer(&llama.clone().bool("tokenizer.ggml.add_bos_token", false));
    assert_eq!(
        bare.encode("Hello", ControlTokens::Default).unwrap(),
        bare.encode("Hello", ControlTokens::Text).unwrap()
    );
    let both = tokenizer(&llama.clone().bool("tokenizer.ggml.add_eos_token", true));
    let ids = both.encode("Hello", ControlTokens::Default).unwrap();
    assert_eq!((ids[0], ids[ids.len() - 1]), (128_000, 128_009));
    let stops = |writer: &Writer| {
        let bytes = writer.bytes();
        let header = GgufHeader::parse(&bytes).unwrap();
        vocabulary(&header.metadata(&bytes)).unwrap().special_ids().unwrap().stop
    };
    assert_eq!(stops(&llama), [128_001, 128_008, 128_009]);
    let oss = converted(&fixtures.join("gpt-oss-20b")).byte_level("gpt-4o");
    assert_eq!(stops(&oss.u32("tokenizer.ggml.eos_token_id", 200_002)), [199_999, 200_002, 200_012]);
}
