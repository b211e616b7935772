//! Tests of the chat in a pseudo terminal.

mod variants;

use tempfile::TempDir;

use crate::support::session::expect;
use crate::support::session::play;

#[test]
fn a_conversation_streams_and_remembers_earlier_turns() {
    let home = TempDir::new().unwrap();
    let mut chat = play(&home, &["demo"]);
    let banner = expect(&mut chat, ">>> ");
    assert!(
        banner.contains("demo model: answers questions about inferno only") && banner.contains("/help"),
        "{banner}"
    );

    chat.send_line("My name is Ada").unwrap();
    let first = expect(&mut chat, "tok/s");
    assert!(first.contains("Ada"), "{first}");
    assert!(first.contains("\u{1b}[2m"), "the reasoning is not dim: {first}");
    expect(&mut chat, ">>> ");

    chat.send_line("What is my name?").unwrap();
    let second = expect(&mut chat, "tok/s");
    assert!(second.contains("name is Ada"), "{second}");
    expect(&mut chat, ">>> ");

    chat.send_line("/stats").unwrap();
    let stats = expect(&mut chat, ">>> ");
    assert!(stats.contains("gpt_oss") && stats.contains("harmony"), "{stats}");

    chat.send_line("/exit").unwrap();
    chat.exp_eof().unwrap();
    let history = home.path().join(".local/state/inferno/history");
    assert!(std::fs::read_to_string(history).unwrap().contains("My name is Ada"));
}

#[test]
fn lines_typed_before_the_prompt_are_answered_in_order() {
    let home = TempDir::new().unwrap();
    let mut chat = play(&home, &["demo"]);
    chat.send("My name is Ada\nWhat is my name?\n/exit\n").unwrap();
    chat.flush().unwrap();
    let first = expect(&mut chat, "tok/s");
    assert!(first.contains("Ada"), "{first}");
    let second = expect(&mut chat, "tok/s");
    assert!(second.contains("name is Ada"), "{second}");
    chat.exp_eof().unwrap();
}

#[test]
fn ctrl_c_stops_the_answer_and_a_second_one_leaves() {
    let home = TempDir::new().unwrap();
    // With --ignore-eos, the answer continues until Ctrl-C stops it or the context is full.
    let mut chat = play(&home, &["demo", "--ignore-eos", "--context", "4096"]);
    expect(&mut chat, ">>> ");
    chat.send_line("How do I download a model?").unwrap();
    expect(&mut chat, "inferno download");
    chat.send_control('c').unwrap();
    expect(&mut chat, "stopped");
    expect(&mut chat, ">>> ");
    // After Ctrl-C, the chat still accepts commands.
    chat.send_line("/set temperature 0.5").unwrap();
    expect(&mut chat, "temperature is 0.5");
    expect(&mut chat, ">>> ");
    chat.send_control('c').unwrap();
    expect(&mut chat, "press Ctrl-C again");
    chat.send_control('c').unwrap();
    chat.exp_eof().unwrap();
}

#[test]
fn play_without_a_model_asks_for_one() {
    let home = TempDir::new().unwrap();
    let mut chat = play(&home, &[]);
    let table = expect(&mut chat, "which model? [1] ");
    assert!(table.contains("demo"), "{table}");
    chat.send_line("7").unwrap();
    expect(&mut chat, "type 1, a name, or q to quit");
    expect(&mut chat, "which model?");
    chat.send_line("1").unwrap();
    expect(&mut chat, ">>> ");
    chat.send_line("\"\"\"How do I").unwrap();
    chat.send_line("list my models?\"\"\"").unwrap();
    expect(&mut chat, "inferno list");
    expect(&mut chat, ">>> ");
    chat.send_line("/nonsense").unwrap();
    expect(&mut chat, "unknown command /nonsense");
    expect(&mut chat, ">>> ");
    chat.send_control('d').unwrap();
    chat.exp_eof().unwrap();
}
