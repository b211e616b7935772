//! Compiles every `.cu` in this folder and its subfolders into one fat binary (machine code for the built architecture, PTX for later
//! ones), so that nothing is compiled by the driver at start-up. Does nothing without the feature `cuda`.
//!
//! nvcc: $NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin, PATH, /usr/local/cuda/bin. Architecture: $CUDA_COMPUTE_CAP (such as 90),
//! else the GPU that nvidia-smi reports, else 80.
//!
//! Also tells the crate which commit it is built from, as INFERNO_COMMIT, the major version of
//! nvcc's toolkit, as INFERNO_CUDA_MAJOR, and a hash of the demo model, as
//! INFERNO_DEMO_REVISION.

use std::path::{Path, PathBuf};
use std::process::Command;

/// In the order of `hub::demo`.
const DEMO: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors",
];

fn main() {
    println!("cargo::rerun-if-changed=src/kernels");
    println!("cargo::rustc-env=INFERNO_COMMIT={}", commit());
    println!("cargo::rustc-env=INFERNO_DEMO_REVISION={}", demo());
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "CUDA_COMPUTE_CAP"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let nvcc = find_nvcc();
    let capability = compute_capability();
    println!("cargo::rustc-env=INFERNO_COMPUTE_CAP={capability}");
    println!("cargo::rustc-env=INFERNO_CUDA_MAJOR={}", major_version(&nvcc));
    // A new commit runs this script again, mostly with the same kernels.
    let sources = sources();
    let (stamp, inputs) = (out.join("inputs"), inputs(&nvcc, &capability, &sources));
    if std::fs::read(&stamp).is_ok_and(|of_last_run| of_last_run == inputs) {
        return;
    }
    let sources = sources.iter().filter(|path| path.extension().is_some_and(|extension| extension == "cu"));
    let children: Vec<_> = sources
        .map(|source| {
            let name = source.file_stem().and_then(|name| name.to_str()).expect("a kernel file has a plain name");
            let child = Command::new(&nvcc)
                .args(["-fatbin", "-O3", "-std=c++17", "-lineinfo", "-Isrc/kernels"])
                .args(targets(name, &capability))
                .arg("-o")
                .arg(out.join(format!("{name}.fatbin")))
                .arg(source)
                .spawn();
            (name, child)
        })
        .collect();
    for (name, child) in children {
        let status = child.and_then(|mut child| child.wait());
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => panic!("{} failed on {name}.cu: {status}", nvcc.display()),
            Err(error) => panic!("cannot run {}: {error}", nvcc.display()),
        }
    }
    std::fs::write(&stamp, inputs).expect("OUT_DIR can be written");
}

/// Machine code for the built architecture, PTX for later ones.
fn targets(name: &str, capability: &str) -> Vec<String> {
    // Hopper's matrix instructions are no part of plain sm_90, and no later GPU has them: PTX goes without.
    if (name, capability) == ("experts_gemm", "90") {
        return ["arch=compute_90a,code=sm_90a", "arch=compute_90,code=compute_90"]
            .map(|target| format!("-gencode={target}"))
            .to_vec();
    }
    vec![format!("-gencode=arch=compute_{capability},code=[compute_{capability},sm_{capability}]")]
}

/// The CUDA sources under `src/kernels`, in a fixed order. Two kernel files of one name are an error: a fat binary is
/// called like its source.
fn sources() -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from("src/kernels")];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("src/kernels can be read").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh") {
                sources.push(path);
            }
        }
    }
    sources.sort();
    let mut names = std::collections::HashSet::new();
    for source in &sources {
        assert!(names.insert(source.file_name()), "two CUDA files are called {}", source.display());
    }
    sources
}

/// All that the fat binaries are made from.
fn inputs(nvcc: &Path, capability: &str, sources: &[PathBuf]) -> Vec<u8> {
    let mut inputs = format!("{} {capability}\n", nvcc.display()).into_bytes();
    for path in sources.iter().map(PathBuf::as_path).chain([Path::new("src/kernels/build.rs")]) {
        inputs.extend(std::fs::read(path).unwrap_or_default());
    }
    inputs
}

/// A hash of the demo's files (FNV-1a, 64 bits), in place of a commit.
fn demo() -> String {
    let folder = Path::new("assets/demo");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for name in DEMO {
        let bytes = std::fs::read(folder.join(name)).expect("the demo is part of the crate");
        hash = bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    }
    format!("{hash:016x}")
}

/// The short hash of the checked out commit; `unknown` outside a clone. A packaged crate may lie in another project's
/// clone, so only a `.git` right here counts.
fn commit() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_string())
    };
    if !Path::new(".git").exists() {
        return "unknown".into();
    }
    // Git adds a line to the first at every commit and checkout; the second is for clones that keep no such log.
    for watched in ["logs/HEAD", "HEAD"].iter().filter_map(|name| git(&["rev-parse", "--git-path", name])) {
        // A path that does not exist would run this script every time.
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
    let folders = homes.map(|home| home.join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates: Vec<PathBuf> = folders.chain(std::env::split_paths(&path)).collect();
    candidates.push("/usr/local/cuda/bin".into());
    let found = candidates.into_iter().map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.exists());
    found.unwrap_or_else(|| "nvcc".into())
}

/// Of the toolkit: `13` of "Cuda compilation tools, release 13.0, V13.0.88".
fn major_version(nvcc: &Path) -> String {
    let nvcc_says = Command::new(nvcc).arg("--version").output().unwrap_or_else(|error| {
        let needed = "the feature `cuda` needs a CUDA toolkit; set CUDA_HOME to its folder";
        panic!("cannot run {} ({error}): {needed}", nvcc.display())
    });
    let text = String::from_utf8_lossy(&nvcc_says.stdout);
    let release = text.split_once("release ").and_then(|(_, release)| release.split_once('.'));
    release.unwrap_or_else(|| panic!("{} does not tell its version: {text:?}", nvcc.display())).0.to_string()
}

fn compute_capability() -> String {
    if let Ok(capability) = std::env::var("CUDA_COMPUTE_CAP") {
        return capability.trim().replace('.', "");
    }
    let query = Command::new("nvidia-smi").args(["--query-gpu=compute_cap", "--format=csv,noheader"]).output();
    let text = query.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    // Without a driver nvidia-smi prints a sentence instead.
    let lowest = text.lines().filter_map(|line| line.trim().replace('.', "").parse::<u32>().ok()).min();
    lowest.unwrap_or(80).to_string()
}
