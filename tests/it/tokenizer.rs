//! Compares tokenizers with llama.cpp's test vectors and with the `tokenizers` crate.
//! Also tests streaming and broken files.

use std::fs;
use std::time::{Duration, Instant};

use inferno::tokenizer::{ControlTokens, TextStream, Tokenizer};
use serde_json::{Value, json};

use crate::harness::{Need, TestCase};
use crate::support::{demo_dir, fixtures, named_cases};

/// A model in `INFERNO_FIXTURES` for which llama.cpp has test vectors.
#[derive(Clone, Copy)]
struct VectorModel {
    /// The folder with tokenizer.json.
    folder: &'static str,
    /// The name of the test vectors.
    vectors: &'static str,
}

impl VectorModel {
    fn load(self) -> Tokenizer {
        Tokenizer::from_dir(&fixtures().join(self.folder)).unwrap()
    }
}

const VECTOR_MODELS: [VectorModel; 5] = [
    VectorModel { folder: "gpt-oss-20b", vectors: "ggml-vocab-gpt-4o" },
    VectorModel { folder: "Llama-3.1-8B-Instruct", vectors: "ggml-vocab-llama-bpe" },
    VectorModel { folder: "gpt2", vectors: "ggml-vocab-gpt-2" },
    VectorModel { folder: "Qwen2.5", vectors: "ggml-vocab-qwen2" },
    VectorModel { folder: "TinyLlama-1.1B-Chat-v1.0", vectors: "ggml-vocab-llama-spm" },
];

fn vector_models() -> Vec<TestCase<VectorModel>> {
    let case = |value: VectorModel| TestCase { name: value.folder.into(), need: Some(Need::Fixtures), value };
    VECTOR_MODELS.map(case).into()
}

#[test(each = vector_models)]
fn ids_agree_with_llama_cpp(model: VectorModel) {
    let tokenizer = model.load();
    let read = |ending: &str| {
        let name = format!("{}.gguf.{ending}", model.vectors);
        fs::read_to_string(fixtures().join("vectors/llama.cpp").join(name)).unwrap()
    };
    let (inputs, outputs) = (read("inp"), read("out"));
    let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
    let outputs: Vec<&str> = outputs.lines().collect();
    let mut checked = 0;
    for (text, ids) in inputs.iter().zip(&outputs) {
        let want: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
        // llama.cpp's expected ids have no BOS. `ControlTokens::Text` adds none.
        assert_eq!(tokenizer.encode(text, ControlTokens::Text).unwrap(), want, "{text:?}");
        checked += 1;
    }
    assert!(checked > 30, "only {checked} test vectors");
}

#[test(each = vector_models)]
fn streamed_text_is_complete_and_never_splits_a_character(model: VectorModel) {
    let text = "Once upon a time, naïve Ångström 你好，世界 🦀🏳️‍🌈 told:\n\tfn main() {}  twice.  अच्छा ";
    let tokenizer = model.load();
    let ids = tokenizer.encode(text, ControlTokens::Text).unwrap();
    let (mut stream, mut streamed) = (TextStream::new(), String::new());
    for &id in &ids {
        let piece = stream.push(&tokenizer, id).unwrap();
        assert!(!piece.contains('\u{FFFD}'), "{piece:?}");
        streamed.push_str(&piece);
    }
    streamed.push_str(&stream.finish(&tokenizer).unwrap());
    assert_eq!(streamed, tokenizer.decode(&ids).unwrap());
    assert_eq!(streamed.trim_start(), text);
    // A stream that continues after some ids of a text returns the remaining text, including a leading space.
    let complete = |&end: &usize| !tokenizer.decode(&ids[..end]).unwrap().ends_with('\u{FFFD}');
    let half = (0..ids.len() / 2).rev().find(complete).unwrap();
    let mut stream = TextStream::continuing(&ids[..half]);
    let mut rest: String = ids[half..].iter().map(|&id| stream.push(&tokenizer, id).unwrap()).collect();
    rest.push_str(&stream.finish(&tokenizer).unwrap());
    assert_eq!(tokenizer.decode(&ids[..half]).unwrap() + &rest, streamed);
}

#[test]
fn a_character_after_incomplete_ones_is_streamed_whole() {
    let tokenizer = Tokenizer::from_dir(&demo_dir()).unwrap();
    let ids = 0..tokenizer.vocab_size() as u32;
    let id_of = |byte: u8| ids.clone().find(|&id| tokenizer.table().bytes(id) == [byte]).unwrap();
    for invalid in 0..40 {
        let bytes = [&[0xF0].repeat(invalid)[..], "🙙é".as_bytes()].concat();
        let (mut stream, mut streamed) = (TextStream::new(), String::new());
        for byte in bytes {
            streamed.push_str(&stream.push(&tokenizer, id_of(byte)).unwrap());
        }
        streamed.push_str(&stream.finish(&tokenizer).unwrap());
        assert!(streamed.ends_with("🙙é"), "{invalid}: {streamed:?}");
    }
    // An incomplete character must be returned after a limited number of ids, even if none of them has a token.
    let mut stream = TextStream::new();
    stream.push(&tokenizer, id_of(0xF0)).unwrap();
    let text: String = (0..20).map(|_| stream.push(&tokenizer, u32::MAX).unwrap()).collect();
    assert_eq!(text, "\u{FFFD}");
}

/// Asserts that the bytes of a text's tokens make up the text. Some tokenizers add a leading space.
fn assert_bytes_are_complete(tokenizer: &Tokenizer) {
    let text = "naïve 你好 🦀🏳️‍🌈\n\tfn main() {}  twice";
    let ids = tokenizer.encode(text, ControlTokens::Text).unwrap();
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.table().bytes(id)).collect();
    assert_eq!(String::from_utf8(bytes).unwrap().trim_start(), text);
    assert!(tokenizer.table().bytes(u32::MAX).is_empty());
}

#[test]
fn bytes_of_tokens_make_up_the_text() {
    assert_bytes_are_complete(&Tokenizer::from_dir(&demo_dir()).unwrap());
}

#[test(each = vector_models)]
fn bytes_of_real_tokens_make_up_the_text(model: VectorModel) {
    assert_bytes_are_complete(&model.load());
}

#[test(fixtures)]
fn ids_without_a_token_decode_to_nothing() {
    let fixtures = fixtures();
    let tokenizer = Tokenizer::from_dir(&fixtures.join("gpt-oss-20b")).unwrap();
    let hello = tokenizer.encode("Hello", ControlTokens::Text).unwrap();
    let ids = [&[200_500], &hello[..], &[201_087; 50], &hello[..]].concat();
    let mut stream = TextStream::new();
    let mut text: String = ids.iter().map(|&id| stream.push(&tokenizer, id).unwrap()).collect();
    text.push_str(&stream.finish(&tokenizer).unwrap());
    assert_eq!(text, "HelloHello");
}

/// Returns the demo, and the models with test vectors.
fn parsed_models() -> Vec<TestCase<Option<VectorModel>>> {
    let mut cases = named_cases([("demo", None)]);
    cases.extend(vector_models().into_iter().map(|case| TestCase {
        name: case.name,
        need: case.need,
        value: Some(case.value),
    }));
    cases
}

/// Compares inferno's faster parser with the `tokenizers` crate, for several forms of tokenizer.json.
#[test(each = parsed_models)]
fn parser_agrees_with_the_tokenizers_crate(model: Option<VectorModel>) {
    let folder = model.map_or_else(demo_dir, |model| fixtures().join(model.folder));
    let bytes = fs::read(folder.join("tokenizer.json")).unwrap();
    let original: Value = serde_json::from_slice(&bytes).unwrap();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut json = original.clone();
        change(&mut json["model"]);
        serde_json::to_vec(&json).unwrap()
    };
    let rewrite_merges = |model: &mut Value, as_strings: bool| {
        for merge in model["merges"].as_array_mut().unwrap() {
            let parts: Vec<String> = match &*merge {
                Value::String(both) => both.split(' ').map(str::to_string).collect(),
                pair => serde_json::from_value(pair.clone()).unwrap(),
            };
            *merge = if as_strings { parts.join(" ").into() } else { parts.into() };
        }
    };
    let variants = [
        bytes.clone(),
        changed(&|model| rewrite_merges(model, true)),
        changed(&|model| rewrite_merges(model, false)),
        changed(&|model| drop(model.as_object_mut().unwrap().remove("type"))),
    ];
    let text = "Hello <|start|>assistant<|end|> wörld 12345 \n\n  ok </s> <s> <think> 日本語, don't";
    for bytes in variants {
        let library = tokenizers::Tokenizer::from_bytes(&bytes).unwrap();
        let ours = Tokenizer::from_bytes(&bytes).unwrap();
        let want = library.encode(text, false).unwrap();
        assert_eq!(ours.encode(text, ControlTokens::Parse).unwrap(), want.get_ids());
        assert_eq!(ours.decode(want.get_ids()).unwrap(), library.decode(want.get_ids(), false).unwrap());
        assert_eq!(ours.vocab_size(), library.get_vocab_size(true));
    }
    let broken = changed(&|model| model["merges"][0] = "a b c".into());
    let error = format!("{:#}", Tokenizer::from_bytes(&broken).err().unwrap());
    assert!(error.contains("cannot load the tokenizer: "), "{error}");
}

/// Returns a BPE tokenizer.json for the letters a, b and c, modified by `change`.
fn small(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut json = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": null,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3}, "merges": [["a", "b"]]}
    });
    change(&mut json);
    serde_json::to_vec(&json).unwrap()
}

/// Loads a tokenizer, encodes `text` with every [`ControlTokens`], and decodes the results and an invalid id.
/// Returns the first error, if any. Asserts that all of this takes less than 20 s.
fn outcome(bytes: &[u8], text: &str) -> Option<String> {
    let begin = Instant::now();
    let run = || -> anyhow::Result<()> {
        let tokenizer = Tokenizer::from_bytes(bytes)?;
        for controls in [ControlTokens::Default, ControlTokens::Parse, ControlTokens::Text] {
            tokenizer.decode(&tokenizer.encode(text, controls)?)?;
        }
        tokenizer.decode(&[0, 1, 3, u32::MAX])?;
        Ok(())
    };
    let error = run().err().map(|error| format!("{error:#}"));
    assert!(begin.elapsed() < Duration::from_secs(20), "the tokenizer took {:?}; error: {error:?}", begin.elapsed());
    error
}

/// Tests files that make the `tokenizers` crate panic, or made earlier versions panic (huggingface/tokenizers #2151).
#[test]
fn files_that_make_the_library_panic_do_not_panic() {
    assert_eq!(outcome(&small(|_| ()), "abcab"), None);
    // Truncation settings in tokenizer.json are for training and must be ignored.
    let truncation = json!({"max_length": 2, "stride": 5, "strategy": "LongestFirst", "direction": "Right"});
    assert_eq!(outcome(&small(|json| json["truncation"] = truncation), "abcab"), None);
    let template = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}});
    let strip = json!({"type": "Strip", "content": "a", "start": 9, "stop": 9});
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("template", small(|json| json["post_processor"] = template)),
        ("merge", small(|json| json["model"]["merges"] = json!([["ab", "c"]]))),
        ("strip", small(|json| json["decoder"] = strip)),
        ("length", small(|json| json["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0}))),
        ("charsmap", small(|json| json["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "%"}))),
        ("charsmap", small(|json| json["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}))),
    ];
    for (what, bytes) in cases {
        let outcome = outcome(&bytes, "abcab");
        println!("{what}: {outcome:?}");
        assert!(outcome.is_none_or(|error| error.contains("cannot ")), "{what}");
    }
}

/// Tests regular expressions that backtrack catastrophically, compile to huge programs or are invalid.
#[test]
fn slow_patterns_terminate() {
    let text = format!("{}!", "a".repeat(20_000));
    for pattern in
        ["(a+)+$", "(a|a)*b", "(?=(a+)+b)a", "(a*)*\\1b", "(?:a{1000}){1000}", "((((a{99}){99}){99}){99})", "("]
    {
        let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let outcome = outcome(&small(|json| json["pre_tokenizer"] = split), &text);
        println!("{pattern}: {outcome:?}");
        assert!(outcome.is_none_or(|error| error.contains("cannot ")), "{pattern}");
    }
}

#[test]
fn strange_vocabularies_do_not_panic() {
    let added = |id: u64, content: &str| {
        let token = json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        small(|json| json["added_tokens"] = json!([token]))
    };
    for (id, content) in [
        (0, "<s>"),               // the id of another token
        (u32::MAX.into(), "<s>"), // an unused id
        (1 << 40, "<s>"),         // an id above `u32::MAX`
        (4, "a"),                 // the text of another token
        (4, ""),                  // no text
    ] {
        println!("added token {content:?} with id {id}: {:?}", outcome(&added(id, content), "ab<s>c"));
    }
    for vocab in [json!({}), json!({"a": u32::MAX}), json!({"a": 0, "b": 0}), json!({"": 0}), json!({"a": -1})] {
        println!("vocabulary {vocab}: {:?}", outcome(&small(|json| json["model"]["vocab"] = vocab.clone()), "abc"));
    }
    // Windows line breaks in tokenizer.json are whitespace. A byte order mark is not valid JSON.
    let pretty: Value = serde_json::from_slice(&small(|_| ())).unwrap();
    let crlf = serde_json::to_string_pretty(&pretty).unwrap().replace('\n', "\r\n");
    assert_eq!(outcome(crlf.as_bytes(), "abc"), None);
    assert!(outcome(format!("\u{feff}{crlf}").as_bytes(), "abc").unwrap().contains("cannot load the tokenizer: "));
    assert_eq!(outcome(&small(|_| ()), "a\r\nb\u{feff}\0c"), None);
}

/// Gemma's HTML tags are added tokens that are not special. Except for `<s>` and `</s>`,
/// inferno does not treat them as control tokens. A tag in a text is therefore encoded as its token,
/// as in transformers, even with `ControlTokens::Text`.
#[test]
fn html_tags_are_text_unless_they_are_special() {
    // The ids of the added tokens start at 4, because the vocabulary has four tokens.
    let tokenizer = |contents: &[&str], special: bool| {
        let added = contents.iter().zip(4..).map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special})
        });
        Tokenizer::from_bytes(&small(|json| json["added_tokens"] = added.collect())).unwrap()
    };
    let contents = ["<h1>", "</h1>", "<table>", "<s>", "</s>", "<think>", "<unused0>", "<h7>", "[i]"];
    let ours = tokenizer(&contents, false);
    for controls in [ControlTokens::Text, ControlTokens::Parse] {
        assert_eq!(ours.encode("<h1>ab</h1>c<table>", controls).unwrap(), [4, 3, 5, 2, 6]);
    }
    assert_eq!(ours.table().bytes(4), b"<h1>");
    let names = |tokenizer: &Tokenizer| tokenizer.controls().map(|(name, _)| name.to_string()).collect::<Vec<_>>();
    assert_eq!(names(&ours), ["<unused0>", "<think>", "</s>", "<h7>", "<s>", "[i]"]);
    assert_eq!(names(&tokenizer(&["<h1>", "</code>"], true)), ["</code>", "<h1>"]);
}
