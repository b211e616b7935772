//! Tests of settings from flags, the environment and the configuration file, of standard input that is appended
//! to the prompt, of `--jsonl` output, of shell completions and of logs.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::process::{Output, Stdio};

use inferno::SamplingParams;
use inferno::engine::sampling::SAMPLING_FIELDS;
use rexpect::session::PtySession;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::demo_dir;
use crate::support::program::{assert_fails, inferno, run, text};
use crate::support::session::{expect, play_with};

const ASK: [&str; 5] = ["play", "demo", "--prompt", "How do I list my models?", "--json"];

fn home_with(config: &str) -> TempDir {
    let home = TempDir::new().unwrap();
    fs::create_dir_all(home.path().join(".config/inferno")).unwrap();
    fs::write(home.path().join(".config/inferno/config.toml"), config).unwrap();
    home
}

fn ask(home: &TempDir, more: &[&str], environment: &[(&str, &str)]) -> Output {
    inferno(home).args(ASK).args(more).envs(environment.iter().copied()).output().unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn flags_override_the_environment_which_overrides_the_file() {
    let config = "device = \"cpu\"\ntemperature = 0\nseed = 1\nmax-tokens = 3\n[models.demo]\nseed = 2\n[models.\"a/b\"]\nseed = 3\n";
    let home = home_with(config);
    let seed = |more: &[&str], environment: &[(&str, &str)]| json(&ask(&home, more, environment))["seed"].as_u64();
    assert_eq!(seed(&[], &[]), Some(2), "[models.demo] must override the top-level keys");
    assert_eq!(seed(&[], &[("INFERNO_SEED", "4")]), Some(4));
    assert_eq!(seed(&["--seed", "5"], &[("INFERNO_SEED", "4")]), Some(5));
    let answer = json(&ask(&home, &[], &[]));
    assert_eq!((answer["tokens"].as_array().unwrap().len(), answer["finish_reason"].as_str()), (3, Some("length")));
    let other = home.path().join("other.toml");
    fs::write(&other, "device = \"cpu\"\nseed = 6\nmax-tokens = 1\nstop = [\"a\", \"b\"]\nplain = true\n").unwrap();
    assert_eq!(seed(&[], &[("INFERNO_CONFIG", other.to_str().unwrap())]), Some(6));
    // `bench` reads `device` from the file and ignores keys that only `play` uses.
    let output = inferno(&home).args(["bench", "demo", "-p", "8", "-n", "2", "-r", "1"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn mistakes_in_the_configuration_file_are_reported() {
    let fails = |config: &str, words: &[&str]| assert_fails(&ask(&home_with(config), &[], &[]), 2, words);
    fails("tempratur = 1\n", &["config.toml", "unknown key 'tempratur'", "temperature"]);
    fails("[models.other]\ndevize = \"cpu\"\n", &["unknown key 'devize'", "other"]);
    fails("device = \"tpu\"\n", &["config.toml", "tpu", "--device"]);
    fails("seed = {}\n", &["'seed'"]);
    fails("seed = \n", &["config.toml"]);
    fails("device = \"cpu\"\nseed = [1, 2]\n", &["config.toml", "'seed' takes one value"]);
    fails("temperature = []\n", &["config.toml", "'temperature' takes one value"]);
    let home = home_with("");
    let path = home.path().join(".config/inferno/config.toml");
    fs::write(&path, b"seed = \xff\n").unwrap();
    assert_fails(&ask(&home, &[], &[]), 2, &["config.toml"]);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_fails(&ask(&home, &[], &[]), 2, &["config.toml"]);
    // `--help` and `list` work even if the file has mistakes.
    let output = inferno(&home_with("x = 1\n")).args(["play", "--help"]).output().unwrap();
    assert!(output.status.success());
    assert!(inferno(&home_with("x = 1\n")).arg("list").output().unwrap().status.success());
}

#[test]
fn mistakes_in_the_environment_are_reported() {
    let home = TempDir::new().unwrap();
    let with = |name: &str, value: &str| ask(&home, &["--device", "cpu", "--max-tokens", "1"], &[(name, value)]);
    for (name, value) in [
        ("INFERNO_PLAIN", "0"),
        ("INFERNO_PLAIN", "1"),
        ("INFERNO_EAGER", "yes"),
        // The earlier name of `portable` is still accepted.
        ("INFERNO_ATTENTION", "eager"),
        ("INFERNO_ATTENTION", "portable"),
        ("INFERNO_HIDE_REASONING", "on"),
        ("INFERNO_SEED", ""),
        ("INFERNO_STOP", "zebra"),
    ] {
        json(&with(name, value));
    }
    assert_eq!(json(&with("INFERNO_SEED", "12"))["seed"], 12);
    assert_fails(&with("INFERNO_TEMPERATURE", "abc"), 2, &["INFERNO_TEMPERATURE", "'abc'"]);
    assert_fails(&with("INFERNO_PLAIN", "perhaps"), 2, &["INFERNO_PLAIN"]);
    // A flag overrides an environment variable, even if the variable has an invalid value.
    json(&ask(&home, &["--device", "cpu", "--max-tokens", "1", "--seed", "3"], &[("INFERNO_SEED", "abc")]));
}

#[test]
fn every_sampling_parameter_can_be_set_everywhere() {
    let help = text(&run(&["play", "--help"]).stdout).to_string();
    let keys: String = SAMPLING_FIELDS.iter().map(|field| format!("{} = 1\n", field.flag)).collect();
    let home = home_with(&format!("device = \"cpu\"\nmax-tokens = 1\n{keys}"));
    assert_eq!(json(&ask(&home, &[], &[]))["seed"], 1);
    let mut chat = play_with(&home, &["demo"], &[]);
    expect(&mut chat, ">>> ");
    for field in SAMPLING_FIELDS {
        let flag = format!("--{} <{}>", field.flag, field.value_name);
        assert!(help.contains(&flag) && help.contains(field.help), "--help lacks {flag} or its help text: {help}");
        let variable = format!("INFERNO_{}", field.name.to_uppercase());
        let expected = field.set(&mut SamplingParams::greedy(), "-200").unwrap_err();
        let output = ask(&home, &[], &[(&variable, "-200")]);
        assert_fails(&output, 2, &[&variable, "'-200'", &format!("--{}", field.flag), &expected]);
        assert_fails(&ask(&home, &[&format!("--{}", field.flag), "-200"], &[]), 2, &["'-200'", &expected]);

        chat.send_line(&format!("/set {} -200", field.flag)).unwrap();
        expect(&mut chat, &format!("cannot set {} to '-200': {expected}", field.flag));
        expect(&mut chat, ">>> ");
        chat.send_line(&format!("/set {} 0.5", field.flag)).unwrap();
        let shown = expect(&mut chat, ">>> ");
        assert!(shown.contains(&format!("{} is 0.5", field.flag)) || shown.contains("whole number"), "{shown}");
    }
    chat.send_line("My name is Ada").unwrap();
    expect(&mut chat, "first token");
    expect(&mut chat, ">>> ");
    chat.send_line("/exit").unwrap();
    chat.exp_eof().unwrap();
    let folder = fs::read_dir(home.path().join(".local/state/inferno/conversations")).unwrap();
    let journal = fs::read_to_string(folder.last().unwrap().unwrap().path()).unwrap();
    for field in SAMPLING_FIELDS {
        assert!(
            journal.contains(&format!("\"{}\":[", field.flag)),
            "the journal does not contain {}: {journal}",
            field.flag
        );
    }
}

#[test]
fn configuration_sections_match_the_full_model_name() {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let home =
        home_with("device = \"cpu\"\nmax-tokens = 9\n[models.\"a/little\"]\ntop-k = 7\n[models.demo]\ntop-k = 5\n");
    let repository = home.path().join("models/models--a--little");
    let snapshot = repository.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    for entry in fs::read_dir(demo_dir()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), snapshot.join(entry.file_name())).unwrap();
    }
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), commit).unwrap();

    let top_k = |chat: &mut PtySession| {
        chat.send_line("/set").unwrap();
        expect(chat, "top-k ");
        let value = expect(chat, "top-p");
        expect(chat, ">>> ");
        value.trim().to_string()
    };
    let mut chat = play_with(&home, &["little"], &[]);
    expect(&mut chat, ">>> ");
    assert_eq!(top_k(&mut chat), "7");
    chat.send_line("/model demo").unwrap();
    expect(&mut chat, "switched to");
    expect(&mut chat, ">>> ");
    assert_eq!(top_k(&mut chat), "5");
    // A value set with `/set` also applies to models that are loaded later.
    chat.send_line("/set top-k 3").unwrap();
    expect(&mut chat, ">>> ");
    chat.send_line("/model littl").unwrap();
    expect(&mut chat, "switched to");
    expect(&mut chat, ">>> ");
    assert_eq!(top_k(&mut chat), "3");
    chat.send_line("My name is Ada").unwrap();
    expect(&mut chat, "tok/s");
    expect(&mut chat, ">>> ");
    chat.send_line("/exit").unwrap();
    chat.exp_eof().unwrap();
    let folder = fs::read_dir(home.path().join(".local/state/inferno/conversations")).unwrap();
    let journal = fs::read_to_string(folder.last().unwrap().unwrap().path()).unwrap();
    assert!(journal.contains("\"model\":\"a/little\""), "{journal}");

    let mut chat = play_with(&home, &["little@main"], &[]);
    expect(&mut chat, ">>> ");
    chat.send_line("My name is Ada").unwrap();
    expect(&mut chat, "tok/s");
    expect(&mut chat, ">>> ");
    chat.send_line("/save branch").unwrap();
    expect(&mut chat, "saved");
    chat.send_line("/exit").unwrap();
    chat.exp_eof().unwrap();
    let journal = fs::read_to_string(home.path().join(".local/state/inferno/conversations/branch.jsonl")).unwrap();
    assert!(journal.contains("\"revision\":[\"main\"]"), "{journal}");
    let mut chat = play_with(&home, &["--resume", "branch"], &[]);
    assert!(expect(&mut chat, ">>> ").contains("1 question"));

    // A revision in the model name overrides INFERNO_REVISION.
    let other = [("INFERNO_REVISION", "other")];
    let mut chat = play_with(&home, &["a/little@main", "--device", "cpu"], &other);
    expect(&mut chat, ">>> ");

    let mut chat = play_with(&home, &[], &[]);
    expect(&mut chat, "which model? [1-2] ");
    chat.send_line("a/little").unwrap();
    expect(&mut chat, ">>> ");
    assert_eq!(top_k(&mut chat), "7");
}

#[test]
fn a_redirected_file_is_appended_and_a_pipe_only_with_stdin_flag() {
    let home = TempDir::new().unwrap();
    let path = home.path().join("notes.txt");
    fs::write(&path, "first line of notes\nand a second one\n").unwrap();
    let tokens = |stdin: Stdio, more: &[&str]| {
        let mut command = inferno(&home);
        command.args(ASK).args(["--device", "cpu", "--max-tokens", "1"]).args(more).stdin(stdin);
        json(&command.output().unwrap())["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let alone = tokens(Stdio::null(), &[]);
    let with_file = tokens(File::open(&path).unwrap().into(), &[]);
    assert!(with_file > alone + 5, "{with_file} and {alone}");
    // Start after the first line, as in a shell loop `while read`. inferno must not append the remaining lines, because
    // the loop still has to read them.
    let mut partly_read = File::open(&path).unwrap();
    partly_read.seek(SeekFrom::Start(20)).unwrap();
    assert_eq!(tokens(partly_read.into(), &[]), alone);

    // A pipe that stays open must not block inferno.
    let mut child = inferno(&home)
        .args(ASK)
        .args(["--device", "cpu", "--max-tokens", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let open = child.stdin.take();
    let output = child.wait_with_output().unwrap();
    assert_eq!(json(&output)["usage"]["prompt_tokens"].as_u64(), Some(alone));
    drop(open);

    let mut child = inferno(&home)
        .args(ASK)
        .args(["--device", "cpu", "--max-tokens", "1", "--stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&fs::read(&path).unwrap()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(json(&output)["usage"]["prompt_tokens"].as_u64(), Some(with_file));
    assert_fails_usage(&run(&["play", "demo", "--stdin"]));
}

fn assert_fails_usage(output: &Output) {
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn jsonl_events_add_up_to_the_whole_answer() {
    let home = TempDir::new().unwrap();
    let args = ["play", "demo", "--device", "cpu", "--prompt", "How do I list my models?", "--temperature", "0"];
    let whole = json(&inferno(&home).args(args).arg("--json").output().unwrap());
    let output = inferno(&home).args(args).arg("--jsonl").output().unwrap();
    let events: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text_of = |event: &str| -> String {
        events.iter().filter(|line| line["event"] == event).map(|line| line["text"].as_str().unwrap()).collect()
    };
    assert_eq!(events.first().unwrap()["event"], "start");
    assert_eq!(events.first().unwrap()["model"], "demo");
    assert_eq!(text_of("answer"), whole["text"].as_str().unwrap());
    assert_eq!(text_of("reasoning"), whole["reasoning"].as_str().unwrap());
    let end = events.last().unwrap();
    assert_eq!((end["event"].as_str(), end["finish_reason"].as_str()), (Some("end"), Some("stop")));
    assert_eq!(end["usage"], whole["usage"]);
    assert!(events.len() > 10, "expected more than 10 events");
    assert_fails_usage(&run(&["play", "demo", "--prompt", "x", "--json", "--jsonl"]));
    let long = "download ".repeat(500);
    let output = run(&["play", "demo", "--device", "cpu", "--context", "128", "--prompt", &long, "--jsonl"]);
    assert!(!output.status.success());
    let last: Value = serde_json::from_str(text(&output.stdout).lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "error");
}

#[test]
fn completions_are_generated_and_verbose_logs_go_to_stderr() {
    for (shell, word) in [("bash", "complete -F"), ("zsh", "#compdef inferno"), ("fish", "complete -c inferno")] {
        let script = text(&run(&["completions", shell]).stdout);
        assert!(script.contains(word) && script.contains("hide-reasoning"), "{shell}");
    }
    let home = home_with("seed = 1\n");
    let output = ask(&home, &["--device", "cpu", "--max-tokens", "1", "-v"], &[]);
    let log = text(&output.stderr);
    for word in ["config.toml", "model.safetensors", "execution mode"] {
        assert!(log.contains(word), "the log does not contain {word}: {log}");
    }
    json(&output);
    assert_eq!(text(&ask(&home, &["--device", "cpu", "--max-tokens", "1"], &[]).stderr), "");
    let env = [("RUST_LOG", "inferno=info")];
    assert!(text(&ask(&home, &["--device", "cpu", "--max-tokens", "1"], &env).stderr).contains("execution mode"));
}
