//! Tests of chat formats: rendering conversations to ids, and parsing generated ids into channels.
//!
//! Most chat tests use a tiny tokenizer that this module builds.
//! Tests with the tokenizers and templates of published models need `INFERNO_FIXTURES`.
//! `tests/golden/make_chat.py` renders conversations with transformers and openai-harmony,
//! and writes the expected results to `tests/golden/chat.json`.

use std::path::Path;
use std::sync::OnceLock;

use inferno::chat::{
    AnswerParser, Channel, ChatFormat, Delta, FormatViolation, FormatViolations, Message, ReasoningEffort,
    RenderOptions, Rendered, ToolCall,
};
use inferno::tokenizer::{ControlTokens, Tokenizer};
use serde_json::{Value, json};

use crate::support::{Random, fixtures};

mod golden;
mod harmony;
mod malformed;
mod messages;
mod tagged;
mod template;

const HARMONY: [&str; 9] = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|constrain|>",
    "<|endoftext|>",
    "<|reserved|>",
];

/// Returns a tokenizer with one token per byte value, followed by the added tokens `special` and `plain`.
/// Only the tokens in `special` are marked as special.
/// The tokenizer has no merges, so each byte of ordinary text becomes one token.
fn byte_tokenizer(special: &[&str], plain: &[&str]) -> Tokenizer {
    // As in GPT-2, the vocabulary has a printable character in place of each byte.
    let printable = |b: &u32| (33..=126).contains(b) || (161..=172).contains(b) || (174..=255).contains(b);
    let mut vocab = serde_json::Map::new();
    let mut next = 256;
    for byte in 0..256u32 {
        let stand_in = if printable(&byte) { byte } else { next };
        next += u32::from(!printable(&byte));
        vocab.insert(char::from_u32(stand_in).unwrap().to_string(), json!(byte));
    }
    let added = special.iter().map(|s| (s, true)).chain(plain.iter().map(|s| (s, false)));
    let added: Vec<Value> = added
        .enumerate()
        .map(|(i, (content, special))| {
            json!({"id": 256 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": special})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
}

fn harmony_tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| byte_tokenizer(&HARMONY, &[]))
}

fn harmony_format(tokenizer: &Tokenizer) -> ChatFormat {
    ChatFormat::load(Path::new("/nonexistent"), tokenizer).unwrap().expect("harmony")
}

/// Returns the gpt-oss tokenizer. All tests share it, because loading is slow.
fn gpt_oss() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::from_dir(&fixtures().join("gpt-oss-20b")).unwrap())
}

fn options() -> RenderOptions {
    RenderOptions {
        tools: Vec::new(),
        reasoning_effort: ReasoningEffort::Medium,
        date: "2025-06-28".into(),
        add_generation_prompt: true,
        template_variables: serde_json::Map::new(),
    }
}

/// The result of parsing generated text. Consecutive deltas of one channel are joined.
struct Parsed {
    deltas: Vec<(Channel, String)>,
    tool_calls: Vec<ToolCall>,
    format_violations: usize,
    violations: FormatViolations,
}

impl Parsed {
    fn text(&self, channel: Channel) -> String {
        self.deltas.iter().filter(|(c, _)| *c == channel).map(|(_, text)| text.as_str()).collect()
    }

    fn answer(&self) -> String {
        self.text(Channel::Answer)
    }

    fn reasoning(&self) -> String {
        self.text(Channel::Reasoning)
    }
}

fn parse_ids(format: &ChatFormat, tokenizer: &Tokenizer, prompt: &str, ids: &[u32]) -> Parsed {
    parse_with(format.parser(&Rendered { ids: Vec::new(), text: prompt.into() }), tokenizer, ids)
}

fn parse_with(mut parser: AnswerParser, tokenizer: &Tokenizer, ids: &[u32]) -> Parsed {
    let mut deltas: Vec<(Channel, String)> = Vec::new();
    let mut take = |new: Vec<Delta>| {
        for Delta { channel, text } in new {
            assert!(!text.is_empty(), "the parser returned an empty delta");
            match deltas.last_mut().filter(|(last, _)| *last == channel) {
                Some((_, joined)) => joined.push_str(&text),
                None => deltas.push((channel, text)),
            }
        }
    };
    for &id in ids {
        take(parser.push(tokenizer, id).unwrap());
    }
    take(parser.finish(tokenizer).unwrap());
    assert_eq!(parser.finish(tokenizer).unwrap(), [], "the second call to `finish` returned deltas");
    let (tool_calls, violations) = (parser.tool_calls().to_vec(), parser.violations());
    Parsed { deltas, tool_calls, format_violations: violations.total(), violations }
}

fn parse(format: &ChatFormat, tokenizer: &Tokenizer, prompt: &str, text: &str) -> Parsed {
    parse_ids(format, tokenizer, prompt, &tokenizer.encode(text, ControlTokens::Parse).unwrap())
}

fn messages(value: Value) -> Vec<Message> {
    serde_json::from_value(value).unwrap()
}
