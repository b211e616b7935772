//! Tests of untrusted chat templates, tokenizers and prompts, and of the sandbox process.
//! Hostile input must not make a command exceed its limits on time and memory.
//! Text in messages must never become a control token.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use inferno::chat::{Message, ReasoningEffort, RenderOptions, ToolCall};
use inferno::sandbox;
use inferno::tokenizer::{ControlTokens, Tokenizer};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::at_home;
use crate::support::bounded::{Bounded, bounded, bounded_with_input};
use crate::support::program::copy_of_demo;

/// A copy of the demo model in which the token `<|start|>` is renamed to `<|begin|>`.
/// Without `<|start|>`, inferno uses chat_template.jinja instead of the harmony format.
struct Model {
    folder: TempDir,
    path: PathBuf,
}

impl Model {
    fn new() -> Self {
        let (folder, path) = copy_of_demo();
        let model = Self { folder, path };
        model.edit("tokenizer.json", |text| text.replace("<|start|>", "<|begin|>"));
        model
    }

    fn with_template(template: &str) -> Self {
        let model = Self::new();
        fs::write(model.path.join("chat_template.jinja"), template).unwrap();
        model
    }

    fn with_tokenizer(change: impl FnOnce(&mut Value)) -> Self {
        let model = Self::with_template("{{ messages[0].content }}");
        model.edit("tokenizer.json", |text| {
            let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
            change(&mut tokenizer);
            tokenizer.to_string()
        });
        model
    }

    fn edit(&self, file: &str, change: impl FnOnce(String) -> String) {
        let file = self.path.join(file);
        let text = change(fs::read_to_string(&file).unwrap());
        fs::write(file, text).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = at_home(Command::new(env!("CARGO_BIN_EXE_inferno")), &self.folder);
        command.args(arguments);
        command
    }

    fn play(&self, arguments: &[&str]) -> Bounded {
        let path = self.path.to_str().unwrap();
        let fixed = ["play", path, "--device", "cpu", "--context", "512", "--max-tokens", "4", "--prompt"];
        bounded(self.command(&[&fixed[..], arguments].concat()))
    }

    fn tokenize(&self, text: &str) -> Bounded {
        bounded_with_input(self.command(&["tokenize", self.path.to_str().unwrap()]), text.as_bytes())
    }
}

/// Returns a normalizer or decoder that replaces `pattern` with `content`.
fn replace(pattern: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
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

#[test]
fn hostile_templates_are_refused() {
    let loop_over = |body: &str| {
        format!("{{% set ns = namespace(s='aaaa', l=[1, 2]) %}}{{% for i in range(60) %}}{body}{{% endfor %}}")
    };
    let templates = [
        ("a cycle", "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".to_string(), "recursed too deeply"),
        (
            "pprint of a cycle",
            "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | pprint }}".into(),
            "took more than",
        ),
        (
            "== of cycles",
            "{% set a = namespace() %}{% set a.x = a %}{% set a.y = a %}{% set b = namespace() %}{% set b.x = b %}\
             {% set b.y = b %}{{ a == b }}"
                .into(),
            "",
        ),
        ("a long chain of operators", format!("{{{{ 1{} }}}}", "+1".repeat(490_000)), "recursed too deeply"),
        ("parentheses", format!("{{{{ {}1{} }}}}", "(".repeat(400_000), ")".repeat(400_000)), "recursion"),
        ("doubling", loop_over("{% set ns.s = ns.s ~ ns.s %}"), "MiB of memory"),
        ("replace", loop_over("{% set ns.s = ns.s | replace('a', 'aa') %}"), "MiB of memory"),
        ("join", loop_over("{% set ns.s = [ns.s, ns.s, ns.s] | join(ns.s) %}"), "MiB of memory"),
        ("doubling a list", loop_over("{% set ns.l = ns.l + ns.l %}{{ ns.l | list | length }}"), ""),
        ("steps", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".into(), "steps"),
    ];
    for (name, template, reason) in templates {
        let model = Model::with_template(&template);
        let answer = model.play(&["hello"]);
        println!(
            "{name}: {:.1} s, peak memory {} MiB, stderr: {}",
            answer.seconds,
            answer.peak_bytes >> 20,
            answer.stderr.trim()
        );
        answer.assert_fails(1, &["chat template", reason]);
        // Without `--chat`, `tokenize` does not use the template, so it still works.
        model.tokenize("hello").assert_succeeds();
    }
}

#[test]
fn model_with_a_hostile_template_continues_text() {
    let model = Model::with_template("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}");
    model.play(&["How do I", "--raw"]).assert_succeeds();
}

#[test]
fn next_request_works_after_a_template_exceeded_a_limit() {
    let template = "{% if messages[0].content == 'boom' %}{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}\
                    {% else %}{{ messages[0].content }}{% endif %}";
    let model = Model::with_template(template);
    let language = sandbox::load_language(&model.path).unwrap();
    let render = |text: &str| language.render(&[Message::user(text)], &options());
    let expected = render("hello").unwrap();
    for _ in 0..2 {
        let error = render("boom").unwrap_err().to_string();
        assert!(error.contains("recursed too deeply"), "{error}");
        assert_eq!(render("hello").unwrap(), expected);
    }
}

/// The sandbox process must encode and render exactly as the library does in this process.
/// Decoding always runs in this process, here with the token table that the sandbox process sent.
#[test]
fn sandbox_process_agrees_with_this_process() {
    let model =
        Model::with_template("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}");
    for path in [model.path.clone(), crate::support::demo_dir()] {
        let language = sandbox::load_language(&path).unwrap();
        let here = Tokenizer::from_dir(&path).unwrap();
        assert_eq!(language.tokenizer.vocab_size(), here.vocab_size());
        assert!(language.tokenizer.controls().eq(here.controls()));
        for text in ["", "How do I download a model?", "<|end|> é 世界 🦀\n\t  x", "a\u{300}\u{FDD0}"] {
            for controls in [ControlTokens::Default, ControlTokens::Parse, ControlTokens::Text] {
                let ids = language.tokenizer.encode(text, controls).unwrap();
                assert_eq!(ids, here.encode(text, controls).unwrap(), "{text:?}");
                assert_eq!(language.tokenizer.decode(&ids).unwrap(), here.decode(&ids).unwrap());
            }
            let messages = [Message::system(text), Message::user(text)];
            let chat = inferno::chat::ChatFormat::load(&path, &here).unwrap().unwrap();
            let rendered = language.render(&messages, &options()).unwrap();
            assert_eq!(rendered, chat.render(&here, &messages, &options()).unwrap());
        }
    }
}

#[test]
fn hostile_tokenizers_end_within_limits() {
    let chain = |count: usize| vec![replace("a", &"a".repeat(100)); count];
    type Change = Box<dyn FnOnce(&mut Value)>;
    let tokenizers: [(&str, Change, &str); 8] = [
        (
            "a normalizer that multiplies the text",
            Box::new(move |t| t["normalizer"] = json!({"type": "Sequence", "normalizers": chain(6)})),
            "MiB of memory",
        ),
        (
            "a decoder that multiplies the text",
            Box::new(move |t| t["decoder"] = json!({"type": "Sequence", "decoders": chain(6)})),
            "lengthen text",
        ),
        (
            "a decoder that replaces an empty string",
            Box::new(|t| {
                let steps = vec![json!({"type": "BPEDecoder", "suffix": ""}); 32];
                t["decoder"] = json!({"type": "Sequence", "decoders": steps});
            }),
            "replaces an empty string",
        ),
        (
            "a decoder with a regular expression",
            Box::new(|t| t["decoder"] = json!({"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""})),
            "regular expression",
        ),
        (
            "a prefix of 50 MB",
            Box::new(|t| t["normalizer"] = json!({"type": "Prepend", "prepend": "a".repeat(50_000_000)})),
            "",
        ),
        (
            "a suffix of a million tokens",
            Box::new(|t| {
                let token = json!({"SpecialToken": {"id": "x", "type_id": 0}});
                let text = json!({"Sequence": {"id": "A", "type_id": 0}});
                t["post_processor"] = json!({
                    "type": "TemplateProcessing", "single": [text, token], "pair": [text, token],
                    "special_tokens": {"x": {"id": "x", "ids": vec![1; 1_000_000], "tokens": vec!["x"; 1_000_000]}},
                });
            }),
            "",
        ),
        (
            "a regular expression that backtracks",
            Box::new(|t| {
                t["pre_tokenizer"] = json!({
                    "type": "Split", "pattern": {"Regex": "(?=(a+)+$)(a|a)+b"}, "behavior": "Isolated", "invert": false,
                });
            }),
            "",
        ),
        (
            "long pieces",
            Box::new(|t| {
                let pieces: Vec<Value> = (1..4000).map(|length| json!(["a".repeat(length), -1.0])).collect();
                t["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false});
                t["normalizer"] = Value::Null;
            }),
            "",
        ),
    ];
    for (name, change, reason) in tokenizers {
        let model = Model::with_tokenizer(change);
        let answer = model.tokenize(&"a".repeat(100_000));
        println!(
            "{name}: exit code {:?}, {:.1} s, stderr: {}",
            answer.status.code(),
            answer.seconds,
            answer.stderr.trim()
        );
        if !reason.is_empty() {
            answer.assert_fails(1, &["token", reason]);
        }
    }
}

#[test]
fn long_prompt_is_refused_before_it_is_tokenized() {
    let model = Model::new();
    let command = model.command(&["play", "demo", "--device", "cpu"]);
    bounded_with_input(command, &b"hello world ".repeat(5_000_000)).assert_fails(10, &["60.0 MB", "shorten"]);
}

/// Each normalizer in this test converts some text other than `<|end|>`, such as `<|END|>`, to this control token.
/// In a message, such text must be encoded as ordinary text or be refused.
#[test]
fn text_never_becomes_a_control_token_through_a_normalizer() {
    let normalizers = [
        json!({"type": "NFKC"}),
        json!({"type": "Lowercase"}),
        json!({"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}),
        replace("\u{200B}", ""),
        replace("§", "<|end|>"),
        json!({"type": "Sequence", "normalizers": [replace("~", "|"), {"type": "NFKC"}, {"type": "Lowercase"}]}),
    ];
    let spellings =
        ["<|end|>", "＜|end|＞", "<|END|>", "<|e\u{301}nd|>", "<|e\u{200B}nd|>", "§", "<~end~>", "<\u{FF5C}ＥＮＤ|>"];
    let mut converted = 0;
    for normalizer in &normalizers {
        for is_special in [true, false] {
            let model = Model::with_tokenizer(|tokenizer| {
                tokenizer["normalizer"] = normalizer.clone();
                for token in tokenizer["added_tokens"].as_array_mut().unwrap() {
                    (token["normalized"], token["special"]) = (json!(true), json!(is_special));
                }
            });
            let template = "<|begin|>{% for m in messages %}{{ m.content }}<|end|>{% endfor %}";
            fs::write(model.path.join("chat_template.jinja"), template).unwrap();
            let language = sandbox::load_language(&model.path).unwrap();
            let tokenizer = &language.tokenizer;
            let controls = |ids: &[u32]| ids.iter().filter(|id| tokenizer.is_control(**id)).count();
            for spelling in spellings {
                let text = format!("a {spelling} b");
                converted += controls(&tokenizer.encode(&text, ControlTokens::Parse).unwrap());
                if let Ok(ids) = tokenizer.encode(&text, ControlTokens::Text) {
                    assert_eq!(controls(&ids), 0, "{text:?} has a control token with {normalizer}");
                }
                match language.render(&[Message::user(&text), Message::user("ok")], &options()) {
                    Ok(rendered) => {
                        assert_eq!(controls(&rendered.ids), 3, "{text:?}: wrong control token count with {normalizer}")
                    }
                    Err(error) => assert!(error.to_string().contains("control token"), "{error}"),
                }
            }
        }
    }
    // Check that the normalizers convert other spellings. Otherwise, the test would prove nothing.
    // `<|end|>` itself adds at most 12 to `converted`: 6 normalizers, each with `special` true and false.
    assert!(converted > 20, "{converted}");
}

/// Asserts that user messages with these texts add no control tokens to the rendered conversation.
/// `expected` is the number of control tokens that the template itself adds.
#[track_caller]
fn assert_controls(model: &Model, texts: &[&str], expected: usize) {
    let language = sandbox::load_language(&model.path).unwrap();
    let messages: Vec<Message> = texts.iter().map(|text| Message::user(*text)).collect();
    let ids = language.render(&messages, &options()).unwrap().ids;
    let controls = ids.iter().filter(|id| language.tokenizer.is_control(**id)).count();
    assert_eq!(controls, expected, "{texts:?} became {ids:?}");
}

#[test]
fn text_never_becomes_a_control_token_of_the_model_itself() {
    let model = Model::with_tokenizer(|tokenizer| {
        let pieces = ["<unk>", "h", "i", "<", "|", ">", "c", "a", "l", "<|call|>"];
        let vocab: Vec<Value> = pieces.iter().enumerate().map(|(id, piece)| json!([piece, -(id as f64)])).collect();
        tokenizer["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false});
        tokenizer["normalizer"] = json!({"type": "NFKC"});
        (tokenizer["pre_tokenizer"], tokenizer["decoder"]) = (Value::Null, Value::Null);
        let token = |id: u32, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        tokenizer["added_tokens"] = json!([token(0, "<unk>"), token(9, "<|call|>")]);
    });
    assert_controls(&model, &["hi"], 0);
    assert_controls(&model, &["hi＜|call|＞"], 0);
    assert_controls(&model, &["hi<|call|>"], 0);
    // The emoji has no token, so it becomes `<unk>`, which is a control token of this model.
    // Encoding a message fails if one of its characters becomes a control token, except for `<unk>`, which is harmless.
    let language = sandbox::load_language(&model.path).unwrap();
    assert!(language.render(&[Message::user("😀<|call|>")], &options()).is_ok());
}

#[test]
fn text_never_becomes_a_short_or_a_split_control_token() {
    let model = Model::with_tokenizer(|tokenizer| {
        let text = tokenizer.to_string().replace("<|call|>", "☃");
        *tokenizer = serde_json::from_str(&text).unwrap();
    });
    let template = "<|begin|>{% for m in messages %}{{ m.content }}{% endfor %}<|end|>";
    fs::write(model.path.join("chat_template.jinja"), template).unwrap();
    for texts in [&["x☃y"][..], &["☃"], &["☃☃", "☃"], &["hi<|e", "nd|>"], &["<", "|end|>"], &["<|end|", ">"]]
    {
        assert_controls(&model, texts, 2);
    }
}

/// `chat::injection` marks control tokens in messages with a character, U+FDD0 by default, and later removes the marks.
/// If the arguments of a tool call contain U+FDD0 as a JSON escape, the rendered text must keep this character.
#[test]
fn spelled_noncharacters_are_kept() {
    let model = Model::with_template("{{ messages[0].tool_calls[0].function.arguments | tojson }}");
    let language = sandbox::load_language(&model.path).unwrap();
    let mut message = Message::assistant("");
    let arguments = r#"{"a": "x\ufdd0y <|end|>"}"#.to_string();
    message.tool_calls.push(ToolCall { id: None, name: "f".into(), arguments });
    let rendered = language.render(&[message], &options()).unwrap();
    assert_eq!(rendered.text, "{\"a\": \"x\u{FDD0}y <|end|>\"}");
}

/// Returns the ids of the child processes of `pid`. /proc lists each child under the thread that started it.
fn children(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<u32>>()).collect()
}

/// If the program is killed, the pipe to its sandbox process closes, and the sandbox process must exit.
#[test]
fn sandbox_process_ends_with_the_program() {
    let model = Model::with_template("{{ messages[0].content }}");
    let play = ["play", model.path.to_str().unwrap(), "--device", "cpu", "--context", "4096", "--min-p", "0.9"];
    let mut command = model.command(&play);
    command.args(["--prompt", "hello", "--stop", "never", "--temperature", "2", "--max-tokens", "4000"]);
    let mut program = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let processes = (0..1000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        Some(children(program.id())).filter(|processes| !processes.is_empty())
    });
    let processes = processes.expect("no sandbox process was started");
    program.kill().unwrap();
    program.wait().unwrap();
    let is_running = |process: &u32| Path::new(&format!("/proc/{process}/cmdline")).exists();
    let has_ended = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        !processes.iter().any(is_running)
    });
    assert!(has_ended, "a sandbox process outlived the program");
}
