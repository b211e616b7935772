//! Tests that the source files, type members, modules, tests and link targets named in pages or comments exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use proc_macro2::TokenStream;
use regex::Regex;

use super::members::Members;
use super::{page, repository};
use crate::support::add_files;

/// The extensions of Rust and CUDA files.
const SOURCE: [&str; 3] = ["rs", "cu", "cuh"];

/// Returns the source files that a text names in backticks.
/// Leaves out patterns such as `*.rs`, extensions such as `.rs`, and placeholders such as `x.rs` and `NAME.rs`.
fn named_source_files(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|path| {
        let is_pattern = path.contains([' ', '*', '<', '…', '$', '"']) || path.contains("NAME");
        let Some((stem, extension)) = path.rsplit_once('.') else { return false };
        let is_example = stem.is_empty() || stem.ends_with('/') || stem == "x" || stem.ends_with("/x");
        SOURCE.contains(&extension) && !is_pattern && !is_example
    })
}

/// Pages and comments may leave out the first folders of a path, as in `engine/handle/mod.rs`.
/// In a comment, a file name without a folder must belong to one file only, or to a file in the folder of the comment.
/// A name that many files have, such as `mod.rs`, may stand for all of them.
#[test]
fn source_files_that_the_pages_and_comments_name_exist() {
    let mut files = vec![repository().join("build.rs")];
    for folder in ["src", "tests", "benches", "fuzz", "examples"] {
        add_files(&repository().join(folder), &SOURCE, &mut files);
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
    let pages = ["architecture", "scheduling", "several-gpus", "contributing", "library", "unsafe"];
    for name in pages.map(|page| format!("docs/{page}.md")).into_iter().chain(["README.md".to_string()]) {
        for path in named_source_files(&page(&name)) {
            in_pages += 1;
            assert_exists(&name, path);
        }
    }
    for file in files
        .iter()
        .filter(|file| ["src", "tests", "benches", "fuzz"].iter().any(|top| file.starts_with(repository().join(top))))
    {
        let code = fs::read_to_string(file).unwrap();
        let comments = code.lines().enumerate().filter_map(|(index, line)| Some((index, line.split_once("//")?.1)));
        for (index, comment) in comments {
            for path in named_source_files(comment) {
                in_comments += 1;
                let place = format!("{}:{}", file.display(), index + 1);
                assert_exists(&place, path);
                let is_general = path.contains('/') || ["lib.rs", "main.rs", "mod.rs"].contains(&path);
                let is_clear = is_general || file.with_file_name(path).exists();
                assert!(
                    is_clear || files.iter().filter(|file| file.ends_with(path)).count() <= 1,
                    "{place} names {path}, but several files have this name; add a folder"
                );
            }
        }
    }
    assert!(
        in_pages > 50 && in_comments > 100,
        "found only {in_pages} source files in pages and {in_comments} in comments"
    );
}

/// In scripts, Python tests, fuzz targets, deployment files and Cargo.toml, this test finds paths even without
/// backticks: in comments, and on all lines of Python files.
#[test]
fn source_files_that_comments_of_scripts_name_exist() {
    let extensions = [&SOURCE[..], &["py", "sh"]].concat();
    let mut files = vec![repository().join("build.rs")];
    for folder in ["src", "tests", "benches", "fuzz", "examples", "scripts", "deploy"] {
        add_files(&repository().join(folder), &extensions, &mut files);
    }
    let mut scripts: Vec<PathBuf> =
        ["Cargo.toml", "fuzz/Cargo.toml", "deploy/Dockerfile"].map(|path| repository().join(path)).into();
    for folder in ["scripts", "deploy", "fuzz/src", "fuzz/fuzz_targets"] {
        add_files(&repository().join(folder), &["rs", "py", "sh", "yaml"], &mut scripts);
    }
    for folder in ["clients", "deploy", "llama2c", "mutate", "serve"] {
        add_files(&repository().join("tests").join(folder), &["py"], &mut scripts);
    }
    let pattern = Regex::new(&format!(r"[\w./-]*\w\.(?:{})\b", extensions.join("|"))).unwrap();
    // Files that these scripts write.
    let others = ["DIR/env.sh", "reproduce.sh"];
    let mut count = 0;
    for script in scripts {
        let text = fs::read_to_string(&script).unwrap();
        let start = match script.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => "//",
            Some("py") => "", // Docstrings have no marker on each line.
            _ => "#",
        };
        for line in text.lines().filter_map(|line| Some(line.split_once(start)?.1)) {
            for path in pattern.find_iter(line).map(|found| found.as_str().trim_start_matches(['.', '/'])) {
                let exists = others.contains(&path) || files.iter().any(|file| file.ends_with(path));
                assert!(exists, "{} names {path}, which does not exist", script.display());
                count += 1;
            }
        }
    }
    assert!(count > 50, "found only {count} source files in scripts");
}

/// The first cell of a row names a file of the folder, or a file or all files of a folder in it.
#[test]
fn pages_about_scripts_and_tests_list_exactly_the_files() {
    for folder in ["scripts", "tests"] {
        let page = page(&format!("{folder}/README.md"));
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let missing: Vec<&str> = rows.clone().filter(|path| !repository().join(folder).join(path).exists()).collect();
        assert!(missing.is_empty(), "{folder}/README.md lists files that do not exist: {missing:?}");
        let listed: BTreeSet<&str> = rows.map(|path| path.split('/').next().unwrap()).collect();
        let files = fs::read_dir(repository().join(folder)).unwrap();
        let files: BTreeSet<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        let others = ["README.md", "__pycache__"];
        let files: BTreeSet<&str> = files.iter().map(String::as_str).filter(|name| !others.contains(name)).collect();
        assert_eq!(listed, files, "{folder}/README.md and the folder {folder}/ differ");
    }
}

/// In pages and comments, `Type::name` must name a member of the type or of a trait that the type implements.
/// Types that other crates define are not checked.
#[test]
fn members_that_pages_and_comments_name_exist() {
    let mut files = Vec::new();
    for folder in ["src", "tests", "benches", "examples", "fuzz/src", "fuzz/fuzz_targets"] {
        add_files(&repository().join(folder), &SOURCE, &mut files);
    }
    let mut members = Members::default();
    let mut texts = Vec::new();
    for file in files {
        let code = fs::read_to_string(&file).unwrap();
        if file.extension().is_some_and(|extension| extension == "rs") {
            members.scan(code.parse::<TokenStream>().unwrap_or_else(|error| panic!("{}: {error}", file.display())));
        }
        let comments: Vec<&str> = code.lines().map(|line| line.split_once("//").map_or("", |(_, text)| text)).collect();
        texts.push((file, comments.join("\n")));
    }
    let mut pages = vec![repository().join("README.md"), repository().join("CHANGELOG.md")];
    add_files(&repository().join("docs"), &["md"], &mut pages);
    texts.extend(pages.into_iter().map(|page| (page.clone(), fs::read_to_string(page).unwrap())));

    let pattern = Regex::new(r"`(?:\w+::)*([A-Z]\w*)::(\w+)(?:\(\))?`").unwrap();
    let mut count = 0;
    for (file, text) in &texts {
        for (index, line) in text.lines().enumerate() {
            for (_, [name, member]) in pattern.captures_iter(line).map(|found| found.extract()) {
                let Some(exists) = members.has(name, member) else { continue };
                let place = format!("{}:{}", file.display(), index + 1);
                assert!(exists, "{place}: {name} has no member named {member}");
                count += 1;
            }
        }
    }
    assert!(count > 150, "pages and comments name only {count} members");
}

/// A list in the module comment of a folder counts as a list of modules if it names at least one module of the folder.
#[test]
fn modules_that_module_comments_list_exist() {
    let mut files = Vec::new();
    add_files(&repository().join("src"), &["rs"], &mut files);
    add_files(&repository().join("tests/it"), &["rs"], &mut files);
    // An item starts with names and a colon. After a semicolon, it may have more names and another colon.
    let items = Regex::new(r"(?:^|; )((?:`[\w/]+`(?:, | and )?)+):").unwrap();
    let names = Regex::new(r"`([\w/]+)`").unwrap();
    let mut count = 0;
    for file in files {
        let folder = if file.ends_with("mod.rs") { file.parent().unwrap().into() } else { file.with_extension("") };
        let code = fs::read_to_string(&file).unwrap();
        let comment: Vec<&str> = code.lines().map_while(|line| line.strip_prefix("//!")).collect();
        for list in comment.split(|line| line.is_empty()) {
            let list = list.iter().filter_map(|line| line.strip_prefix(" - "));
            let listed = list.flat_map(|item| items.captures_iter(item)).flat_map(|found| {
                let (_, [group]) = found.extract();
                names.captures_iter(group).map(|name| name.extract::<1>().1[0].trim_end_matches('/'))
            });
            let exists = |name: &&str| folder.join(name).is_dir() || folder.join(format!("{name}.rs")).is_file();
            let (found, missing): (Vec<_>, Vec<_>) = listed.partition(exists);
            let place = file.display();
            assert!(found.is_empty() || missing.is_empty(), "{place} lists modules that do not exist: {missing:?}");
            count += found.len();
        }
    }
    assert!(count > 100, "found only {count} modules in lists");
}

/// Returns the anchor that a heading has on GitHub.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
    text.chars().filter(|&c| c.is_alphanumeric() || c == '-' || c == '_').collect()
}

#[test]
fn links_between_pages_have_targets() {
    let mut pages = ["README.md", "CHANGELOG.md", "SECURITY.md", "deploy/README.md", "benches/results/README.md"]
        .map(|name| repository().join(name))
        .to_vec();
    add_files(&repository().join("docs"), &["md"], &mut pages);
    let mut count = 0;
    for path in pages {
        let text = fs::read_to_string(&path).unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") || target.contains([' ', '\n']) {
                continue;
            }
            count += 1;
            let (file, fragment) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(file.exists(), "{} links to {target}, which does not exist", path.display());
            if !fragment.is_empty() && file.extension().is_some_and(|extension| extension == "md") {
                let linked = fs::read_to_string(&file).unwrap();
                let mut headings = linked.lines().filter(|line| line.starts_with('#')).map(anchor);
                assert!(
                    headings.any(|heading| heading == fragment),
                    "{} links to {target}: no such heading",
                    path.display()
                );
            }
        }
    }
    assert!(count > 50, "found only {count} relative links");
}

/// In the docs, a lower-case name in backticks with at least three underscores must be the name of a function, such as
/// a test, or of a public field.
#[test]
fn tests_that_the_docs_name_exist() {
    let mut files = Vec::new();
    add_files(&repository().join("tests/it"), &["rs"], &mut files);
    add_files(&repository().join("src"), &["rs"], &mut files);
    let code: String = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let mut pages = Vec::new();
    add_files(&repository().join("docs"), &["md"], &mut pages);
    let mut names = Vec::new();
    for path in pages {
        let text = fs::read_to_string(&path).unwrap().replace('\n', " ");
        let is_test = |name: &&str| {
            let is_name = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
            // Metric names start with `inferno_`. `model_context_window_exceeded` is a value in Anthropic's API.
            let is_other = name.starts_with("inferno_") || *name == "model_context_window_exceeded";
            is_name && name.matches('_').count() >= 3 && !is_other
        };
        // After a split at backticks, every second part is code.
        names.extend(text.split('`').skip(1).step_by(2).filter(is_test).map(str::to_string));
    }
    assert!(!names.is_empty());
    for name in names {
        let exists = code.contains(&format!("fn {name}(")) || code.contains(&format!("pub {name}: "));
        assert!(exists, "the docs name the function or field {name}, which does not exist");
    }
}
