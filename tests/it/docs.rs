//! Checks the documentation:
//! - `docs/` lists all flags, environment variables, exit codes, configuration keys and unsafe code.
//! - Tests, source files and link targets that the pages name exist, and so do flags and metrics on the server pages.
//! - Source files that comments name exist.
//! - Speeds and memory sizes in the tables agree with benches/results.
//! - Defaults in docs/tuning.md agree with `inferno serve --help`, and figures in docs/tuning.md with other pages.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use inferno::error::Error;
use serde_json::Value;

use crate::support::program::{run, text};

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

/// The extensions of source files.
const SOURCE: [&str; 3] = ["rs", "cu", "cuh"];

/// Returns the source files that a text names in backticks.
/// Leaves out patterns, and files that recipes create: `x.rs` and `NAME.rs`.
fn named_source_files(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|path| {
        let is_pattern = path.contains([' ', '*', '<', '…', '$', '"']) || path.contains("NAME");
        let Some((stem, extension)) = path.rsplit_once('.') else { return false };
        let is_example = stem.is_empty() || stem.ends_with('/') || stem == "x" || stem.ends_with("/x");
        SOURCE.contains(&extension) && !is_pattern && !is_example
    })
}

/// A path such as `engine/handle/mod.rs` may leave out the first folders.
#[test]
fn source_files_that_the_pages_and_comments_name_exist() {
    let mut files = vec![repository().join("build.rs")];
    for folder in ["src", "tests", "benches", "fuzz", "docs"] {
        collect(&repository().join(folder), &SOURCE, &mut files);
    }
    // Files of the crates openai-harmony and candle-flash-attn, and a file that the build script writes.
    let others = ["src/encoding.rs", "src/ffi.rs", "constants.cuh"];
    let assert_exists = |place: &str, path: &str| {
        assert!(
            others.contains(&path) || files.iter().any(|file| file.ends_with(path)),
            "{place} names {path}, which does not exist"
        );
    };
    let (mut in_pages, mut in_comments) = (0, 0);
    for name in ["README.md", "docs/architecture.md", "docs/contributing.md", "docs/unsafe.md"] {
        for path in named_source_files(&page(name)) {
            in_pages += 1;
            assert_exists(name, path);
        }
    }
    for file in files.iter().filter(|file| ["src", "tests"].iter().any(|top| file.starts_with(repository().join(top))))
    {
        let code = fs::read_to_string(file).unwrap();
        let comments = code.lines().enumerate().filter_map(|(index, line)| Some((index, line.split_once("//")?.1)));
        for (index, comment) in comments {
            for path in named_source_files(comment) {
                in_comments += 1;
                assert_exists(&format!("{}:{}", file.display(), index + 1), path);
            }
        }
    }
    assert!(
        in_pages > 50 && in_comments > 100,
        "found only {in_pages} source files in pages and {in_comments} in comments"
    );
}

#[test]
fn reference_page_lists_every_environment_variable() {
    let page = page("docs/reference.md");
    let mut files = Vec::new();
    collect(&repository().join("src"), &["rs"], &mut files);
    let mut variables = BTreeSet::new();
    for file in files {
        let code = fs::read_to_string(&file).unwrap();
        // Splitting at quotation marks yields string literals and code. Keep only environment variables.
        let literals = code.split('"').filter(|literal| {
            let prefixes = ["INFERNO_", "HF_", "XDG_", "CUDA_", "NVCC", "NO_COLOR", "RUST_LOG", "VISUAL", "EDITOR"];
            let is_name = literal.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            is_name && prefixes.iter().any(|prefix| literal.starts_with(prefix) && !literal.ends_with('_'))
        });
        variables.extend(literals.map(str::to_string));
    }
    // Leave out variables that the build script sets for the compiler, and names of driver errors (`CUDA_ERROR_*`).
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
    let function = source.split_once("pub fn exit_code").unwrap().1.split("\n    }\n").next().unwrap();
    let arms = function.lines().filter_map(|line| line.trim_end_matches(',').rsplit_once("=> "));
    let constant = |name: &str| source.split_once(&format!("const {name}: u8 = "))?.1.split(';').next()?.parse().ok();
    let number = |code: &str| code.parse::<u8>().ok().or_else(|| constant(code));
    let errors = arms.map(|(_, code)| number(code).unwrap_or_else(|| panic!("'{code}' is not an exit code")));
    // Add the codes of other outcomes: 0 for success, 1 for errors of other types, and 130 for Ctrl-C.
    let codes: BTreeSet<u8> = errors.chain([0, 1, 130]).collect();
    assert_eq!(documented, codes, "the exit codes in docs/reference.md and src/error.rs differ");

    let help = help(&[]);
    let numbers = help.split_once("Exit codes:").unwrap().1.split(|c: char| !c.is_ascii_digit());
    let in_help: BTreeSet<u8> = numbers.filter_map(|number| number.parse().ok()).collect();
    assert_eq!(documented, in_help, "the exit codes in docs/reference.md and `inferno --help` differ");
    assert_eq!(Error::Usage(String::new()).exit_code(), 2);
}

#[test]
fn reference_page_lists_every_configuration_key() {
    let home = tempfile::TempDir::new().unwrap();
    let config = home.path().join("config.toml");
    fs::write(&config, "no-such-key = 1\n").unwrap();
    let output =
        crate::support::program::inferno(&home).env("INFERNO_CONFIG", &config).args(["play", "demo"]).output().unwrap();
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

/// The results of one or more runs of `inferno bench --json`, from benches/results. Figures are means over the runs.
struct Results(Vec<Value>);

impl Results {
    fn read(names: &[&str]) -> Self {
        let path = |name: &&str| format!("benches/results/{name}.json");
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

    /// Returns the generated tokens per second with `requests` concurrent requests, formatted as in the docs: "1,353".
    fn speed_at_once(&self, requests: u64) -> String {
        let is_wanted = |load: &&Value| load["concurrency"] == requests;
        let load = |run: &Value| run["serving"].as_array().unwrap().iter().find(is_wanted).unwrap().clone();
        let speed = self.mean(|run| load(run)["output_tok_per_s"].as_f64().unwrap()).round() as u64;
        format!("{},{:03}", speed / 1000, speed % 1000)
    }

    fn gigabytes(&self, when: &str) -> String {
        format!("{:.1}", self.mean(|run| run["memory"][when].as_f64().unwrap()) / 1e9)
    }
}

/// The serving results of gpt-oss-20b on an H200: two runs of the same commit.
const H200_SERVING: [&str; 2] =
    ["2026-11-28-nvidia-h200-gpt-oss-20b-serving", "2026-11-28-nvidia-h200-gpt-oss-20b-serving-2"];

#[test]
fn speeds_and_memory_agree_with_the_stored_results() {
    let read = |name: &str| Results::read(&[name]);
    let oss = Results::read(&["2026-11-22-nvidia-h200-gpt-oss-20b-1", "2026-11-22-nvidia-h200-gpt-oss-20b-2"]);
    let (llama, small) = (read("2026-11-22-nvidia-h200-llama-3.1-8b"), read("2026-11-22-nvidia-h200-llama-3.2-1b"));
    let qwen = read("2026-11-22-nvidia-h200-qwen3-30b-a3b");
    let qwen_q8 = read("2026-11-22-nvidia-h200-qwen3-30b-a3b-q8_0");
    // The benchmark results of single sequences and of concurrent requests, for one H200, one H100, two and four H100s.
    let newest = [
        (&["2026-11-28-nvidia-h200-gpt-oss-20b", "2026-11-28-nvidia-h200-gpt-oss-20b-2"][..], &H200_SERVING[..]),
        (
            &["2026-11-28-nvidia-h100-gpt-oss-20b", "2026-11-28-nvidia-h100-gpt-oss-20b-2"],
            &["2026-11-28-nvidia-h100-gpt-oss-20b-serving", "2026-11-28-nvidia-h100-gpt-oss-20b-serving-2"],
        ),
        (
            &["2026-11-28-nvidia-h100-x2-gpt-oss-20b", "2026-11-28-nvidia-h100-x2-gpt-oss-20b-2"],
            &["2026-11-28-nvidia-h100-x2-gpt-oss-20b-serving", "2026-11-28-nvidia-h100-x2-gpt-oss-20b-serving-2"],
        ),
        (
            &["2026-11-28-nvidia-h100-x4-gpt-oss-20b", "2026-11-28-nvidia-h100-x4-gpt-oss-20b-2"],
            &["2026-11-28-nvidia-h100-x4-gpt-oss-20b-serving", "2026-11-28-nvidia-h100-x4-gpt-oss-20b-serving-2"],
        ),
    ]
    .map(|(single, serving)| (Results::read(single), Results::read(serving)));
    let decode = |results: &Results| format!("{} / {}", results.speed("tg", 128, 0), results.speed("tg", 128, 8192));
    let prefill = |results: &Results| format!("{} / {}", results.speed("pp", 512, 0), results.speed("pp", 2048, 0));
    let (loaded, end) = ("after_load_bytes", "at_end_bytes");
    let overview =
        |results: &Results| format!("{} | {} | {} GB", decode(results), prefill(results), results.gigabytes(loaded));
    let memory = |results: &Results| format!("{} / {} GB", results.gigabytes(loaded), results.gigabytes(end));

    let singles = |speeds: &dyn Fn(&Results) -> String| newest.each_ref().map(|(single, _)| speeds(single)).join(" | ");
    let at_once = |requests| newest.each_ref().map(|(_, serving)| serving.speed_at_once(requests)).join(" | ");
    let rows = [
        ("README.md", format!("decode | {}", singles(&|results| results.speed("tg", 128, 0)))),
        ("README.md", format!("prefill of 512 / 2,048 tokens | {}", singles(&prefill))),
        ("README.md", format!("8 requests at once (512 prompt tokens, 128 generated) | {}", at_once(8))),
        ("README.md", format!("128 such requests | {}", at_once(128))),
        ("README.md", format!("Qwen3-30B-A3B | {}", overview(&qwen))),
        ("docs/benchmarks.md", format!("gpt-oss-20b | 8,194 | {}", memory(&newest[0].0))),
        ("docs/benchmarks.md", format!("Llama-3.1-8B | 2,050 | {}", memory(&llama))),
        ("docs/benchmarks.md", format!("Llama-3.2-1B | 2,050 | {}", memory(&small))),
        ("docs/benchmarks.md", format!("Llama-3.1-8B | {} | {}", llama.speed("tg", 128, 0), prefill(&llama))),
        ("docs/benchmarks.md", format!("Llama-3.2-1B | {} | {}", small.speed("tg", 128, 0), prefill(&small))),
        ("docs/benchmarks.md", format!("Qwen3-30B-A3B | {}", overview(&qwen))),
        ("docs/benchmarks.md", format!("Qwen3-30B-A3B with `--quantize q8_0` | {}", overview(&qwen_q8))),
        ("docs/benchmark-history.md", format!("decode, empty context | {}", oss.speed("tg", 128, 0))),
        ("docs/benchmark-history.md", format!("decode after 8,192 tokens | {}", oss.speed("tg", 128, 8192))),
        ("docs/benchmark-history.md", format!("prefill, 512 tokens | {}", oss.speed("pp", 512, 0))),
        ("docs/benchmark-history.md", format!("prefill, 2,048 tokens | {}", oss.speed("pp", 2048, 0))),
        ("docs/benchmark-history.md", format!("prefill, 8,192 tokens | {}", oss.speed("pp", 8192, 0))),
    ];
    // docs/benchmarks.md has a section for each GPU setup. Sections may share rows, so check each one alone.
    let benchmarks = page("docs/benchmarks.md");
    let sections = ["## One H200", "## One H100", "### Two H100s", "### Four H100s"];
    for (heading, (single, serving)) in sections.into_iter().zip(&newest) {
        let level = heading.split(' ').next().unwrap();
        let section = benchmarks.split_once(&format!("\n{heading}\n")).unwrap().1;
        let section = section.split(&format!("\n{level} ")).next().unwrap();
        let mut rows = vec![format!("| decode | {} |", single.speed("tg", 128, 0))];
        for (tokens, name) in [(512, "512"), (2048, "2,048"), (8192, "8,192")] {
            rows.push(format!("| prefill of {name} tokens | {} |", single.speed("pp", tokens, 0)));
        }
        for requests in [8, 32, 64, 128, 256] {
            let name = if level == "###" { format!("{requests} requests") } else { requests.to_string() };
            rows.push(format!("| {name} | {} |", serving.speed_at_once(requests)));
        }
        for row in rows {
            assert!(section.contains(&row), "{heading} in docs/benchmarks.md does not contain this row: {row}");
        }
    }
    for (name, row) in rows {
        assert!(page(name).contains(&format!("{row} |")), "{name} does not contain this row: {row}");
    }
}

/// The documentation pages about the server. The tests check the flags and metrics named on these pages.
const SERVER_PAGES: [&str; 5] =
    ["docs/tuning.md", "docs/serving.md", "docs/reliability.md", "docs/troubleshooting.md", "docs/deploy.md"];

/// Returns all words of a text that start with a prefix and contain only lower-case letters, digits and `others`.
fn words<'t>(text: &'t str, prefix: &str, others: &[char]) -> BTreeSet<&'t str> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || others.contains(&c);
    let words = text.split(|c: char| !is_part(c)).map(|word| word.trim_end_matches(others));
    words.filter(|word| word.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty())).collect()
}

#[test]
fn flags_on_the_pages_about_the_server_exist() {
    let scripts = ["deploy/smg/smg.sh", "scripts/image.sh", "scripts/release.sh", "scripts/serve/load.py"];
    let others = ["scripts/serve/reliability.py", "scripts/serve/process.py", "tests/deploy/run.py"];
    let known = [&["docs/cli.md"][..], &scripts, &others].concat().into_iter().map(page).collect::<String>();
    let mut known = words(&known, "--", &['-']);
    // Add the flags of other programs that the pages mention.
    known.extend(["--features", "--locked", "--path", "--release", "--test", "--nocapture"]); // cargo
    known.extend(["--build", "--build-arg", "--profile", "--from-literal"]); // docker and kubectl
    known.extend(["--cacert", "--check", "--ignore-missing", "--strict"]); // curl, sha256sum and kubernetes-validate
    known.insert("--cache-threshold"); // SMG
    for name in SERVER_PAGES {
        let page = page(name);
        let missing: Vec<&str> = words(&page, "--", &['-']).difference(&known).copied().collect();
        assert!(missing.is_empty(), "{name} names flags that do not exist: {missing:?}");
    }
}

/// All metrics named on the server pages must be in docs/serving.md.
/// The test `serving_page_lists_exactly_the_metrics` compares docs/serving.md with `/metrics`.
#[test]
fn metrics_on_the_pages_about_the_server_exist() {
    let serving = page("docs/serving.md");
    let known = words(&serving, "inferno_", &['_']);
    for name in SERVER_PAGES {
        let page = page(name);
        let missing: Vec<&str> = words(&page, "inferno_", &['_']).difference(&known).copied().collect();
        assert!(missing.is_empty(), "{name} names metrics that do not exist: {missing:?}");
    }
    assert!(words(&page("docs/tuning.md"), "inferno_", &['_']).len() > 10);
}

/// In docs/tuning.md, the second column of a row with flags contains their defaults.
#[test]
fn defaults_on_the_tuning_page_are_those_of_the_program() {
    let help = help(&["serve"]);
    let default_of = |flag: &str| {
        let start = help.find(&format!("      {flag} <"))?;
        help[start..].split_once("default: ")?.1.split(']').next()
    };
    let mut count = 0;
    for row in page("docs/tuning.md").lines().filter(|line| line.starts_with("| `--")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let flags: Vec<&str> =
            cells[0].split('`').skip(1).step_by(2).map(|flag| flag.split(' ').next().unwrap()).collect();
        let defaults: Vec<&str> = if flags.len() > 1 { cells[1].split(", ").collect() } else { vec![cells[1]] };
        for (flag, documented) in flags.into_iter().zip(defaults) {
            if !documented.contains(|c: char| c.is_ascii_digit()) {
                continue;
            }
            let wanted = documented.replace(',', "").trim_end_matches(" s").to_string();
            let default = default_of(flag).unwrap_or_else(|| panic!("{flag} has no default")).replace(',', "");
            let is_same = default == wanted || default.ends_with(&format!("; {wanted} for serve"));
            assert!(is_same, "docs/tuning.md says that the default of {flag} is {documented}; it is {default}");
            count += 1;
        }
    }
    assert!(count > 6, "docs/tuning.md has only {count} defaults");
}

/// Returns the numbers in a text that have at least three characters, counting commas and decimal points.
fn numbers(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_digit() || c == ',' || c == '.';
    let numbers = text.split(|c| !is_part(c)).map(|word| word.trim_matches([',', '.']));
    numbers.filter(|number| number.len() >= 3).collect()
}

#[test]
fn figures_on_the_tuning_page_are_those_of_the_benchmarks() {
    let pages = ["benchmarks", "benchmark-history", "reliability", "serving", "cli"];
    let known = pages.map(|name| page(&format!("docs/{name}.md"))).concat();
    let known = numbers(&known);
    let tuning = page("docs/tuning.md");
    // Code in backticks contains addresses and lengths, which are not measured figures.
    // After a split at backticks, every second part is code.
    let text: Vec<&str> = tuning.split('`').step_by(2).collect();
    let text = text.join(" ");
    let unknown: Vec<&str> = numbers(&text).difference(&known).copied().collect();
    assert!(unknown.is_empty(), "docs/tuning.md has figures without a source on another page: {unknown:?}");
}

/// Returns the anchor that a heading has on GitHub.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
    text.chars().filter(|&c| c.is_alphanumeric() || c == '-' || c == '_').collect()
}

#[test]
fn links_between_pages_have_targets() {
    let mut pages = vec![PathBuf::from("README.md"), PathBuf::from("SECURITY.md"), PathBuf::from("deploy/README.md")];
    let docs = fs::read_dir(repository().join("docs")).unwrap().map(|entry| entry.unwrap().file_name());
    pages.extend(
        docs.map(|name| Path::new("docs").join(name)).filter(|path| path.extension().is_some_and(|e| e == "md")),
    );
    let mut count = 0;
    for path in pages {
        let text = page(path.to_str().unwrap());
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") || target.contains([' ', '\n']) {
                continue;
            }
            count += 1;
            let (file, fragment) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(repository().join(&file).exists(), "{} links to {target}, which does not exist", path.display());
            if !fragment.is_empty() && file.extension().is_some_and(|extension| extension == "md") {
                let linked = page(file.to_str().unwrap());
                let mut headings = linked.lines().filter(|line| line.starts_with('#')).map(anchor);
                assert!(
                    headings.any(|heading| heading == fragment),
                    "{} links to {target}: no such heading",
                    path.display()
                );
            }
        }
    }
    assert!(count > 50, "the pages have only {count} links");
}

/// In the docs, a name in backticks with at least three underscores is the name of a test, another function or a field.
#[test]
fn tests_that_the_docs_name_exist() {
    let mut files = Vec::new();
    collect(&repository().join("tests/it"), &["rs"], &mut files);
    collect(&repository().join("src"), &["rs"], &mut files);
    let code: String = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let pages = fs::read_dir(repository().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut names = Vec::new();
    for path in pages.filter(|path| path.extension().is_some_and(|extension| extension == "md")) {
        let text = fs::read_to_string(&path).unwrap().replace('\n', " ");
        // After a split at backticks, every second part is code.
        let is_test = |name: &&str| {
            let is_name = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
            // Metric names start with `inferno_`. `model_context_window_exceeded` is a value in Anthropic's API.
            let is_other = name.starts_with("inferno_") || *name == "model_context_window_exceeded";
            is_name && name.matches('_').count() >= 3 && !is_other
        };
        names.extend(text.split('`').skip(1).step_by(2).filter(is_test).map(str::to_string));
    }
    assert!(!names.is_empty());
    for name in names {
        let exists = code.contains(&format!("fn {name}(")) || code.contains(&format!("pub {name}: "));
        assert!(exists, "the docs name the function or field {name}, which does not exist");
    }
}

/// Returns the name of the function that a line of code defines.
fn defined_function(line: &str) -> Option<&str> {
    let (before, rest) = line.split_once("fn ")?;
    let name = rest.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$')).next()?;
    (before.is_empty() || before.ends_with([' ', '('])).then_some(name).filter(|name| !name.is_empty())
}

/// Returns the functions and the implementations (such as `Send for Pinned`) that contain `unsafe` code in a file.
fn unsafe_items(code: &str) -> BTreeSet<String> {
    // Remove lines that are comments, and the contents of strings within a line.
    let line = |line: &str| {
        if line.trim_start().starts_with("//") {
            String::new()
        } else {
            line.replace("\\\"", "").split('"').step_by(2).collect()
        }
    };
    let lines: Vec<String> = code.lines().map(line).collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut items = BTreeSet::new();
    for (index, line) in lines.iter().enumerate() {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let Some((before, after)) = line.split_once("unsafe") else { continue };
        if before.ends_with(|c| is_part(c) || c == '[') || after.starts_with(is_part) {
            continue;
        }
        let item = if let Some(name) = defined_function(after) {
            Some(name)
        } else if let Some(implementation) = after.strip_prefix(" impl ") {
            implementation.split(" {").next()
        } else if after.starts_with(" extern") {
            lines[index + 1..].iter().find_map(|line| defined_function(line))
        } else {
            // Search backward for the line that defines the enclosing function.
            // In formatted code, that line is indented less than every line between it and the unsafe code.
            // Skip lines that start with `)`, because such lines may end a list of parameters.
            let mut least = indent(line);
            let outer = lines[..index].iter().rev().filter(|line| !line.trim_start().starts_with(')'));
            let mut outer = outer.filter(|line| {
                let is_outer = !line.trim().is_empty() && indent(line) < least;
                least = if is_outer { indent(line) } else { least };
                is_outer
            });
            outer.find_map(|line| defined_function(line))
        };
        items.insert(item.unwrap_or_else(|| panic!("{line}: no enclosing function")).to_string());
    }
    items
}

#[test]
fn unsafe_page_lists_exactly_the_unsafe_code() {
    let mut files = Vec::new();
    for folder in ["src", "fuzz/src", "tests/it", "tests/macros", "benches", "examples"] {
        collect(&repository().join(folder), &["rs"], &mut files);
    }
    let mut code = BTreeSet::new();
    for path in files {
        let name = path.strip_prefix(repository()).unwrap();
        let name = name.strip_prefix("src").unwrap_or(name).to_str().unwrap().replace('\\', "/");
        code.extend(unsafe_items(&fs::read_to_string(&path).unwrap()).into_iter().map(|item| (name.clone(), item)));
    }
    let mut listed = BTreeSet::new();
    let text = page("docs/unsafe.md");
    // The first cell of a row names a file, then its functions. A method may include its type: `Type::method`.
    for cell in text.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next()) {
        let mut file = "";
        for name in cell.split('`').step_by(2) {
            if name.ends_with(".rs") {
                file = name;
            } else {
                let item = name.rsplit("::").next().unwrap_or(name);
                listed.insert((file.to_string(), item.to_string()));
            }
        }
    }
    assert!(code.len() > 80, "{code:?}");
    let (missing, stale): (Vec<_>, Vec<_>) = (code.difference(&listed).collect(), listed.difference(&code).collect());
    assert!(
        missing.is_empty() && stale.is_empty(),
        "docs/unsafe.md: review and list {missing:?}; remove {stale:?}, which have no unsafe code"
    );
}

#[test]
fn unsafe_code_belongs_to_the_enclosing_function() {
    let code = [
        "unsafe impl Send for Words {}",
        "impl Words {",
        "    fn first(",
        "        &self,",
        "    ) -> u32 {",
        "        fn helper() {}",
        "        // unsafe",
        "        let text = \"unsafe\";",
        "        unsafe { read(self) }",
        "    }",
        "    pub unsafe fn second(&self) {}",
        "}",
    ];
    let items: Vec<String> = unsafe_items(&code.join("\n")).into_iter().collect();
    assert_eq!(items, ["Send for Words", "first", "second"]);
}

/// Adds the files of a folder that have one of `extensions`.
fn collect(folder: &Path, extensions: &[&str], files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, extensions, files);
        } else if extensions.iter().any(|&wanted| path.extension().is_some_and(|extension| extension == wanted)) {
            files.push(path);
        }
    }
}
