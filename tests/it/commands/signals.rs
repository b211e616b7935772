//! Tests of keys and signals: typed-ahead and invalid input, Ctrl-C, Ctrl-Z, and the restored terminal modes.

use std::fs;

use nix::sys::signal::kill;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use rexpect::process::Signal;
use tempfile::TempDir;

use crate::harness::{Need, TestCase};
use crate::support::screen::{DEMO, Screen};

const CTRL_C: &[u8] = b"\x03";
const QUESTION: &[u8] = b"How do I download a model?\r";
const LONG_ANSWER: [&str; 3] = ["--ignore-eos", "--max-tokens", "2000"];

/// Starts a chat and waits until it is streaming a long answer.
fn streaming(home: &TempDir) -> Screen {
    let mut chat = Screen::chat(home, &LONG_ANSWER);
    stream(&mut chat);
    chat
}

fn stream(chat: &mut Screen) {
    chat.settle();
    chat.send(QUESTION);
    chat.wait("\x1b[2m");
}

/// Returns the tested signals, and whether each signal arrives while an answer is streaming.
fn signals() -> Vec<TestCase<(Signal, bool)>> {
    let cases = [
        (Signal::SIGTERM, true),
        (Signal::SIGTERM, false),
        (Signal::SIGHUP, true),
        (Signal::SIGQUIT, false),
        // The signals of a crash and of an exceeded CPU time limit, and a signal from another program (SIGUSR1).
        (Signal::SIGABRT, true),
        (Signal::SIGSEGV, false),
        (Signal::SIGSEGV, true),
        (Signal::SIGBUS, true),
        (Signal::SIGXCPU, true),
        (Signal::SIGUSR1, false),
    ];
    let case = |(signal, in_mid_stream): (Signal, bool)| TestCase {
        name: format!("{signal}::{}", if in_mid_stream { "in_mid_stream" } else { "at_the_prompt" }),
        // The children of this process also ignore the signal.
        need: is_ignored(signal).then_some(Need::DefaultSignal),
        value: (signal, in_mid_stream),
    };
    cases.map(case).into()
}

#[test(each = signals)]
fn signals_restore_the_terminal((signal, in_mid_stream): (Signal, bool)) {
    let home = TempDir::new().unwrap();
    // The shell outlives the program, so the test can check the terminal state that the program leaves behind.
    let shell = "ulimit -c 0; trap : TERM HUP QUIT ABRT SEGV BUS XCPU USR1; \"$@\"; echo ended with $?; read line";
    let mut chat = Screen::with_script(&home, shell, &[&DEMO[..], &LONG_ANSWER].concat(), &[]);
    chat.wait(">>> ");
    chat.settle();
    if in_mid_stream {
        stream(&mut chat);
    }
    assert!(!chat.is_sane());
    kill(Pid::from_raw(-chat.pid().as_raw()), signal).unwrap();
    chat.wait(&format!("ended with {}", 128 + signal as i32));
    assert!(chat.is_sane());
    let written = String::from_utf8_lossy(&chat.written).into_owned();
    assert!(written.rfind("\x1b[?2004l") > written.rfind("\x1b[?2004h"), "bracketed paste is still on");
}

/// The environment variable with which [`crashes_restore_the_terminal`] tells a copy of this process how to end.
const CRASH: &str = "INFERNO_TEST_CRASH";

/// Ends this process if the variable [`CRASH`] is set. `main` calls this function before the harness runs any test.
pub fn crash_if_requested() {
    if let Ok(kind) = std::env::var(CRASH) {
        // inferno must handle crashes of any thread. A thread that Rust starts has a stack of limited size.
        let is_panic = std::thread::spawn(move || crash(&kind)).join().is_err();
        std::process::exit(if is_panic { 101 } else { 0 });
    }
}

/// Switches the terminal to raw mode and ends the process.
fn crash(kind: &str) {
    inferno::terminal::guard();
    let mut modes = tcgetattr(std::io::stdin()).unwrap();
    cfmakeraw(&mut modes);
    tcsetattr(std::io::stdin(), SetArg::TCSANOW, &modes).unwrap();
    let _: u64 = match kind {
        "abort" => std::process::abort(),
        "exit" => std::process::exit(3),
        "panic" => panic!("on purpose"),
        // SAFETY: the read is invalid on purpose. It raises SIGSEGV, which ends this process.
        "fault" => unsafe { std::ptr::null::<u8>().wrapping_add(16).read_volatile() }.into(),
        "overflow" => overflow(0),
        other => panic!("unknown crash {other}"),
    };
}

#[expect(unconditional_recursion, reason = "the stack must overflow")]
fn overflow(depth: u64) -> u64 {
    std::hint::black_box([depth; 100])[0] + overflow(depth + 1)
}

#[test]
fn crashes_restore_the_terminal() {
    let home = TempDir::new().unwrap();
    let program = std::env::current_exe().unwrap();
    for (kind, code) in [("fault", 139), ("overflow", 134), ("abort", 134), ("panic", 101), ("exit", 3)] {
        let script = "ulimit -c 0; \"$PROGRAM\"; echo ended with $?; read line";
        let environment = [(CRASH, kind), ("PROGRAM", program.to_str().unwrap())];
        let mut shell = Screen::with_script(&home, script, &[], &environment);
        shell.wait(&format!("ended with {code}"));
        assert!(shell.is_sane(), "{kind}");
    }
}

/// Returns whether this process ignores `signal`.
fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal as i32 - 1) & 1 == 1
}

#[test]
fn ctrl_z_stops_the_chat_and_fg_continues_it() {
    let home = TempDir::new().unwrap();
    let program = env!("CARGO_BIN_EXE_inferno");
    let mut shell = Screen::with_script(
        &home,
        "exec bash --norc --noprofile --noediting -i",
        &[],
        &[("PS1", "shell: "), ("P", program)],
    );
    shell.wait("shell: ");
    shell.send(format!("$P {} --ignore-eos --max-tokens 300\r", DEMO.join(" ")).as_bytes());
    shell.wait(">>> ");
    shell.settle();
    shell.send(QUESTION);
    shell.wait("\x1b[2m");
    shell.send(b"\x1a");
    shell.wait("Stopped");
    shell.wait("shell: ");
    assert!(shell.is_sane());
    shell.send(b"fg\r");
    shell.wait("\x1b[?2004h");
    assert!(!shell.is_sane());
    shell.wait("tok/s");
    shell.wait(">>> ");
    shell.settle();
    shell.send(b"\x1a");
    shell.wait("shell: ");
    assert!(shell.is_sane());
    shell.send(b"fg\r");
    shell.settle();
    assert!(shell.say("/stats").contains("harmony"));
    // SIGTERM must also end a stopped program.
    shell.settle();
    shell.send(b"\x1a");
    shell.wait("shell: ");
    // Wait until the shell notices the program's exit. `jobs -l` would list a job that is still stopped.
    shell.send(b"kill %1; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.5; kill -0 %1 2> /dev/null || break; done\r");
    shell.wait("shell: ");
    shell.settle();
    shell.send(b"jobs -l; echo that was all\r");
    shell.wait("that was all\r");
    let jobs = shell.wait("that was all\r");
    assert!(!jobs.contains("Stopped"), "{jobs}");
}

#[test]
fn each_ctrl_c_stops_the_answer_clears_the_line_or_leaves() {
    let home = TempDir::new().unwrap();
    let mut chat = streaming(&home);
    // When Ctrl-C stops an answer, a line that was typed during the answer becomes the draft.
    chat.send(b"/clear\r");
    chat.settle_briefly();
    chat.send(CTRL_C);
    chat.wait("stopped");
    chat.settle();
    assert_eq!(chat.rows().last().unwrap(), ">>> /clear");
    // Ctrl-C on a line with text only clears the line. On an empty line, the second Ctrl-C leaves the chat.
    chat.send(CTRL_C);
    chat.settle();
    assert_eq!(chat.rows().last().unwrap(), ">>>");
    chat.send(b"draft");
    chat.settle();
    chat.send(CTRL_C);
    chat.settle();
    assert!(!chat.rows().join("\n").contains("press Ctrl-C again"), "{:?}", chat.rows());
    chat.send(CTRL_C);
    chat.wait("press Ctrl-C again");
    chat.settle();
    chat.send(CTRL_C);
    assert_eq!(chat.end(), WaitStatus::Exited(chat.pid(), 0));
    assert!(chat.is_sane());
}

#[test]
fn typed_ahead_lines_stay_in_order_and_a_paste_is_one_message() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &["--ignore-eos", "--max-tokens", "150"]);
    stream(&mut chat);
    chat.send(b"/set top-k 5\r/set top-k 6\r/set top-x\x7fk\x1b[D\x1bOC 7\r");
    chat.send(b"\x1b[200~one\r/exit\r\"two\"\x1b[201~");
    let mut order = String::new();
    for _ in 0..3 {
        order.push_str(&chat.wait("top-k is "));
        order.push_str(&chat.wait("\n"));
    }
    let digits: String = order.lines().filter_map(|line| line.chars().next().filter(char::is_ascii_digit)).collect();
    assert!(digits.ends_with("567"), "{order}");
    chat.settle();
    let rows = chat.rows();
    assert_eq!(rows[rows.len() - 3..], [">>> one", "/exit", "\"two\""]);
    chat.send(b"\r");
    chat.wait("tok/s");
    chat.wait(">>> ");
    chat.send(b"/exit\r");
    assert_eq!(chat.end(), WaitStatus::Exited(chat.pid(), 0));
    let history = fs::read_to_string(home.path().join(".local/state/inferno/history")).unwrap();
    assert!(history.contains("/set top-k 7") && history.contains("one\\n/exit"), "{history}");
}

#[test]
fn invalid_utf_8_leaves_the_line_unchanged() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &[]);
    chat.settle();
    // 0xe9 starts a three-byte UTF-8 character. The space after 0xe9 makes the character invalid.
    chat.send(b"/st\xe9 ");
    chat.wait("not UTF-8");
    chat.settle();
    assert_eq!(chat.rows().last().unwrap(), ">>> /st");
    assert!(chat.say("ats").contains("harmony"));
}

#[test]
fn ctrl_c_in_the_editor_does_not_reach_the_chat() {
    let home = TempDir::new().unwrap();
    let editor = home.path().join("editor.sh");
    let wait = "trap 'echo interrupted' INT; echo editor is ready; while ! read line; do :; done";
    let script = format!("{wait}; echo What is a token? > \"$1\"\n");
    fs::write(&editor, script).unwrap();
    let command = format!("sh {}", editor.display());
    let mut chat = Screen::new(&home, &DEMO, &[("EDITOR", &command), ("VISUAL", "")]);
    chat.wait(">>> ");
    chat.settle();
    chat.send(b"draft\x07");
    chat.wait("editor is ready");
    for _ in 0..3 {
        chat.send(CTRL_C);
        chat.wait("interrupted");
    }
    chat.send(b"\r");
    chat.wait("What is a token?");
    chat.settle();
    chat.send(b"\r");
    let answer = chat.wait("tok/s");
    let stats = chat.wait("\n");
    assert!(!answer.contains("stopped") && !stats.contains("stopped"), "{answer}{stats}");
}
