//! Tests that docs/unsafe.md lists exactly the unsafe code.

use std::collections::BTreeSet;
use std::fs;

use super::{page, repository};
use crate::support::add_files;

/// Returns the name of the function that a line of code defines, if it defines one.
fn defined_function(line: &str) -> Option<&str> {
    let (before, rest) = line.split_once("fn ")?;
    let name = rest.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$')).next()?;
    (before.is_empty() || before.ends_with([' ', '('])).then_some(name).filter(|name| !name.is_empty())
}

/// Returns the functions of a file that are unsafe or contain unsafe code.
/// Also returns the unsafe implementations, such as `Send for Pinned`.
/// For an `unsafe extern` block or function type, returns the next function in the file.
fn unsafe_items(code: &str) -> BTreeSet<String> {
    // Remove comment lines and the contents of strings, because the word `unsafe` in them is not code.
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
            // Each enclosing line is indented less than the lines between it and the unsafe code.
            // Skip lines that start with `)`: they may end the parameters of the function, and are indented like its
            // first line. Lines that start with `where` are also indented like that, but are not supported.
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
        add_files(&repository().join(folder), &["rs"], &mut files);
    }
    let mut code = BTreeSet::new();
    for path in files {
        let name = path.strip_prefix(repository()).unwrap();
        let name = name.strip_prefix("src").unwrap_or(name).to_str().unwrap().replace('\\', "/");
        code.extend(unsafe_items(&fs::read_to_string(&path).unwrap()).into_iter().map(|item| (name.clone(), item)));
    }
    let mut listed = BTreeSet::new();
    let text = page("docs/unsafe.md");
    // The first cell of a row names one or more files, each followed by its functions and unsafe implementations,
    // such as `Send for Pinned`. A method may include its type: `Type::method`.
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
