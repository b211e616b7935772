//! Shared test helpers: golden models, fixture paths, devices, relative error, random numbers.
//!
//! - `program`: runs inferno; `bounded`: runs inferno with limits on time and memory
//! - `session`, `screen`: run inferno in a pseudo terminal
//! - `engine`: engines with the demo model or a golden model, and their answers
//! - `gguf`: GGUF files; `random_models`: checkpoints with random weights; `fake_hub`: a hub on 127.0.0.1

pub mod bounded;
pub mod engine;
pub mod fake_hub;
pub mod gguf;
pub mod program;
#[cfg(feature = "cuda")]
pub mod random_models;
pub mod screen;
pub mod session;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::device::{self, DeviceChoice};
use inferno::kernels::SumOrder;
use inferno::models;
use inferno::nn::decoder::Decoder;
use inferno::nn::kv_cache::KvCache;
use inferno::nn::pass::{PassBatch, RowSelection, SequenceSpan};
use inferno::weights::{Checkpoint, Inventory, LoadProgress, WeightsBuilder};
use tempfile::TempDir;

use crate::harness::{Need, TestCase, is_gpu_expected};

/// Waits until `is_done` returns true. Fails with `what` after 60 s.
pub fn wait_until(what: &str, is_done: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_done() {
        assert!(start.elapsed() < Duration::from_secs(60), "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the path of a file or folder in `tests/golden`.
/// If the test binary was copied to another machine, `INFERNO_GOLDEN` must name a copy of `tests/golden`.
pub fn golden(case: &str) -> PathBuf {
    let root = std::env::var_os("INFERNO_GOLDEN").map(PathBuf::from);
    root.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"))).join(case)
}

/// A checkpoint in `tests/golden`, with results that transformers computed from it.
pub struct GoldenModel {
    /// The path of the model's folder, relative to `tests/golden`.
    pub name: &'static str,
    pub kind: GoldenKind,
    /// Whether tests convert the checkpoint to a GGUF file.
    pub has_gguf: bool,
    /// The largest number of ranks, 1 or 2, with which the decode graph must support the model.
    /// 0 if the decode graph need not support it.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only tests that need a GPU read it"))]
    pub graph_ranks: usize,
    /// Whether the model has a router, which chooses the experts of each token.
    /// Rounding can change the choice in a near tie.
    pub has_router: bool,
    /// Whether the decode graph can choose other experts than the eager decoder in a near tie,
    /// because the two round the input of the router differently.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only `decode_graph.rs` reads it"))]
    pub can_graph_choose_other_experts: bool,
}

/// A group of golden models. Some tests run only one group, or all except one.
#[derive(PartialEq)]
pub enum GoldenKind {
    /// The main model of a family, or of one version of the family, such as `llama2` and `llama3`.
    Family,
    /// A model with other sizes or settings than the main model.
    /// If its name ends in `_new`, config.json has the format of transformers 5.
    /// If its name ends in `_graph`, the decode graph supports its sizes.
    Variant,
    /// A model with 8-bit weights in the compressed-tensors format.
    ///
    /// Most of these models also quantize the activations. Another order of summation or a 16-bit dtype can make an
    /// activation round to another 8-bit value, which changes the logits by more than a usual rounding error.
    /// `make_compressed.py` chooses the golden token ids so that the order of summation in f32 has no such effect.
    Compressed,
}

const FAMILY: GoldenModel = GoldenModel {
    name: "",
    kind: GoldenKind::Family,
    has_gguf: true,
    graph_ranks: 0,
    has_router: false,
    can_graph_choose_other_experts: false,
};
const VARIANT: GoldenModel = GoldenModel { kind: GoldenKind::Variant, has_gguf: false, ..FAMILY };
const COMPRESSED: GoldenModel = GoldenModel { kind: GoldenKind::Compressed, ..VARIANT };

/// All golden safetensors models except `trained`. Most tests select some of them with [`golden_models`].
pub const GOLDEN_MODELS: &[GoldenModel] = &[
    GoldenModel { name: "gpt_oss", has_router: true, ..FAMILY },
    GoldenModel { name: "gpt_oss_new", has_router: true, ..VARIANT },
    GoldenModel { name: "llama2", ..FAMILY },
    GoldenModel { name: "llama3", ..FAMILY },
    GoldenModel { name: "llama_new", ..VARIANT },
    GoldenModel { name: "gpt_oss_graph", has_gguf: true, graph_ranks: 2, has_router: true, ..VARIANT },
    GoldenModel { name: "llama_graph", has_gguf: true, graph_ranks: 2, ..VARIANT },
    GoldenModel { name: "mistral", graph_ranks: 1, ..FAMILY },
    GoldenModel { name: "qwen2", graph_ranks: 1, ..FAMILY },
    GoldenModel { name: "qwen3", graph_ranks: 1, ..FAMILY },
    GoldenModel { name: "qwen3_moe", has_router: true, ..FAMILY },
    GoldenModel { name: "mixtral", has_router: true, ..FAMILY },
    GoldenModel { name: "phi3", ..FAMILY },
    GoldenModel { name: "phi4", ..FAMILY },
    GoldenModel { name: "gemma2", ..FAMILY },
    GoldenModel { name: "gemma3", ..FAMILY },
    GoldenModel { name: "gpt2", ..FAMILY },
    GoldenModel {
        name: "mixtral_graph",
        graph_ranks: 2,
        has_router: true,
        can_graph_choose_other_experts: true,
        ..VARIANT
    },
    GoldenModel {
        name: "qwen3_moe_graph",
        graph_ranks: 2,
        has_router: true,
        can_graph_choose_other_experts: true,
        ..VARIANT
    },
    GoldenModel { name: "gemma2_graph", graph_ranks: 2, ..VARIANT },
    GoldenModel { name: "gemma3_graph", graph_ranks: 1, ..VARIANT },
    GoldenModel { name: "compressed/int8", ..COMPRESSED },
    GoldenModel { name: "compressed/int8_weights", ..COMPRESSED },
    GoldenModel { name: "compressed/int8_packed", ..COMPRESSED },
    GoldenModel { name: "compressed/fp8", ..COMPRESSED },
    GoldenModel { name: "compressed/fp8_static", ..COMPRESSED },
];

/// The models in `tests/golden/gguf_quantized`: the names of the GGUF files and of the files with their logits.
pub const QUANTIZED_GGUF_MODELS: [&str; 10] =
    ["llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3", "gpt2", "gpt_oss"];

/// Returns the names of the golden models for which `is_selected` returns true.
pub fn golden_models(is_selected: impl Fn(&GoldenModel) -> bool) -> Vec<&'static str> {
    GOLDEN_MODELS.iter().filter(|model| is_selected(model)).map(|model| model.name).collect()
}

/// Returns the folder of real tokenizers, configs and chat templates, for tests marked `#[test(fixtures)]`.
pub fn fixtures() -> PathBuf {
    fixtures_if_set().expect("INFERNO_FIXTURES must name the folder of fixtures")
}

/// Returns the fixtures folder if `INFERNO_FIXTURES` is set, for tests that can also run without it.
pub fn fixtures_if_set() -> Option<PathBuf> {
    std::env::var_os("INFERNO_FIXTURES").map(PathBuf::from)
}

/// Returns the first GPU. Panics if inferno cannot use a GPU.
pub fn gpu() -> Device {
    device::open(DeviceChoice::FirstCuda).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the first GPU, or `None` if there is no GPU.
/// With `INFERNO_REQUIRE_GPU=1`, panics instead of returning `None`.
pub fn gpu_if_expected() -> Option<Device> {
    is_gpu_expected().then(gpu)
}

/// All dtypes in which inferno computes.
pub const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[cfg(feature = "cuda")]
pub const DTYPES_OF_16_BITS: [DType; 2] = [DType::BF16, DType::F16];

/// Returns cases that run on every machine. Each element of `cases` is the name of a case and its value.
pub fn named_cases<T>(cases: impl IntoIterator<Item = (impl Into<String>, T)>) -> Vec<TestCase<T>> {
    cases.into_iter().map(|(name, value)| TestCase { name: name.into(), need: None, value }).collect()
}

/// Returns cases that run on every machine, each named after its value.
pub fn cases<T: ToString>(values: impl IntoIterator<Item = T>) -> Vec<TestCase<T>> {
    named_cases(values.into_iter().map(|value| (value.to_string(), value)))
}

/// Returns a test case that needs a GPU.
pub fn gpu_case<T>(name: String, value: T) -> TestCase<T> {
    TestCase { name, need: Some(Need::Gpu), value }
}

/// Returns the cases of a test that runs every named value on the first GPU in each of `dtypes`.
pub fn on_gpu<T: Clone>(values: impl IntoIterator<Item = (String, T)>, dtypes: &[DType]) -> Vec<TestCase<(T, DType)>> {
    let mut cases = Vec::new();
    for (name, value) in values {
        for &dtype in dtypes {
            cases.push(gpu_case(format!("{name}::{}", dtype.as_str()), (value.clone(), dtype)));
        }
    }
    cases
}

/// Returns the largest allowed difference between logits in `dtype` and the f32 logits of transformers, relative to the
/// largest |logit|. For models with 8-bit activations, `tolerance` in `models/golden.rs` can be larger.
///
/// `tests/golden/provenance.json` records how far transformers itself is from these logits: by up to 6.1e-2 in bf16
/// (`bfloat16_relative_error`) and 2.4e-6 in f64. f16 rounds to 11 bits instead of 8, so its errors are about an eighth
/// of those of bf16. `make.py` checks that a mistake in the computation changes the logits by at least 1e-2, so the
/// tests in f32 find it.
pub fn logits_tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 1e-4,
        DType::F16 => 2e-2,
        _ => 6e-2,
    }
}

/// A device and a dtype for a test that also runs without a GPU.
#[derive(Clone, Copy)]
pub struct TestDevice {
    pub is_gpu: bool,
    pub dtype: DType,
}

impl TestDevice {
    const ALL: [Self; 4] = [
        Self { is_gpu: false, dtype: DType::F32 },
        Self { is_gpu: true, dtype: DType::F32 },
        Self { is_gpu: true, dtype: DType::BF16 },
        Self { is_gpu: true, dtype: DType::F16 },
    ];

    /// Opens the device, and returns it with its dtype.
    /// Call this only in the body of a test: a list of cases contains cases for GPUs even if the machine has no GPU.
    pub fn open(self) -> (Device, DType) {
        (if self.is_gpu { gpu() } else { Device::Cpu }, self.dtype)
    }

    fn case<T>(self, value: T) -> TestCase<T> {
        let device = if self.is_gpu { "cuda" } else { "cpu" };
        let need = self.is_gpu.then_some(Need::Gpu);
        TestCase { name: format!("{device}_{}", self.dtype.as_str()), need, value }
    }
}

/// Returns the cases of a test: the CPU with f32, and the first GPU with f32, bf16 and f16.
pub fn devices() -> Vec<TestCase<TestDevice>> {
    TestDevice::ALL.map(|device| device.case(device)).into()
}

/// Like [`devices`], but only with f32.
pub fn devices_in_f32() -> Vec<TestCase<TestDevice>> {
    devices().into_iter().filter(|case| case.value.dtype == DType::F32).collect()
}

/// Returns the cases of a test that runs every named value on every device of [`devices`].
pub fn on_devices<T: Copy>(values: impl IntoIterator<Item = (&'static str, T)>) -> Vec<TestCase<(T, TestDevice)>> {
    let cases = |(name, value)| {
        TestDevice::ALL.map(|device| {
            let case = device.case((value, device));
            TestCase { name: format!("{name}::{}", case.name), ..case }
        })
    };
    values.into_iter().flat_map(cases).collect()
}

/// Returns the largest |got - want| divided by the largest |want|, or NaN if any value is NaN.
pub fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len(), "the computed values and the expected values differ in length");
    let scale = want.iter().fold(0f32, |scale, value| scale.max(value.abs()));
    let error = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0f32, |a, b| {
        // `f32::max` would ignore a NaN.
        if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
    });
    error / scale
}

/// Returns all elements of a tensor as f32.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the token ids in an i64 tensor of a golden file.
pub fn token_ids(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec1::<i64>().unwrap().into_iter().map(|id| id as u32).collect()
}

/// Reads the token ids, and the logits that transformers computed, from the safetensors file of a golden model.
pub fn expected_logits(file: &Path) -> (Vec<u32>, Vec<f32>) {
    let golden = safetensors::load(file, &Device::Cpu).unwrap();
    (token_ids(&golden["ids"]), values(&golden["logits"]))
}

/// Returns the folder of the demo model.
/// If the test binary was copied to another machine, `INFERNO_DEMO` must name a copy of the folder.
pub fn demo_dir() -> PathBuf {
    let folder = std::env::var_os("INFERNO_DEMO").map(PathBuf::from);
    folder.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo")))
}

/// Returns the f32 logits of all `ids`, computed on the CPU with the checkpoint folder or GGUF file `path`.
/// Asserts that the tensor table of the model's family predicts the size of the loaded tensors in memory.
pub fn checkpoint_logits(path: &Path, ids: &[u32]) -> anyhow::Result<Vec<f32>> {
    let config = models::read_config(path)?;
    let checkpoint = Checkpoint::open(path)?;
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).build()?;
    // The context length is 160, as in `models/golden.rs`, because LongRoPE chooses its factors by the context length.
    let decoder = config.build(&weights, 160)?;
    let inventory = Inventory::from_checkpoint(&checkpoint, config.family.tensors, None);
    assert_eq!(inventory.loaded_bytes(DType::F32), progress.resident_bytes());
    Ok(values(&logits_of(&decoder, ids, DType::F32, &Device::Cpu)?))
}

/// Runs `ids` in one pass with an empty KV cache. Returns the logits of every token.
pub fn logits_of(decoder: &Decoder, ids: &[u32], dtype: DType, device: &Device) -> anyhow::Result<Tensor> {
    let (cache, tables) = KvCache::for_one_sequence(decoder.cache_layout(), ids.len(), dtype, device)?;
    let span = SequenceSpan { tokens: ids.len(), position: 0, tables: &tables };
    decoder
        .forward(&PassBatch { ids, sequences: &[span], rows: RowSelection::All, sum_order: SumOrder::Fastest }, &cache)
}

/// Reproducible random numbers from the linear congruential generator of Knuth's MMIX.
pub struct Random(pub u64);

impl Random {
    /// Returns the upper 31 bits of the next state. The lower bits are less random.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// Returns a number less than `limit`, or 0 if `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// Returns a number in [0, 1) with 24 random bits.
    #[cfg(feature = "cuda")]
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 7) as f32 / (1u64 << 24) as f32
    }

    /// Returns the sum of four uniform random numbers, which is approximately normally distributed.
    /// Multiplies one number in fifty, on average, by 40 to produce outliers.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.next() as f32 / (1u64 << 31) as f32 - 0.5).sum();
        if self.next().is_multiple_of(50) { sum * 40.0 } else { sum }
    }

    /// Returns an f32 tensor of values from [`normal`](Self::normal), rounded to `dtype`.
    /// A later conversion to `dtype` is therefore exact, and tests measure only the error of the kernel.
    pub fn tensor(&mut self, shape: &[usize], dtype: DType) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap()
    }

    /// Returns a tensor of random bytes in `range`.
    pub fn bytes(&mut self, shape: &[usize], range: Range<u64>) -> Tensor {
        let values: Vec<u8> = (0..shape.iter().product())
            .map(|_| (range.start + self.next() % (range.end - range.start)) as u8)
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }
}

/// Adds to `files` all files in a folder and its subfolders whose extension is in `extensions`.
pub fn add_files(folder: &Path, extensions: &[&str], files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_files(&path, extensions, files);
        } else if extensions.iter().any(|&wanted| path.extension().is_some_and(|extension| extension == wanted)) {
            files.push(path);
        }
    }
}

/// Gives a command the home directory `home`, the model cache `home/models`, a terminal type and an unreachable hub.
/// Removes environment variables that configure inferno, the hub, folders, colors or logs.
pub fn at_home(mut command: Command, home: &TempDir) -> Command {
    let prefixes = ["HF_", "INFERNO_", "XDG_", "NO_COLOR", "RUST_LOG"];
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy();
        // INFERNO_REQUIRE_GPU can stay, because only the tests read it.
        if prefixes.iter().any(|prefix| name.starts_with(prefix)) && name != "INFERNO_REQUIRE_GPU" {
            command.env_remove(&variable);
        }
    }
    command.env("HOME", home.path()).env("INFERNO_CACHE", home.path().join("models"));
    // No server listens on this port, so the hub cannot be reached.
    command.env("HF_ENDPOINT", "http://127.0.0.1:1").env("TERM", "xterm-256color");
    command
}
