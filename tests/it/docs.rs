//! Checks that the pages in `docs/` list all flags, environment variables, exit codes and configuration keys.
//! Also compares documented speeds and memory use with benches/results, and checks that tests named in `docs/` exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use inferno::error::Error;
use serde_json::Value;

use crate::cli::{run, text};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page(name: &str) -> String {
    fs::read_to_string(repository().join(name)).unwrap()
}

/// Returns the output of `inferno ARGS --help`, with trailing spaces removed from each line.
fn help(args: &[&str]) -> String {
    let output = run(&[args, &["--help"]].concat());
    assert!(output.status.success());
    text(&output.stdout).lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

#[test]
fn cli_page_matches_the_help_of_every_command() {
    let page = page("docs/cli.md");
    let overview = help(&[]);
    let commands = overview.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.len() > 8, "{commands:?}");
    let stale = "docs/cli.md is out of date: run scripts/cli-reference.sh";
    assert!(page.contains(&overview), "{stale}");
    for command in commands.into_iter().filter(|command| *command != "help") {
        assert!(
            page.contains(&format!("## inferno {command}\n\n```text\n{}\n```", help(&[command]))),
            "{stale} ({command})"
        );
    }
}

#[test]
fn reference_page_lists_every_environment_variable() {
    let page = page("docs/reference.md");
    let mut files = Vec::new();
    collect(&repository().join("src"), &mut files);
    let mut variables = BTreeSet::new();
    for file in files {
        let code = fs::read_to_string(&file).unwrap();
        // Splitting at quotation marks yields string literals and the code between them. Keep only variable names.
        let literals = code.split('"').filter(|literal| {
            let prefixes = ["INFERNO_", "HF_", "XDG_", "CUDA_", "NVCC", "NO_COLOR", "RUST_LOG", "VISUAL", "EDITOR"];
            let is_name = literal.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            is_name && prefixes.iter().any(|prefix| literal.starts_with(prefix) && !literal.ends_with('_'))
        });
        variables.extend(literals.map(str::to_string));
    }
    // The build script sets these variables for the compiler. `CUDA_ERROR_*` are names of driver errors.
    let internal = ["COMMIT", "COMPUTE_CAP", "CUDA_MAJOR", "DEMO_REVISION", "NATIVE_CAPS"];
    let internal = internal.map(|name| format!("INFERNO_{name}"));
    let missing: Vec<&String> = variables
        .iter()
        .filter(|name| !internal.contains(name) && !name.starts_with("CUDA_ERROR_"))
        .filter(|name| !page.contains(&format!("`{name}`")))
        .collect();
    assert!(variables.len() > 15, "{variables:?}");
    assert!(missing.is_empty(), "docs/reference.md does not list {missing:?}");
}

/// docs/reference.md, `--help` and `Error::exit_code` must list the same exit codes.
#[test]
fn reference_page_lists_exactly_the_exit_codes() {
    let reference = page("docs/reference.md");
    let section = reference.split_once("## Exit codes\n").unwrap().1.split("\n## ").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    let documented: BTreeSet<u8> = rows.filter_map(|(code, _)| code.parse().ok()).collect();

    // In `Error::exit_code`, each match arm ends with an exit code: a number or the name of a constant.
    let source = page("src/error.rs");
    let function = source.split_once("pub fn exit_code").unwrap().1;
    let arms = function.lines().filter_map(|line| line.trim_end_matches(',').rsplit_once("=> "));
    let constant = |name: &str| source.split_once(&format!("const {name}: u8 = "))?.1.split(';').next()?.parse().ok();
    let number = |code: &str| code.parse::<u8>().ok().or_else(|| constant(code));
    let errors = arms.map(|(_, code)| number(code).unwrap_or_else(|| panic!("'{code}' is not an exit code")));
    // Add 0 for success, 1 for errors without their own code, and 130 for Ctrl-C.
    let codes: BTreeSet<u8> = errors.chain([0, 1, 130]).collect();
    assert_eq!(documented, codes, "docs/reference.md and src/error.rs differ");

    let help = help(&[]);
    let numbers = help.split_once("Exit codes:").unwrap().1.split(|c: char| !c.is_ascii_digit());
    let in_help: BTreeSet<u8> = numbers.filter_map(|number| number.parse().ok()).collect();
    assert_eq!(documented, in_help, "docs/reference.md and `inferno --help` differ");
    assert_eq!(Error::Usage(String::new()).exit_code(), 2);
}

#[test]
fn reference_page_lists_every_configuration_key() {
    let home = tempfile::TempDir::new().unwrap();
    let config = home.path().join("config.toml");
    fs::write(&config, "no-such-key = 1\n").unwrap();
    let output = crate::cli::inferno(&home).env("INFERNO_CONFIG", &config).args(["play", "demo"]).output().unwrap();
    let message = text(&output.stderr);
    let known = message.split_once("known keys: ").unwrap_or_else(|| panic!("{message}")).1.lines().next().unwrap();
    let page = page("docs/reference.md");
    for key in known.split(", ") {
        assert!(page.contains(&format!("`{key}`")), "docs/reference.md does not list the key {key}");
    }
}

#[test]
fn readme_is_short() {
    assert!(page("README.md").lines().count() <= 250);
}

/// Results of `inferno bench --json` in benches/results. If a model has several runs, their values are averaged.
struct Results(Vec<Value>);

impl Results {
    fn read(names: &[&str]) -> Self {
        let path = |name: &&str| format!("benches/results/2026-11-22-nvidia-h200-{name}.json");
        Self(names.iter().map(|name| serde_json::from_str(&page(&path(name))).unwrap()).collect())
    }

    fn mean(&self, number: impl Fn(&Value) -> f64) -> f64 {
        self.0.iter().map(number).sum::<f64>() / self.0.len() as f64
    }

    /// Returns the speed of one bench test in tokens per second, formatted as in the docs: "751", "1,353" or "40,100".
    fn speed(&self, kind: &str, tokens: u64, depth: u64) -> String {
        let is_wanted = |test: &&Value| test["kind"] == kind && test["tokens"] == tokens && test["depth"] == depth;
        let speed = |run: &Value| run["tests"].as_array().unwrap().iter().find(is_wanted).unwrap()["tok_per_s"].clone();
        let mean = self.mean(|run| speed(run)["mean"].as_f64().unwrap());
        let rounded = if mean < 2000.0 { mean.round() } else { (mean / 100.0).round() * 100.0 } as u64;
        if rounded < 1000 { rounded.to_string() } else { format!("{},{:03}", rounded / 1000, rounded % 1000) }
    }

    fn gigabytes(&self, when: &str) -> String {
        format!("{:.1}", self.mean(|run| run["memory"][when].as_f64().unwrap()) / 1e9)
    }
}

#[test]
fn speeds_and_memory_agree_with_the_stored_results() {
    let oss = Results::read(&["gpt-oss-20b-1", "gpt-oss-20b-2"]);
    let (llama, small) = (Results::read(&["llama-3.1-8b"]), Results::read(&["llama-3.2-1b"]));
    let (qwen, qwen_q8) = (Results::read(&["qwen3-30b-a3b"]), Results::read(&["qwen3-30b-a3b-q8_0"]));
    let decode = |results: &Results| format!("{} / {}", results.speed("tg", 128, 0), results.speed("tg", 128, 8192));
    let prefill = |results: &Results| format!("{} / {}", results.speed("pp", 512, 0), results.speed("pp", 2048, 0));
    let each = |kind, tokens| [&oss, &llama, &small].map(|results| results.speed(kind, tokens, 0)).join(" | ");
    let (loaded, end) = ("after_load_bytes", "at_end_bytes");
    let overview =
        |results: &Results| format!("{} | {} | {} GB", decode(results), prefill(results), results.gigabytes(loaded));
    let memory = [&oss, &llama, &small]
        .map(|results| format!("{} / {} GB", results.gigabytes(loaded), results.gigabytes(end)))
        .join(" | ");

    let rows = [
        ("README.md", format!("gpt-oss-20b (MXFP4) | {}", overview(&oss))),
        ("README.md", format!("Qwen3-30B-A3B | {}", overview(&qwen))),
        ("docs/benchmarks.md", format!("decode, empty context | {}", each("tg", 128))),
        ("docs/benchmarks.md", format!("decode after 8,192 tokens | {}", oss.speed("tg", 128, 8192))),
        ("docs/benchmarks.md", format!("prefill, 512 tokens | {}", each("pp", 512))),
        ("docs/benchmarks.md", format!("prefill, 2,048 tokens | {}", each("pp", 2048))),
        ("docs/benchmarks.md", format!("prefill, 8,192 tokens | {}", oss.speed("pp", 8192, 0))),
        ("docs/benchmarks.md", format!("(context 16,386 / 2,050 / 2,050) | {memory}")),
        ("docs/benchmarks.md", format!("(Gemma-2: 6,000) | {} | {}", decode(&qwen), decode(&qwen_q8))),
        ("docs/benchmarks.md", format!("prefill of 512 / 2,048 tokens | {} | {}", prefill(&qwen), prefill(&qwen_q8))),
    ];
    for (name, row) in rows {
        assert!(page(name).contains(&format!("{row} |")), "{name} does not contain this row: {row}");
    }
}

/// In the docs, a name in backticks with at least three underscores is the name of a test.
#[test]
fn tests_that_the_docs_name_exist() {
    let mut files = Vec::new();
    collect(&repository().join("tests/it"), &mut files);
    let code: String = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let pages = fs::read_dir(repository().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut names = Vec::new();
    for path in pages.filter(|path| path.extension().is_some_and(|extension| extension == "md")) {
        let text = fs::read_to_string(&path).unwrap().replace('\n', " ");
        // After a split at backticks, every second part is code.
        let is_test = |name: &&str| {
            let is_name = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
            // Names of metrics start with `inferno_`. `model_context_window_exceeded` is a value in Anthropic's API.
            let is_other = name.starts_with("inferno_") || *name == "model_context_window_exceeded";
            is_name && name.matches('_').count() >= 3 && !is_other
        };
        names.extend(text.split('`').skip(1).step_by(2).filter(is_test).map(str::to_string));
    }
    assert!(!names.is_empty());
    for name in names {
        assert!(code.contains(&format!("fn {name}(")), "the docs name the test {name}, which does not exist");
    }
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}
