//! Tests of constraints in a chat format with tags around reasoning and tool calls.
//!
//! The tests rename control tokens of the demo model to `<think>` and `</think>`, the tags around reasoning.

use std::fs;

use inferno::device::DeviceChoice;
use inferno::engine::{Constraint, FinishReason, Grammar, GrammarKind, Prompt, ToolGrammar};
use inferno::error::Error;
use inferno::{Engine, GenerateOptions, Request};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::schema::problem;
use super::{complete_json, question, sampled, with_schema};
use crate::support::engine::Answer;
use crate::support::program::copy_of_demo;

/// Loads a copy of the demo model with the tags `<think>` and `</think>`. Its chat template ends with `start`.
/// If `has_tools` is true, the copy also has the tags `<tool_call>` and `</tool_call>`.
fn tagged_demo(start: &str, has_tools: bool) -> (TempDir, Engine) {
    demo_with(start, if has_tools { &["<tool_call>", "</tool_call>"] } else { &[] })
}

/// Like [`tagged_demo`], but the copy has the control tokens `tool_tokens` (at most two), of any tool call format.
fn demo_with(start: &str, tool_tokens: &[&str]) -> (TempDir, Engine) {
    let (folder, path) = copy_of_demo();
    let file = path.join("tokenizer.json");
    let mut tokenizer = fs::read_to_string(&file).unwrap();
    tokenizer = tokenizer.replace("<|channel|>", "<think>").replace("<|end|>", "</think>");
    for (token, new) in ["<|constrain|>", "<|call|>"].into_iter().zip(tool_tokens) {
        tokenizer = tokenizer.replace(token, new);
    }
    fs::write(file, tokenizer).unwrap();
    let template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}</think>{% endfor %}";
    fs::write(path.join("chat_template.jinja"), format!("{template}{start}")).unwrap();
    fs::write(path.join("generation_config.json"), json!({ "eos_token_id": [1993, 1992] }).to_string()).unwrap();
    let engine = Engine::builder(&path).device(DeviceChoice::Cpu).context(1024).load().unwrap();
    (folder, engine)
}

fn schema() -> Value {
    let properties = json!({ "name": { "type": "string", "maxLength": 9 }, "size": { "enum": [1, 2, 3] } });
    json!({ "type": "object", "properties": properties, "required": ["name", "size"], "additionalProperties": false })
}

#[test]
fn answers_are_constrained_after_their_reasoning() {
    for (start, always_reasons) in [("<|start|>assistant", false), ("<|start|>assistant<think>", true)] {
        let (_folder, engine) = tagged_demo(start, false);
        let mut reasoned = 0;
        for seed in 0..6 {
            let options = with_schema(seed, &schema());
            let events: Vec<_> =
                engine.submit(question().options(options)).unwrap().into_iter().map(|event| event.unwrap()).collect();
            let reasoning: String = events.iter().map(|event| event.text(inferno::chat::Channel::Reasoning)).collect();
            reasoned += usize::from(!reasoning.is_empty());
            let answer = Answer::from_events(&events);
            assert_eq!(problem(&complete_json(&answer), &schema(), &schema()), None, "{}", answer.text);
        }
        assert!(
            if always_reasons { reasoned == 6 } else { reasoned > 0 },
            "{start}: only {reasoned} of 6 answers contain reasoning"
        );
    }
}

#[test]
fn tool_calls_are_constrained_in_their_tags() {
    let (_folder, engine) = tagged_demo("<|start|>assistant", true);
    let tool = |name: &str| {
        let arguments = Grammar { name: name.to_string(), kind: GrammarKind::JsonSchema(schema()) };
        ToolGrammar { name: name.to_string(), arguments: Some(arguments) }
    };
    for (seed, can_call_in_parallel) in [(0, false), (1, false), (2, true), (3, true)] {
        let tools = vec![tool("list"), tool("files.delete")];
        let constraint = Constraint { answer: None, tools, requires_tool: true, can_call_in_parallel };
        let options = GenerateOptions { constraint: Some(constraint), max_tokens: Some(600), ..sampled(seed) };
        let answer = Answer::read(engine.submit(question().options(options)).unwrap());
        let calls = &answer.summary.tool_calls;
        assert!(!calls.is_empty() && (can_call_in_parallel || calls.len() == 1), "{answer:?}");
        // With parallel tool calls, `max_tokens` may cut off the last call.
        let is_cut = answer.summary.finish_reason == FinishReason::Length;
        for call in &calls[..calls.len() - usize::from(is_cut)] {
            assert!(["list", "files.delete"].contains(&call.name.as_str()), "{call:?}");
            assert_eq!(problem(&serde_json::from_str(&call.arguments).unwrap(), &schema(), &schema()), None);
        }
        assert!(can_call_in_parallel || answer.summary.finish_reason == FinishReason::ToolCalls, "{answer:?}");
        assert_eq!(answer.text, "");
    }
}

#[test]
fn required_tools_need_a_format_with_tags() {
    let (_folder, engine) = tagged_demo("<|start|>assistant", false);
    let tools = vec![ToolGrammar { name: "list".to_string(), arguments: None }];
    let constraint = Constraint { tools, requires_tool: true, ..Constraint::default() };
    let options = GenerateOptions { constraint: Some(constraint), ..sampled(0) };
    let request = question().options(options);
    let error = engine.submit(request.clone()).err().unwrap();
    let name = match error.downcast_ref() {
        Some(Error::InvalidConstraint { name, .. }) => name,
        _ => panic!("{error:#}"),
    };
    assert_eq!(name, "tool_choice");
    // A text prompt has no chat format, so it cannot have tools.
    let prompt = Prompt::Text("a".to_string());
    assert!(engine.submit(Request { prompt, ..request }).is_err());
}

/// Strict tools are refused if a control token starts tool calls in a format that inferno cannot constrain.
/// They are allowed without such a token. Tools that are neither strict nor required are always allowed.
#[test]
fn strict_tools_are_refused_with_unsupported_tool_tokens() {
    let schema = || Grammar { name: "schema".to_string(), kind: GrammarKind::JsonSchema(schema()) };
    for (token, is_strict, is_refused) in [
        ("[TOOL_CALLS]", true, true),
        ("<|python_tag|>", true, true),
        ("[TOOL_CALLS]", false, false),
        ("[OTHER]", true, false),
    ] {
        let (_folder, engine) = demo_with("<|start|>assistant", &[token]);
        let tools = vec![ToolGrammar { name: "list".to_string(), arguments: is_strict.then(schema) }];
        let constraint = Constraint { tools, ..Constraint::default() };
        let options = GenerateOptions { constraint: Some(constraint), max_tokens: Some(2), ..sampled(0) };
        match engine.submit(question().options(options)) {
            Ok(_) => assert!(!is_refused, "{token}"),
            Err(error) => {
                assert!(is_refused, "{token}: {error:#}");
                assert!(format!("{error:#}").contains("strict tools"), "{error:#}");
            }
        }
    }
}
