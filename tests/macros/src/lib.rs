//! The `#[test]` attribute for the integration tests, and `cuda_modules!`, which finds the tests of CUDA builds.
//!
//! `#[test]` replaces the built-in attribute, which can ignore a test only at compile time.
//! Whether a GPU is present is known only at run time.

use std::path::Path;
use std::{fs, io};

use proc_macro::{Delimiter, Group, TokenStream, TokenTree};

/// Registers a test with the harness in `tests/it/harness.rs`.
///
/// - `#[test]` runs everywhere.
/// - `#[test(gpu)]` needs an NVIDIA GPU.
/// - `#[test(gpu_alone)]` needs an NVIDIA GPU, and runs while no other test runs.
/// - `#[test(flash_attn)]` needs an NVIDIA GPU, and a build with the feature `flash-attn`.
/// - `#[test(fixtures)]` needs the folder that `INFERNO_FIXTURES` names.
/// - `#[test(full_size)]` needs a GPU and the model that `INFERNO_FULL_SIZE` names. It also runs alone.
/// - `#[test(no_driver)]` needs a program that starts without an NVIDIA driver.
/// - `#[test(mount)]` needs the right to mount filesystems.
/// - `#[test(each = LIST)]` is one test for each case that the function `LIST` returns. Each case has its own need.
/// - `#[test(each_alone = LIST)]` is the same, but each case runs while no other test runs.
///
/// A test whose requirement is not met is reported as ignored.
/// A `#[cfg]` removes the test, wherever it stands, because the compiler evaluates it before this attribute.
#[proc_macro_attribute]
pub fn test(need: TokenStream, function: TokenStream) -> TokenStream {
    let argument = need.to_string();
    let cases = argument.strip_prefix("each = ").or_else(|| argument.strip_prefix("each_alone = "));
    let is_alone = matches!(argument.as_str(), "gpu_alone" | "full_size") || argument.starts_with("each_alone = ");
    let need = match argument.as_str() {
        _ if cases.is_some() => "",
        "" => "None",
        "gpu" | "gpu_alone" => "Some(crate::harness::Need::Gpu)",
        "flash_attn" => "Some(crate::harness::Need::FlashAttn)",
        "fixtures" => "Some(crate::harness::Need::Fixtures)",
        "full_size" => "Some(crate::harness::Need::FullSize)",
        "no_driver" => "Some(crate::harness::Need::NoDriver)",
        "mount" => "Some(crate::harness::Need::Mount)",
        other => {
            let known = "gpu, gpu_alone, flash_attn, fixtures, full_size, no_driver, mount";
            return error(&format!(
                "unknown #[test] argument '{other}'; use {known}, each = LIST or each_alone = LIST"
            ));
        }
    };
    let tokens: Vec<TokenTree> = function.clone().into_iter().collect();
    let Some(fn_position) = tokens.iter().position(|token| token.to_string() == "fn") else {
        return error("#[test] applies only to functions");
    };
    let name = tokens[fn_position + 1].to_string();
    let attributes = || {
        tokens[..fn_position].iter().filter_map(|token| match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket => Some(group),
            _ => None,
        })
    };
    if attributes().any(|attribute| attribute_name(attribute) == "ignore") {
        return error("write #[test(NEED)], such as #[test(gpu)], instead of #[ignore]");
    }
    let path = format!("concat!(module_path!(), \"::{name}\")");
    let tests = match cases {
        Some(cases) => format!("crate::harness::tests_of_cases({path}, {cases}(), {is_alone}, {name})"),
        None => format!(
            "vec![crate::harness::Test {{
                path: {path}.to_string(), need: {need}, is_alone: {is_alone}, run: ::std::boxed::Box::new({name}),
            }}]"
        ),
    };
    let registration = format!("::inventory::submit! {{ crate::harness::Registration(|| {tests}) }}");
    let mut output = function;
    output.extend(registration.parse::<TokenStream>().expect("the registration is valid Rust"));
    output
}

/// Returns the paths and sources of the modules that tests/it compiles only with the feature `cuda`,
/// as `&[(&str, &str)]`. Builds without CUDA can then list the tests of these modules.
/// Such a module is declared in `main.rs`, or in the `mod.rs` of a folder next to it.
#[proc_macro]
pub fn cuda_modules(_: TokenStream) -> TokenStream {
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    match cuda_modules_of(&Path::new(&root).join("tests/it")) {
        Ok(entries) => format!("&[{entries}]").parse().expect("the list is valid Rust"),
        Err(io) => error(&format!("cannot read tests/it: {io}")),
    }
}

fn cuda_modules_of(root: &Path) -> io::Result<String> {
    let mut entries = entries_of(root, "main.rs", "")?;
    for folder in fs::read_dir(root)? {
        let folder = folder?.path();
        if folder.join("mod.rs").is_file() {
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            entries += &entries_of(&folder, "mod.rs", &format!("{name}::"))?;
        }
    }
    Ok(entries)
}

/// Returns the entries for the modules that `file` in `folder` declares. `parent` is the prefix of their paths.
fn entries_of(folder: &Path, file: &str, parent: &str) -> io::Result<String> {
    let mut entries = String::new();
    let mut needs_cuda = false;
    for line in fs::read_to_string(folder.join(file))?.lines() {
        if line.starts_with("#[") {
            needs_cuda |= line.starts_with("#[cfg(") && line.contains("feature = \"cuda\"") && !line.contains("not(");
            continue;
        }
        if let Some(name) = line.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';')).filter(|_| needs_cuda) {
            let path = format!("{parent}{name}");
            entries += &format!("({path:?}, include_str!({:?})),", folder.join(format!("{name}.rs")));
        }
        needs_cuda = false;
    }
    Ok(entries)
}

fn attribute_name(attribute: &Group) -> String {
    attribute.stream().into_iter().next().map(|token| token.to_string()).unwrap_or_default()
}

fn error(message: &str) -> TokenStream {
    format!("compile_error!({message:?});").parse().expect("compile_error! takes a string")
}
