//! Tests the parsing of generated harmony output, well-formed and malformed.

use super::*;
use Channel::{Answer, Reasoning, ToolCall as Call};

fn parse_harmony(text: &str) -> Parsed {
    let tokenizer = harmony_tokenizer();
    parse(&harmony_format(tokenizer), tokenizer, "<|start|>assistant", text)
}

/// Parses text generated after `<|start|>assistant`, and checks the deltas, joined as in [`Parsed`].
fn check(text: &str, expected: &[(Channel, &str)]) -> Parsed {
    let parsed = parse_harmony(text);
    let deltas: Vec<(Channel, &str)> = parsed.deltas.iter().map(|(channel, text)| (*channel, text.as_str())).collect();
    assert_eq!(deltas, expected, "{text}");
    parsed
}

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall { id: None, name: name.into(), arguments: arguments.into() }
}

#[test]
fn well_formed_output_is_parsed() {
    let text = "<|channel|>analysis<|message|>Hm. 🙂<|end|><|start|>assistant<|channel|>final<|message|>It is 4.";
    for end in ["", "<|return|>", "<|end|>", "<|end|><|return|>", "<|endoftext|>"] {
        let parsed = check(&format!("{text}{end}"), &[(Reasoning, "Hm. 🙂"), (Answer, "It is 4.")]);
        assert_eq!(parsed.format_violations, 0);
    }
    let empty = check("<|channel|>final<|message|><|return|>", &[]);
    assert_eq!(empty.format_violations, 0);
}

#[test]
fn recipient_of_a_tool_call_may_be_in_either_place() {
    let arguments = "{\"x\": \"<ä>\"}";
    for header in [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f <|constrain|> json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary json to=functions.f",
        "<|channel|>commentary to=functions.f",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=functions.f<|channel|>commentary<|constrain|>json",
        " to=functions.f<|channel|>commentary code",
        " to=functions.f<|channel|>analysis",
        "<|channel|>analysis to=functions.f code",
        "<|channel|>analysis<|message|><|end|><|start|>assistant to=functions.f<|channel|>commentary",
    ] {
        let parsed = check(&format!("{header}<|message|>{arguments}<|call|>"), &[(Call, arguments)]);
        assert_eq!(parsed.tool_calls, [call("f", arguments)], "{header}");
        assert_eq!(parsed.format_violations, 0, "{header}");
    }
    // A tool call may have no arguments. Namespaces other than `functions` remain part of the tool's name.
    let parsed = check("<|channel|>analysis to=browser.search code<|message|><|call|>", &[]);
    assert_eq!(parsed.tool_calls, [call("browser.search", "")]);
}

#[test]
fn text_before_a_tool_call_is_part_of_the_answer() {
    let parsed = check(
        "<|channel|>commentary<|message|>I look it up.<|end|>\
         <|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        &[(Answer, "I look it up."), (Call, "{}")],
    );
    assert_eq!((parsed.tool_calls.len(), parsed.format_violations), (1, 0));
    check("<|channel|>commentary to=assistant<|message|>Hello<|end|>", &[(Answer, "Hello")]);
    check("<|channel|>commentary to=user<|message|>Hello<|end|>", &[(Answer, "Hello")]);
}

#[test]
fn output_without_a_header_is_the_answer() {
    for text in
        ["Hello.", "I can't help with that.", "assistants are many", "to be or not to be", "as", "assistant", "你好"]
    {
        let parsed = check(text, &[(Answer, text)]);
        assert_eq!(parsed.format_violations, 1, "{text}");
        check(&format!("{text}<|return|>"), &[(Answer, text)]);
    }
    check("<|message|>Hello<|return|>", &[(Answer, "Hello")]);
}

#[test]
fn missing_message_marker_is_recovered() {
    check("<|channel|>final Hello there, you<|return|>", &[(Answer, "Hello there, you")]);
    check("<|channel|>commentary Hello<|end|>", &[(Answer, "Hello")]);
    check("<|channel|>final你好<|end|>", &[(Answer, "你好")]);
    check("<|channel|>finalHello<|end|>", &[(Answer, "Hello")]);
    check(
        "<|channel|>analysis We think.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        &[(Reasoning, "We think."), (Answer, "Yes")],
    );
    check("<|channel|>analysis We think<|channel|>final<|message|>Yes", &[(Reasoning, "We think"), (Answer, "Yes")]);
    check(
        "<|channel|>analysis We think<|start|>assistant<|channel|>final<|message|>Yes",
        &[(Reasoning, "We think"), (Answer, "Yes")],
    );
    check("<|start|>assistant Hello there<|return|>", &[(Answer, "Hello there")]);
    let parsed =
        check("<|channel|>commentary to=functions.f <|constrain|>json{\"a\": 1}<|call|>", &[(Call, "{\"a\": 1}")]);
    assert_eq!(parsed.tool_calls, [call("f", "{\"a\": 1}")]);
    for content_type in ["", "json ", "json"] {
        let text = format!("<|channel|>commentary to=functions.f {content_type}{{\"a\": 1}}<|call|>");
        let parsed = check(&text, &[(Call, "{\"a\": 1}")]);
        assert_eq!(parsed.tool_calls, [call("f", "{\"a\": 1}")], "{text}");
    }
}

#[test]
fn violations_are_counted_by_kind() {
    use FormatViolation::*;
    for (text, kinds) in [
        ("<|channel|>final<|message|>Yes.<|return|>", &[][..]),
        ("Yes.", &[MissingToken]),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", &[MissingToken]),
        ("<|channel|>final<|message|><|message|>Yes.", &[UnexpectedToken]),
        ("<|message|>Yes.", &[InvalidHeader]),
        ("<|message|><|message|>Yes.", &[InvalidHeader, UnexpectedToken]),
        ("<|channel|>final<|constrain|>json<|constrain|><|message|>Yes.", &[UnexpectedToken]),
    ] {
        let parsed = parse_harmony(text);
        let found: Vec<_> = FormatViolation::ALL.into_iter().filter(|&kind| parsed.violations.of(kind) > 0).collect();
        assert!(kinds.iter().all(|kind| found.contains(kind)), "{text}: {found:?}");
        assert_eq!((found.len(), parsed.format_violations), (kinds.len(), kinds.len()), "{text}: {found:?}");
    }
}

#[test]
fn missing_and_doubled_markers_are_recovered() {
    let both = [(Reasoning, "Hm."), (Answer, "Yes.")];
    for text in [
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|><|start|>assistant<|channel|>final<|message|>Yes.",
        "<|start|>assistant<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Yes.",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.<|return|><|return|>",
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>final<|message|>Yes.",
        "<|channel|>analysis<|message|>Hm.<|end|>assistant<|channel|>final<|message|>Yes.",
        "<|channel|>analysis<|message|><|message|>Hm.<|end|><|message|>Yes.",
        "<|channel|>commentary<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>finale<|message|>Yes.",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|message|>Yes.",
        "<|channel|>analysis<|message|>Hm.<|end|>Yes.",
        "<|channel|>analysis<|message|>Hm.<|end|><|end|><|end|><|start|>assistant<|channel|>final<|message|>Yes.<|call|>",
    ] {
        // The parser reads `finale` as the channel name `final`, followed by the text `e`.
        let expected = if text.contains("finale") { [both[0], (Answer, "eYes.")] } else { both };
        let parsed = check(text, &expected);
        assert!(parsed.format_violations > 0 || text.contains("<|end|><|end|>"), "{text}");
    }
    let parsed =
        check("<|channel|>commentary to=functions.f<|channel|>commentary<|message|>{}<|call|>", &[(Call, "{}")]);
    assert_eq!(parsed.tool_calls, [call("f", "{}")]);
}

#[test]
fn unknown_channels_are_answers_and_foreign_roles_are_reasoning() {
    check("<|channel|>summary<|message|>Hello<|return|>", &[(Answer, "Hello")]);
    // A message that the model generates in a role other than assistant is shown as reasoning, not as the answer.
    check(
        "<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>More?<|end|>",
        &[(Answer, "Yes."), (Reasoning, "More?")],
    );
    check("<|start|>functions.f to=assistant<|channel|>commentary<|message|>42<|end|>", &[(Reasoning, "42")]);
}

#[test]
fn unfinished_headers_are_answers_only_as_a_last_resort() {
    // If the generation is cut off inside a header, for example by a token limit, and the header is valid so far, the
    // header is dropped.
    check("<|channel|>ana", &[]);
    check("<|channel|>analysis", &[]);
    check("<|channel|>commentary to", &[]);
    // If the model itself ends the message inside the header and generates nothing else, the words of the header become
    // the answer.
    check("<|start|>assistant<|channel|>fin<|end|>", &[(Answer, "assistant fin")]);
    check("<|channel|>", &[]);
    check("", &[]);
    check("<|return|>", &[]);
    // A header that is cut off after an answer is dropped too.
    for header in ["", "ana", "analysis", "commentary to", "commentary json"] {
        let text = format!("<|channel|>final<|message|>Yes.<|end|><|start|>assistant<|channel|>{header}");
        assert_eq!(check(&text, &[(Answer, "Yes.")]).format_violations, 0, "{text}");
        // A header with a role is dropped even if the model has generated nothing else.
        check(&format!("<|start|>assistant<|channel|>{header}"), &[]);
    }
    // A recipient before `<|channel|>` is valid, but the beginning of one is not: nothing can complete it any more.
    for header in ["commentary <|constrain|>json", "commentary json", "commentary", "comm", ""] {
        // The prompt ends with `<|start|>assistant`, so a second `<|start|>` at the beginning is a violation.
        for (start, violations) in
            [("", 0), ("<|start|>assistant", 1), ("<|channel|>final<|message|>Yes.<|end|><|start|>assistant", 0)]
        {
            let text = format!("{start} to=functions.f<|channel|>{header}");
            let expected: &[_] = if text.contains("Yes.") { &[(Answer, "Yes.")] } else { &[] };
            let parsed = check(&text, expected);
            assert_eq!((parsed.tool_calls.len(), parsed.format_violations), (0, violations), "{text}");
        }
    }
    let parsed = check("<|start|>assistant to<|channel|>fin", &[(Answer, "assistant to fin")]);
    assert_eq!(parsed.format_violations, 2, "the second `<|start|>` and the header");
    // A role that is not allowed is a violation.
    let text = "<|channel|>final<|message|>Yes.<|end|><|start|>user<|channel|>fin";
    assert_eq!(check(text, &[(Answer, "Yes.")]).format_violations, 1);
    let endless = "x".repeat(500);
    check(&format!("<|channel|>{endless}"), &[(Answer, &endless)]);
    check(&format!("<|start|>{endless}"), &[(Answer, &endless)]);
}

#[test]
fn text_is_returned_as_soon_as_it_is_certain() {
    let tokenizer = harmony_tokenizer();
    let mut parser = harmony_format(tokenizer).parser(&Rendered { ids: vec![], text: String::new() });
    let mut seen = Vec::new();
    for id in tokenizer.encode("<|channel|>final<|message|>é!Hi", ControlTokens::Parse).unwrap() {
        seen.push(parser.push(tokenizer, id).unwrap().iter().map(|delta| delta.text.as_str()).collect::<String>());
    }
    assert_eq!(seen[seen.len() - 5..], ["", "é", "!", "H", "i"]);
}

/// Random sequences of control tokens and words never cause a panic.
/// Words that cannot be part of a header are returned in order.
#[test]
fn random_tokens_never_lose_text() {
    let tokenizer = harmony_tokenizer();
    let format = harmony_format(tokenizer);
    let headers =
        ["assistant", "analysis", "commentary", "final", " to=functions.f", "json", " ", "user", "to", "functions.f"];
    let mut numbers = Random(0x9e37_79b9_7f4a_7c15);
    for round in 0..4000 {
        let mut text = String::new();
        let mut expected = Vec::new();
        for step in 0..numbers.below(24) {
            match numbers.below(3) {
                0 => text.push_str(HARMONY[numbers.below(HARMONY.len())]),
                1 => text.push_str(headers[numbers.below(headers.len())]),
                // Words in square brackets cannot be part of a header, so the parser must return these words as text.
                _ => {
                    let words = format!("[{round} {step}]");
                    text.push_str(&words);
                    expected.push(words);
                }
            }
        }
        let mut ids = tokenizer.encode(&text, ControlTokens::Parse).unwrap();
        if round % 4 == 0 {
            // Insert an id that has no token, and a byte that is not valid UTF-8.
            // Each may split words in brackets, so this round does not look for the words.
            ids.insert(numbers.below(ids.len() + 1), 9_999_999);
            ids.insert(numbers.below(ids.len() + 1), 0xff);
            expected.clear();
        }
        let parsed = parse_ids(&format, tokenizer, "<|start|>assistant", &ids);
        let all: String = parsed.deltas.iter().map(|(_, text)| text.as_str()).collect();
        let mut at = 0;
        for words in expected {
            match all[at..].find(&words) {
                Some(found) => at += found + words.len(),
                None => panic!("{words} is lost\n{text}\n{:?}", parsed.deltas),
            }
        }
        let has_text = text.chars().any(|c| !c.is_whitespace()) && ids.iter().any(|id| *id > 32 && *id < 256);
        let has_call = !parsed.tool_calls.is_empty();
        let has_message = text.contains("<|message|>");
        // A second <|channel|> in a header discards the text after the first one.
        let has_discarded_header = text.matches("<|channel|>").count() > 1;
        // A valid header that the end of the text cuts off is dropped.
        let is_cut_off = text.rsplit_once("<|channel|>").is_some_and(|(_, header)| {
            let is_last = !header.replace("<|constrain|>", "").contains("<|");
            let begins = |name: &&str| name.starts_with(header.trim()) || header.trim().starts_with(*name);
            is_last && ["analysis", "commentary", "final"].iter().any(begins)
        });
        let may_be_empty = !has_text || has_call || has_message || has_discarded_header || is_cut_off;
        assert!(may_be_empty || !all.is_empty(), "the parser returned no text for {text}");
    }
}

#[test(fixtures)]
fn parsing_agrees_with_the_vectors_of_openai_harmony() {
    let (fixtures, tokenizer) = (fixtures(), gpt_oss());
    let format = harmony_format(tokenizer);
    let read = |name: &str| std::fs::read_to_string(fixtures.join(format!("vectors/harmony/{name}.txt"))).unwrap();
    let ids = |name: &str| read(name).split_whitespace().map(|id| id.parse().unwrap()).collect::<Vec<u32>>();
    let prompt = "<|start|>assistant";

    let parsed = parse_ids(&format, tokenizer, prompt, &ids("test_simple_reasoning_response"));
    assert_eq!(parsed.reasoning(), "User asks: \"What is 2 + 2?\" Simple arithmetic. Provide answer.");
    assert_eq!((parsed.answer().as_str(), parsed.format_violations), ("2 + 2 = 4.", 0));

    let parsed = parse_ids(&format, tokenizer, prompt, &ids("test_simple_tool_call"));
    assert_eq!(parsed.reasoning(), "User asks: \"What is the weather in Tokyo?\" We need to use lookup_weather tool.");
    assert_eq!(parsed.tool_calls, [call("lookup_weather", "{\"location\": \"Tokyo\"}")]);

    let parsed = parse(&format, tokenizer, prompt, read("test_streamable_parser").trim_end());
    let arguments = "{\"query\": \"current US president July 2025\", \"topn\": 10, \"source\": \"news\"}";
    assert_eq!(parsed.tool_calls, [call("browser.search", arguments)]);
    assert!(parsed.reasoning().starts_with("User asks \"Who is"));
    assert!(parsed.reasoning().ends_with("{\"result\": \"https://openai.com/\"}"));
    // A model may generate ids above the tokenizer's last id.
    let parsed = parse_ids(&format, tokenizer, prompt, &[200005, 17196, 200008, 201000, 17, 201087, 200002]);
    assert_eq!(parsed.answer(), "2");
}
