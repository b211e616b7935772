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
    // Use a tokenizer without tag tokens, because a tag token counts as a tag even in the middle of an answer.
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
    // The end tag is missing, and the call is not JSON.
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
        // Without `<|python_tag|>`, JSON objects separated by a semicolon are an answer.
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
