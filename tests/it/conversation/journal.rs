//! Tests of saved conversations: `--resume`, `/load`, and journals after a kill, a full disk or damage.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rexpect::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::program::{inferno, text};
use crate::support::screen::{DEMO, Screen};

fn folder(home: &TempDir) -> PathBuf {
    home.path().join(".local/state/inferno")
}

fn journal(home: &TempDir) -> PathBuf {
    let mut all: Vec<PathBuf> = fs::read_dir(folder(home).join("conversations"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"))
        .collect();
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn resume(home: &TempDir, more: &[&str]) -> (Screen, String) {
    let mut chat = Screen::new(home, &[&["play", "--resume"], more].concat(), &[]);
    let banner = chat.wait(">>> ");
    (chat, banner)
}

/// Types a line, and checks that the output up to the next prompt contains `expected`.
fn assert_says(chat: &mut Screen, line: &str, expected: &str) {
    let output = chat.say(line);
    assert!(output.contains(expected), "the output after {line:?} does not contain {expected:?}: {output}");
}

fn leave(mut chat: Screen) {
    chat.settle();
    chat.send(b"/exit\r");
    chat.end();
}

/// Starts a chat, asks the given questions, and leaves with /exit.
fn conversation(home: &TempDir, args: &[&str], questions: &[&str]) {
    let mut chat = Screen::chat(home, args);
    for question in questions {
        assert_says(&mut chat, question, "tok/s");
    }
    leave(chat);
}

/// Returns the questions in a journal, in order. A `messages` record replaces all earlier messages.
fn questions(path: &Path) -> Vec<String> {
    let mut questions = Vec::new();
    for line in fs::read_to_string(path).unwrap().lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        if record["record"] == "messages" {
            questions.clear();
        }
        let messages = record["messages"].as_array().cloned().unwrap_or_default();
        let users = messages.into_iter().filter(|message| message["role"] == "user");
        questions.extend(users.map(|message| message["content"].as_str().unwrap().to_string()));
    }
    questions
}

#[test]
fn resume_restores_all_settings_and_ignores_invalid_ones() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &["--stop", "zebra", "--stop", "yak"]);
    chat.say("/set plain on");
    chat.say("/set hide-reasoning on");
    assert_says(&mut chat, "/set max-tokens 0", "expected a positive integer or none");
    assert_says(&mut chat, "My name is Ada", "tok/s");
    leave(chat);
    let shown = |chat: &mut Screen| {
        let settings = chat.say("/set");
        let on = |name: &str| settings.lines().any(|line| line.starts_with(name) && line.trim_end().ends_with(" on"));
        assert!(settings.contains("\"zebra\", \"yak\""), "{settings}");
        (on("plain"), on("hide-reasoning"))
    };
    let (mut chat, banner) = resume(&home, &[]);
    assert!(banner.contains("1 question"), "{banner}");
    assert_eq!(shown(&mut chat), (true, true));
    // `/model` loads the model again, but keeps the settings.
    assert_says(&mut chat, "/model demo", "switched to");
    assert_eq!(shown(&mut chat), (true, true));
    leave(chat);

    // Invalid settings in a journal are ignored. The valid settings in the same journal apply.
    let path = journal(&home);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"plain\":[\"true\"]", "\"plain\":[\"maybe\"],\"color\":[\"red\"]")).unwrap();
    let (mut chat, banner) = resume(&home, &[]);
    assert!(banner.contains("ignored a setting") && banner.contains("maybe") && banner.contains("'color'"), "{banner}");
    assert!(!banner.contains("config.toml"), "{banner}");
    assert_eq!(shown(&mut chat), (false, true));
    leave(chat);
}

#[test]
fn turns_that_a_full_disk_refused_are_written_later() {
    let home = TempDir::new().unwrap();
    conversation(&home, &[], &["My name is Ada"]);
    let path = journal(&home);
    let (mut chat, _) = resume(&home, &[]);
    chat.settle();
    let pid = chat.pid().to_string();
    let limit = |size: &str| {
        let status = Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={size}")]).status();
        assert!(status.unwrap().success());
    };
    let before = fs::read(&path).unwrap();
    // Limit the file size, so that only part of the next turn fits into the journal.
    limit(&format!("{}:", before.len() + 60));
    let second = "How do I list my models?";
    assert_says(&mut chat, second, "not saved for --resume");
    assert_eq!(fs::read(&path).unwrap(), before, "part of the turn remains in the journal");
    limit("unlimited:");
    let third = chat.say("What is my name?");
    assert!(third.contains("tok/s") && !third.contains("not saved"), "{third}");
    leave(chat);
    assert_eq!(questions(&path), ["My name is Ada", second, "What is my name?"].map(str::to_string));
    let (chat, banner) = resume(&home, &[]);
    assert!(banner.contains("3 questions"), "{banner}");
    leave(chat);
}

#[test]
fn damaged_journals_load_up_to_the_damage_and_are_copied() {
    let home = TempDir::new().unwrap();
    conversation(&home, &[], &["My name is Ada", "How do I list my models?", "What is a token?"]);
    let path = journal(&home);
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, whole.replacen("How do I list", "How do\" I list", 1)).unwrap();
    let damaged = fs::read(&path).unwrap();
    let (mut chat, banner) = resume(&home, &[]);
    // inferno wraps the warning about the damaged journal, so join the lines of the banner.
    let banner = banner.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(banner.contains("is damaged at line") && banner.contains("1 question"), "{banner}");
    assert_eq!(fs::read(path.with_extension("damaged")).unwrap(), damaged, "the copy differs from the damaged journal");
    assert_says(&mut chat, "What is my name?", "Ada");
    leave(chat);
    let (chat, banner) = resume(&home, &[]);
    assert!(banner.contains("2 questions") && !banner.contains("damaged"), "{banner}");
    leave(chat);

    // If a journal is damaged again, the new copy does not replace the first copy.
    // `--resume` without a name opens a damaged conversation even if no question is left in it.
    let first_line = fs::read_to_string(&path).unwrap().lines().next().unwrap().to_string();
    fs::write(&path, format!("{first_line}\nnonsense\n")).unwrap();
    let (chat, banner) = resume(&home, &[]);
    assert!(banner.contains("is damaged at line 2"), "{banner}");
    leave(chat);
    assert_eq!(fs::read(path.with_extension("damaged")).unwrap(), damaged);
    assert!(fs::read_to_string(path.with_extension("damaged-2")).unwrap().ends_with("nonsense\n"));
}

#[test]
fn removed_limits_stay_removed_after_resume() {
    let home = TempDir::new().unwrap();
    let config = home.path().join(".config/inferno");
    fs::create_dir_all(&config).unwrap();
    fs::write(config.join("config.toml"), "max-tokens = 7\nstop = [\"zebra\"]\n").unwrap();
    let mut chat = Screen::chat(&home, &[]);
    assert_says(&mut chat, "/set", "max-tokens          7");
    assert_says(&mut chat, "/set max-tokens none", "max-tokens is none");
    assert_says(&mut chat, "/set stop none", "stop is none");
    assert_says(&mut chat, "My name is Ada", "tok/s");
    leave(chat);
    let (mut chat, _) = resume(&home, &[]);
    let settings = chat.say("/set");
    assert!(settings.contains("max-tokens          none") && !settings.contains("zebra"), "{settings}");
    leave(chat);
    // `--resume` without a name skips a conversation that another process has open.
    conversation(&home, &[], &["What is the KV cache?"]);
    let (open, banner) = resume(&home, &[]);
    assert!(banner.contains("the KV"), "{banner}");
    let (other, banner) = resume(&home, &[]);
    assert!(!banner.contains("the KV") && banner.contains("1 question"), "{banner}");
    leave(other);
    leave(open);
}

#[test]
fn pasted_lines_and_unexpected_arguments_run_no_command() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &[]);
    assert_says(&mut chat, "My name is Ada", "tok/s");
    for command in ["/clear all", "/exit now", "/undo twice"] {
        assert!(chat.say(command).contains("takes no arguments"), "{command}");
    }
    chat.settle();
    chat.send(b"\x1b[200~/clear\rand what is my name?\x1b[201~\r");
    assert!(chat.wait("tok/s").contains("Ada"));
    leave(chat);
    assert_eq!(questions(&journal(&home)), ["My name is Ada", "/clear\nand what is my name?"].map(str::to_string));
}

#[test]
fn a_kill_during_an_answer_loses_only_that_turn() {
    let home = TempDir::new().unwrap();
    conversation(&home, &[], &["My name is Ada"]);
    for round in 1..=3 {
        let (mut chat, banner) = resume(&home, &["--ignore-eos", "--max-tokens", "60"]);
        assert!(banner.contains(&format!("{round} question")), "{round}: {banner}");
        assert_says(&mut chat, &format!("What is {round}?"), "tok/s");
        // Allow a long answer. On a busy machine, an answer of 60 tokens could end before the test sends the signal.
        chat.say("/set max-tokens 3000");
        chat.settle();
        chat.send(b"How do I download a model?\r");
        chat.wait("\x1b[2m");
        chat.signal(Signal::SIGKILL);
        chat.end();
    }
    let expected = ["My name is Ada", "What is 1?", "What is 2?", "What is 3?"].map(str::to_string);
    assert_eq!(questions(&journal(&home)), expected);
}

#[test]
fn load_restores_a_cleared_conversation_with_its_settings() {
    let home = TempDir::new().unwrap();
    let notes = home.path().join("my notes.txt");
    fs::write(&notes, "notes").unwrap();
    let mut chat = Screen::chat(&home, &["--stop", "zebra", "--stop", "yak"]);
    chat.say("/set top-k 3");
    chat.say("My name is Ada");
    assert_says(&mut chat, "/save ada", "saved");
    assert_says(&mut chat, "/clear", "saved as ada");
    assert_says(&mut chat, "/context", "used          0 of");
    chat.say("/set top-k 9");
    chat.say("/set stop none");
    chat.say("/set max-tokens 50");
    assert_says(&mut chat, &format!("/file '{}'", notes.display()), "attached to the next message");
    // If the conversation does not exist, `/load` fails, and the chat continues.
    assert_says(&mut chat, "/load nobody", "conversation 'nobody': not found");
    assert_says(&mut chat, "/set top-k 8", "top-k is 8");
    let loaded = chat.say("/load ada");
    assert!(loaded.contains("1 question") && loaded.contains("My name is Ada"), "{loaded}");
    let settings = chat.say("/set");
    for line in ["top-k               3", "max-tokens          none", "\"zebra\", \"yak\""] {
        assert!(settings.contains(line), "/set does not show {line:?}: {settings}");
    }
    assert_says(&mut chat, "/file", "nothing is attached");
    assert_says(&mut chat, "What is my name?", "Ada");
    let output = chat.say("/system Be brief.").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(output.contains("saved as ada"), "{output}");
    leave(chat);
    let ada = folder(&home).join("conversations/ada.jsonl");
    assert_eq!(questions(&ada), ["My name is Ada", "What is my name?"].map(str::to_string));
}

#[test]
fn resume_skips_conversations_without_a_question() {
    let home = TempDir::new().unwrap();
    conversation(&home, &[], &["My name is Ada"]);
    let mut chat = Screen::chat(&home, &[]);
    chat.say("How do I list my models?");
    assert_says(&mut chat, "/undo", "removed: ");
    leave(chat);
    let (chat, banner) = resume(&home, &[]);
    assert!(banner.contains("My name is Ada"), "{banner}");
    leave(chat);
}

#[test]
fn resume_accepts_new_instructions_and_obeys_inferno_nohistory() {
    let home = TempDir::new().unwrap();
    conversation(&home, &["--system", "Be kind."], &["My name is Ada"]);
    let path = journal(&home);
    let before = fs::read(&path).unwrap();
    let mut chat = Screen::new(&home, &["play", "--resume"], &[("INFERNO_NOHISTORY", "1")]);
    assert!(chat.wait(">>> ").contains("1 question"));
    assert_says(&mut chat, "What is my name?", "Ada");
    leave(chat);
    assert_eq!(fs::read(&path).unwrap(), before);

    let (mut chat, banner) = resume(&home, &["--system", "Be brief."]);
    assert!(banner.contains("1 question"), "{banner}");
    assert_says(&mut chat, "/system", "Be brief.");
    assert_says(&mut chat, "What is my name?", "Ada");
    leave(chat);
    let (mut chat, _) = resume(&home, &[]);
    assert_says(&mut chat, "/system", "Be brief.");
    leave(chat);
}

#[test]
fn regen_gives_another_answer_and_the_journal_has_the_last_one() {
    let home = TempDir::new().unwrap();
    // Use a high temperature, because at a low temperature /regen often generates the same answer again.
    let mut chat =
        Screen::new(&home, &["play", "demo", "--device", "cpu", "--temperature", "2", "--max-tokens", "60"], &[]);
    chat.wait(">>> ");
    chat.say("Tell me about models");
    let answer = |chat: &mut Screen, number: usize| -> Value {
        let path = home.path().join(format!("{number}.json"));
        assert_says(chat, &format!("/export json ~/{number}.json"), "written");
        let json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        assert_eq!(json["messages"].as_array().unwrap().len(), 2, "{json}");
        json["messages"][1].clone()
    };
    let first = answer(&mut chat, 0);
    let mut last = first.clone();
    for number in 1..6 {
        assert_says(&mut chat, "/regen", "tok/s");
        last = answer(&mut chat, number);
        if last != first {
            break;
        }
    }
    assert_ne!(last, first);
    leave(chat);
    let (mut chat, banner) = resume(&home, &[]);
    assert!(banner.contains("1 question"), "{banner}");
    assert_eq!(answer(&mut chat, 9), last);
    leave(chat);
}

#[test]
fn an_unusable_state_folder_does_not_stop_the_chat() {
    let home = TempDir::new().unwrap();
    fs::create_dir_all(home.path().join(".local/state")).unwrap();
    // Put a file in place of the state folder, because a read-only folder would not stop root.
    fs::write(folder(&home), "not a folder").unwrap();
    let mut chat = Screen::chat(&home, &[]);
    let answer = chat.say("My name is Ada");
    assert!(answer.contains("tok/s") && answer.contains("not saved for --resume: cannot create"), "{answer}");
    assert_says(&mut chat, "/save ada", "cannot create");
    assert_says(&mut chat, "What is my name?", "Ada");
    leave(chat);
}

#[cfg(unix)]
#[test]
fn a_damaged_history_is_moved_aside() {
    let home = TempDir::new().unwrap();
    fs::create_dir_all(folder(&home)).unwrap();
    let history = folder(&home).join("history");
    fs::write(&history, b"#V2\nold\n\xff\xfe\n").unwrap();
    let mut chat = Screen::new(&home, &DEMO, &[]);
    assert!(chat.wait(">>> ").contains("is damaged"));
    chat.say("/stats");
    leave(chat);
    assert!(fs::read_to_string(&history).unwrap().contains("/stats"));
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&history).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    assert!(fs::read(history.with_extension("bad")).unwrap().ends_with(b"\xff\xfe\n"));
}

#[test]
fn a_conversation_saved_with_its_cache_needs_no_prefill() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &[]);
    assert_says(&mut chat, "/save ada --cache", "cannot save this conversation: it has no answer yet");
    chat.say("My name is Ada");
    let saved = chat.say("/save ada --cache");
    assert!(saved.contains("tokens of its KV cache") && saved.contains("--resume ada"), "{saved}");
    let again = chat.say("/save --cache");
    assert!(again.contains("tokens of its KV cache") && again.contains("--resume ada"), "{again}");
    leave(chat);
    let conversations = folder(&home).join("conversations");
    assert!(conversations.join("ada.kv").exists());

    let ask = |name: &str| {
        let mut command = inferno(&home);
        let output = command.args(["play", "--resume", name, "--prompt", "What is my name?", "-v"]).output().unwrap();
        assert!(output.status.success() && text(&output.stdout).contains("Ada"), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    let log = ask("ada");
    assert!(log.contains("loaded the saved KV cache tokens=") && !log.contains("cache tokens=0"), "{log}");
    let (mut chat, _) = resume(&home, &[]);
    assert_says(&mut chat, "/save bob", "saved; to continue");
    leave(chat);
    assert!(conversations.join("bob.kv").exists() && !conversations.join("ada.kv").exists());
    // If the saved KV cache is damaged, the next turn must still succeed.
    fs::write(conversations.join("bob.kv"), "damaged").unwrap();
    assert!(ask("bob").contains("cannot load the saved KV cache"));
}
