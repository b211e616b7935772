//! Tests of grammars that constrain the answers of the demo model.

mod answers;
mod hostile;
mod schema;
mod tagged;
mod tools;

use inferno::chat::Message;
use inferno::engine::{Constraint, FinishReason, GrammarKind};
use inferno::error::Error;
use inferno::{EngineHandle, GenerateOptions, Request};
use serde_json::Value;

use crate::support::engine::{Answer, sampling};

/// Returns options that sample up to 1,500 tokens at temperature 1.
fn sampled(seed: u64) -> GenerateOptions {
    GenerateOptions { max_tokens: Some(1500), ..GenerateOptions::new(sampling(|params| params.seed = seed)) }
}

/// Returns options for an answer that must match a JSON schema.
fn with_schema(seed: u64, schema: &Value) -> GenerateOptions {
    GenerateOptions { constraint: Some(Constraint::new(GrammarKind::JsonSchema(schema.clone()))), ..sampled(seed) }
}

fn question() -> Request {
    Request::chat([Message::user("How do I list my models?")])
}

fn ask(engine: &EngineHandle, options: GenerateOptions) -> Answer {
    Answer::read(engine.submit(question().options(options)).unwrap())
}

/// Submits a constraint that the engine must refuse. Returns the reason in the error.
fn refusal(engine: &EngineHandle, kind: GrammarKind) -> String {
    let what = format!("{kind:?}");
    let options = GenerateOptions { constraint: Some(Constraint::new(kind)), max_tokens: Some(1), ..sampled(0) };
    let error = engine.submit(question().options(options)).err().unwrap_or_else(|| panic!("{what} was not refused"));
    match error.downcast_ref() {
        Some(Error::InvalidConstraint { reason, .. }) => reason.clone(),
        _ => panic!("{error:#}"),
    }
}

/// Asserts that an answer is complete, and returns its JSON.
fn complete_json(answer: &Answer) -> Value {
    assert_eq!(answer.summary.finish_reason, FinishReason::Stop, "{}", answer.text);
    assert_eq!(answer.summary.format_violations, 0, "{}", answer.text);
    serde_json::from_str(&answer.text).unwrap_or_else(|error| panic!("{error}: {}", answer.text))
}
