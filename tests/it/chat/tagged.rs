//! Tests the parsing of output from models with a chat template: answers, reasoning and tool calls.

use super::*;
use Channel::{Answer, Reasoning, ToolCall as Call};

const TAGS: [&str; 4] = ["<think>", "</think>", "<tool_call>", "</tool_call>"];

fn format(tokenizer: &Tokenizer) -> ChatFormat {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), "").unwrap();
    ChatFormat::load(dir.path(), tokenizer).unwrap().unwrap()
}

/// Returns two tokenizers: one that has a token for each tag, and one that encodes tags as plain text.
fn tokenizers() -> [Tokenizer; 2] {
    [byte_tokenizer(&["<|im_end|>"], &TAGS), byte_tokenizer(&["<|im_end|>"], &[])]
}

fn check(prompt: &str, text: &str, expected: &[(Channel, &str)]) {
    for tokenizer in tokenizers() {
        let parsed = parse(&format(&tokenizer), &tokenizer, prompt, text);
        let deltas: Vec<(Channel, &str)> =
            parsed.deltas.iter().map(|(channel, text)| (*channel, text.as_str())).collect();
        assert_eq!(deltas, expected, "{text}");
    }
}

#[test]
fn reasoning_tags_are_found_as_tokens_and_as_text() {
    let prompt = "<|im_start|>assistant\n";
    check(prompt, "Hello\n\n", &[(Answer, "Hello\n\n")]);
    check(prompt, "<think>\nHm.\n\nSo.\n</think>\n\nYes.<|im_end|>", &[(Reasoning, "Hm.\n\nSo."), (Answer, "Yes.")]);
    check(prompt, "\n<think>Hm.</think>Yes", &[(Reasoning, "Hm."), (Answer, "Yes")]);
    check(prompt, "<think>\n\n</think>\n\nYes", &[(Answer, "Yes")]);
    check(prompt, "<think>\nHm, a < b and 1 << 2 </", &[(Reasoning, "Hm, a < b and 1 << 2 </")]);
    check(prompt, "<thin", &[(Answer, "<thin")]);
    check(prompt, "  <b>", &[(Answer, "  <b>")]);
    check(prompt, " ", &[(Answer, " ")]);
}

#[test]
fn prompt_may_end_with_the_reasoning_tag() {
    for prompt in ["<|Assistant|><think>\n", "<think>", "<think>\n\n"] {
        check(prompt, "Hm.\n</think>\n\nYes.", &[(Reasoning, "Hm."), (Answer, "Yes.")]);
        check(prompt, "Hm", &[(Reasoning, "Hm")]);
        check(prompt, "</think>\n\n\nYes", &[(Answer, "\nYes")]);
    }
    check("<think>\n\n</think>\n\n", "Yes", &[(Answer, "Yes")]);
}

#[test]
fn tags_in_an_answer_are_text() {
    // Use a tokenizer without tag tokens, because a tag token is never text, even in the middle of an answer.
    let tokenizer = byte_tokenizer(&[], &[]);
    let text = "<think>Hm.</think>Write <think> first, </think> last, then <tool_call>.";
    let parsed = parse(&format(&tokenizer), &tokenizer, "", text);
    assert_eq!(parsed.reasoning(), "Hm.");
    assert_eq!(parsed.answer(), "Write <think> first, </think> last, then <tool_call>.");
}

#[test]
fn tool_calls_are_parsed() {
    let [tokenizer, _] = tokenizers();
    let text = "<think>Hm</think>Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": [1, 2]}}\n</tool_call>\n\
                <tool_call>\n{\"name\": \"g\"}\n</tool_call><tool_call>broken";
    let parsed = parse(&format(&tokenizer), &tokenizer, "", text);
    assert_eq!(parsed.answer(), "Let me see.\n");
    let names: Vec<_> = parsed.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
    assert_eq!(names, [("f", "{\"x\": [1, 2]}"), ("g", ""), ("", "broken")]);
    // The last tool call has no end tag and is not JSON.
    assert_eq!(parsed.format_violations, 2);
    assert_eq!(FormatViolation::ALL.map(|kind| parsed.violations.of(kind)), [0, 1, 0, 1]);
    assert!(parsed.deltas.iter().any(|(channel, _)| *channel == Call));
}

#[test]
fn tool_calls_of_mistral_and_llama_are_parsed() {
    let tokenizer = byte_tokenizer(&["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|eom_id|>"], &[]);
    let both = &[("f", "{\"x\": [1, 2]}"), ("g", "{}")][..];
    for (answer, text, calls, violations) in [
        (
            "",
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": [1, 2]}, \"id\": \"a\"}, {\"name\": \"g\", \"arguments\": {}}]",
            both,
            0,
        ),
        ("I look.", "I look.[TOOL_CALLS]f[ARGS]{\"x\": [1, 2]}[TOOL_CALLS]g[CALL_ID]123[ARGS]{}", both, 0),
        (
            "",
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"x\": [1, 2]}}; {\"name\": \"g\", \"parameters\": {}}<|eom_id|>",
            both,
            0,
        ),
        ("", "<|python_tag|>import os", &[("", "import os")], 1),
        ("", "[TOOL_CALLS][]", &[("", "[]")], 1),
        ("", "[TOOL_CALLS]f[ARGS]{\"x\": [1", &[("", "f[ARGS]{\"x\": [1")], 1),
        // Without `<|python_tag|>` and without tools in the request, JSON objects are an answer.
        ("{\"name\": \"f\"}; [1]", "{\"name\": \"f\"}; [1]", &[], 0),
    ] {
        let parsed = parse(&format(&tokenizer), &tokenizer, "", text);
        let found: Vec<_> = parsed.tool_calls.iter().map(|call| (&*call.name, &*call.arguments)).collect();
        assert_eq!(
            (parsed.answer().as_str(), &found[..], parsed.format_violations),
            (answer, calls, violations),
            "{text}"
        );
        assert_eq!(parsed.violations.of(FormatViolation::InvalidToolCall), violations, "{text}");
    }
}

/// Returns a tokenizer with control tokens of Llama 3 and with the tokens `<think>` and `</think>`.
/// Small Llama 3 models have `<|python_tag|>`, but often write tool calls without it.
fn llama_tokenizer() -> Tokenizer {
    byte_tokenizer(&["<|python_tag|>", "<|eot_id|>", "<think>", "</think>"], &[])
}

/// Returns a parser for the answer to a request with the tools `f` and `get_weather`.
fn with_tools(tokenizer: &Tokenizer) -> AnswerParser {
    let tools = ["f", "get_weather"].map(|name| json!({ "type": "function", "function": { "name": name } }));
    let prompt = Rendered { ids: Vec::new(), text: String::new() };
    format(tokenizer).parser(&prompt).with_tools(tokenizer, &tools)
}

#[test]
fn answers_of_llama_that_are_only_calls_are_calls() {
    let tokenizer = llama_tokenizer();
    let paris = ("get_weather", "{\"city\": \"Paris } \\\" {\"}");
    let call = r#"{"name": "get_weather", "parameters": {"city": "Paris } \" {"}}"#;
    for (text, calls) in [
        (call.to_string(), &[paris][..]),
        (format!("\n {call} \n<|eot_id|>"), &[paris]),
        (format!("{call}; {}", r#"{"arguments":{},"name":"f"}"#), &[paris, ("f", "{}")]),
        (format!("{call}\n\n{call}"), &[paris, paris]),
        (
            r#"{"type": "function", "name": "f", "parameters": {"x": {"y": [{}]}}}"#.into(),
            &[("f", "{\"x\": {\"y\": [{}]}}")],
        ),
        (format!("<think>Hm.</think>\n\n{call}"), &[paris]),
    ] {
        let ids = tokenizer.encode(&text, ControlTokens::Parse).unwrap();
        let parsed = parse_with(with_tools(&tokenizer), &tokenizer, &ids);
        let found: Vec<_> = parsed.tool_calls.iter().map(|call| (&*call.name, &*call.arguments)).collect();
        assert_eq!((found.as_slice(), parsed.answer().as_str()), (calls, ""), "{text}");
        assert_eq!(parsed.format_violations, 0, "{text}");
    }
}

#[test]
fn other_answers_in_json_are_text() {
    let call = r#"{"name": "f", "parameters": {}}"#;
    let texts = [
        r#"{"name": "g", "parameters": {}}"#.to_string(),
        r#"{"name": "f"}"#.to_string(),
        r#"{"parameters": {}}"#.to_string(),
        r#"{"name": "f", "parameters": "{}"}"#.to_string(),
        r#"{"name": "f", "parameters": [1]}"#.to_string(),
        r#"{"name": "f", "parameters": {}, "parameters": {}}"#.to_string(),
        r#"{"name": "f", "parameters": {}, "arguments": {}}"#.to_string(),
        r#"{"name": "f", "parameters": {1}}"#.to_string(),
        r#"{"name": "f", "parameters": {}, "note": 1}"#.to_string(),
        r#"{"name": "f", "parameters": {"x": 1"#.to_string(),
        format!("{call} is a call."),
        format!("Call: {call}"),
        format!("```json\n{call}\n```"),
        format!("{call} {call}"),
        format!("{call};"),
        format!("[{call}]"),
        "\n\n{\n  \"name\": \"x\"\n}\n".into(),
        "{".into(),
        "{}".into(),
        " \n".into(),
    ];
    let tokenizer = llama_tokenizer();
    let check = |parser: AnswerParser, tokenizer: &Tokenizer, text: &str| {
        let parsed = parse_with(parser, tokenizer, &tokenizer.encode(text, ControlTokens::Text).unwrap());
        assert_eq!((parsed.answer().as_str(), parsed.tool_calls.len()), (text, 0), "{text}");
        assert_eq!(parsed.format_violations, 0, "{text}");
    };
    for text in &texts {
        check(with_tools(&tokenizer), &tokenizer, text);
    }
    // Without a control token, even a valid call is text if the request has no tools or the vocabulary has no
    // `<|python_tag|>`.
    let prompt = Rendered { ids: Vec::new(), text: String::new() };
    check(format(&tokenizer).parser(&prompt).with_tools(&tokenizer, &[]), &tokenizer, call);
    let other = byte_tokenizer(&["<|im_end|>"], &[]);
    check(with_tools(&other), &other, call);
}

#[test]
fn answers_in_json_are_held_back_only_while_they_can_be_calls() {
    let tokenizer = llama_tokenizer();
    for (start, next) in [
        ("{\"", "c"),
        ("{\"name\": \"get_w", "i"),
        ("{\"name\": ", "1"),
        ("{\"name\": \"f\", \"parameters\": ", "["),
        ("{\"name\": \"f\", \"parameters\": {\"x\": \"}\"}}", " I"),
        ("\n{\"name\": \"f\", \"parameters\": {}}; ", "x"),
    ] {
        let mut parser = with_tools(&tokenizer);
        for id in tokenizer.encode(start, ControlTokens::Text).unwrap() {
            assert_eq!(parser.push(&tokenizer, id).unwrap(), [], "{start}");
        }
        let ids = tokenizer.encode(next, ControlTokens::Text).unwrap();
        let deltas: Vec<Delta> = ids.iter().flat_map(|&id| parser.push(&tokenizer, id).unwrap()).collect();
        assert_eq!(deltas, [Delta { channel: Answer, text: format!("{start}{next}") }]);
        // Once the text cannot be a tool call, the parser holds nothing back.
        let id = tokenizer.encode("{", ControlTokens::Text).unwrap()[0];
        assert_eq!(parser.push(&tokenizer, id).unwrap(), [Delta { channel: Answer, text: "{".into() }]);
    }
}

#[test]
fn control_tokens_are_never_text() {
    let tokenizer = byte_tokenizer(&["<|im_start|>", "<|im_end|>"], &TAGS);
    let parsed = parse(&format(&tokenizer), &tokenizer, "", "One<|im_end|> two</think></tool_call><|im_start|>!");
    assert_eq!(parsed.answer(), "One two!");
}

#[test]
fn random_tokens_never_lose_text() {
    let pieces = [
        "<think>",
        "</think>",
        "<th",
        "</",
        "ink>",
        "\n",
        " ",
        "<|im_end|>",
        "é",
        "\u{1F642}",
        "<tool_call>",
        "</tool_call>",
    ];
    let mut numbers = Random(0x2545_f491_4f6c_dd1d);
    for tokenizer in tokenizers() {
        let format = format(&tokenizer);
        for round in 0..2000 {
            let mut text = String::new();
            let mut expected = Vec::new();
            for step in 0..numbers.below(20) {
                if numbers.below(3) == 0 {
                    let word = format!("[{round}.{step}]");
                    text.push_str(&word);
                    expected.push(word);
                } else {
                    text.push_str(pieces[numbers.below(pieces.len())]);
                }
            }
            let prompt = if round % 2 == 0 { "<think>\n" } else { "" };
            let parsed = parse(&format, &tokenizer, prompt, &text);
            let all: String = parsed.deltas.iter().map(|(_, text)| text.as_str()).collect();
            for word in expected {
                assert!(all.contains(&word), "{word} is lost\n{text:?}\n{:?}", parsed.deltas);
            }
            assert!(!all.contains("<|im_end|>"));
        }
    }
}
