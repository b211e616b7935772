//! Tests that figures in the README and the docs agree with stored results or with other pages,
//! and that benches/results has exactly the files that the pages name.

use std::collections::BTreeSet;

use regex::Regex;
use serde_json::Value;

use super::{page, repository};
use crate::support::add_files;

/// The results of one or more runs of `inferno bench --json`, from benches/results. Methods return means over the runs.
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
    /// Speeds from 2,000 on are rounded to hundreds.
    fn speed(&self, kind: &str, tokens: u64, depth: u64) -> String {
        let is_wanted = |test: &&Value| test["kind"] == kind && test["tokens"] == tokens && test["depth"] == depth;
        let speed = |run: &Value| run["tests"].as_array().unwrap().iter().find(is_wanted).unwrap()["tok_per_s"].clone();
        let mean = self.mean(|run| speed(run)["mean"].as_f64().unwrap());
        let rounded = if mean < 2000.0 { mean.round() } else { (mean / 100.0).round() * 100.0 } as u64;
        grouped(rounded)
    }

    /// Returns the total output speed of `requests` concurrent requests in tokens per second, formatted as in the docs:
    /// "751" or "1,353".
    fn speed_at_once(&self, requests: u64) -> String {
        let is_wanted = |load: &&Value| load["concurrency"] == requests;
        let load = |run: &Value| run["serving"].as_array().unwrap().iter().find(is_wanted).unwrap().clone();
        let speed = self.mean(|run| load(run)["output_tok_per_s"].as_f64().unwrap()).round() as u64;
        grouped(speed)
    }

    fn gigabytes(&self, when: &str) -> String {
        format!("{:.1}", self.mean(|run| run["memory"][when].as_f64().unwrap()) / 1e9)
    }
}

/// Formats a number below one million as in the docs: "751", or "1,353" with a thousands separator.
fn grouped(number: u64) -> String {
    if number < 1000 { number.to_string() } else { format!("{},{:03}", number / 1000, number % 1000) }
}

#[test]
fn only_numbers_from_1000_have_a_thousands_separator() {
    assert_eq!([7, 999, 1000, 40_100].map(grouped).join(" "), "7 999 1,000 40,100");
}

/// The results of gpt-oss-20b on one kind of GPUs, which have a section of docs/benchmarks.md and a column of the table
/// in the README.
struct Setup {
    /// The heading of the section.
    heading: &'static str,
    /// The results with one sequence at a time.
    one_sequence: Results,
    /// The results with several requests at once.
    at_once: Results,
}

impl Setup {
    /// Reads the results of two runs with one sequence, and of two runs with several requests.
    fn read(heading: &'static str, one_sequence: [&str; 2], at_once: [&str; 2]) -> Self {
        Self { heading, one_sequence: Results::read(&one_sequence), at_once: Results::read(&at_once) }
    }
}

fn setups() -> [Setup; 4] {
    [
        Setup::read(
            "## One H200",
            ["2026-11-30-nvidia-h200-gpt-oss-20b-7", "2026-11-30-nvidia-h200-gpt-oss-20b-8"],
            ["2026-11-30-nvidia-h200-gpt-oss-20b-serving-13", "2026-11-30-nvidia-h200-gpt-oss-20b-serving-14"],
        ),
        Setup::read(
            "## One H100",
            ["2026-11-28-nvidia-h100-gpt-oss-20b", "2026-11-28-nvidia-h100-gpt-oss-20b-2"],
            ["2026-11-28-nvidia-h100-gpt-oss-20b-serving", "2026-11-28-nvidia-h100-gpt-oss-20b-serving-2"],
        ),
        Setup::read(
            "### Two H100s",
            ["2026-11-28-nvidia-h100-x2-gpt-oss-20b", "2026-11-28-nvidia-h100-x2-gpt-oss-20b-2"],
            ["2026-11-28-nvidia-h100-x2-gpt-oss-20b-serving", "2026-11-28-nvidia-h100-x2-gpt-oss-20b-serving-2"],
        ),
        Setup::read(
            "### Four H100s",
            ["2026-11-28-nvidia-h100-x4-gpt-oss-20b", "2026-11-28-nvidia-h100-x4-gpt-oss-20b-2"],
            ["2026-11-28-nvidia-h100-x4-gpt-oss-20b-serving", "2026-11-28-nvidia-h100-x4-gpt-oss-20b-serving-2"],
        ),
    ]
}

/// Returns the decode speeds after 0 and 8,192 cached tokens, as in the docs.
fn decode(results: &Results) -> String {
    format!("{} / {}", results.speed("tg", 128, 0), results.speed("tg", 128, 8192))
}

/// Returns the prefill speeds for 512 and 2,048 tokens, as in the docs.
fn prefill(results: &Results) -> String {
    format!("{} / {}", results.speed("pp", 512, 0), results.speed("pp", 2048, 0))
}

/// Returns the GPU memory after loading and at the end, as in the docs.
fn memory(results: &Results) -> String {
    format!("{} / {} GB", results.gigabytes("after_load_bytes"), results.gigabytes("at_end_bytes"))
}

/// Asserts that a text has a table row for each start of a row.
fn assert_has_rows(name: &str, text: &str, starts: &[String]) {
    let missing: Vec<&String> = starts.iter().filter(|start| !text.contains(&format!("\n| {start} |"))).collect();
    assert!(missing.is_empty(), "{name} does not contain these rows: {missing:#?}");
}

/// Searches each row only in the section of its GPUs, because another section may have the same row.
#[test]
fn speeds_of_each_gpu_setup_agree_with_the_stored_results() {
    let benchmarks = page("docs/benchmarks.md");
    for Setup { heading, one_sequence, at_once } in setups() {
        let level = heading.split(' ').next().unwrap();
        let section = benchmarks.split_once(&format!("\n{heading}\n")).unwrap().1;
        let section = section.split(&format!("\n{level} ")).next().unwrap();
        let mut rows = vec![format!("decode | {}", one_sequence.speed("tg", 128, 0))];
        for (tokens, name) in [(512, "512"), (2048, "2,048"), (8192, "8,192")] {
            rows.push(format!("prefill of {name} tokens | {}", one_sequence.speed("pp", tokens, 0)));
        }
        for requests in [8, 32, 64, 128, 256] {
            let name = if level == "###" { format!("{requests} requests") } else { requests.to_string() };
            rows.push(format!("{name} | {}", at_once.speed_at_once(requests)));
        }
        assert_has_rows(&format!("{heading} in docs/benchmarks.md"), section, &rows);
    }
}

#[test]
fn speeds_in_the_readme_agree_with_the_stored_results() {
    let setups = setups();
    let one_sequence = |cell: &dyn Fn(&Results) -> String| setups.each_ref().map(|setup| cell(&setup.one_sequence));
    let at_once = |requests| setups.each_ref().map(|setup| setup.at_once.speed_at_once(requests)).join(" | ");
    let qwen = Results::read(&["2026-11-22-nvidia-h200-qwen3-30b-a3b"]);
    let rows = [
        format!("decode | {}", one_sequence(&|results| results.speed("tg", 128, 0)).join(" | ")),
        format!("prefill of 512 / 2,048 tokens | {}", one_sequence(&prefill).join(" | ")),
        format!("8 requests at once (512 prompt tokens, 128 generated) | {}", at_once(8)),
        format!("128 such requests | {}", at_once(128)),
        format!("Qwen3-30B-A3B | {} | {} | {} GB", decode(&qwen), prefill(&qwen), qwen.gigabytes("after_load_bytes")),
    ];
    assert_has_rows("README.md", &page("README.md"), &rows);
}

#[test]
fn speeds_and_memory_of_other_models_agree_with_the_stored_results() {
    let read = |model: &str| Results::read(&[&format!("2026-11-22-nvidia-h200-{model}")]);
    let (llama, small) = (read("llama-3.1-8b"), read("llama-3.2-1b"));
    let (qwen, qwen_q8) = (read("qwen3-30b-a3b"), read("qwen3-30b-a3b-q8_0"));
    let [Setup { one_sequence: oss, .. }, ..] = setups();
    let overview = |results: &Results| {
        format!("{} | {} | {} GB", decode(results), prefill(results), results.gigabytes("after_load_bytes"))
    };
    let rows = [
        format!("gpt-oss-20b | 8,194 | {}", memory(&oss)),
        format!("Llama-3.1-8B | 2,050 | {}", memory(&llama)),
        format!("Llama-3.2-1B | 2,050 | {}", memory(&small)),
        format!("Llama-3.1-8B | {} | {}", llama.speed("tg", 128, 0), prefill(&llama)),
        format!("Llama-3.2-1B | {} | {}", small.speed("tg", 128, 0), prefill(&small)),
        format!("Qwen3-30B-A3B | {}", overview(&qwen)),
        format!("Qwen3-30B-A3B with `--quantize q8_0` | {}", overview(&qwen_q8)),
    ];
    assert_has_rows("docs/benchmarks.md", &page("docs/benchmarks.md"), &rows);
}

#[test]
fn speeds_on_2026_11_22_agree_with_the_stored_results() {
    let oss = Results::read(&["2026-11-22-nvidia-h200-gpt-oss-20b-1", "2026-11-22-nvidia-h200-gpt-oss-20b-2"]);
    let rows = [
        format!("decode, empty context | {}", oss.speed("tg", 128, 0)),
        format!("decode after 8,192 tokens | {}", oss.speed("tg", 128, 8192)),
        format!("prefill, 512 tokens | {}", oss.speed("pp", 512, 0)),
        format!("prefill, 2,048 tokens | {}", oss.speed("pp", 2048, 0)),
        format!("prefill, 8,192 tokens | {}", oss.speed("pp", 8192, 0)),
    ];
    assert_has_rows("docs/history/benchmarks.md", &page("docs/history/benchmarks.md"), &rows);
}

/// The folder must have no other files, so that it does not collect the results of figures that newer ones replaced.
#[test]
fn result_files_are_exactly_those_that_the_pages_name() {
    let mut paths = Vec::new();
    add_files(&repository().join("benches/results"), &["json", "txt"], &mut paths);
    let files = paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap());
    // The pages name JSON files without their ending.
    let files: BTreeSet<String> = files.map(|name| name.trim_end_matches(".json").to_string()).collect();
    let pages = ["docs/benchmarks.md", "docs/reliability.md"];
    let named: BTreeSet<String> = pages.into_iter().flat_map(|name| named_files(&page(name), &files)).collect();
    let missing: Vec<&String> = named.difference(&files).collect();
    assert!(missing.is_empty(), "{pages:?} name files that benches/results does not have: {missing:?}");
    let unnamed: Vec<&String> = files.difference(&named).collect();
    assert!(unnamed.is_empty(), "benches/results has files that {pages:?} do not name: {unnamed:?}");
}

/// Returns the result files that a page names in backticks. A name that starts with a hyphen, such as `-2`, replaces or
/// extends the end of the name before it, so the result depends on which `files` exist.
fn named_files(page: &str, files: &BTreeSet<String>) -> Vec<String> {
    let full_name = Regex::new(r"^20\d\d-\d\d-\d\d-\S+$").unwrap();
    // Flags such as `-p` have a single letter after the hyphen.
    let end_of_name = Regex::new(r"^-(\d+|[a-z]\S+)$").unwrap();
    let mut names: Vec<String> = Vec::new();
    // After a split at backticks, every second part is code.
    for code in page.split('`').skip(1).step_by(2) {
        let last = names.last().filter(|_| end_of_name.is_match(code));
        if full_name.is_match(code) {
            names.push(code.to_string());
        } else if let Some(last) = last {
            // The longest start of the last name with which the file exists, or else the whole name.
            let starts = last.match_indices('-').map(|(at, _)| &last[..at]).chain([&**last]);
            let name = starts.rev().map(|start| format!("{start}{code}")).find(|name| files.contains(name));
            let name = name.unwrap_or_else(|| format!("{last}{code}"));
            names.push(name);
        }
    }
    names
}

#[test]
fn a_name_with_a_hyphen_continues_the_name_before_it() {
    let files = ["2026-11-30-cpu-demo", "2026-11-30-cpu-demo-7", "2026-11-30-cpu-demo-8", "2026-11-30-cpu-oss-8"];
    let page = "`2026-11-30-cpu-demo-7`, `-8`, `-p`, `--gpus` and `-oss-8`, but not `-9`";
    let names = named_files(page, &files.map(str::to_string).into());
    let [_, seven, eight, oss] = files;
    assert_eq!(names, [seven, eight, oss, "2026-11-30-cpu-oss-8-9"]);
}

/// Returns the numbers in a text that have at least three characters, including commas and decimal points.
fn numbers(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_digit() || c == ',' || c == '.';
    let numbers = text.split(|c| !is_part(c)).map(|word| word.trim_matches([',', '.']));
    numbers.filter(|number| number.len() >= 3).collect()
}

#[test]
fn figures_on_the_tuning_page_are_those_of_the_benchmarks() {
    let pages = ["benchmarks", "history/benchmarks", "reliability", "history/reliability", "serving", "cli"];
    let known = pages.map(|name| page(&format!("docs/{name}.md"))).concat();
    let known = numbers(&known);
    let tuning = page("docs/tuning.md");
    // Leave out code in backticks: its numbers are arguments of flags, not measured figures.
    // After a split at backticks, every second part is code.
    let text: Vec<&str> = tuning.split('`').step_by(2).collect();
    let text = text.join(" ");
    let unknown: Vec<&str> = numbers(&text).difference(&known).copied().collect();
    assert!(unknown.is_empty(), "docs/tuning.md has figures without a source on another page: {unknown:?}");
}
