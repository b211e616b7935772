//! Tests of weights files that another program truncates while inferno loads them.
//! Loading must not crash. If it fails, the error must name the file.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use candle_core::{DType, Device};
use inferno::models;
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder};
use tempfile::TempDir;

use crate::harness::TestCase;
use crate::support::gguf::models::{demo_as_gguf, saved};
use crate::support::program::{copy_of_demo, inferno};
use crate::support::{Random, TestDevice, golden, on_devices};

/// The number of times that `disturb_loads` loads a model.
const LOADS: usize = 12;

/// Copies a golden model to a temporary folder. Returns the path of the model and the path of its weights file.
fn copy(name: &str) -> (TempDir, PathBuf, PathBuf) {
    let (from, folder) = (golden(name), TempDir::new().unwrap());
    if from.extension().is_some_and(|extension| extension == "gguf") {
        let path = folder.path().join("model.gguf");
        fs::copy(from, &path).unwrap();
        return (folder, path.clone(), path);
    }
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    let path = folder.path().to_path_buf();
    (folder, path.clone(), path.join("model.safetensors"))
}

fn truncate(path: &Path, bytes: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

/// Opens a model, truncates its weights file to half the size, and returns the error from loading, or `no error`.
fn load_after_truncation(name: &str, quantize: Option<&str>, (device, dtype): (&Device, DType)) -> String {
    let (_folder, model, weights_file) = copy(name);
    let config = models::read_config(&model).unwrap();
    let checkpoint = Checkpoint::open(&model).unwrap();
    truncate(&weights_file, File::open(&weights_file).unwrap().metadata().unwrap().len() / 2);
    let progress = LoadProgress::silent();
    let quantize = quantize.map(|quantize| quantize.parse().unwrap());
    let weights = WeightsBuilder::new(&checkpoint, device, dtype, &progress).quantize(quantize);
    let decoder = weights.build().and_then(|weights| config.build(&weights, 32));
    decoder.err().map_or("no error".into(), |error| format!("{error:#}"))
}

/// Returns models in several formats on several devices.
fn models_on_devices() -> Vec<TestCase<(&'static str, TestDevice)>> {
    let models = [
        "llama3",
        "mixtral",
        "compressed/int8_packed",
        "compressed/fp8",
        "gguf_quantized/llama.gguf",
        "gguf_quantized/gpt_oss.gguf",
        "gguf_quantized/gpt2.gguf",
    ];
    on_devices(models.map(|name| (name, name)))
}

#[test(each = models_on_devices)]
fn truncation_between_header_and_tensors_is_an_error((name, device): (&'static str, TestDevice)) {
    let (device, dtype) = device.open();
    let file = if name.ends_with(".gguf") { "model.gguf" } else { "model.safetensors" };
    for quantize in [None, Some("q8_0"), Some("int8")] {
        let error = load_after_truncation(name, quantize, (&device, dtype));
        let is_clear = error.contains(file) && error.contains("shorter than its header says");
        assert!(is_clear, "{quantize:?}: expected an error about {file}, found {error}");
    }
}

/// Starts `inferno play` processes. Truncates the weights file at a random time after each process opens it.
/// Asserts that each process succeeds, or fails with an error that names the weights file.
fn disturb_loads(model: &Path, weights_file: &Path) {
    let (home, original) = (TempDir::new().unwrap(), fs::read(weights_file).unwrap());
    let mut random = Random(original.len() as u64);
    let mut failures = 0;
    for run in 0..LOADS {
        fs::write(weights_file, &original).unwrap();
        let mut command = inferno(&home);
        command.args(["-v", "play", "--device", "cpu", "--max-tokens", "1", "--prompt", "Hi"]).arg(model);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut log = String::new();
        // The program logs a line with `opened` after it opens the file and before it reads the header and the tensors.
        while !log.contains("opened") && stderr.read_line(&mut log).unwrap() > 0 {}
        std::thread::sleep(Duration::from_micros(random.below(60_000) as u64));
        truncate(weights_file, random.below(original.len()) as u64);
        stderr.read_to_string(&mut log).unwrap();
        let status = child.wait().unwrap();
        match status.code() {
            Some(0) => {}
            Some(1) => {
                failures += 1;
                let error = log.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
                assert!(error.contains(weights_file.to_str().unwrap()), "run {run}: {log}");
            }
            _ => panic!("run {run}: {status}\n{log}"),
        }
    }
    println!("{failures} of {LOADS} loads of {} failed", weights_file.display());
}

#[test]
fn truncation_during_a_load_never_ends_the_program_by_a_signal() {
    let (_folder, model) = copy_of_demo();
    disturb_loads(&model, &model.join("model.safetensors"));
    let (_folder, file) = saved(&demo_as_gguf());
    disturb_loads(&file, &file);
}
