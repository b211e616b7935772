//! Tests of the chat in unusual terminals and with unusual input.

use std::fs;
use std::process::{Command, Stdio};

use nix::sys::wait::WaitStatus;
use tempfile::TempDir;

use crate::support::program::{inferno, text};
use crate::support::screen::{DEMO, Screen};

const QUESTION: &str = "How do I download a model?";

/// Returns the words of the turn with [`QUESTION`], up to the row with the speed. The speed differs in each run.
fn words(rows: &[String]) -> Vec<String> {
    let turn = rows.iter().skip_while(|row| !row.contains(QUESTION)).take_while(|row| !row.contains("tok/s"));
    turn.flat_map(|row| row.split_whitespace()).map(str::to_string).collect()
}

fn ask(chat: &mut Screen) {
    chat.settle();
    chat.send(QUESTION.as_bytes());
    chat.send(b"\r");
}

fn wait_for_end(chat: &mut Screen) -> Vec<String> {
    chat.wait("tok/s");
    chat.wait(">>> ");
    chat.settle();
    words(&chat.all_rows())
}

const LONG: [&str; 3] = ["--ignore-eos", "--max-tokens", "250"];

fn words_without_disturbance(home: &TempDir) -> Vec<String> {
    let mut chat = Screen::chat(home, &LONG);
    ask(&mut chat);
    wait_for_end(&mut chat)
}

#[test]
fn folding_and_unfolding_reasoning_changes_no_words() {
    // With --ignore-eos, the demo may reason again after its answer, so reasoning and answers can alternate.
    // `bright_rows` leaves out the dim reasoning. Folding the reasoning must not change the answers.
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &LONG);
    ask(&mut chat);
    let plain = wait_for_end(&mut chat);
    let answers = words(&chat.bright_rows());
    assert!(!plain.iter().any(|word| word == "thought:"), "{plain:?}");
    assert!(answers.len() < plain.len(), "no reasoning in {plain:?}");

    let mut chat = Screen::chat(&home, &LONG);
    ask(&mut chat);
    chat.wait("\x1b[2m");
    chat.send(b"\x0f");
    chat.wait("▸ th");
    chat.send(b"\x0f");
    let unfolded = wait_for_end(&mut chat);
    assert_eq!(words(&chat.bright_rows()), answers);
    // On a busy machine, the first reasoning may end before the second Ctrl-O. That reasoning then stays folded.
    assert!(unfolded == plain || unfolded.iter().any(|word| word == "thought:"), "{unfolded:?}\n{plain:?}");

    let mut chat = Screen::chat(&home, &LONG);
    ask(&mut chat);
    chat.wait("\x1b[2m");
    chat.send(b"\x0f");
    let folded = wait_for_end(&mut chat);
    assert_eq!(words(&chat.bright_rows()), answers);
    // Do not count the 4 words of a summary such as `▸ thought: 3 words`, which can be longer than the reasoning.
    let summaries = folded.iter().filter(|word| *word == "thought:").count();
    assert!(summaries > 0 && folded.len() - 4 * summaries < plain.len(), "{folded:?}\n{plain:?}");
}

#[test]
fn resizing_during_an_answer_keeps_its_last_words() {
    let home = TempDir::new().unwrap();
    let plain = words_without_disturbance(&home);
    let mut chat = Screen::chat(&home, &LONG);
    ask(&mut chat);
    chat.wait("inferno");
    chat.resize(30, 100);
    assert_eq!(wait_for_end(&mut chat), plain);

    // In a narrower window, rows that were already printed may be cut off, and some words may appear twice.
    let mut chat = Screen::chat(&home, &LONG);
    ask(&mut chat);
    chat.wait("inferno");
    let before = words(&chat.resize(24, 50));
    let narrow = wait_for_end(&mut chat);
    let same = narrow.iter().rev().zip(plain.iter().rev()).take_while(|(a, b)| a == b).count();
    let all = plain.len();
    assert!(same + before.len() >= all, "only the last {same} of {all} words match: {narrow:?}\n{before:?}\n{plain:?}");
    assert!(narrow.len() <= plain.len() + 12, "too many repeated words in the narrow window: {narrow:?}\n{plain:?}");
    chat.resize(24, 80);
    assert!(chat.say("/stats").contains("harmony"));
}

#[test]
fn a_pasted_megabyte_is_one_message() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &[]);
    chat.settle();
    let megabyte = "/exit is not meant here\n".repeat((1 << 20) / 24);
    chat.send(format!("\x1b[200~a {megabyte}\x1b[201~").as_bytes());
    chat.settle();
    chat.send(b"\r");
    chat.wait("this message alone exceeds");
    assert!(chat.say("My name is Ada").contains("tok/s"));
    // Paste text again while an answer is streaming.
    ask(&mut chat);
    chat.wait("\x1b[2m");
    chat.send(format!("\x1b[200~b {megabyte}\x1b[201~\r").as_bytes());
    chat.wait("this message alone exceeds");
    chat.wait(">>> ");
    chat.settle();
    chat.send(b"/exit\r");
    assert_eq!(chat.end(), WaitStatus::Exited(chat.pid(), 0));
}

#[test]
fn a_dumb_terminal_gets_no_escape_sequences() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::new(&home, &DEMO, &[("TERM", "dumb")]);
    chat.wait(">>> ");
    assert!(chat.say(QUESTION).contains("tok/s"));
    assert!(chat.say("/stats").contains("harmony"));
    chat.send(b"/exit\r");
    assert_eq!(chat.end(), WaitStatus::Exited(chat.pid(), 0));
    assert!(!chat.written.contains(&0x1b), "{}", String::from_utf8_lossy(&chat.written));
}

#[test]
fn no_color_and_plain_show_the_answer_as_written() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::new(&home, &DEMO, &[("NO_COLOR", "1")]);
    chat.wait(">>> ");
    let answer = chat.say(QUESTION);
    assert!(answer.contains("[thinking] ") && answer.contains("[answer] "), "{answer}");
    assert!(!answer.contains("\x1b[2m"), "{answer}");
    let as_written = text(&inferno(&home).args(DEMO).args(["--prompt", QUESTION]).output().unwrap().stdout);
    let mut chat = Screen::chat(&home, &["--plain"]);
    let answer = chat.say(QUESTION).replace('\r', "");
    assert!(answer.contains(as_written.trim()), "{answer}\n{as_written}");
}

#[test]
fn non_ascii_input_works_in_the_c_locale() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::new(&home, &DEMO, &[("LC_ALL", "C"), ("LANG", "C")]);
    chat.wait(">>> ");
    assert!(chat.say("My name is Zoë").contains("tok/s"));
    assert!(chat.say("/undo").contains("removed: My name is Zoë"));
}

#[cfg(unix)]
#[test]
fn a_closed_stdout_is_no_error() {
    let home = TempDir::new().unwrap();
    let output = Command::new("sh")
        .args(["-c", "{ \"$@\"; echo code $? >&2; } | head -c 10", "sh", env!("CARGO_BIN_EXE_inferno")])
        .args(DEMO)
        .args(["--prompt", QUESTION, "--ignore-eos", "--max-tokens", "200"])
        .env("HOME", home.path())
        .env("INFERNO_CACHE", home.path().join("models"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.stdout.len(), 10);
    let errors = text(&output.stderr);
    assert!(errors.ends_with("code 0\n") && !errors.contains("panicked"), "{errors}");
}

#[test]
fn a_backslash_continues_the_message_on_the_next_line() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &[]);
    chat.settle();
    chat.send(b"How do I\\\r");
    chat.settle();
    chat.send(b"list my models?\r");
    assert!(chat.wait("tok/s").contains("inferno list"));
    chat.wait(">>> ");
    assert!(chat.say("/export json ~/said.json").contains("written"));
    let said = fs::read_to_string(home.path().join("said.json")).unwrap();
    assert!(said.contains("How do I\\nlist my models?"), "{said}");
}

#[test]
fn unsuitable_files_are_refused_with_a_reason() {
    let home = TempDir::new().unwrap();
    let at = |name: &str| home.path().join(name).display().to_string();
    fs::write(at("binary"), [0u8, 159, 146, 150]).unwrap();
    fs::write(at("large.txt"), "download ".repeat(2_000_000)).unwrap();
    fs::write(at("near.txt"), "download ".repeat(6_000)).unwrap();
    let mut chat = Screen::chat(&home, &[]);
    assert!(chat.say(&format!("/file {}", at("binary"))).contains("not UTF-8"));
    assert!(chat.say(&format!("/file {}", at(""))).contains("not a regular file"));
    let refusal = chat.say(&format!("/file {}", at("large.txt")));
    let refusal = refusal.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(refusal.contains("do not fit in a context of 4096 tokens"), "{refusal}");
    assert!(chat.say("/file").contains("nothing is attached"));
    assert!(chat.say(&format!("/file {}", at("near.txt"))).contains("attached to the next message"));
    assert!(chat.say("My name is Ada").contains("/file none"));
    assert!(chat.say("/file none").contains("nothing is attached"));
    assert!(chat.say("/export md /nonexistent/x.md").contains("nothing to export"));
    chat.say("My name is Ada");
    assert!(chat.say("/export md /nonexistent/x.md").contains("No such file"));
    assert!(chat.say("/export md ~/talk.md").contains("written to"));
    assert!(fs::read_to_string(at("talk.md")).unwrap().contains("My name is Ada"));
    assert!(chat.say("/context").contains("messages      2"));
}

#[test]
fn a_message_longer_than_the_context_is_explained() {
    let home = TempDir::new().unwrap();
    for overflow in ["stop", "drop-oldest"] {
        let mut chat = Screen::chat(&home, &["--context", "256", "--overflow", overflow]);
        chat.settle();
        chat.send("\"\"\"".as_bytes());
        for _ in 0..100 {
            chat.send(b"download the model\r");
        }
        chat.send(b"end\"\"\"\r");
        chat.wait("end\"\"\"");
        let output = chat.wait(">>> ");
        assert!(output.contains("this message alone exceeds the context of 256 tokens"), "{output}");
        assert!(chat.say("My name is Ada").contains("tok/s"));
    }
}
