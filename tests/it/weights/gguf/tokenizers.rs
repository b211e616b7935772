//! Tests of tokenizers that are built from GGUF metadata.
//!
//! Tests of published tokenizers need `INFERNO_FIXTURES`. They compare the token ids with llama.cpp's test vectors,
//! with tokenizer.json and with a reference implementation of SentencePiece.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use inferno::language::Language;
use inferno::tokenizer::gguf::Vocabulary;
use inferno::tokenizer::{ControlTokens, TextStream, Tokenizer};
use inferno::weights::gguf::{GgufCheckpoint, GgufHeader, chat_template, vocabulary};
use serde_json::{Value, json};

use crate::harness::TestCase;
use crate::support::gguf::models::saved;
use crate::support::gguf::vocabulary::{BYTE, CONTROL, Converted, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, converted};
use crate::support::gguf::writer::Writer;
use crate::support::{fixtures, named_cases};

/// Builds a tokenizer from the metadata of a GGUF file.
fn tokenizer(writer: &Writer) -> Tokenizer {
    let bytes = writer.bytes();
    let header = GgufHeader::parse(&bytes).unwrap();
    Tokenizer::from_gguf(&vocabulary(&header.metadata(&bytes)).unwrap()).unwrap()
}

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

#[test]
fn control_tokens_absorb_whitespace_only_in_phi_3() {
    let mut model = Converted {
        tokens: ["<unk>", "<s>", "</s>"].map(String::from).to_vec(),
        types: vec![UNKNOWN, CONTROL, USER_DEFINED],
        merges: vec![],
    };
    for token in ["<|endoftext|>", "<|end|>"] {
        push(&mut model.tokens, &mut model.types, token, CONTROL);
    }
    for token in ["▁", "a"] {
        push(&mut model.tokens, &mut model.types, token, NORMAL);
    }
    let sentencepiece = || model.sentencepiece(&[0.0; 7]).bool("tokenizer.ggml.add_space_prefix", false);
    let ids = |writer: Writer, token: &str| {
        tokenizer(&writer).encode(&format!("{token} \u{20}a"), ControlTokens::Parse).unwrap()
    };
    for (id, token) in (0..).zip(&model.tokens[..5]) {
        let phi = ids(sentencepiece().string("general.architecture", "phi3"), token);
        let absorbs = matches!(token.as_str(), "</s>" | "<|end|>");
        assert_eq!(phi, if absorbs { vec![id, 6] } else { vec![id, 5, 5, 6] }, "{token}");
        for architecture in ["llama", "phi2"] {
            let other = ids(sentencepiece().string("general.architecture", architecture), token);
            assert_eq!(other, [id, 5, 5, 6], "{architecture}: {token}");
        }
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

/// Returns a vocabulary with one token per byte value, plus the tokens and merges that `case` adds.
fn small(case: impl FnOnce(&mut Vec<String>, &mut Vec<i32>, &mut Vec<String>)) -> Converted {
    let byte = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        // Bytes without a printable character map to U+0100 and the following code points, in order.
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap(),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte - 0x7f)).unwrap(),
        0xad => '\u{143}',
    };
    let mut tokens: Vec<String> = (0..=255).map(|b| byte(b).to_string()).collect();
    let (mut types, mut merges) = (vec![NORMAL; 256], Vec::new());
    case(&mut tokens, &mut types, &mut merges);
    Converted { tokens, types, merges }
}

fn push(tokens: &mut Vec<String>, types: &mut Vec<i32>, token: &str, kind: i32) {
    tokens.push(token.into());
    types.push(kind);
}

#[test]
fn every_token_type_is_encoded_correctly() {
    let vocabulary = small(|tokens, types, merges| {
        for (token, kind) in [("ab", NORMAL), ("abc", CONTROL), ("<think>", USER_DEFINED), ("<|end|>", CONTROL)] {
            push(tokens, types, token, kind);
        }
        push(tokens, types, "[PAD]", UNUSED);
        push(tokens, types, "", UNUSED);
        push(tokens, types, "", CONTROL);
        merges.extend(["a b".to_string(), "ab c".to_string()]);
    });
    for pre in ["gpt-2", "llama-bpe", "default", "smollm", "tekken", "deepseek-r1-qwen", "deepseek-v3", "falcon"] {
        let tokenizer = tokenizer(&vocabulary.byte_level(pre));
        let encode = |text, controls| tokenizer.encode(text, controls).unwrap();
        assert_eq!(encode("ab", ControlTokens::Text), [256], "{pre}");
        // With `ControlTokens::Text`, neither a merge nor a lookup of the whole word may produce a control token.
        assert_eq!(encode("abc", ControlTokens::Text), [256, u32::from(b'c')], "{pre}");
        assert_eq!(encode("abc", ControlTokens::Parse), [257], "{pre}");
        assert_eq!(encode("<think>", ControlTokens::Parse), [258], "{pre}");
        assert!(!encode("<think><|end|>[PAD]", ControlTokens::Text).iter().any(|id| *id > 256), "{pre}");
        assert_eq!(encode("<|end|>", ControlTokens::Parse), [259], "{pre}");
        assert!(tokenizer.is_control(259) && tokenizer.is_control(258) && !tokenizer.is_control(256));
        assert_eq!(tokenizer.decode(&[256, 258, 260, 261, 262, 259]).unwrap(), "ab<think>[PAD]<|end|>");
        assert_eq!(tokenizer.vocab_size(), 261);
    }
}

/// Returns the stop tokens of a vocabulary, in the order of their ids.
fn stop_tokens(writer: &Writer) -> Vec<String> {
    let bytes = writer.bytes();
    let header = GgufHeader::parse(&bytes).unwrap();
    let vocabulary = vocabulary(&header.metadata(&bytes)).unwrap();
    let stop = vocabulary.special_ids().unwrap().stop;
    stop.into_iter().map(|id| vocabulary.tokens[id as usize].to_string()).collect()
}

/// The files name no stop token, so inferno finds the stop tokens by their text. Like llama.cpp, it finds them even if
/// their type is wrong or missing.
#[test]
fn known_stop_tokens_need_no_metadata() {
    let known = [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "▁<EOT>",
        "<｜end▁of▁sentence｜>",
    ];
    for kind in [NORMAL, CONTROL, USER_DEFINED] {
        let vocabulary = small(|tokens, types, _| known.iter().for_each(|token| push(tokens, types, token, kind)));
        assert_eq!(stop_tokens(&vocabulary.byte_level("gpt-2")), known, "type {kind}");
        let tokenizer = tokenizer(&vocabulary.byte_level("gpt-2"));
        assert_eq!(tokenizer.encode("<|im_end|>", ControlTokens::Parse).unwrap(), [258], "type {kind}");
        assert_ne!(tokenizer.encode("<|im_end|>", ControlTokens::Text).unwrap(), [258], "type {kind}");
    }
    let without_types = Writer::new()
        .string("tokenizer.ggml.model", "gpt2")
        .strings("tokenizer.ggml.tokens", &[&["a"], &known[..]].concat());
    assert_eq!(stop_tokens(&without_types), known);
    // `</s>` is text in Qwen2 and an HTML tag in Gemma.
    let controls = ["</s>", "<eos>"];
    for (kind, expected) in [(NORMAL, &[][..]), (USER_DEFINED, &[]), (CONTROL, &controls)] {
        let vocabulary = small(|tokens, types, _| controls.iter().for_each(|token| push(tokens, types, token, kind)));
        assert_eq!(stop_tokens(&vocabulary.byte_level("gpt-2")), expected, "type {kind}");
    }
    // In the harmony format, `<|end|>` ends only a message.
    let harmony = ["<|return|>", "<|end|>", "<|call|>"];
    let vocabulary = small(|tokens, types, _| harmony.iter().for_each(|token| push(tokens, types, token, CONTROL)));
    assert_eq!(stop_tokens(&vocabulary.byte_level("gpt-4o")), ["<|return|>", "<|call|>"]);
}

/// The stop tokens of a GGUF file without a vocabulary come from the files beside it.
#[test]
fn stop_tokens_of_a_file_without_a_vocabulary_come_from_its_folder() {
    let (folder, path) = saved(&Writer::new().string("general.architecture", "llama"));
    let added = |(content, id): (&str, u32)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let added = [("<|stop|>", 1), ("<|im_end|>", 2), ("<|im_start|>", 3), ("<|other|>", 4)].map(added);
    let tokenizer = json!({"added_tokens": added, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}});
    let write = |name: &str, json: Value| fs::write(folder.path().join(name), json.to_string()).unwrap();
    write("tokenizer.json", tokenizer);
    assert_eq!(Language::load(&path).unwrap().stop_ids(), [2]);
    write("tokenizer_config.json", json!({"eos_token": "<|stop|>"}));
    assert_eq!(Language::load(&path).unwrap().stop_ids(), [1, 2]);
    // Token 0 is ordinary text, so it is not a stop token even if a file names it.
    write("generation_config.json", json!({"eos_token_id": [0, 1, 4]}));
    assert_eq!(Language::load(&path).unwrap().stop_ids(), [1, 2, 4]);
}

#[test]
fn pre_tokenizers_split_differently() {
    let vocabulary = small(|tokens, types, merges| {
        for (left, right) in
            [("1", "2"), ("12", "3"), ("123", "4"), ("A", "b"), ("b", "C"), ("'", "S"), (".", "."), ("..", ".")]
        {
            push(tokens, types, &[left, right].concat(), NORMAL);
            merges.push(format!("{left} {right}"));
        }
    });
    let pieces = |pre: &str, text: &str| {
        let tokenizer = tokenizer(&vocabulary.byte_level(pre));
        let ids = tokenizer.encode(text, ControlTokens::Text).unwrap();
        ids.iter().map(|id| tokenizer.token(*id).unwrap()).collect::<Vec<_>>().join("|")
    };
    let cases = [
        ("gpt-2", "1234", "1234"),
        ("default", "1234", "123|4"),
        ("falcon", "1234", "123|4"),
        ("llama-bpe", "1234", "123|4"),
        ("gpt-4o", "1234", "123|4"),
        ("deepseek-v3", "1234", "123|4"),
        ("qwen2", "1234", "1|2|3|4"),
        ("deepseek-r1-qwen", "1234", "1|2|3|4"),
        ("tekken", "1234", "1|2|3|4"),
        ("smollm", "1234", "1|2|3|4"),
        ("gpt-2", "AbC", "Ab|C"),
        ("gpt-4o", "AbC", "Ab|C"),
        ("gpt-4o", "bC", "b|C"),
        ("tekken", "bC", "b|C"),
        ("qwen2", "bC", "bC"),
        ("gpt-2", "'S", "'|S"),
        ("llama-bpe", "'S", "'S"),
        ("default", "...", "..."),
    ];
    for (pre, text, want) in cases {
        assert_eq!(pieces(pre, text), want, "{pre}: {text}");
    }
}

/// Returns the error from building a tokenizer from the metadata of a GGUF file, or `no error`.
fn vocabulary_error(writer: &Writer) -> String {
    let bytes = writer.bytes();
    let header = GgufHeader::parse(&bytes).unwrap();
    let tokenizer = vocabulary(&header.metadata(&bytes)).and_then(|vocabulary| Tokenizer::from_gguf(&vocabulary));
    tokenizer.err().map_or("no error".into(), |error| format!("{error:#}"))
}

/// Returns files with an invalid vocabulary, each with a text of the error message.
fn invalid_vocabularies() -> Vec<TestCase<(Writer, &'static str)>> {
    let plain = || small(|_, _, _| {});
    let merged = |merge: &str| small(|_, _, merges| merges.push(merge.into())).byte_level("gpt-2");
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let good = || plain().byte_level("gpt-2");
    let bare = |tokens: &[&str]| Writer::new().string(&key("model"), "gpt2").strings(&key("tokens"), tokens);
    let cases = vec![
        ("no_model", Writer::new(), "metadata key tokenizer.ggml.model is missing"),
        ("no_tokens", Writer::new().string(&key("model"), "gpt2"), "metadata key tokenizer.ggml.tokens is missing"),
        (
            "unsupported_model",
            plain().written("bert"),
            "tokenizer.ggml.model: 'bert' is not supported; supported: gpt2, llama",
        ),
        ("no_pre_tokenizer", plain().written("gpt2"), "metadata key tokenizer.ggml.pre is missing"),
        (
            "unsupported_pre_tokenizer",
            plain().byte_level("gpt-7"),
            "tokenizer.ggml.pre: 'gpt-7' is not supported; supported: default, gpt-2",
        ),
        (
            "no_merges",
            plain().written("gpt2").string(&key("pre"), "gpt-2"),
            "metadata key tokenizer.ggml.merges is missing",
        ),
        ("no_scores", plain().written("llama"), "metadata key tokenizer.ggml.scores is missing"),
        (
            "too_few_scores",
            plain().sentencepiece(&[0.0; 255]),
            "tokenizer.ggml.scores: its length is 255, but the vocabulary has 256 tokens",
        ),
        (
            "too_many_types",
            bare(&["a", "b"]).i32s(&key("token_type"), &[1; 3]),
            "tokenizer.ggml.token_type: its length is 3, but the vocabulary has 2 tokens",
        ),
        ("empty", bare(&[]), "tokenizer.ggml.tokens: 0 tokens; 1 to 2097152 are allowed"),
        ("duplicate_token", bare(&["a", "b", "a"]), "tokenizer.ggml.tokens: 'a' has two ids: 0 and 2"),
        (
            "scores_are_strings",
            bare(&["a"]).strings(&key("scores"), &["1"]),
            "metadata key tokenizer.ggml.scores[0]: expected floats",
        ),
        (
            "tokens_are_integers",
            Writer::new().string(&key("model"), "gpt2").i32s(&key("tokens"), &[1]),
            "tokens[0]: expected strings, found I32(1)",
        ),
        ("long_merge", merged(&"ab".repeat(1 << 20)), "ababab…' must be two tokens separated by a space"),
        ("merge_without_space", merged("ab"), "tokenizer.ggml.merges[0]: 'ab' must be two tokens separated by a space"),
        ("merge_of_three", merged("a b c"), "must be two tokens separated by a space"),
        ("merge_begins_with_a_space", merged(" a"), "must be two tokens separated by a space"),
        ("merge_ends_with_a_space", merged("a "), "must be two tokens separated by a space"),
        ("empty_merge", merged(""), "must be two tokens separated by a space"),
        (
            "merge_of_an_unknown_token",
            merged("a b"),
            "tokenizer.ggml.merges[0]: 'a b' needs a token that is not in the vocabulary",
        ),
        // The `tokenizers` crate can panic if the result of a merge is longer than every token,
        // so inferno must reject such a merge first.
        (
            "merge_longer_than_every_token",
            merged("Ā Ā"),
            "tokenizer.ggml.merges[0]: 'Ā Ā' needs a token that is not in the vocabulary",
        ),
        (
            "id_outside_the_vocabulary",
            good().u32(&key("bos_token_id"), 256),
            "tokenizer.ggml.bos_token_id: 256 is not a token id: the vocabulary has 256 tokens",
        ),
        (
            "largest_id",
            good().u32(&key("eot_token_id"), u32::MAX),
            "tokenizer.ggml.eot_token_id: 4294967295 is not a token id",
        ),
        (
            "id_is_a_string",
            good().string(&key("eos_token_id"), "x"),
            "tokenizer.ggml.eos_token_id: expected an integer",
        ),
        (
            "bos_without_id",
            good().bool(&key("add_bos_token"), true),
            "tokenizer.ggml.add_bos_token is true, but the file specifies no id for that token",
        ),
        (
            "eos_without_id",
            good().bool(&key("add_eos_token"), true),
            "tokenizer.ggml.add_eos_token is true, but the file specifies no id for that token",
        ),
        (
            "switch_is_an_integer",
            good().u32(&key("add_eos_token"), 1),
            "tokenizer.ggml.add_eos_token: expected a boolean, found U32(1)",
        ),
    ];
    named_cases(cases.into_iter().map(|(name, writer, message)| (name, (writer, message))))
}

#[test(each = invalid_vocabularies)]
fn invalid_vocabulary_is_an_error((writer, message): (Writer, &'static str)) {
    let error = vocabulary_error(&writer);
    assert!(error.contains(message), "expected {message:?}, found {error:?}");
}

#[test]
fn valid_vocabulary_is_no_error() {
    assert_eq!(vocabulary_error(&small(|_, _, _| {}).byte_level("gpt-2")), "no error");
}

#[test]
fn token_that_is_too_long_for_merges_is_an_error() {
    let vocabulary = Converted { tokens: vec!["a".repeat(30_000)], types: vec![NORMAL], merges: vec![] };
    let begin = std::time::Instant::now();
    let message = vocabulary_error(&vocabulary.sentencepiece(&[0.0]));
    assert!(message.contains("the tokens up to id 0 are too long to convert to BPE merges"), "{message}");
    assert!(begin.elapsed().as_secs() < 10);
}

#[test]
fn sentencepiece_follows_scores_and_falls_back_to_bytes() {
    let mut model = Converted {
        tokens: vec!["<unk>".into(), "<s>".into(), "</s>".into()],
        types: vec![UNKNOWN, CONTROL, CONTROL],
        merges: vec![],
    };
    (0..=255).for_each(|byte| push(&mut model.tokens, &mut model.types, &format!("<0x{byte:02X}>"), BYTE));
    let start = model.tokens.len();
    for token in ["▁", "a", "b", "c", "<", "s", ">", "ab", "bc", "▁a", "s>"] {
        push(&mut model.tokens, &mut model.types, token, NORMAL);
    }
    let id = |token: &str| model.tokens.iter().position(|candidate| candidate == token).unwrap() as u32;
    let scores = |best: &str| -> Vec<f32> {
        (0..model.tokens.len())
            .map(|i| if model.tokens[i] == best { 0.0 } else { -(i.saturating_sub(start) as f32) - 1.0 })
            .collect()
    };
    let encode = |writer: &Writer, text: &str, controls| tokenizer(writer).encode(text, controls).unwrap();
    let text = |best, text| encode(&model.sentencepiece(&scores(best)), text, ControlTokens::Text);
    assert_eq!(text("bc", "abc"), [id("▁a"), id("bc")]);
    assert_eq!(text("ab", "abc"), [id("▁"), id("ab"), id("c")]);
    assert_eq!(text("ab", "é"), [id("▁"), id("<0xC3>"), id("<0xA9>")]);
    // With `ControlTokens::Text`, the text of a control token is encoded like any other text.
    assert_eq!(text("ab", "<s>"), [id("▁"), id("<"), id("s>")]);
    let writer = model.sentencepiece(&scores("ab"));
    assert_eq!(encode(&writer, "a", ControlTokens::Default), [1, id("▁a")]);
    assert_eq!(encode(&writer, "</s>a", ControlTokens::Parse), [2, id("▁a")]);
    let bare = writer.clone().bool("tokenizer.ggml.add_space_prefix", false);
    assert_eq!(encode(&bare, "a b", ControlTokens::Text), [id("a"), id("▁"), id("b")]);
    assert_eq!(tokenizer(&bare).decode(&[id("▁a"), id("▁"), id("<0xC3>"), id("<0xA9>")]).unwrap(), " a é");
    assert_eq!(tokenizer(&writer).decode(&[id("▁a"), id("▁"), id("<0xC3>"), id("<0xA9>")]).unwrap(), "a é");
}

#[test]
fn chat_templates_are_found_by_name() {
    let bytes = Writer::new()
        .string("tokenizer.chat_template", "{{ messages }}")
        .string("tokenizer.chat_template.tool_use", "{{ tools }}")
        .bytes();
    let header = GgufHeader::parse(&bytes).unwrap();
    let metadata = header.metadata(&bytes);
    assert_eq!(chat_template(&metadata, None).unwrap(), Some("{{ messages }}"));
    assert_eq!(chat_template(&metadata, Some("tool_use")).unwrap(), Some("{{ tools }}"));
    assert_eq!(chat_template(&metadata, Some("rag")).unwrap(), None);
}

#[test]
fn empty_vocabulary_is_an_error() {
    let error = Tokenizer::from_gguf(&Vocabulary::default()).err().unwrap().to_string();
    assert!(error.contains("0 tokens"), "{error}");
}
