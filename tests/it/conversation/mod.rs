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
    assert!(say(&mut chat, "/set temprature 1").contains("unknown setting 'temprature'"));
    assert!(say(&mut chat, "/set temperature hot").contains("expected a number"));
    assert!(say(&mut chat, "/set top-p 7").contains("expected a number from 0 to 1"));
    assert!(say(&mut chat, "/reasoning low").contains("reasoning is low"));
    assert!(say(&mut chat, "/reasoning hide").contains("hidden"));
    assert!(say(&mut chat, "/system Be brief.").contains("new system prompt"));
    assert!(say(&mut chat, "/system").contains("Be brief."));
    leave(chat);
}

#[test]
fn undo_and_regen_change_the_last_turn() {
    let home = TempDir::new().unwrap();
    let mut chat = chat_with_demo(&home);
    assert!(say(&mut chat, "/undo").contains("nothing to undo"));
    assert!(say(&mut chat, "/regen").contains("no question yet"));
    // If the reasoning is hidden, a line such as `▸ thought: 12 words` takes its place.
    say(&mut chat, "/reasoning hide");
    let first = say(&mut chat, "My name is Ada");
    assert!(first.contains("tok/s") && first.contains("thought:"), "{first}");
    assert!(say(&mut chat, "What is my name?").contains("Ada"));
    let again = say(&mut chat, "/regen");
    assert!(again.contains("Ada") && again.contains("tok/s"), "{again}");
    assert!(say(&mut chat, "/stats").contains("messages      4"));
    assert!(say(&mut chat, "/undo").contains("removed: What is my name?"));
    assert!(say(&mut chat, "/stats").contains("messages      2"));
    let context = say(&mut chat, "/context");
    assert!(context.contains("of 4096 tokens") && context.contains("when full     stop"), "{context}");
    leave(chat);
}

#[test]
fn conversations_are_exported_and_saved() {
    let home = TempDir::new().unwrap();
    let mut chat = chat_with_demo(&home);
    assert!(say(&mut chat, "/save talk").contains("it has no answer yet"));
    assert!(say(&mut chat, "/export md").contains("nothing to export"));
    say(&mut chat, "My name is Ada");

    let export = home.path().join("talk.md");
    assert!(say(&mut chat, &format!("/export md {}", export.display())).contains("written"));
    assert!(say(&mut chat, &format!("/export md {}", export.display())).contains("exists"));
    let text = fs::read_to_string(&export).unwrap();
    assert!(text.contains("## You\n\nMy name is Ada\n") && text.contains("## Model"), "{text}");
    let export = home.path().join("talk.json");
    assert!(say(&mut chat, &format!("/export json {}", export.display())).contains("written"));
    let json: Value = serde_json::from_str(&fs::read_to_string(&export).unwrap()).unwrap();
    assert_eq!(json["messages"][0]["content"], "My name is Ada");
    assert_eq!(json["messages"].as_array().unwrap().len(), 2);
    assert_eq!(json["model"], "demo");

    assert!(say(&mut chat, "/save talk").contains("--resume talk"));
    assert!(say(&mut chat, "/save ../talk").contains("cannot use the name"));
    assert!(say(&mut chat, "/load").contains("talk"));
    assert!(say(&mut chat, "/clear").contains("new conversation"));
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
    assert!(say(&mut chat, "/file /nonexistent").contains("No such file"));
    assert!(say(&mut chat, &format!("/file {}", notes.display())).contains("attached to the next message"));
    assert!(say(&mut chat, "/file").contains("notes.txt"));
    say(&mut chat, "What is in it?");
    assert!(say(&mut chat, "/file").contains("nothing is attached"));
    leave(chat);
    let saved: String = journals(&home).iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    assert!(saved.contains("notes.txt:\\n```\\nMy name is Ada\\n```\\n\\nWhat is in it?"), "{saved}");
}

#[test]
fn the_model_can_be_changed_in_a_chat() {
    let home = TempDir::new().unwrap();
    let mut chat = chat_with_demo(&home);
    assert!(say(&mut chat, "/model").contains("demo (current)"));
    assert!(say(&mut chat, "/model nobody/nothing").contains("not on this machine"));
    assert!(say(&mut chat, "/model demo").contains("switched to demo"));
    assert!(say(&mut chat, "How do I list my models?").contains("inferno list"));
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
    assert!(prompt(&mut killed).contains("2 questions"));
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
    assert!(say(&mut chat, "/system").contains("Be kind."));
    assert!(say(&mut chat, "What is my name?").contains("Ada"));
    let name = journal.file_stem().unwrap().to_str().unwrap().to_string();

    // While one process has the conversation open, another cannot open it.
    let mut second = play_with(&home, &["--resume", &name], &[]);
    expect(&mut second, "open in another inferno");
    leave(chat);

    let mut chat = play_with(&home, &["--resume", &name, "--top-k", "9"], &[]);
    assert!(prompt(&mut chat).contains("3 questions"));
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
    assert!(say(&mut chat, "/save ada").contains("INFERNO_NOHISTORY"));
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
    assert!(say(&mut chat, "/set overflow drop-oldest").contains("drop-oldest"));
    let answer = say(&mut chat, question);
    assert!(answer.contains("the model no longer sees the oldest") && answer.contains("tok/s"), "{answer}");
    assert!(say(&mut chat, "/context").contains("not seen"));
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
