//! Tests of tool calls whose names and arguments are constrained.

use inferno::chat::{Message, RenderOptions};
use inferno::engine::{Constraint, FinishReason, Grammar, GrammarKind, ToolGrammar};
use inferno::tokenizer::ControlTokens;
use inferno::{EngineHandle, GenerateOptions, Request};
use serde_json::{Value, json};

use super::schema::problem;
use super::{question, sampled};
use crate::support::engine::{Answer, demo};

fn schema() -> Value {
    json!({ "type": "object", "properties": { "name": { "type": "string", "maxLength": 10 }, "size": { "type": "integer", "minimum": 1, "maximum": 50 } }, "required": ["name"], "additionalProperties": false })
}

fn tool(name: &str) -> ToolGrammar {
    let arguments = Grammar { name: format!("arguments of {name}"), kind: GrammarKind::JsonSchema(schema()) };
    ToolGrammar { name: name.to_string(), arguments: Some(arguments) }
}

fn ask(engine: &EngineHandle, seed: u64, constraint: Constraint) -> Answer {
    let tools = ["list_models", "files.delete"].map(|name| json!({ "type": "function", "function": { "name": name, "description": "A tool.", "parameters": schema() } }));
    let request = Request::chat([Message::user("Which models do I have?")]);
    let render = RenderOptions {
        tools: tools.to_vec(),
        ..match &request.prompt {
            inferno::engine::Prompt::Chat { render, .. } => render.clone(),
            _ => unreachable!(),
        }
    };
    let options = GenerateOptions { constraint: Some(constraint), ..sampled(seed) };
    Answer::read(engine.submit(request.render(render).options(options)).unwrap())
}

#[test]
fn a_required_tool_is_called_with_valid_arguments() {
    let engine = demo(2048);
    for seed in 0..6 {
        let tools = vec![tool("list_models"), tool("files.delete")];
        let answer = ask(&engine, seed, Constraint { tools, requires_tool: true, ..Constraint::default() });
        let [call] = &answer.summary.tool_calls[..] else { panic!("{answer:?}") };
        assert!(["list_models", "files.delete"].contains(&call.name.as_str()), "{}", call.name);
        let arguments = serde_json::from_str(&call.arguments).unwrap();
        assert_eq!(problem(&arguments, &schema(), &schema()), None, "{}", call.arguments);
        assert_eq!((answer.summary.finish_reason, answer.summary.format_violations), (FinishReason::ToolCalls, 0));
        assert_eq!(answer.text, "");
        // With one tool, the constraint leaves only one possible tool name.
        let tools = vec![tool("files.delete")];
        let answer = ask(&engine, seed, Constraint { tools, requires_tool: true, ..Constraint::default() });
        assert_eq!(answer.summary.tool_calls[0].name, "files.delete");
    }
}

#[test]
fn a_tool_call_can_follow_another_one() {
    let engine = demo(2048);
    let end = engine.tokenizer().token_id("<|end|>").unwrap();
    for can_call_in_parallel in [true, false] {
        let tools = vec![tool("list_models")];
        let constraint = Constraint { tools, requires_tool: true, can_call_in_parallel, ..Constraint::default() };
        // The bias for `<|end|>` makes the model write another message wherever the constraint allows one.
        let logit_bias = [(end, 100.0)].into();
        let options = GenerateOptions { constraint: Some(constraint), logit_bias, max_tokens: Some(200), ..sampled(0) };
        let answer = Answer::read(engine.submit(question().options(options)).unwrap());
        let [first, others @ ..] = &answer.summary.tool_calls[..] else { panic!("{answer:?}") };
        assert_eq!(problem(&serde_json::from_str(&first.arguments).unwrap(), &schema(), &schema()), None);
        assert_eq!(others.is_empty(), !can_call_in_parallel, "{answer:?}");
    }
}

/// A call to a tool that has no grammar ends the answer, even if text answers must match a grammar.
#[test]
fn a_tool_call_ends_an_answer_with_a_grammar() {
    let engine = demo(2048);
    let answer = Grammar { name: "answer".to_string(), kind: GrammarKind::JsonSchema(schema()) };
    let tools = vec![ToolGrammar { name: "list_models".to_string(), arguments: None }];
    let constraint = Constraint { answer: Some(answer), tools, ..Constraint::default() };
    // The logit bias makes the model call the tool immediately, with no arguments.
    let channel = engine.tokenizer().encode("commentary", ControlTokens::Text).unwrap()[0];
    let call = engine.tokenizer().token_id("<|call|>").unwrap();
    let logit_bias = [(channel, 100.0), (call, 100.0)].into();
    let options = GenerateOptions { constraint: Some(constraint), logit_bias, max_tokens: Some(200), ..sampled(0) };
    let answer = Answer::read(engine.submit(question().options(options)).unwrap());
    let [call] = &answer.summary.tool_calls[..] else { panic!("{answer:?}") };
    assert_eq!((call.name.as_str(), answer.text.as_str()), ("list_models", ""));
    assert_eq!(answer.summary.finish_reason, FinishReason::ToolCalls);
}

/// With an optional tool, the model may call the tool or write an answer. The answer must match its grammar.
#[test]
fn an_optional_tool_does_not_loosen_the_answer() {
    let engine = demo(2048);
    let answer_schema = json!({ "type": "object", "properties": { "count": { "type": "integer", "minimum": 0, "maximum": 9 } }, "required": ["count"], "additionalProperties": false });
    let grammar = Grammar { name: "answer".to_string(), kind: GrammarKind::JsonSchema(answer_schema.clone()) };
    for seed in 0..6 {
        for tool in [tool("list_models"), ToolGrammar { name: "list_models".to_string(), arguments: None }] {
            let constraint = Constraint { answer: Some(grammar.clone()), tools: vec![tool], ..Constraint::default() };
            let answer = ask(&engine, seed, constraint);
            if answer.summary.tool_calls.is_empty() {
                let json = serde_json::from_str(&answer.text).unwrap_or_else(|error| panic!("{error} {}", answer.text));
                assert_eq!(problem(&json, &answer_schema, &answer_schema), None);
            } else {
                assert_eq!(answer.text, "");
            }
        }
        // Without a grammar for the answer, the model may write any text, but a tool call is still constrained.
        let constraint = Constraint { tools: vec![tool("list_models")], ..Constraint::default() };
        let answer = ask(&engine, seed, constraint);
        for call in &answer.summary.tool_calls {
            assert_eq!(call.name, "list_models");
            assert_eq!(problem(&serde_json::from_str(&call.arguments).unwrap(), &schema(), &schema()), None);
        }
        assert_eq!(answer.summary.format_violations, 0);
    }
}
