//! Real tokenizers against the vectors of llama.cpp, and text as it streams. Skipped without $INFERNO_FIXTURES.

use std::fs;
use std::path::PathBuf;

use inferno::tokenizer::{Controls, TextStream, Tokenizer};
use serde_json::Value;

use crate::support::demo_dir;

fn fixtures() -> Option<PathBuf> {
    let folder = std::env::var_os("INFERNO_FIXTURES").map(PathBuf::from);
    if folder.is_none() {
        println!("skipped: INFERNO_FIXTURES is not set");
    }
    folder
}

/// Whose tokenizer, and which vectors.
const VECTORS: &[(&str, &str)] = &[
    ("gpt-oss-20b", "ggml-vocab-gpt-4o"),
    ("Llama-3.1-8B-Instruct", "ggml-vocab-llama-bpe"),
    ("gpt2", "ggml-vocab-gpt-2"),
    ("Qwen2.5", "ggml-vocab-qwen2"),
    ("TinyLlama-1.1B-Chat-v1.0", "ggml-vocab-llama-spm"),
];

#[test]
fn ids_agree_with_the_vectors_of_llama_cpp() {
    let Some(fixtures) = fixtures() else { return };
    for (model, vectors) in VECTORS {
        let tokenizer = Tokenizer::from_dir(&fixtures.join(model)).unwrap();
        let read = |ending: &str| {
            let path = fixtures.join("vectors/llama.cpp").join(format!("{vectors}.gguf.{ending}"));
            fs::read_to_string(path).unwrap()
        };
        let (inputs, outputs) = (read("inp"), read("out"));
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs: Vec<&str> = outputs.lines().collect();
        let mut checked = 0;
        for (text, ids) in inputs.iter().zip(&outputs) {
            let want: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
            // `Text` adds no prefix, which the vectors leave out as well.
            assert_eq!(tokenizer.encode(text, Controls::Text).unwrap(), want, "{model}: {text:?}");
            checked += 1;
        }
        assert!(checked > 30, "{model}: {checked} cases");
    }
}

#[test]
fn streamed_text_is_the_whole_text_and_never_half_a_character() {
    let Some(fixtures) = fixtures() else { return };
    let text = "Once upon a time, naïve Ångström 你好，世界 🦀🏳️‍🌈 told:\n\tfn main() {}  twice.  अच्छा ";
    for (model, _) in VECTORS {
        let tokenizer = Tokenizer::from_dir(&fixtures.join(model)).unwrap();
        let ids = tokenizer.encode(text, Controls::Text).unwrap();
        let (mut stream, mut streamed) = (TextStream::new(), String::new());
        for &id in &ids {
            let piece = stream.push(&tokenizer, id).unwrap();
            assert!(!piece.contains('\u{FFFD}'), "{model}: {piece:?}");
            streamed.push_str(&piece);
        }
        streamed.push_str(&stream.finish(&tokenizer).unwrap());
        assert_eq!(streamed, tokenizer.decode(&ids).unwrap(), "{model}");
        assert_eq!(streamed.trim_start(), text, "{model}");
        // Going on after a part of the text gives the rest of it, its first space included.
        let complete = |&end: &usize| !tokenizer.decode(&ids[..end]).unwrap().ends_with('\u{FFFD}');
        let half = (0..ids.len() / 2).rev().find(complete).unwrap();
        let mut stream = TextStream::after(&ids[..half]);
        let mut rest: String = ids[half..].iter().map(|&id| stream.push(&tokenizer, id).unwrap()).collect();
        rest.push_str(&stream.finish(&tokenizer).unwrap());
        assert_eq!(tokenizer.decode(&ids[..half]).unwrap() + &rest, streamed, "{model}");
    }
}

#[test]
fn ids_without_a_token_are_survived() {
    let Some(fixtures) = fixtures() else { return };
    let tokenizer = Tokenizer::from_dir(&fixtures.join("gpt-oss-20b")).unwrap();
    let hello = tokenizer.encode("Hello", Controls::Text).unwrap();
    let ids = [&[200_500], &hello[..], &[201_087; 50], &hello[..]].concat();
    let mut stream = TextStream::new();
    let mut text: String = ids.iter().map(|&id| stream.push(&tokenizer, id).unwrap()).collect();
    text.push_str(&stream.finish(&tokenizer).unwrap());
    assert_eq!(text, "HelloHello");
}

/// The library's own reading of a file is the judge of ours, which is faster, in every spelling of a model.
#[test]
fn tokenizers_are_what_the_library_makes_of_them() {
    let folders =
        fixtures().map_or(Vec::new(), |fixtures| VECTORS.iter().map(|(model, _)| fixtures.join(model)).collect());
    for folder in folders.into_iter().chain([demo_dir()]) {
        let bytes = fs::read(folder.join("tokenizer.json")).unwrap();
        let as_is: Value = serde_json::from_slice(&bytes).unwrap();
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut json = as_is.clone();
            change(&mut json["model"]);
            serde_json::to_vec(&json).unwrap()
        };
        let spell = |model: &mut Value, old: bool| {
            for merge in model["merges"].as_array_mut().unwrap() {
                let parts: Vec<String> = match &*merge {
                    Value::String(both) => both.split(' ').map(str::to_string).collect(),
                    pair => serde_json::from_value(pair.clone()).unwrap(),
                };
                *merge = if old { parts.join(" ").into() } else { parts.into() };
            }
        };
        let spellings = [
            bytes.clone(),
            changed(&|model| spell(model, true)),
            changed(&|model| spell(model, false)),
            changed(&|model| drop(model.as_object_mut().unwrap().remove("type"))),
        ];
        let text = "Hello <|start|>assistant<|end|> wörld 12345 \n\n  ok </s> <s> <think> 日本語, don't";
        for bytes in spellings {
            let library = tokenizers::Tokenizer::from_bytes(&bytes).unwrap();
            let ours = Tokenizer::from_bytes(&bytes).unwrap();
            let want = library.encode(text, false).unwrap();
            assert_eq!(ours.encode(text, Controls::Parse).unwrap(), want.get_ids(), "{}", folder.display());
            assert_eq!(ours.decode(want.get_ids()).unwrap(), library.decode(want.get_ids(), false).unwrap());
            assert_eq!(ours.vocab_size(), library.get_vocab_size(true));
        }
        let strange = changed(&|model| model["merges"][0] = "a b c".into());
        let error = format!("{:#}", Tokenizer::from_bytes(&strange).err().unwrap());
        assert!(error.contains("loading failed"), "{error}");
    }
}
