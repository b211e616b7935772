//! End-to-end tests of conversations: commands, key bindings, journals on disk, and a full context.

mod journal;

use std::fs;
use std::path::{Path, PathBuf};

use rexpect::process::Signal;
use rexpect::session::PtySession;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::session::{expect, play, play_with};

const DEMO: [&str; 3] = ["demo", "--temperature", "0"];

fn prompt(chat: &mut PtySession) -> String {
    expect(chat, ">>> ")
}

/// Types a line and returns the output up to the next `>>> `, without escape sequences.
fn say(chat: &mut PtySession, line: &str) -> String {
    chat.send_line(line).unwrap();
    // The echo of the line does not contain `>>> `, so the next `>>> ` marks the end of the output.
    without_escapes(&prompt(chat))
}

/// Types a line, and checks that the output up to the next `>>> ` contains `expected`.
fn assert_says(chat: &mut PtySession, line: &str, expected: &str) {
    let output = say(chat, line);
    assert!(output.contains(expected), "the output after {line:?} does not contain {expected:?}: {output}");
}

/// Removes CSI escape sequences. While an answer is streaming, a redraw may place them in the middle of a word.
fn without_escapes(output: &str) -> String {
    let mut parts = output.split("\u{1b}[");
    let mut text = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let end = part.find(|c: char| ('@'..='~').contains(&c)).map_or(part.len(), |end| end + 1);
        text += &part[end..];
    }
    text
}

/// Types exactly this text, unlike `send_line`, which also presses Enter.
fn type_in(chat: &mut PtySession, text: &str) {
    chat.send(text).unwrap();
    chat.flush().unwrap();
}

fn leave(mut chat: PtySession) {
    chat.send_line("/exit").unwrap();
    chat.exp_eof().unwrap();
}

fn conversations(home: &TempDir) -> PathBuf {
    home.path().join(".local/state/inferno/conversations")
}

fn journals(home: &TempDir) -> Vec<PathBuf> {
    let entries = fs::read_dir(conversations(home)).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[cfg(unix)]
fn mode(path: &Path) -> u32 {
    std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).unwrap().permissions()) & 0o777
}

/// Starts a chat with the demo model, and waits for the prompt.
fn chat_with_demo(home: &TempDir) -> PtySession {
    let mut chat = play(home, &DEMO);
    prompt(&mut chat);
    chat
}

#[test]
fn help_describes_every_command() {
    let home = TempDir::new().unwrap();
    let mut chat = chat_with_demo(&home);
    let help = say(&mut chat, "/help");
    for command in
        "help exit clear undo regen system set reasoning file save load export stats context model".split(' ')
    {
        assert!(help.contains(&format!("/{command}")), "/help does not list {command}: {help}");
        let about = say(&mut chat, &format!("/help {command}"));
        assert!(about.contains(&format!("/{command}")) && !about.contains("unknown command"), "{about}");
    }
    leave(chat);
}

#[test]
fn settings_are_listed_checked_and_changed() {
    let home = TempDir::new().unwrap();
    let mut chat = chat_with_demo(&home);
    let all = say(&mut chat, "/set");
    for setting in ["temperature", "top-k", "stop", "hide-reasoning", "plain", "overflow"] {
        assert!(all.contains(setting), "/set does not list {setting}: {all}");
    }
    assert_says(&mut chat, "/set temprature 1", "unknown setting 'temprature'");
    assert_says(&mut chat, "/set temperature hot", "expected a number");
    assert_says(&mut chat, "/set top-p 7", "expected a number from 0 to 1");
    assert_says(&mut chat, "/reasoning low", "reasoning is low");
    assert_says(&mut chat, "/reasoning hide", "hidden");
    assert_says(&mut chat, "/system Be brief.", "new system prompt");
    assert_says(&mut chat, "/system", "Be brief.");
    leave(chat);
}

#[test]
fn undo_and_regen_change_the_last_turn() {
    let home = TempDir::new().unwrap();
    let mut chat = chat_with_demo(&home);
    assert_says(&mut chat, "/undo", "nothing to undo");
    assert_says(&mut chat, "/regen", "no question yet");
    // If the reasoning is hidden, a line such as `▸ thought: 12 words` takes its place.
    say(&mut chat, "/reasoning hide");
    let first = say(&mut chat, "My name is Ada");
    assert!(first.contains("tok/s") && first.contains("thought:"), "{first}");
    assert_says(&mut chat, "What is my name?", "Ada");
    let again = say(&mut chat, "/regen");
    assert!(again.contains("Ada") && again.contains("tok/s"), "{again}");
    assert_says(&mut chat, "/stats", "messages      4");
    assert_says(&mut chat, "/undo", "removed: What is my name?");
    assert_says(&mut chat, "/stats", "messages      2");
    let context = say(&mut chat, "/context");
    assert!(context.contains("of 4096 tokens") && context.contains("when full     stop"), "{context}");
    leave(chat);
}

#[test]
fn conversations_are_exported_and_saved() {
    let home = TempDir::new().unwrap();
    let mut chat = chat_with_demo(&home);
    assert_says(&mut chat, "/save talk", "it has no answer yet");
    assert_says(&mut chat, "/export md", "nothing to export");
    say(&mut chat, "My name is Ada");

    let export = home.path().join("talk.md");
    assert_says(&mut chat, &format!("/export md {}", export.display()), "written");
    assert_says(&mut chat, &format!("/export md {}", export.display()), "exists");
    let text = fs::read_to_string(&export).unwrap();
    assert!(text.contains("## You\n\nMy name is Ada\n") && text.contains("## Model"), "{text}");
    let export = home.path().join("talk.json");
    assert_says(&mut chat, &format!("/export json {}", export.display()), "written");
    let json: Value = serde_json::from_str(&fs::read_to_string(&export).unwrap()).unwrap();
    assert_eq!(json["messages"][0]["content"], "My name is Ada");
    assert_eq!(json["messages"].as_array().unwrap().len(), 2);
    assert_eq!(json["model"], "demo");

    assert_says(&mut chat, "/save talk", "--resume talk");
    assert_says(&mut chat, "/save ../talk", "cannot use the name");
    assert_says(&mut chat, "/load", "talk");
    assert_says(&mut chat, "/clear", "new conversation");
    leave(chat);
    let journal = conversations(&home).join("talk.jsonl");
    assert!(fs::read_to_string(&journal).unwrap().contains("My name is Ada"));
    #[cfg(unix)]
    {
        assert_eq!(mode(&journal), 0o600);
        assert_eq!(mode(&home.path().join(".local/state/inferno/history")), 0o600);
        assert_eq!(mode(&conversations(&home)), 0o700);
    }
}

#[test]
fn a_file_is_attached_to_the_next_message_only() {
    let home = TempDir::new().unwrap();
    let notes = home.path().join("notes.txt");
    fs::write(&notes, "My name is Ada\n").unwrap();
    let mut chat = chat_with_demo(&home);
    assert_says(&mut chat, "/file /nonexistent", "No such file");
    assert_says(&mut chat, &format!("/file {}", notes.display()), "attached to the next message");
    assert_says(&mut chat, "/file", "notes.txt");
    say(&mut chat, "What is in it?");
    assert_says(&mut chat, "/file", "nothing is attached");
    leave(chat);
    let saved: String = journals(&home).iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    assert!(saved.contains("notes.txt:\\n```\\nMy name is Ada\\n```\\n\\nWhat is in it?"), "{saved}");
}

#[test]
fn the_model_can_be_changed_in_a_chat() {
    let home = TempDir::new().unwrap();
    let mut chat = chat_with_demo(&home);
    assert_says(&mut chat, "/model", "demo (current)");
    assert_says(&mut chat, "/model nobody/nothing", "not on this machine");
    assert_says(&mut chat, "/model demo", "switched to demo");
    assert_says(&mut chat, "How do I list my models?", "inferno list");
    leave(chat);
}

#[test]
fn a_killed_conversation_is_resumed_with_every_finished_turn() {
    let home = TempDir::new().unwrap();
    let mut chat = play(&home, &["demo", "--temperature", "0", "--top-k", "7", "--system", "Be kind."]);
    prompt(&mut chat);
    say(&mut chat, "My name is Ada");
    say(&mut chat, "/set top-p 0.5");
    say(&mut chat, "How do I list my models?");
    // Resume the conversation, and kill the program in the middle of a long answer.
    let mut killed = {
        leave(chat);
        play(&home, &["--resume", "--ignore-eos"])
    };
    let banner = prompt(&mut killed);
    assert!(banner.contains("2 questions"), "{banner}");
    killed.send_line("What is the KV cache?").unwrap();
    // Wait for dim text, which is the start of the reasoning.
    expect(&mut killed, "\u{1b}[2m");
    killed.process_mut().kill(Signal::SIGKILL).unwrap();
    drop(killed);

    // Simulate a kill in the middle of a write.
    let [journal] = &journals(&home)[..] else { panic!("{:?}", journals(&home)) };
    let whole = fs::read(journal).unwrap();
    fs::write(journal, [&whole[..], br#"{"record":"turn","messages":[{"role":"us"#].concat()).unwrap();

    // Without flags, the model, the device and the settings come from the journal.
    let mut chat = play_with(&home, &["--resume"], &[]);
    let banner = prompt(&mut chat);
    assert!(banner.contains("demo") && banner.contains("2 questions"), "{banner}");
    let settings = say(&mut chat, "/set");
    for line in ["temperature         0", "top-k               7", "top-p               0.5"] {
        assert!(settings.contains(line), "/set does not show {line:?}: {settings}");
    }
    assert_says(&mut chat, "/system", "Be kind.");
    assert_says(&mut chat, "What is my name?", "Ada");
    let name = journal.file_stem().unwrap().to_str().unwrap().to_string();

    // While one process has the conversation open, another cannot open it.
    let mut second = play_with(&home, &["--resume", &name], &[]);
    expect(&mut second, "open in another inferno");
    leave(chat);

    let mut chat = play_with(&home, &["--resume", &name, "--top-k", "9"], &[]);
    let banner = prompt(&mut chat);
    assert!(banner.contains("3 questions"), "{banner}");
    assert!(say(&mut chat, "/set").contains("top-k               9"), "the flag must override the journal");
    leave(chat);
    let mut none = play_with(&home, &["--resume", "other"], &[]);
    expect(&mut none, "conversation 'other': not found");
}

#[test]
fn inferno_nohistory_creates_no_state_folder() {
    let home = TempDir::new().unwrap();
    let mut chat = play_with(&home, &["demo", "--device", "cpu"], &[("INFERNO_NOHISTORY", "1")]);
    prompt(&mut chat);
    say(&mut chat, "My name is Ada");
    assert_says(&mut chat, "/save ada", "INFERNO_NOHISTORY");
    leave(chat);
    assert!(!home.path().join(".local/state/inferno").exists());
}

#[test]
fn a_full_context_is_announced_and_drop_oldest_continues() {
    let home = TempDir::new().unwrap();
    let question = "How do I download a model?";
    let mut chat = play(&home, &["demo", "--context", "256", "--max-tokens", "40", "--temperature", "0"]);
    prompt(&mut chat);
    let mut said = String::new();
    for _ in 0..8 {
        said.push_str(&say(&mut chat, question));
    }
    assert!(said.contains("% of the context is used") || said.contains("the context is full"), "{said}");
    assert!(said.contains("would exceed the context of 256 tokens"), "{said}");
    assert_says(&mut chat, "/set overflow drop-oldest", "drop-oldest");
    let answer = say(&mut chat, question);
    assert!(answer.contains("the model no longer sees the oldest") && answer.contains("tok/s"), "{answer}");
    assert_says(&mut chat, "/context", "not seen");
    for _ in 0..4 {
        let answer = say(&mut chat, question);
        assert!(answer.contains("tok/s") && !answer.contains("would exceed"), "{answer}");
    }
    leave(chat);
}

#[test]
fn ctrl_o_folds_reasoning_and_typed_ahead_lines_are_kept() {
    let home = TempDir::new().unwrap();
    let mut chat = play(&home, &["demo", "--ignore-eos", "--max-tokens", "150", "--temperature", "0"]);
    prompt(&mut chat);
    chat.send_line("How do I download a model?").unwrap();
    expect(&mut chat, "inferno download");
    chat.send_control('o').unwrap();
    chat.send_line("/context").unwrap();
    let rest = expect(&mut chat, "when full");
    assert!(rest.contains("tok/s") && rest.contains(">>> /context"), "{rest}");
    prompt(&mut chat);
    let second = say(&mut chat, "What is the KV cache?");
    assert!(second.contains("thought: "), "the reasoning is not folded: {second}");
    // After the answer, typed keys must appear on the screen again.
    type_in(&mut chat, "/stats");
    expect(&mut chat, "/stats");
    chat.send_line("").unwrap();
    prompt(&mut chat);
    leave(chat);
}

#[test]
fn tab_completes_and_ctrl_g_opens_the_editor() {
    let home = TempDir::new().unwrap();
    let editor = home.path().join("an editor");
    fs::write(&editor, "#!/bin/sh\necho ' list my models?' >> \"$1\"\n").unwrap();
    #[cfg(unix)]
    fs::set_permissions(&editor, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let quoted = format!("'{}'", editor.display());
    let mut chat = play_with(&home, &["demo", "--device", "cpu"], &[("EDITOR", &quoted), ("VISUAL", "")]);
    prompt(&mut chat);
    type_in(&mut chat, "/he\t\n");
    expect(&mut chat, "list the commands");
    prompt(&mut chat);
    type_in(&mut chat, "/model de\t\n");
    expect(&mut chat, "switched to demo");
    prompt(&mut chat);
    type_in(&mut chat, "How do I");
    expect(&mut chat, "How do I");
    chat.send_control('g').unwrap();
    expect(&mut chat, "list my models?");
    chat.send_line("").unwrap();
    expect(&mut chat, "inferno list");
    prompt(&mut chat);
    // Ctrl-R searches the history.
    chat.send_control('r').unwrap();
    type_in(&mut chat, "/mod");
    expect(&mut chat, "/model demo");
    chat.send_control('c').unwrap();
    prompt(&mut chat);
    // Pasted lines are sent as one message.
    type_in(&mut chat, "\u{1b}[200~/help\nand /exit\u{1b}[201~");
    expect(&mut chat, "and /exit");
    chat.send_line("").unwrap();
    let answer = expect(&mut chat, ">>> ");
    assert!(answer.contains("tok/s") && !answer.contains("list the commands"), "{answer}");
    leave(chat);
}
