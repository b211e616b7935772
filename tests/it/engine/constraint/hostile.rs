//! Tests of grammars that are invalid, not supported, or meant to exhaust time or memory.

use std::time::{Duration, Instant};

use inferno::engine::{Constraint, GrammarKind};
use inferno::{Event, GenerateOptions};
use serde_json::{Value, json};

use super::{question, refusal, sampled};
use crate::harness::TestCase;
use crate::support::engine::{Answer, demo};
use crate::support::named_cases;

/// The maximum time for compiling an abusive grammar, with a margin for a busy machine.
const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn constraints_that_cannot_be_enforced_are_refused() {
    let engine = demo(256);
    let object = |keyword: &str, value: Value| GrammarKind::JsonSchema(json!({ "type": "object", keyword: value }));
    for (kind, expected) in [
        (object("dependentRequired", json!({ "a": ["b"] })), "dependentRequired"),
        (GrammarKind::JsonSchema(json!({ "type": "array", "uniqueItems": true })), "uniqueItems"),
        (GrammarKind::JsonSchema(json!({ "not": { "type": "string" } })), "not"),
        (GrammarKind::JsonSchema(json!({ "type": "text" })), "text"),
        (GrammarKind::JsonSchema(json!({ "type": "string", "format": "no-such-format" })), "no-such-format"),
        (GrammarKind::JsonSchema(json!({ "$ref": "#/$defs/missing" })), "missing"),
        (GrammarKind::JsonSchema(json!({ "$ref": "https://example.com/schema" })), "example.com"),
        (GrammarKind::JsonSchema(json!({ "type": "integer", "minimum": 5, "maximum": 4 })), "minimum"),
        (GrammarKind::JsonSchema(json!(false)), ""),
        // An integer matches both subschemas of this `oneOf`.
        // inferno supports `oneOf` only if no value can match two subschemas.
        (GrammarKind::JsonSchema(json!({ "oneOf": [{ "type": "integer" }, { "type": "number" }] })), "oneOf"),
        (GrammarKind::Regex("(".to_string()), ""),
        (GrammarKind::Regex(r"(?=look)ahead".to_string()), ""),
        (GrammarKind::Lark("start: missing".to_string()), "missing"),
        (GrammarKind::Lark(String::new()), ""),
        (GrammarKind::Choice(Vec::new()), ""),
    ] {
        let what = format!("{kind:?}");
        let reason = refusal(&engine, kind);
        assert!(!reason.is_empty() && reason.contains(expected) && reason.len() < 2500, "{what}: {reason}");
        assert!(!reason.contains("backtrace") && !reason.contains("<state>"), "{what}: {reason}");
    }
    // The llguidance option `lenient` has no effect: the unsupported keyword `not` is still refused.
    let lenient = json!({ "type": "object", "x-guidance": { "lenient": true }, "not": {} });
    assert!(refusal(&engine, GrammarKind::JsonSchema(lenient)).contains("not"));
}

#[test]
fn disjoint_options_of_one_of_are_supported() {
    let engine = demo(1024);
    let option = |kind: &str| json!({ "type": "object", "properties": { "kind": { "const": kind } }, "required": ["kind"], "additionalProperties": false });
    let schema = json!({ "oneOf": [option("cat"), option("dog")] });
    let answer = super::ask(&engine, super::with_schema(0, &schema));
    let json = super::complete_json(&answer);
    assert!(["cat", "dog"].contains(&json["kind"].as_str().unwrap()), "{json}");
}

fn nested(depth: usize, inner: Value, wrap: impl Fn(Value) -> Value) -> Value {
    (0..depth).fold(inner, |schema, _| wrap(schema))
}

/// Returns grammars that could exhaust a limit or crash the compiler: large, deep, recursive, ambiguous and others.
fn abusive_grammars() -> Vec<TestCase<GrammarKind>> {
    let schema = GrammarKind::JsonSchema;
    let regex = |text: &str| GrammarKind::Regex(text.to_string());
    let lark = |text: &str| GrammarKind::Lark(text.to_string());
    let many: Vec<String> = (0..50_000).map(|index| format!("value-{index}")).collect();
    let fields: serde_json::Map<String, Value> =
        (0..3000).map(|index| (format!("field{index}"), json!({ "type": "string" }))).collect();
    named_cases([
        ("enum", schema(json!({ "enum": many }))),
        ("fields", schema(json!({ "type": "object", "properties": fields }))),
        (
            "deep_objects",
            schema(nested(
                60,
                json!({ "type": "null" }),
                |inner| json!({ "type": "object", "properties": { "a": inner }, "required": ["a"] }),
            )),
        ),
        (
            "deep_options",
            schema(nested(
                60,
                json!({ "type": "null" }),
                |inner| json!({ "anyOf": [inner, { "type": "array", "items": { "type": "string" } }] }),
            )),
        ),
        (
            "doubling_options",
            schema(nested(
                20,
                json!({ "type": "string" }),
                |inner| json!({ "anyOf": [inner.clone(), { "type": "array", "items": [] }] }),
            )),
        ),
        ("self_reference", schema(json!({ "$ref": "#" }))),
        (
            "reference_loop",
            schema(
                json!({ "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } }, "$ref": "#/$defs/a" }),
            ),
        ),
        (
            "recursive_all_of",
            schema(
                json!({ "$defs": { "a": { "allOf": [{ "$ref": "#/$defs/a" }, { "type": "object" }] } }, "$ref": "#/$defs/a" }),
            ),
        ),
        (
            "recursive_tree",
            schema(
                json!({ "type": "object", "properties": { "left": { "$ref": "#" }, "right": { "$ref": "#" } }, "additionalProperties": false }),
            ),
        ),
        (
            "huge_counts",
            schema(
                json!({ "type": "array", "items": { "type": "string", "minLength": 100_000 }, "minItems": 100_000 }),
            ),
        ),
        ("huge_number", schema(json!({ "type": "number", "minimum": 1e300, "maximum": 1.5e300 }))),
        ("multiple_of", schema(json!({ "type": "integer", "multipleOf": 99_991 }))),
        ("multi_byte_text", schema(json!({ "type": "é".repeat(200) }))),
        ("pattern", schema(json!({ "type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$" }))),
        ("nested_repeats", regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}")),
        ("redos", regex("(a+)+b")),
        ("redos_with_options", regex("(a|a|aa)*(a|aa)*(b|bb)*c{0,5000}")),
        ("distance", regex("(a|b)*a(a|b){200}")),
        ("unicode", regex(r"(\p{L}|\p{N}){500}[^\p{L}]{500}")),
        ("parentheses", regex(&format!("{}a{}", "(".repeat(60_000), ")".repeat(60_000)))),
        ("intersection", lark("start: /(.*a){30}/ & /(.*b){30}/ & /(.*c){30}/")),
        ("ambiguous", lark("start: a a a a a a\na: b*\nb: \"x\"* | \"xx\"*")),
        ("left_recursion", lark("start: start start | \"a\" | \"\"")),
        ("deep_lark", lark(&format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000)))),
        (
            "exponential_rules",
            lark(
                &(0..40)
                    .map(|index| format!("r{index}: r{0} r{0}\n", index + 1))
                    .chain(["r40: \"a\"\nstart: r0".to_string()])
                    .collect::<String>(),
            ),
        ),
    ])
}

/// A request with an abusive grammar is refused, fails or ends within a time limit. A later request still works.
#[test(each = abusive_grammars)]
fn abusive_grammars_are_refused_or_stay_within_limits(kind: GrammarKind) {
    let engine = demo(256);
    // The first constraint also builds the engine's grammar compiler, which must not count as compile time.
    refusal(&engine, GrammarKind::Regex("(".to_string()));
    let started = Instant::now();
    let options = GenerateOptions { constraint: Some(Constraint::new(kind)), max_tokens: Some(40), ..sampled(1) };
    if let Ok(stream) = engine.submit(question().options(options)) {
        let compiled = started.elapsed();
        assert!(compiled < LIMIT, "the grammar was compiled in {compiled:?}");
        let events: Result<Vec<Event>, _> = stream.into_iter().collect();
        if let Err(problem) = events {
            assert!(problem.to_string().contains("cannot"), "{problem}");
        }
    }
    assert!(started.elapsed() < 2 * LIMIT, "the request took {:?}", started.elapsed());
    assert!(!Answer::read(engine.submit(question()).unwrap()).tokens.is_empty());
    assert_eq!(engine.stats().used_blocks, 0);
}

/// Compile time grows with the square of the number of optional properties, so inferno limits this number.
#[test]
fn objects_with_many_optional_properties_are_refused() {
    let engine = demo(256);
    let schema = |optional: usize, required: usize| {
        let names = |kind: &str, count: usize| (0..count).map(|index| format!("{kind}{index}")).collect::<Vec<_>>();
        let (optional, required) = (names("optional", optional), names("required", required));
        let fields: serde_json::Map<String, Value> =
            optional.iter().chain(&required).map(|name| (name.clone(), json!({ "type": "string" }))).collect();
        json!({ "type": "object", "properties": fields, "required": required })
    };
    let submit = |schema: Value| {
        let constraint = Some(Constraint::new(GrammarKind::JsonSchema(schema)));
        let options = GenerateOptions { constraint, max_tokens: Some(4), ..sampled(1) };
        engine.submit(question().options(options)).map(drop)
    };
    submit(schema(300, 300)).unwrap();
    let refusal = |schema| submit(schema).unwrap_err().to_string();
    assert!(refusal(schema(1001, 0)).contains("up to 1000 in one object"));
    assert!(refusal(json!({ "anyOf": [schema(800, 0), schema(700, 5)] })).contains("optional properties"));
    // A name counts once in `required`, and only if it is the name of a property.
    let mut repeated = schema(1002, 0);
    repeated["required"] = vec!["optional1"; 2000].into();
    assert!(refusal(repeated).contains("up to 1000 in one object"));
    let mut unknown = schema(1001, 0);
    unknown["required"] = (0..2000).map(|index| format!("other{index}")).collect();
    assert!(refusal(unknown).contains("up to 1000 in one object"));
    // A property may have the same name as the schema keyword `properties`.
    submit(json!({ "type": "object", "properties": { "properties": { "const": 1 } } })).unwrap();
}

/// If enforcing a grammar becomes too expensive, the request fails instead of continuing without its constraint.
#[test]
fn spent_fuel_is_an_error() {
    let engine = demo(2048);
    // The grammar is ambiguous: each letter multiplies the number of possible parses.
    // The text cannot end before it has 600 letters, so the parses become too expensive first.
    let kind = GrammarKind::Lark("start: e{600} \"z\"\ne: \"x\" | e e | e e e | e e e e".to_string());
    let constraint = Some(Constraint::new(kind));
    let stream = engine.submit(question().options(GenerateOptions { constraint, ..sampled(3) })).unwrap();
    let mut text = String::new();
    for event in stream {
        match event {
            Ok(event) => {
                text.push_str(&event.answer());
                assert!(event.summary().is_none(), "the answer ended without an error: {text}");
            }
            Err(problem) => {
                assert!(problem.to_string().starts_with("cannot constrain the answer"), "{problem}");
                assert!(text.chars().all(|letter| letter == 'x'), "{text}");
                return;
            }
        }
    }
    panic!("the answer ended without an error: {text}");
}
