//! Tests of reading weights ahead of use, with several threads.
//! The values of the loaded tensors must not depend on how they are read.
//! Failed reads, failed allocations and panics of read-ahead threads must become errors.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use candle_core::{DType, Device};
use inferno::kernels::upload::UploadTarget;
use inferno::weights::{Checkpoint, LoadProgress, ReadAheadOptions, ReadAheadReader, Weights, WeightsBuilder};
use tempfile::TempDir;

use super::{Host, bits, random, small, snapshot};
use crate::harness::TestCase;
use crate::support::{golden, gpu, gpu_if_expected, named_cases};

/// Writes a checkpoint with tensors of four dtypes. Their sizes are below, near and above the default piece size.
fn mixed() -> TempDir {
    let sizes = [1, 2, 3, 4, 5, 100, 4096, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 11 << 20];
    let dtypes = [DType::F32, DType::F16, DType::BF16, DType::U8];
    snapshot(dtypes.into_iter().flat_map(|dtype| {
        sizes.into_iter().enumerate().map(move |(layer, size)| {
            let elements = (size / dtype.size_in_bytes()).max(1);
            (format!("model.layers.{layer}.{}", dtype.as_str()), random(elements, dtype))
        })
    }))
}

/// Takes tensors from `weights` in the order of `names`, and compares them with tensors loaded without read-ahead.
fn compare(checkpoint: &Checkpoint, weights: &Weights, names: &[String], dtype: DType) {
    let progress = LoadProgress::silent();
    let plain = WeightsBuilder::new(checkpoint, &Device::Cpu, dtype, &progress).build().unwrap();
    for name in names {
        let info = checkpoint.info(name).unwrap();
        let take = |weights: &Weights| match info.candle_dtype().unwrap() {
            DType::U8 => weights.bytes(name, &info.shape).unwrap(),
            _ => weights.float(name, &info.shape).unwrap(),
        };
        let (got, want) = (take(weights), take(&plain));
        assert_eq!((got.dtype(), got.dims()), (want.dtype(), want.dims()), "{name}");
        assert!(bits(&got) == bits(&want), "{name} as {dtype:?} differs from the tensor loaded without read-ahead");
    }
}

fn names(checkpoint: &Checkpoint) -> Vec<String> {
    checkpoint.tensors().map(|(name, _)| name.to_string()).collect()
}

/// Returns four loading orders: as given, reversed, shuffled, and each tensor twice in a row.
fn orders(names: &[String]) -> Vec<Vec<String>> {
    let reversed = names.iter().rev().cloned().collect();
    let shuffled = (0..names.len()).map(|i| names[i * 7919 % names.len()].clone()).collect();
    let twice = names.iter().flat_map(|name| [name.clone(), name.clone()]).collect();
    vec![names.to_vec(), reversed, shuffled, twice]
}

/// A golden model, and how a test reads it ahead.
struct ReadAheadCase {
    model: &'static str,
    threads: usize,
    /// The compute dtype.
    dtype: DType,
}

fn read_ahead_cases() -> Vec<TestCase<ReadAheadCase>> {
    let case = |model: &'static str| {
        [(1, DType::F32), (3, DType::BF16), (8, DType::F16)].map(|(threads, dtype)| {
            (format!("{model}::{threads}_threads::{}", dtype.as_str()), ReadAheadCase { model, threads, dtype })
        })
    };
    named_cases(["gpt_oss", "llama3"].into_iter().flat_map(case))
}

#[test(each = read_ahead_cases)]
fn tensors_read_ahead_equal_those_of_the_file(case: ReadAheadCase) {
    let ReadAheadCase { model, threads, dtype } = case;
    let progress = LoadProgress::silent();
    let checkpoint = Checkpoint::open(&golden(model)).unwrap();
    for order in orders(&names(&checkpoint)) {
        let host = Host::default();
        let options = ReadAheadOptions { piece_bytes: 1000, ..small(threads) };
        let reader = ReadAheadReader::start(host.clone(), checkpoint.read_requests(dtype), options).unwrap();
        let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, dtype, &progress);
        let weights = weights.read_ahead(reader).build().unwrap();
        compare(&checkpoint, &weights, &order, dtype);
        drop(weights);
        assert_eq!(host.live.load(Ordering::SeqCst), 0, "some memory was not freed");
    }
}

/// Returns the weights and row counts of the q, k and v projections of a layer.
fn attention_parts<'c>(checkpoint: &Checkpoint, weights: &Weights<'c>, layer: usize) -> [(Weights<'c>, usize); 3] {
    ["q_proj", "k_proj", "v_proj"].map(|name| {
        let module = format!("model.layers.{layer}.self_attn.{name}");
        let rows = checkpoint.info(&format!("{module}.weight")).unwrap().shape[0];
        (weights.at(module), rows)
    })
}

#[test]
fn stacked_tensors_are_read_as_one() {
    let progress = LoadProgress::silent();
    let checkpoint = Checkpoint::open(&golden("llama3")).unwrap();
    let stored = checkpoint.info("model.layers.0.self_attn.q_proj.weight").unwrap().candle_dtype().unwrap();
    let mut devices = vec![(Device::Cpu, stored)];
    devices.extend(gpu_if_expected().map(|gpu| (gpu, DType::BF16)));
    for (device, dtype) in devices {
        let host = Host::default();
        let options = ReadAheadOptions { piece_bytes: 1000, ..small(3) };
        let read_requests = checkpoint.read_requests(dtype);
        let stacks = read_requests.iter().filter(|request| request.ranges.len() == 3).count();
        let layers = checkpoint.tensors().filter(|(name, _)| name.ends_with("q_proj.weight")).count();
        assert_eq!(stacks, if dtype == stored { layers } else { 0 });
        let plain = WeightsBuilder::new(&checkpoint, &Device::Cpu, dtype, &progress).build().unwrap();
        let weights = match &device {
            Device::Cpu => {
                let reader = ReadAheadReader::start(host.clone(), read_requests, options).unwrap();
                WeightsBuilder::new(&checkpoint, &device, dtype, &progress).read_ahead(reader).build().unwrap()
            }
            gpu => WeightsBuilder::new(&checkpoint, gpu, dtype, &progress).build().unwrap(),
        };
        for layer in 0..layers {
            let columns = checkpoint.info("model.norm.weight").unwrap().shape[0];
            let got = Weights::stacked(&attention_parts(&checkpoint, &weights, layer), "weight", columns).unwrap();
            let want = Weights::stacked(&attention_parts(&checkpoint, &plain, layer), "weight", columns).unwrap();
            assert_eq!(got.dims(), want.dims());
            assert!(bits(&got) == bits(&want), "layer {layer}");
            let mut wrong = attention_parts(&checkpoint, &weights, layer);
            wrong[1].1 += 1;
            let error = format!("{:#}", Weights::stacked(&wrong, "weight", columns).unwrap_err());
            assert!(error.contains("k_proj.weight: expected shape"), "{error}");
        }
    }
}

#[test(gpu)]
fn tensors_on_a_gpu_equal_those_of_the_file() {
    let gpu = gpu();
    let progress = LoadProgress::silent();
    let folder = mixed();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for order in orders(&names(&checkpoint)) {
            let weights = WeightsBuilder::new(&checkpoint, &gpu, dtype, &progress).build().unwrap();
            compare(&checkpoint, &weights, &order, dtype);
        }
    }
}

#[test]
fn thousands_of_tiny_tensors_are_read() {
    let tensor = |i: usize| (format!("model.layers.{i}.x"), random(i % 5 + 1, DType::BF16));
    let folder = snapshot((0..5000).map(tensor));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let progress = LoadProgress::silent();
    let names = names(&checkpoint);
    let reader = ReadAheadReader::start(Host::default(), checkpoint.read_requests(DType::F32), small(4)).unwrap();
    let weights =
        WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).read_ahead(reader).build().unwrap();
    compare(&checkpoint, &weights, &names, DType::F32);
    if let Some(gpu) = gpu_if_expected() {
        let weights = WeightsBuilder::new(&checkpoint, &gpu, DType::BF16, &progress).build().unwrap();
        compare(&checkpoint, &weights, &names, DType::BF16);
    }
}

/// Runs a function on another thread. Panics if the function panics or does not return within a minute.
fn in_time<R: Send + 'static>(run: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(run()));
    receiver.recv_timeout(Duration::from_secs(60)).expect("the function timed out or panicked")
}

/// Opens a checkpoint with three 40-byte tensors, calls `spoil` on its file, and returns the error from taking the
/// second tensor with read-ahead.
fn take_middle_tensor<T: UploadTarget>(target: T, spoil: impl FnOnce(PathBuf) + Send + 'static) -> String {
    in_time(move || {
        let folder = snapshot(["a", "b", "c"].map(|name| (name.to_string(), random(20, DType::BF16))));
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        spoil(folder.path().join("model.safetensors"));
        let reader = ReadAheadReader::start(target, checkpoint.read_requests(DType::BF16), small(2)).unwrap();
        format!("{:#}", reader.take("b", DType::BF16, &[20]).unwrap_err())
    })
}

#[test]
fn read_ahead_failures_and_panics_become_errors() {
    let host = Host::default();
    let error = take_middle_tensor(Host { limit: Some(39), ..host.clone() }, |_| ());
    assert!(error.contains("cannot allocate tensor ") && error.contains("out of memory"), "{error}");
    let error = take_middle_tensor(Host { panics: true, ..host.clone() }, |_| ());
    assert!(error.contains("panicked"), "{error}");
    let truncate = |path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 110).unwrap();
    };
    let error = take_middle_tensor(host.clone(), truncate);
    assert!(error.contains("model.safetensors") && error.contains("shorter than its header says"), "{error}");
    assert_eq!(host.live.load(Ordering::SeqCst), 0, "some memory was not freed");
    #[cfg(feature = "cuda")]
    if let Some(Device::Cuda(gpu)) = gpu_if_expected() {
        let error = take_middle_tensor(inferno::kernels::upload::CopyStream::new(&gpu).unwrap(), truncate);
        assert!(error.contains("model.safetensors") && error.contains("shorter than its header says"), "{error}");
    }
}

#[test]
fn reader_can_be_dropped_at_any_time() {
    let folder = mixed();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let names = names(&checkpoint);
    let host = Host::default();
    #[cfg(feature = "cuda")]
    let gpu = gpu_if_expected();
    for taken in 0..12 {
        take_some(host.clone(), &checkpoint, &names[..taken]);
        assert_eq!(host.live.load(Ordering::SeqCst), 0, "some memory was not freed");
        #[cfg(feature = "cuda")]
        if let Some(Device::Cuda(gpu)) = &gpu {
            take_some(inferno::kernels::upload::CopyStream::new(gpu).unwrap(), &checkpoint, &names[..taken]);
        }
    }
}

fn take_some<T: UploadTarget>(target: T, checkpoint: &Checkpoint, names: &[String]) {
    let options = ReadAheadOptions { threads: 4, piece_bytes: 1 << 16, ahead_bytes: 1 << 20 };
    let reader = ReadAheadReader::start(target, checkpoint.read_requests(DType::BF16), options).unwrap();
    for name in names {
        let info = checkpoint.info(name).unwrap();
        reader.take(name, info.candle_dtype().unwrap(), &info.shape).unwrap();
    }
}

/// Loads a tensor of 1 TiB, which must be an error. The file is sparse, so it takes almost no disk space.
#[test(gpu)]
fn tensor_larger_than_gpu_memory_is_an_error() {
    let gpu = gpu();
    let folder = TempDir::new().unwrap();
    let (bytes, path) = (1u64 << 40, folder.path().join("model.safetensors"));
    let header = format!(r#"{{"x":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, &gpu, DType::BF16, &progress).build().unwrap();
    let error = format!("{:#}", weights.bytes("x", &[bytes as usize]).unwrap_err());
    assert!(error.contains("tensor x") && error.contains("OUT_OF_MEMORY"), "{error}");
}
