//! Tests of small vocabularies: token types, stop tokens, pre-tokenizers, scores and chat templates.

use std::fs;

use inferno::language::Language;
use inferno::tokenizer::ControlTokens;
use inferno::weights::gguf::{GgufHeader, chat_template, vocabulary};
use serde_json::{Value, json};

use super::{push, small, tokenizer};
use crate::support::gguf::models::saved;
use crate::support::gguf::vocabulary::{BYTE, CONTROL, Converted, NORMAL, UNKNOWN, UNUSED, USER_DEFINED};
use crate::support::gguf::writer::Writer;

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
