//! Tests of failing writes: full disks, file size limits and a closed stderr.
//! Another test checks the signals that the editor of the chat inherits.

use std::fs;
use std::process::{Output, Stdio};

use nix::sys::wait::WaitStatus;
use tempfile::TempDir;

use crate::support::program::{assert_fails, in_shell, inferno, text};
use crate::support::screen::{DEMO, Screen};

/// Runs a shell script in which `"$@"` is the inferno program with the arguments `args`.
fn run_script(home: &TempDir, script: &str, args: &[&str]) -> Output {
    let mut inferno = inferno(home);
    inferno.args(args);
    in_shell(&["sh"], script, home.path(), &inferno).stdin(Stdio::null()).output().unwrap()
}

const ASK_DEMO: [&str; 6] = ["play", "demo", "--device", "cpu", "--prompt", "Hi"];

#[test]
fn file_size_limit_exits_with_11() {
    // `play demo` must fail because it cannot write the demo to the cache.
    // The other commands must fail because they cannot write their output to a file.
    let home = TempDir::new().unwrap();
    let output = run_script(&home, "ulimit -f 0; exec \"$@\"", &ASK_DEMO);
    assert_fails(&output, 11, &["File too large"]);
    for args in [&["list"][..], &["completions", "bash"]] {
        let home = TempDir::new().unwrap();
        let script = "cd \"$HOME\"; ulimit -f 0; exec \"$@\" > output";
        assert_fails(&run_script(&home, script, args), 11, &["cannot write the output: File too large"]);
    }
}

#[test]
fn full_disk_as_stdout_exits_with_11() {
    let home = TempDir::new().unwrap();
    for args in [&["list"][..], &["show", "demo"], &["completions", "zsh"], &ASK_DEMO] {
        let output = run_script(&home, "exec \"$@\" > /dev/full", args);
        assert_fails(&output, 11, &["No space left on device"]);
    }
}

#[test]
fn full_disk_as_stderr_changes_no_exit_code() {
    let home = TempDir::new().unwrap();
    let cases: [(&[&str], i32); 8] = [
        (&["-vv", "list"], 0),
        (&["-vv", "show", "demo"], 0),
        (&[&["-vv"], &ASK_DEMO[..]].concat(), 0),
        (&["bench", "demo", "--device", "cpu", "-p", "8", "-n", "2", "-r", "1"], 0),
        (&["download", "org/missing"], 5),
        (&["play", "missing", "--prompt", "Hi"], 3),
        (&["list", "--nonsense"], 2),
        (&["remove", "missing"], 3),
    ];
    for (args, code) in cases {
        for script in ["exec \"$@\" 2> /dev/full", "exec \"$@\" 2>&-"] {
            let output = run_script(&home, script, args);
            assert_eq!(output.status.code(), Some(code), "{script} {args:?}: {}", text(&output.stderr));
        }
    }
}

#[test]
fn chat_continues_if_stderr_is_a_full_disk() {
    let home = TempDir::new().unwrap();
    let mut chat = Screen::with_script(&home, "exec \"$@\" 2> /dev/full", &DEMO, &[]);
    chat.wait(">>> ");
    chat.say("/help");
    chat.say("/set top-k 5");
    chat.say("How do I download a model?");
    chat.say("/model missing");
    assert!(chat.rows().join("\n").contains("inferno download"), "{:?}", chat.rows());
    chat.send(b"/exit\r");
    assert_eq!(chat.end(), WaitStatus::Exited(chat.pid(), 0));
    assert!(chat.is_sane());
}

/// A chat continues if its history, its journal and an exported file cannot be written.
#[test]
fn chat_continues_at_the_file_size_limit() {
    let home = TempDir::new().unwrap();
    // Write the demo to the cache first, because the file size limit would make this fail.
    assert!(inferno(&home).args(ASK_DEMO).output().unwrap().status.success());
    let mut chat = Screen::with_script(&home, "ulimit -f 0; exec \"$@\"", &DEMO, &[]);
    chat.wait(">>> ");
    chat.say("How do I download a model?");
    let path = home.path().join("answer.md");
    let reply = chat.say(&format!("/export md {}", path.display()));
    assert!(reply.contains("File too large") && !path.exists(), "{reply}");
    chat.send(b"/exit\r");
    assert_eq!(chat.end(), WaitStatus::Exited(chat.pid(), 0));
}

/// A child process inherits which signals are ignored or blocked. inferno ignores SIGPIPE, but the editor must not.
#[test]
fn editor_starts_with_default_signals() {
    let home = TempDir::new().unwrap();
    let editor = home.path().join("editor.sh");
    let script = format!("grep -E 'Sig(Ign|Blk)' /proc/self/status > {0}/signals\n", home.path().display());
    fs::write(&editor, script).unwrap();
    let command = format!("sh {}", editor.display());
    let mut chat = Screen::new(&home, &DEMO, &[("EDITOR", &command), ("VISUAL", "")]);
    chat.wait(">>> ");
    chat.settle();
    chat.send(b"draft\x07");
    chat.wait("draft");
    chat.settle();
    let signals = fs::read_to_string(home.path().join("signals")).unwrap();
    for line in signals.lines() {
        let mask = u64::from_str_radix(line.split_whitespace().next_back().unwrap(), 16).unwrap();
        // SIGPIPE (13), SIGTERM (15) and SIGXFSZ (25) must be neither ignored nor blocked.
        assert!([13, 15, 25].iter().all(|signal| mask >> (signal - 1) & 1 == 0), "{signals}");
    }
}
