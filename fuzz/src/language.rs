//! Fuzzes tokenizers, chat formats and chat templates.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use inferno::chat::{Channel, ChatFormat, Delta, Message, ReasoningEffort, RenderOptions, Rendered};
use inferno::tokenizer::{ControlTokens, TokenTable, Tokenizer};
use inferno::{files, sandbox};
use serde_json::Value;

use super::MAX_BYTES;

const TOKENIZER: &str = include_str!("../../assets/demo/tokenizer.json");
const TOKENIZER_CONFIG: &str = include_str!("../../assets/demo/tokenizer_config.json");

/// The longest template to compile in this process. The compiler is recursive, so longer ones could overflow the stack.
const MAX_COMPILED_BYTES: usize = 4096;

/// The conversation that templates render.
const CONVERSATION: &str = r#"[
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <|end|>"},
    {"role": "assistant", "reasoning": "Hm.", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": "{\"a\": [1, {\"b\": null}]}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "42"}
]"#;

/// The control tokens of harmony that change the state of the parser.
const HARMONY: [&str; 6] = ["<|message|>", "<|start|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"];

/// Texts that occur in the headers of harmony messages.
const HEADERS: [&str; 12] = [
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.f",
    " to=",
    "user",
    "json",
    " ",
    "\n",
    "functions.f",
    " code",
];

/// Loads a tokenizer.json, then encodes and decodes short texts.
///
/// A hostile tokenizer can take unlimited time and memory. In inferno, the sandbox process limits both.
/// This function has no such limits, so it skips files whose normalizer lengthens text too much.
pub fn tokenizer_json(data: &[u8]) {
    if data.len() > MAX_BYTES || normalizer_growth(data) > MAX_BYTES {
        return;
    }
    let Ok(tokenizer) = Tokenizer::from_bytes(data) else { return };
    let added = tokenizer.controls().flat_map(|(text, _)| [text.to_string(), format!("a{text}b {text}")]).take(8);
    let texts = ["", "Hello wörld, 123\n\n <s> </s>", "＜|ＥＮＤ|＞ <|end|> é\u{300}", "\u{200B}世界 🦀\t\u{FDD0}"];
    // Text without a token, such as U+FDD0, becomes the unknown token. This is allowed even if it is a control token.
    let unknown = tokenizer.encode("\u{FDD0}", ControlTokens::Text).unwrap_or_default();
    for text in texts.into_iter().map(str::to_string).chain(added) {
        for controls in [ControlTokens::Default, ControlTokens::Parse, ControlTokens::Text] {
            let Ok(ids) = tokenizer.encode(&text, controls) else { continue };
            let has_control = ids.iter().any(|&id| tokenizer.is_control(id) && !unknown.contains(&id));
            assert!(!has_control || controls != ControlTokens::Text, "{text:?} became a control token");
            let _ = tokenizer.decode(&ids);
        }
    }
    let (header, tokens) = tokenizer.table().to_parts().expect("a table can be sent");
    let table = TokenTable::from_parts(header, &tokens).expect("a table can be received");
    assert_eq!(table.len(), tokenizer.vocab_size());
    for id in 0..tokenizer.vocab_size() as u32 + 8 {
        assert_eq!((table.token(id), table.is_control(id)), (tokenizer.token(id), tokenizer.is_control(id)));
        let _ = tokenizer.decode(&[id]);
    }
}

/// Returns an upper bound on the factor by which the normalizer in a tokenizer.json lengthens text.
fn normalizer_growth(data: &[u8]) -> usize {
    fn growth(value: &Value) -> usize {
        match value {
            // A normalizer can insert each of its strings at every byte of the text.
            Value::String(text) => text.len() + 1,
            Value::Array(items) => items.iter().map(growth).fold(1, usize::saturating_mul),
            Value::Object(fields) => {
                let parameters = fields.iter().filter(|(key, _)| *key != "type");
                parameters.map(|(_, value)| growth(value)).fold(1, usize::saturating_mul)
            }
            _ => 1,
        }
    }
    files::parse_json::<Value>(data).map_or(1, |json| growth(&json["normalizer"]))
}

/// Returns the demo's tokenizer, which has harmony's control tokens.
fn tokenizer() -> &'static Tokenizer {
    static DEMO: OnceLock<Tokenizer> = OnceLock::new();
    DEMO.get_or_init(|| Tokenizer::from_bytes(TOKENIZER.as_bytes()).unwrap())
}

fn harmony() -> ChatFormat {
    ChatFormat::from_template(tokenizer(), "", None, None, Vec::new()).expect("harmony")
}

fn control_id(text: &str) -> u32 {
    tokenizer().controls().find(|(control, _)| *control == text).expect("a control token").1
}

/// Converts bytes to token ids. A byte with a small value becomes a control token or the ids of one of [`HEADERS`].
/// Any other byte forms an id together with the next byte.
pub fn to_ids(data: &[u8]) -> Vec<u32> {
    let tokenizer = tokenizer();
    let mut controls: Vec<u32> = tokenizer.controls().map(|(_, id)| id).collect();
    controls.sort_unstable();
    let (mut ids, mut bytes) = (Vec::new(), data.iter().map(|&byte| usize::from(byte)));
    while let Some(byte) = bytes.next() {
        if let Some(&control) = controls.get(byte) {
            ids.push(control);
        } else if let Some(text) = HEADERS.get(byte - controls.len()) {
            ids.extend(tokenizer.encode(text, ControlTokens::Text).unwrap());
        } else {
            // The ids go beyond the end of the vocabulary, so some of them have no token.
            let id = (byte << 8 | bytes.next().unwrap_or(0)) % (tokenizer.vocab_size() + 32);
            ids.push(id as u32);
        }
    }
    ids
}

/// Parses token ids as generated harmony. The parser must keep all text after `<|message|>`.
pub fn harmony_parser(data: &[u8]) {
    if data.len() > MAX_BYTES / 8 {
        return;
    }
    let (tokenizer, ids) = (tokenizer(), to_ids(data));
    let mut parser = harmony().parser(&Rendered { ids: Vec::new(), text: "<|start|>assistant".into() });
    let mut deltas = Vec::new();
    for &id in &ids {
        deltas.extend(parser.push(tokenizer, id).unwrap());
    }
    deltas.extend(parser.finish(tokenizer).unwrap());
    assert_eq!(parser.finish(tokenizer).unwrap(), [], "the second call of `finish` returned deltas");
    assert!(deltas.iter().all(|delta| !delta.text.is_empty()), "the parser returned an empty delta");

    let texts = |deltas: &[Delta], is_wanted: fn(Channel) -> bool| -> String {
        deltas.iter().filter(|delta| is_wanted(delta.channel)).map(|delta| delta.text.as_str()).collect()
    };
    let arguments: String = parser.tool_calls().iter().map(|call| call.arguments.as_str()).collect();
    assert_eq!(texts(&deltas, |channel| channel == Channel::ToolCall), arguments);
    let all = texts(&deltas, |_| true);
    let mut at = 0;
    for text in contents(&ids) {
        match all[at..].find(&text) {
            Some(found) => at += found + text.len(),
            None => panic!("{text:?} is lost: {deltas:?}"),
        }
    }
}

/// Returns the texts that follow `<|message|>`, without texts that contain incomplete characters.
fn contents(ids: &[u32]) -> Vec<String> {
    let tokenizer = tokenizer();
    let [message, others @ ..] = HARMONY.map(control_id);
    let mut is_content = false;
    let mut parts = vec![Vec::new()];
    for &id in ids {
        if tokenizer.token(id).is_none() || tokenizer.is_control(id) {
            is_content = id == message || (is_content && !others.contains(&id));
            parts.push(Vec::new());
        } else if is_content && let Some(part) = parts.last_mut() {
            part.push(id);
        }
    }
    let texts = parts.iter().map(|part| tokenizer.decode(part).unwrap());
    texts.filter(|text| !text.is_empty() && !text.contains('\u{FFFD}')).collect()
}

/// Reads a conversation and renders it in harmony and with a template.
/// The texts of the messages must not change the number of control tokens.
pub fn chat_messages(data: &[u8]) {
    const TEMPLATE: &str = "{% for m in messages %}<|start|>{{ m.role }}{{ m.name }}<|message|>{{ m.content }}\
        {% for c in m.tool_calls %}<|call|>{{ c.function.name }}{{ c.function.arguments }}{% endfor %}<|end|>{% endfor %}";
    if data.len() > MAX_BYTES {
        return;
    }
    let Ok(messages) = files::parse_json::<Vec<Message>>(data) else { return };
    let json = serde_json::to_vec(&messages).unwrap();
    assert_eq!(files::parse_json::<Vec<Message>>(&json).unwrap(), messages);

    let neutral: Vec<Message> = messages.iter().map(with_neutral_texts).collect();
    let template = without_harmony();
    for (tokenizer, format) in [
        (tokenizer(), harmony()),
        (
            template,
            ChatFormat::from_template(template, "template", Some(TEMPLATE), None, Vec::new()).expect("a template"),
        ),
    ] {
        let render = |messages: &[Message]| format.render(tokenizer, messages, &options());
        let controls = |ids: &[u32]| ids.iter().filter(|&&id| tokenizer.is_control(id)).count();
        match (render(&messages), render(&neutral)) {
            (Ok(one), Ok(other)) => assert_eq!(controls(&one.ids), controls(&other.ids), "{messages:?}"),
            // Rendering marks texts with a noncharacter from U+FDD0 to U+FDEF.
            // It fails if the messages already contain all of them.
            (Err(error), Ok(_)) => assert!(error.to_string().contains("noncharacter"), "{error}"),
            (result, Err(_)) => assert!(result.is_err(), "the conversation is an error only with neutral texts"),
        }
    }
}

/// Returns a copy of a message in which every text is `x`.
/// Empty texts stay empty, because they can change the structure of a prompt.
fn with_neutral_texts(message: &Message) -> Message {
    let neutral = |text: &String| if text.is_empty() { String::new() } else { "x".to_string() };
    let mut message = message.clone();
    message.content = neutral(&message.content);
    for text in [&mut message.reasoning, &mut message.tool_call_id, &mut message.name] {
        *text = text.as_ref().map(neutral);
    }
    for call in &mut message.tool_calls {
        (call.name, call.arguments) = (neutral(&call.name), neutral(&call.arguments));
        call.id = call.id.as_ref().map(neutral);
    }
    message
}

/// Returns the demo's tokenizer without harmony's `<|return|>`, so that a template is used.
fn without_harmony() -> &'static Tokenizer {
    static TEMPLATE: OnceLock<Tokenizer> = OnceLock::new();
    TEMPLATE.get_or_init(|| Tokenizer::from_bytes(TOKENIZER.replace("<|return|>", "<|eot|>").as_bytes()).unwrap())
}

fn options() -> RenderOptions {
    RenderOptions {
        tools: Vec::new(),
        reasoning_effort: ReasoningEffort::Medium,
        date: "2026-01-31".into(),
        add_generation_prompt: true,
        template_variables: serde_json::Map::new(),
    }
}

/// Renders a conversation with a chat template, in a sandbox process. The program must have called `sandbox::init`.
///
/// The fuzzer cannot measure the coverage of the sandbox process. Therefore, this function also
/// compiles small templates in this process, so that coverage guides the fuzzer to new kinds of templates.
pub fn template(data: &[u8]) {
    if let Ok(source) = std::str::from_utf8(data)
        && data.len() <= MAX_COMPILED_BYTES
    {
        let _ = minijinja::Environment::new().template_from_str(source);
    }
    let folder = model_folder();
    fs::write(folder.join("chat_template.jinja"), data).unwrap();
    let Ok(language) = sandbox::load_language(folder) else { return };
    let encode = || language.tokenizer.encode("Hello <|end|>", ControlTokens::Text).unwrap();
    let ids = encode();
    let messages: Vec<Message> = serde_json::from_str(CONVERSATION).unwrap();
    // A template that exceeds a limit takes seconds, so it runs only once.
    if language.render(&messages[..2], &options()).is_ok() {
        let _ = language.render(&messages, &options());
    }
    assert_eq!(encode(), ids, "the sandbox process does not work after it rendered a template");
}

/// Creates a model without weights in a temporary folder. Returns the folder, which is never removed.
fn model_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("inferno-fuzz-template-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("tokenizer.json"), TOKENIZER.replace("<|start|>", "<|begin|>")).unwrap();
        fs::write(folder.join("tokenizer_config.json"), TOKENIZER_CONFIG).unwrap();
        folder
    })
}
