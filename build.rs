//! Compiles the CUDA kernels, lists the files of the demo model, and sets environment variables for the crate.
//!
//! With the feature `cuda`, the script compiles each `.cu` file under `src/kernels` into a fat binary.
//! A fat binary contains machine code for the target GPU, so the driver compiles nothing at startup on that GPU.
//! It also contains PTX, which the driver compiles on later GPUs.
//!
//! Environment variables select the compiler and the GPUs:
//! - Path of nvcc: `NVCC`; otherwise `bin/nvcc` in `CUDA_HOME` or `CUDA_PATH`.
//!   If neither exists, the script looks for nvcc in `PATH` and then in `/usr/local/cuda/bin`.
//! - Target compute capability: `CUDA_COMPUTE_CAP`, such as 90; otherwise the lowest from nvidia-smi; otherwise 80.
//! - More compute capabilities to build machine code for: `INFERNO_EXTRA_COMPUTE_CAPS`, such as 80,86,89.
//!
//! The script sets these variables for the crate, the last three only with the feature `cuda`:
//! - `INFERNO_COMMIT`: the short hash of the Git commit, or `unknown`
//! - `INFERNO_DEMO_REVISION`: a hash of the demo model's files
//! - `INFERNO_COMPUTE_CAP`: the target compute capability
//! - `INFERNO_NATIVE_CAPS`: all compute capabilities with machine code, separated by commas
//! - `INFERNO_CUDA_MAJOR`: the major version of the CUDA toolkit

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const KERNELS: &str = "src/kernels";

/// The file that defines the constants shared by the Rust and CUDA code.
const CONSTANTS: &str = "src/kernels/constants.rs";

/// The files of the demo model. `hub::demo` includes them from a list that this script writes.
const DEMO: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors",
];

fn main() {
    println!("cargo::rerun-if-changed={KERNELS}");
    println!("cargo::rustc-env=INFERNO_COMMIT={}", commit());
    println!("cargo::rustc-env=INFERNO_DEMO_REVISION={}", list_demo_files());
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "CUDA_COMPUTE_CAP", "INFERNO_EXTRA_COMPUTE_CAPS"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        build_kernels();
    }
}

/// Compiles all kernels, unless the last run compiled the same sources with the same options.
fn build_kernels() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo should set OUT_DIR"));
    let nvcc = find_nvcc();
    let capability = compute_capability();
    println!("cargo::rustc-env=INFERNO_COMPUTE_CAP={capability}");
    let native = std::iter::once(capability.clone()).chain(extra_capabilities(&capability)).collect::<Vec<_>>();
    println!("cargo::rustc-env=INFERNO_NATIVE_CAPS={}", native.join(","));
    println!("cargo::rustc-env=INFERNO_CUDA_MAJOR={}", toolkit_major_version(&nvcc));
    link_cuda_runtime_statically(&nvcc, &out);

    let sources = cuda_sources();
    let units: Vec<_> = sources.iter().filter(|path| path.extension().is_some_and(|ext| ext == "cu")).collect();
    let commands: Vec<Command> = units.iter().map(|source| compile_command(&nvcc, &capability, source, &out)).collect();
    let constants = constants_header();

    // Cargo reruns this script after every commit, but most commits do not change the kernels.
    let mut inputs = format!("{commands:?}\n{constants}").into_bytes();
    inputs.extend(sources.iter().flat_map(|source| std::fs::read(source).expect("CUDA sources should be readable")));
    let stamp = out.join("inputs");
    if std::fs::read(&stamp).is_ok_and(|inputs_of_last_run| inputs_of_last_run == inputs) {
        return;
    }
    // If a file fails to compile, other fat binaries may already be new, so the old stamp no longer holds.
    let _ = std::fs::remove_file(&stamp);
    std::fs::write(out.join("constants.cuh"), constants).expect("OUT_DIR should be writable");
    // Compile all files in parallel.
    let children: Vec<_> = commands.into_iter().map(|mut command| command.spawn()).collect();
    for (source, child) in units.into_iter().zip(children) {
        match child.and_then(|mut child| child.wait()) {
            Ok(status) if status.success() => {}
            Ok(status) => panic!("{} failed on {}: {status}", nvcc.display(), source.display()),
            Err(error) => panic!("cannot run {}: {error}", nvcc.display()),
        }
    }
    std::fs::write(&stamp, inputs).expect("OUT_DIR should be writable");
}

/// Makes the linker use the toolkit's static CUDA runtime instead of `libcudart.so`, if the toolkit has it.
///
/// candle-kernels and candle-flash-attn ask for `-lcudart`, and a program with the shared library would not start
/// on a machine that has only the driver. The linker takes the first `libcudart` in its search path, so this function
/// puts the static library there under that name.
fn link_cuda_runtime_statically(nvcc: &Path, out: &Path) {
    let home = nvcc.canonicalize().ok().and_then(|nvcc| Some(nvcc.parent()?.parent()?.to_path_buf()));
    // The last folder is that of Debian's package, whose nvcc is in /usr/bin.
    let folders = match std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => ["targets/sbsa-linux/lib", "lib64", "lib", "lib/aarch64-linux-gnu"],
        _ => ["targets/x86_64-linux/lib", "lib64", "lib", "lib/x86_64-linux-gnu"],
    };
    let mut libraries =
        folders.iter().filter_map(|folder| Some(home.as_ref()?.join(folder).join("libcudart_static.a")));
    let Some(library) = libraries.find(|library| library.exists()) else {
        println!(
            "cargo::warning=no libcudart_static.a in the CUDA toolkit: the program will need libcudart.so to start"
        );
        return;
    };
    let folder = out.join("cudart");
    std::fs::create_dir_all(&folder).expect("OUT_DIR should be writable");
    let copy = folder.join("libcudart.a");
    let _ = std::fs::remove_file(&copy); // a copy of a read-only file cannot be overwritten
    std::fs::copy(&library, copy).expect("the CUDA toolkit should be readable");
    println!("cargo::rerun-if-changed={}", library.display());
    println!("cargo::rustc-link-search=native={}", folder.display());
}

/// Returns the `.cu` and `.cuh` files under `src/kernels`, sorted.
///
/// Panics if two files have the same name, because a fat binary is named after its source.
fn cuda_sources() -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from(KERNELS)];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("kernel directories should be readable").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ext| ext == "cu" || ext == "cuh") {
                sources.push(path);
            }
        }
    }
    sources.sort();
    let mut names = HashSet::new();
    for source in &sources {
        assert!(names.insert(source.file_name()), "two CUDA files have the same name: {}", source.display());
    }
    sources
}

/// Returns the command that compiles one `.cu` file into `OUT_DIR`.
fn compile_command(nvcc: &Path, capability: &str, source: &Path, out: &Path) -> Command {
    let name = source.file_stem().and_then(|name| name.to_str()).expect("kernel file names should be UTF-8");
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "-lineinfo"]).arg("-I").arg(KERNELS).arg("-I").arg(out);
    command.args(code_targets(name, capability));
    command.arg("-o").arg(out.join(format!("{name}.fatbin"))).arg(source);
    command
}

/// Returns the `-gencode` options for one file. They request machine code and PTX for `capability`.
/// They also request machine code for each of `INFERNO_EXTRA_COMPUTE_CAPS`.
fn code_targets(name: &str, capability: &str) -> Vec<String> {
    // Hopper's wgmma instructions need the target sm_90a, and later GPUs cannot run code for sm_90a.
    let is_for_hopper = |capability: &str| matches!(name, "dense_wgmma" | "expert_mlp") && capability == "90";
    let mut targets = if is_for_hopper(capability) {
        // The PTX is for later GPUs, so it is compiled without these instructions.
        vec!["arch=compute_90a,code=sm_90a".into(), "arch=compute_90,code=compute_90".into()]
    } else {
        vec![format!("arch=compute_{capability},code=[compute_{capability},sm_{capability}]")]
    };
    targets.extend(extra_capabilities(capability).map(|extra| {
        let suffix = if is_for_hopper(&extra) { "a" } else { "" };
        format!("arch=compute_{extra}{suffix},code=sm_{extra}{suffix}")
    }));
    targets.into_iter().map(|target| format!("-gencode={target}")).collect()
}

/// Returns the compute capabilities in `INFERNO_EXTRA_COMPUTE_CAPS` except `capability`.
fn extra_capabilities(capability: &str) -> std::vec::IntoIter<String> {
    let extra = std::env::var("INFERNO_EXTRA_COMPUTE_CAPS").unwrap_or_default();
    let extra = extra.split(',').map(|extra| extra.trim().replace('.', ""));
    extra.filter(|extra| !extra.is_empty() && extra != capability).collect::<Vec<_>>().into_iter()
}

/// Translates `constants.rs` into a CUDA header.
fn constants_header() -> String {
    let text = std::fs::read_to_string(CONSTANTS).expect("constants.rs should be readable");
    let mut header = String::from("// Generated by build.rs from constants.rs.\n#pragma once\n");
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    for declaration in code.split("pub const ").skip(1) {
        let parsed = declaration.split_once(": ").and_then(|(name, rest)| {
            let (kind, rest) = rest.split_once(" = ")?;
            let (value, _) = rest.split_once(';')?;
            cpp_declaration(name, kind, value)
        });
        header += &parsed.unwrap_or_else(|| panic!("cannot translate to C++: pub const {declaration}"));
    }
    header
}

/// Returns one constant as a line of C++, or `None` if its type has no translation.
fn cpp_declaration(name: &str, kind: &str, value: &str) -> Option<String> {
    match kind {
        "usize" => Some(format!("constexpr int {name} = {value};\n")),
        "u32" => Some(format!("constexpr unsigned {name} = {value}u;\n")),
        "f32" => Some(format!("constexpr float {name} = {value}f;\n")),
        _ => {
            // C++ writes the outer length of an array of arrays first.
            let (element, length) = kind.strip_prefix('[')?.strip_suffix(']')?.rsplit_once("; ")?;
            let inner = match element.strip_prefix("[usize; ") {
                Some(inner) => format!("[{inner}"),
                None if element == "usize" => String::new(),
                None => return None,
            };
            let values = value.replace('[', "{").replace(']', "}");
            Some(format!("constexpr int {name}[{length}]{inner} = {values};\n"))
        }
    }
}

/// Writes `demo_files.rs`, a Rust expression: a list of the demo model's files, each with its name and contents.
/// Returns a 64-bit FNV-1a hash of the files. The hash serves as the revision of the model.
fn list_demo_files() -> String {
    let folder = std::env::current_dir().expect("cargo should run the script in the crate").join("assets/demo");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut list = String::new();
    for name in DEMO {
        let path = folder.join(name);
        list += &format!("    ({name:?}, include_bytes!({path:?})),\n");
        let bytes = std::fs::read(path).expect("the crate should contain the demo model");
        hash = bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo should set OUT_DIR"));
    std::fs::write(out.join("demo_files.rs"), format!("&[\n{list}]\n")).expect("OUT_DIR should be writable");
    format!("{hash:016x}")
}

/// Returns the short hash of the checked-out commit, or `unknown` outside a Git clone.
///
/// A packaged crate may be inside the clone of another project, so only a `.git` in the crate's own directory counts.
fn commit() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_string())
    };
    if !Path::new(".git").exists() {
        return "unknown".into();
    }
    // Git appends to `logs/HEAD` at every commit and checkout. `HEAD` is for clones without a reflog.
    for watched in ["logs/HEAD", "HEAD"].iter().filter_map(|name| git(&["rev-parse", "--git-path", name])) {
        // Cargo reruns this script in every build if a watched path does not exist.
        if Path::new(&watched).exists() {
            println!("cargo::rerun-if-changed={watched}");
        }
    }
    git(&["rev-parse", "--short", "HEAD"]).unwrap_or_else(|| "unknown".into())
}

fn find_nvcc() -> PathBuf {
    if let Some(nvcc) = std::env::var_os("NVCC") {
        return nvcc.into();
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = homes.map(|home| home.join("bin")).chain(std::env::split_paths(&path)).collect();
    folders.push("/usr/local/cuda/bin".into());
    let found = folders.into_iter().map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.exists());
    found.unwrap_or_else(|| "nvcc".into())
}

/// Returns the major version of nvcc's toolkit: `13` for "Cuda compilation tools, release 13.0, V13.0.88".
fn toolkit_major_version(nvcc: &Path) -> String {
    let version = Command::new(nvcc).arg("--version").output().unwrap_or_else(|error| {
        let hint = "the feature `cuda` needs a CUDA toolkit; set CUDA_HOME to its directory";
        panic!("cannot run {}: {error}; {hint}", nvcc.display())
    });
    let text = String::from_utf8_lossy(&version.stdout);
    let release = text.split_once("release ").and_then(|(_, release)| release.split_once('.'));
    release.unwrap_or_else(|| panic!("cannot read the version of {}: {text:?}", nvcc.display())).0.to_string()
}

/// Returns the compute capability to build for, such as `90`.
fn compute_capability() -> String {
    if let Ok(capability) = std::env::var("CUDA_COMPUTE_CAP") {
        return capability.trim().replace('.', "");
    }
    let query = Command::new("nvidia-smi").args(["--query-gpu=compute_cap", "--format=csv,noheader"]).output();
    let text = query.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    // Without a driver, nvidia-smi prints an error message. None of its lines parses as a number.
    let lowest = text.lines().filter_map(|line| line.trim().replace('.', "").parse::<u32>().ok()).min();
    lowest.unwrap_or(80).to_string()
}
