//! A module imports from lower floors only, and siblings on a floor do not import each other.

use std::path::Path;

/// From the ground up.
const FLOORS: &[&[&str]] = &[
    &["error", "text"],
    &["device", "snapshot"],
    &["kernels", "hub", "tokenizer"],
    &["weights", "chat"],
    &["nn"],
    &["models"],
    &["engine"],
    &["conversation", "terminal"],
    &["repl"],
    &["commands"],
    &["cli"],
];

fn floor(module: &str) -> usize {
    let found = FLOORS.iter().position(|modules| modules.contains(&module));
    found.unwrap_or_else(|| panic!("module {module} has no floor: add it to this test and to README.md"))
}

#[test]
fn no_module_imports_upwards() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&src, &mut files);
    assert!(files.len() > 20);
    for file in files {
        let relative = file.strip_prefix(&src).unwrap();
        let first = relative.components().next().unwrap().as_os_str().to_str().unwrap();
        let module = first.trim_end_matches(".rs");
        // The root may name everything; a build script is not part of the crate.
        if module == "lib" || module == "main" || relative.ends_with("kernels/build.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for (number, line) in code.enumerate() {
            for after in line.split("crate::").skip(1) {
                let target: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if target == module {
                    continue;
                }
                // What the root re-exports, or several modules at once, would hide where it comes from.
                assert!(
                    target.starts_with(char::is_lowercase),
                    "{}:{}: {module} imports crate::{after}, and not from a module",
                    relative.display(),
                    number + 1
                );
                assert!(
                    floor(&target) < floor(module),
                    "{}:{}: {module} may not import {target}",
                    relative.display(),
                    number + 1
                );
            }
        }
    }
}

fn collect(folder: &Path, files: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}
