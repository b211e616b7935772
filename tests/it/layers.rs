//! Checks that top-level modules import only from lower layers, and that the files of a folder form no import cycles.
//! Also checks the table of layers in docs/architecture.md.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::support::add_files;

/// The top-level modules of the crate, lowest layer first.
const LAYERS: &[&[&str]] = &[
    &["text"],
    &["error", "files"],
    &["device", "world", "snapshot"],
    &["kernels", "hub", "tokenizer"],
    &["weights", "chat"],
    &["nn"],
    &["models", "language"],
    &["runner", "sandbox"],
    &["engine"],
    &["conversation", "terminal"],
    &["client", "repl", "server"],
    &["commands"],
    &["cli"],
];

/// A top-level module may import other top-level modules only from lower layers, not from its own layer.
#[test]
fn no_module_imports_from_its_layer_or_above() {
    for reference in Sources::read().references() {
        let (module, target) = (&reference.from[0], &reference.to[0]);
        if module == target {
            continue;
        }
        let place = format!("{}:{}", reference.file.display(), reference.line);
        // If a path uses a re-export in `lib.rs` (`crate::Name`), the layer of the name is unknown.
        assert!(target.starts_with(char::is_lowercase), "{place}: import {target} from the module that defines it");
        assert!(layer(target) < layer(module), "{place}: {module} may import only lower layers, not {target}");
    }
}

/// The table in docs/architecture.md must list the layers in [`LAYERS`], from the highest to the lowest.
/// In the table, the names of folders end in a slash.
#[test]
fn architecture_page_lists_the_layers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let table = page.lines().skip_while(|line| !line.starts_with("| layer |"));
    let rows: Vec<&str> = table.skip(2).take_while(|line| line.starts_with('|')).collect();
    assert_eq!(rows.len(), LAYERS.len(), "docs/architecture.md and LAYERS differ in the number of layers");
    for (row, (layer, modules)) in rows.into_iter().zip(LAYERS.iter().enumerate().rev()) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(cells[1], layer.to_string(), "{row}");
        let names: Vec<&str> = cells[2].split('`').skip(1).step_by(2).collect();
        for name in &names {
            let path = root.join("src").join(name);
            let exists = if name.ends_with('/') { path.is_dir() } else { path.with_extension("rs").is_file() };
            assert!(exists, "docs/architecture.md lists {name}, which is not in src (folders end in a slash)");
        }
        // `main` is a crate root, so it is not in LAYERS.
        let names = names.iter().map(|name| name.trim_end_matches('/'));
        let listed: Vec<&str> = names.filter(|name| *name != "main").collect();
        assert_eq!(listed, *modules, "{row}");
    }
}

fn layer(module: &str) -> usize {
    let layer = LAYERS.iter().position(|modules| modules.contains(&module));
    layer.unwrap_or_else(|| {
        panic!("add the module {module} to LAYERS in tests/it/layers.rs and to docs/architecture.md")
    })
}

/// Files in one folder must not depend on each other in a cycle. This test skips `src` itself, where the order of
/// [`LAYERS`] rules out cycles. What counts as a file and as a dependency:
///
/// - In a folder, `x.rs` and everything in the subfolder `x/` count as one file.
/// - Inside a folder, the file that declares the folder's modules is the file `mod`, also if it is beside the folder.
/// - A file depends on each file that a path in its code leads to, in `use` declarations and elsewhere.
/// - A path through an import or a re-export leads to the file that defines the item.
/// - In the file `mod`, `mod x;` and `pub use x::Name;` are not dependencies, but other paths that use `Name` are.
/// - Inline modules named `tests` are ignored.
#[test]
fn files_of_a_folder_have_no_cycles() {
    let cycles = Sources::read().cycles();
    let cycles: String = cycles.iter().map(|(folder, cycle)| format!("cycle in {folder}:\n{cycle}")).collect();
    assert!(cycles.is_empty(), "{cycles}");
}

/// Tests `Sources::cycles` and `Sources::references` on small examples.
#[test]
fn cycles_and_imports_are_found_in_examples() {
    let parse =
        |files: &[(&str, &str)]| Sources::parse(files.iter().map(|(name, text)| (name.into(), text.to_string())));
    let folders =
        |files: &[(&str, &str)]| parse(files).cycles().into_iter().map(|(folder, _)| folder).collect::<Vec<_>>();
    let a = "use super::b::Thing;\npub struct Other;";
    assert_eq!(folders(&[("x/mod.rs", ""), ("x/a.rs", a), ("x/b.rs", "pub struct Thing;")]), [""; 0]);
    // A cycle of two files.
    let b = "pub struct Thing;\nfn f() { super::a::Other }";
    assert_eq!(folders(&[("x/mod.rs", "mod a; mod b;"), ("x/a.rs", a), ("x/b.rs", b)]), ["x"]);
    // The same cycle, but through a re-export in `mod.rs`.
    let b = "use super::Other;\npub struct Thing(Other);";
    assert_eq!(folders(&[("x/mod.rs", "mod a;\npub use a::Other;"), ("x/a.rs", a), ("x/b.rs", b)]), ["x"]);
    // A cycle of three files.
    let c = "use crate::x::a::Other;\npub struct Third(Other);";
    let b = "use super::c::Third;\npub struct Thing(Third);";
    assert_eq!(folders(&[("x/mod.rs", ""), ("x/a.rs", a), ("x/b.rs", b), ("x/c.rs", c)]), ["x"]);
    // A method with the name of an imported item does not hide the import.
    let hidden = "pub use super::a::other;\nstruct S;\nimpl S { fn other() {} }";
    let user = "use super::b::other;\npub fn third() { other() }";
    let a = "use super::c::third;\npub fn other() { third() }";
    assert_eq!(folders(&[("x/mod.rs", ""), ("x/a.rs", a), ("x/b.rs", hidden), ("x/c.rs", user)]), ["x"]);

    let sources =
        parse(&[("nn/mod.rs", "use crate::engine::{self, handle::Handle};\nfn f() { crate::text::size(1) }")]);
    let found: Vec<String> = sources.references().iter().map(|reference| reference.to.join("::")).collect();
    for expected in ["engine", "engine::handle::Handle", "text::size"] {
        assert!(found.iter().any(|path| path == expected), "{expected} is missing in {found:?}");
    }
}

/// The path of a module or item, relative to the crate root.
type ModulePath = Vec<String>;

/// A path such as `crate::engine::Engine` in the code of a file.
struct Reference {
    file: PathBuf,
    line: usize,
    from: ModulePath,
    to: ModulePath,
}

/// The names and paths in one `.rs` file.
#[derive(Default)]
struct Source {
    file: PathBuf,
    /// The names of the items that the file defines at its top level.
    items: BTreeSet<String>,
    /// Imported and re-exported names, and declared modules, with their full paths.
    imports: HashMap<String, ModulePath>,
    /// Modules that are imported with a glob (`use x::*`).
    globs: Vec<ModulePath>,
    /// Paths in the code, with their line numbers.
    paths: Vec<(usize, ModulePath)>,
}

/// Source files by module path, without the crate roots.
struct Sources(BTreeMap<ModulePath, Source>);

impl Sources {
    fn read() -> Self {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut files = Vec::new();
        add_files(&src, &["rs"], &mut files);
        let text = |file: &PathBuf| std::fs::read_to_string(file).unwrap();
        let sources =
            Self::parse(files.iter().map(|file| (file.strip_prefix(&src).unwrap().to_path_buf(), text(file))));
        assert!(sources.0.len() > 20);
        sources
    }

    /// Parses source files, each given as (path in `src`, text).
    fn parse(files: impl Iterator<Item = (PathBuf, String)>) -> Self {
        let mut sources = BTreeMap::new();
        for (relative, text) in files {
            let mut module: ModulePath =
                relative.with_extension("").iter().map(|part| part.to_str().unwrap().to_string()).collect();
            if module.last().is_some_and(|name| name == "mod") {
                module.pop();
            }
            if module == ["lib"] || module == ["main"] {
                continue;
            }
            let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{}: {error}", relative.display()));
            let mut source = Source { file: relative, ..Default::default() };
            source.scan(tokens, &module, &module, true);
            sources.insert(module, source);
        }
        Self(sources)
    }

    /// Returns all paths in the code, each with its file and line.
    fn references(&self) -> Vec<Reference> {
        let mut references = Vec::new();
        for (module, source) in &self.0 {
            for (line, to) in &source.paths {
                if !to.is_empty() {
                    let (file, from, to) = (source.file.clone(), module.clone(), to.clone());
                    references.push(Reference { file, line: *line, from, to });
                }
            }
        }
        references
    }

    /// Follows imports and re-exports from `path` to a definition. Returns the path of the definition, or the last path
    /// that was reached if there is no definition.
    fn definition(&self, path: &[String]) -> ModulePath {
        let mut path = path.to_vec();
        // Stop after 20 steps, because imports can form a cycle.
        for _ in 0..20 {
            let Some(length) = (0..path.len()).rev().find(|length| self.0.contains_key(&path[..*length])) else {
                break;
            };
            if self.0.contains_key(&path) {
                break;
            }
            let (source, name) = (&self.0[&path[..length]], &path[length]);
            if source.items.contains(name) {
                break;
            }
            let glob = source.globs.iter().find(|glob| {
                self.0.get(*glob).is_some_and(|source| source.items.contains(name) || source.imports.contains_key(name))
            });
            let target = source.imports.get(name).cloned().or(glob.map(|glob| [glob, &path[length..=length]].concat()));
            match target {
                Some(target) => path = [&target[..], &path[length + 1..]].concat(),
                None => break,
            }
        }
        path
    }

    /// Returns the folder of each cycle, and a list of the paths in the code that form the cycle.
    fn cycles(&self) -> Vec<(String, String)> {
        // For each folder: the dependencies (from, to) between its files, each with one path that causes it.
        let mut folders: BTreeMap<ModulePath, BTreeMap<(String, String), String>> = BTreeMap::new();
        for Reference { file, line, from, to } in self.references() {
            let to = self.definition(&to);
            let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            let node = |path: &ModulePath| match path.get(shared) {
                Some(name) if self.0.contains_key(&path[..=shared]) => name.clone(),
                _ => "mod".to_string(),
            };
            let (from, target) = (node(&from), node(&to));
            // A path to a module that contains the file is not a dependency, but a path to an item of that module is.
            if shared > 0 && from != target && to.len() > shared {
                let place = format!("  {from} -> {target}: {}:{line} {}\n", file.display(), to.join("::"));
                folders.entry(to[..shared].to_vec()).or_default().entry((from, target)).or_insert(place);
            }
        }
        let mut cycles = Vec::new();
        for (folder, edges) in folders {
            let reachable = |start: &str| {
                let (mut found, mut open) = (BTreeSet::new(), vec![start.to_string()]);
                while let Some(file) = open.pop() {
                    for (_, next) in edges.keys().filter(|(from, _)| *from == file) {
                        if found.insert(next.clone()) {
                            open.push(next.clone());
                        }
                    }
                }
                found
            };
            let reachable: BTreeMap<&String, BTreeSet<String>> =
                edges.keys().map(|(from, _)| (from, reachable(from))).collect();
            for (file, found) in &reachable {
                let is_mutual = |other: &&String| reachable.get(*other).is_some_and(|found| found.contains(*file));
                let cycle: Vec<&String> = found.iter().filter(is_mutual).collect();
                if cycle.first() == Some(file) {
                    let inside = edges.iter().filter(|((a, b), _)| cycle.contains(&a) && cycle.contains(&b));
                    let reasons = inside.map(|(_, place)| place.as_str()).collect();
                    cycles.push((folder.join("/"), reasons));
                }
            }
        }
        cycles
    }
}

impl Source {
    /// Collects the names and paths in the tokens of a file.
    /// `module` is the module of the file. `scope` is `module` or an inline module in it.
    /// `is_top` is true at the top level of the file, where items count as items of the file.
    fn scan(&mut self, tokens: TokenStream, module: &ModulePath, scope: &ModulePath, is_top: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut i = 0;
        while i < tokens.len() {
            let start = i;
            i += 1;
            let TokenTree::Ident(ident) = &tokens[start] else {
                if let TokenTree::Group(group) = &tokens[start] {
                    self.scan(group.stream(), module, scope, false);
                }
                continue;
            };
            let (word, line) = (ident.to_string(), ident.span().start().line);
            match (word.as_str(), tokens.get(i), tokens.get(i + 1)) {
                ("use", Some(_), _) => {
                    let end = (i..tokens.len()).find(|at| is_punct(&tokens[*at], ';')).unwrap_or(tokens.len());
                    let is_public = is_preceded_by_pub(&tokens[..start]);
                    self.import(&tokens[i..end], &[], module, scope, is_public, line);
                    i = end;
                }
                ("mod", Some(TokenTree::Ident(name)), Some(TokenTree::Group(body))) => {
                    let name = name.to_string();
                    if name != "tests" {
                        let scope = [&scope[..], std::slice::from_ref(&name)].concat();
                        self.scan(body.stream(), module, &scope, false);
                    }
                    i += 2;
                }
                ("mod", Some(TokenTree::Ident(name)), _) => {
                    let name = name.to_string();
                    self.imports.insert(name.clone(), [&scope[..], &[name]].concat());
                    i += 1;
                }
                ("fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static" | "macro_rules", ..) => {
                    let name = tokens[i..].iter().take(3).find_map(|token| match token {
                        TokenTree::Ident(name) if name != "mut" => Some(name.to_string()),
                        _ => None,
                    });
                    if is_top {
                        self.items.extend(name);
                    }
                }
                _ => {
                    let is_member =
                        start > 0 && (is_punct(&tokens[start - 1], '.') || is_path_separator(&tokens, start));
                    let mut path = vec![word];
                    while is_path_separator(&tokens, i + 2)
                        && let Some(TokenTree::Ident(next)) = tokens.get(i + 2)
                    {
                        path.push(next.to_string());
                        i += 3;
                    }
                    let is_call = matches!(tokens.get(i), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
                    let is_name = path.len() > 1 || is_call || path[0].starts_with(char::is_uppercase);
                    if !is_member && is_name {
                        self.paths.extend(self.resolve(&path, scope).map(|path| (line, path)));
                    }
                }
            }
        }
    }

    /// Records the imports of a `use` declaration, or of one item in its braces.
    /// `prefix` is the path before the braces, or empty.
    fn import(
        &mut self,
        tokens: &[TokenTree],
        prefix: &[String],
        module: &ModulePath,
        scope: &ModulePath,
        is_public: bool,
        line: usize,
    ) {
        let mut path = prefix.to_vec();
        let mut alias = None;
        let mut i = 0;
        while i < tokens.len() {
            match &tokens[i] {
                TokenTree::Ident(ident) if ident == "as" => {
                    alias = tokens.get(i + 1).map(|name| name.to_string());
                    break;
                }
                TokenTree::Ident(ident) if ident == "self" && !path.is_empty() => {}
                TokenTree::Ident(ident) => path.push(ident.to_string()),
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    for tree in inner.split(|token| is_punct(token, ',')).filter(|tree| !tree.is_empty()) {
                        self.import(tree, &path, module, scope, is_public, line);
                    }
                    return;
                }
                TokenTree::Punct(punct) if punct.as_char() == '*' => {
                    if let Some(target) = self.resolve(&path, scope) {
                        self.globs.push(target.clone());
                        self.paths.push((line, [target, vec!["*".to_string()]].concat()));
                    }
                    return;
                }
                _ => {}
            }
            i += 1;
        }
        let Some(target) = self.resolve(&path, scope) else { return };
        let name = alias.or_else(|| path.last().cloned()).unwrap_or_default();
        let is_reexport = is_public && target.starts_with(module) && target.len() > module.len();
        if !is_reexport {
            self.paths.push((line, target.clone()));
        }
        self.imports.insert(name, target);
    }

    /// Converts a path in the code to a path from the crate root.
    /// Returns `None` unless the path starts with `crate`, `self`, `super` or a name in `imports`.
    fn resolve(&self, path: &[String], scope: &ModulePath) -> Option<ModulePath> {
        let mut base = scope.clone();
        let rest = match path[0].as_str() {
            "crate" => {
                base.clear();
                &path[1..]
            }
            "self" => &path[1..],
            "super" => {
                let supers = path.iter().take_while(|name| *name == "super").count();
                base.truncate(base.len().checked_sub(supers)?);
                &path[supers..]
            }
            name => {
                base = self.imports.get(name)?.clone();
                &path[1..]
            }
        };
        base.extend_from_slice(rest);
        Some(base)
    }
}

fn is_punct(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == character)
}

/// Returns whether `::` ends right before `position`.
fn is_path_separator(tokens: &[TokenTree], position: usize) -> bool {
    position >= 2
        && position <= tokens.len()
        && is_punct(&tokens[position - 1], ':')
        && is_punct(&tokens[position - 2], ':')
}

/// Returns whether the tokens end in `pub` or `pub(…)`.
fn is_preceded_by_pub(tokens: &[TokenTree]) -> bool {
    let tokens = match tokens {
        [rest @ .., TokenTree::Group(_)] => rest,
        all => all,
    };
    matches!(tokens, [.., TokenTree::Ident(word)] if word == "pub")
}
