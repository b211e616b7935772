//! Tests the flags and metrics on the pages about the server, and the defaults in docs/tuning.md.

use std::collections::BTreeSet;

use super::{help, page};

/// The pages whose flags and metrics the tests check.
const SERVER_PAGES: [&str; 6] = [
    "docs/tuning.md",
    "docs/serving.md",
    "docs/reliability.md",
    "docs/history/reliability.md",
    "docs/troubleshooting.md",
    "docs/deploy.md",
];

/// Returns the words of a text that start with `prefix` and are longer than `prefix`.
/// A word consists of lowercase letters, digits and the characters in `others`, and ends with a letter or digit.
fn words<'t>(text: &'t str, prefix: &str, others: &[char]) -> BTreeSet<&'t str> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || others.contains(&c);
    let words = text.split(|c: char| !is_part(c)).map(|word| word.trim_end_matches(others));
    words.filter(|word| word.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty())).collect()
}

#[test]
fn flags_on_the_pages_about_the_server_exist() {
    let scripts = ["deploy/smg/smg.sh", "scripts/image.sh", "scripts/release.sh", "tests/serve/load.py"];
    let others = ["tests/serve/reliability.py", "tests/serve/process.py", "tests/deploy/run.py"];
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
        assert!(missing.is_empty(), "{name} names flags that neither inferno nor a known program has: {missing:?}");
    }
}

/// All metrics named on the pages about the server must be in docs/serving.md.
/// The test `serving_page_lists_exactly_the_metrics` compares docs/serving.md with `/metrics`.
#[test]
fn metrics_on_the_pages_about_the_server_exist() {
    let serving = page("docs/serving.md");
    let known = words(&serving, "inferno_", &['_']);
    for name in SERVER_PAGES {
        let page = page(name);
        let missing: Vec<&str> = words(&page, "inferno_", &['_']).difference(&known).copied().collect();
        assert!(missing.is_empty(), "{name} names metrics that docs/serving.md does not list: {missing:?}");
    }
    assert!(words(&page("docs/tuning.md"), "inferno_", &['_']).len() > 10);
}

/// In docs/tuning.md, if a table row starts with flags, its second column contains their defaults.
/// Defaults that contain a digit must equal the defaults in `inferno serve --help`.
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
            let default =
                default_of(flag).unwrap_or_else(|| panic!("serve --help shows no default of {flag}")).replace(',', "");
            let is_same = default == wanted || default.ends_with(&format!("; {wanted} for serve"));
            assert!(is_same, "docs/tuning.md says that the default of {flag} is {documented}; it is {default}");
            count += 1;
        }
    }
    assert!(count > 6, "found only {count} defaults with a digit in docs/tuning.md");
}
