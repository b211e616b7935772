//! Tests of constrained answers: in batches, in forks, together with other options, and after a cancellation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use inferno::engine::{Constraint, FinishReason, GrammarKind};
use inferno::tokenizer::ControlTokens;
use inferno::{Event, GenerateOptions, RequestStream, SamplingParams};
use serde_json::{Value, json};

use super::schema::problem;
use super::{ask, complete_json, question, sampled, with_schema};
use crate::support::engine::{Answer, demo, greedy};

/// Returns schemas with nested objects, enums, arrays, ranges, optional fields, patterns, `anyOf` and `$ref`.
fn schemas() -> Vec<Value> {
    let text = json!({ "type": "string", "maxLength": 20 });
    let object = |properties: Value, required: Value| json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false });
    let node = object(
        json!({ "value": { "type": "integer", "minimum": 0, "maximum": 9 }, "next": { "anyOf": [{ "$ref": "#/$defs/leaf" }, { "type": "null" }] } }),
        json!(["value", "next"]),
    );
    let mut list = object(json!({ "head": { "$ref": "#/$defs/node" } }), json!(["head"]));
    list["$defs"] =
        json!({ "node": node, "leaf": object(json!({ "value": { "type": "boolean" } }), json!(["value"])) });
    vec![
        object(
            json!({ "name": text, "size": object(json!({ "gb": { "type": "number", "minimum": 0, "maximum": 100 } }), json!(["gb"])) }),
            json!(["name", "size"]),
        ),
        object(
            json!({ "color": { "enum": ["red", "green", "blue", 5, null] }, "kind": { "const": "model" } }),
            json!(["color", "kind"]),
        ),
        json!({ "type": "array", "items": { "type": "integer", "minimum": -20, "maximum": 300 }, "minItems": 2, "maxItems": 5 }),
        object(
            json!({ "a": { "type": "boolean" }, "b": text, "c": { "type": ["integer", "null"], "maximum": 99, "minimum": -99 } }),
            json!(["b"]),
        ),
        object(
            json!({ "date": { "type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])$" }, "id": { "type": "string", "pattern": "^[a-f]{4,8}$" } }),
            json!(["date", "id"]),
        ),
        json!({ "anyOf": [object(json!({ "error": text }), json!(["error"])), { "type": "array", "items": text, "maxItems": 2 }, { "type": "boolean" }] }),
        list,
        json!({ "type": "string", "maxLength": 12 }),
    ]
}

#[test]
fn answers_match_their_schemas() {
    let engine = demo(2048);
    for schema in schemas() {
        for seed in 0..4 {
            let answer = ask(&engine, with_schema(seed, &schema));
            let json = complete_json(&answer);
            assert_eq!(problem(&json, &schema, &schema), None, "{}", answer.text);
        }
        let answer = ask(&engine, GenerateOptions { sampling: SamplingParams::greedy(), ..with_schema(0, &schema) });
        assert_eq!(problem(&complete_json(&answer), &schema, &schema), None, "{}", answer.text);
    }
    assert_eq!(engine.stats().used_blocks, 0);
}

/// On a GPU, a kernel masks the logits of the tokens that a constraint forbids.
/// The test also runs requests with and without a constraint in the same batches.
#[test(gpu)]
fn answers_match_their_schemas_on_a_gpu() {
    let builder = inferno::Engine::builder(crate::support::demo_dir()).context(2048).sequences(8);
    let engine = builder.load().unwrap();
    let schemas = schemas();
    for (seed, schema) in (0..).zip(&schemas) {
        let answer = ask(&engine, with_schema(seed, schema));
        assert_eq!(problem(&complete_json(&answer), schema, schema), None, "{}", answer.text);
    }
    let submit = |options| engine.submit(question().options(options)).unwrap();
    let streams: Vec<_> =
        (0..).zip(&schemas).map(|(seed, schema)| [submit(with_schema(seed, schema)), submit(sampled(seed))]).collect();
    for ([constrained, free], schema) in streams.into_iter().zip(&schemas) {
        let answer = Answer::read(constrained);
        assert_eq!(problem(&complete_json(&answer), schema, schema), None, "{}", answer.text);
        assert!(!Answer::read(free).tokens.is_empty());
    }
}

/// Each answer in a batch, with or without a constraint, equals the answer when the same request runs alone.
#[test]
fn constraints_do_not_change_other_answers_of_a_batch() {
    let engine = inferno::Engine::builder(crate::support::demo_dir())
        .device(inferno::device::DeviceChoice::Cpu)
        .context(1024)
        .sequences(4)
        .load()
        .unwrap();
    let schemas = schemas();
    let options = |index: usize| match index % 2 {
        0 => GenerateOptions { max_tokens: Some(60), ..sampled(index as u64) },
        _ => GenerateOptions { max_tokens: Some(300), ..with_schema(index as u64, &schemas[index % schemas.len()]) },
    };
    let alone: Vec<Answer> = (0..10).map(|index| ask(&engine, options(index))).collect();
    let streams: Vec<RequestStream> =
        (0..10).map(|index| engine.submit(question().options(options(index))).unwrap()).collect();
    for (index, (alone, stream)) in alone.iter().zip(streams).enumerate() {
        assert_eq!(Answer::read(stream).tokens, alone.tokens, "{index}");
    }
}

#[test]
fn regular_expressions_choices_and_grammars_constrain_answers() {
    let engine = demo(1024);
    let x = engine.tokenizer().encode("x", ControlTokens::Text).unwrap()[0];
    let options =
        |kind: GrammarKind, seed| GenerateOptions { constraint: Some(Constraint::new(kind)), ..sampled(seed) };
    let ask = |kind: GrammarKind, seed| {
        let answer = ask(&engine, options(kind, seed));
        assert_eq!(answer.summary.finish_reason, FinishReason::Stop, "{}", answer.text);
        answer.text
    };
    let texts = ["yes", "no", "it \"depends\"\n", "é/…"];
    let expected = regex::Regex::new(r"^[a-c]{2,5}/(\d{1,6}\.\d{2}|none)$").unwrap();
    let lark = || GrammarKind::Lark("start: \"(\" (start | \"x\") \")\"".to_string());
    for seed in 0..6 {
        let text = ask(GrammarKind::Regex(r"[a-c]{2,5}/(\d{1,6}\.\d{2}|none)".to_string()), seed);
        assert!(expected.is_match(&text), "{text}");
        let text = ask(GrammarKind::Choice(texts.map(str::to_string).to_vec()), seed);
        assert!(texts.contains(&text.as_str()), "{text}");
        // The grammar allows any nesting depth, so the end of the context may cut off the text.
        // In `ended`, a bias for `x` ends the nesting before that.
        let biased = GenerateOptions { logit_bias: BTreeMap::from([(x, 100.0)]), ..options(lark(), seed) };
        let ended = Answer::read(engine.complete("The answer is ", biased).unwrap());
        assert_eq!(ended.summary.finish_reason, FinishReason::Stop, "{}", ended.text);
        for answer in [super::ask(&engine, options(lark(), seed)), ended] {
            let depth = answer.text.find('x').unwrap_or(answer.text.len());
            let whole = format!("{}x{}", "(".repeat(depth), ")".repeat(depth));
            let is_cut = answer.summary.finish_reason == FinishReason::Length;
            assert!(whole == answer.text || (is_cut && whole.starts_with(&answer.text)), "{}", answer.text);
        }
    }
    let fields = json!({ "type": "object", "maxProperties": 2 });
    let answer = super::ask(&engine, with_schema(1, &fields));
    assert!(complete_json(&answer).is_object());
}

/// Constraints also apply to prompts without a chat format.
#[test]
fn text_completions_are_constrained_from_the_first_token() {
    let engine = demo(512);
    for schema in schemas() {
        let answer = Answer::read(engine.complete("The answer is ", with_schema(3, &schema)).unwrap());
        assert_eq!(problem(&complete_json(&answer), &schema, &schema), None, "{}", answer.text);
    }
}

#[test]
fn forks_follow_the_same_constraint_independently() {
    let engine = demo(1024);
    let schema = &schemas()[0];
    let streams = engine.submit_n(question().options(with_schema(40, schema)), 4).unwrap();
    let answers: Vec<Answer> = streams.into_iter().map(Answer::read).collect();
    for (seed, answer) in (40..).zip(&answers) {
        assert_eq!(problem(&complete_json(answer), schema, schema), None, "{}", answer.text);
        assert_eq!(answer.tokens, ask(&engine, with_schema(seed, schema)).tokens, "seed {seed}");
    }
    assert!(answers[1..].iter().any(|other| other.text != answers[0].text), "all four answers are equal");
}

/// With `min_tokens`, a penalty or a logit bias, an answer still matches its schema. `ignore_eos` is refused.
#[test]
fn other_options_apply_within_the_constraint() {
    let engine = demo(1024);
    let schema = json!({ "enum": ["red", "green", "blue"] });
    let change = |change: &dyn Fn(&mut GenerateOptions)| {
        let mut options = with_schema(0, &schema);
        change(&mut options);
        ask(&engine, options)
    };
    let answer = change(&|options| options.min_tokens = 200);
    assert!(["\"red\"", "\"green\"", "\"blue\""].contains(&answer.text.as_str()), "{}", answer.text);
    let answer = change(&|options| options.sampling.repetition_penalty = 2.0);
    assert_eq!(problem(&complete_json(&answer), &schema, &schema), None);
    // The same bias on every token does not change the probabilities of the allowed tokens.
    let banned: BTreeMap<u32, f32> = (0..engine.info().vocab_size as u32).map(|id| (id, -100.0)).collect();
    let answer = change(&|options| options.logit_bias = banned.clone());
    assert_eq!(problem(&complete_json(&answer), &schema, &schema), None);
    let options = GenerateOptions { ignore_eos: true, ..with_schema(0, &schema) };
    let error = engine.submit(question().options(options)).err().unwrap().to_string();
    assert!(error.contains("ignore_eos"), "{error}");
}

/// Log probabilities are computed without the constraint, so a forbidden token can be the most likely token.
#[test]
fn log_probabilities_ignore_the_constraint() {
    let engine = demo(1024);
    let schema = json!({ "enum": ["zebra"] });
    let options = GenerateOptions { logprobs: Some(3), ..with_schema(0, &schema) };
    let events: Vec<Event> =
        engine.submit(question().options(options)).unwrap().into_iter().map(|event| event.unwrap()).collect();
    let scored: Vec<_> = events.iter().filter_map(|event| Some((event.token()?, event.logprobs()?))).collect();
    assert!(scored.iter().any(|(token, logprobs)| logprobs.top[0].0 != *token));
    assert!(scored.iter().all(|(_, logprobs)| logprobs.top[0].1 >= logprobs.chosen));
}

#[test]
fn a_canceled_constraint_frees_its_sequence() {
    let engine = demo(1024);
    let schema = json!({ "type": "array", "items": { "type": "integer" }, "minItems": 1000 });
    let cancel = Arc::new(AtomicBool::new(false));
    let options = GenerateOptions { cancel: Some(cancel.clone()), max_tokens: None, ..with_schema(0, &schema) };
    let mut stream = engine.submit(question().options(options)).unwrap();
    for _ in 0..20 {
        stream.next_blocking().unwrap().unwrap();
    }
    cancel.store(true, Ordering::Relaxed);
    let summary = Answer::read(stream).summary;
    assert_eq!(summary.finish_reason, FinishReason::Canceled);
    engine.with_runner(|_| ()).unwrap();
    assert_eq!(engine.stats().used_blocks, 0);
    assert!(!Answer::read(engine.submit(question().options(greedy())).unwrap()).text.is_empty());
}
