//! Measures the two parts of loading a model that depend on the machine: initializing a GPU, and copying weights from
//! files to the GPU. Needs a GPU and a folder DIR with a model in safetensors files:
//!
//!     INFERNO_FULL_SIZE=DIR cargo bench --features cuda --bench loading
//!
//! Prints one line for each step of the initialization, and then one line for each load of all tensors. The loads differ
//! in the number of threads and in the size of the pieces that a thread reads at a time. The tensors are copied as bytes,
//! in roughly the order in which a model takes them, and no model is built.
//! The first load brings the files into the page cache, and allocates GPU memory that the later loads reuse.
//! On Linux, the last two loads read the files from disk again.
//!
//! `inferno bench MODEL` measures the time of a whole load. This benchmark shows which part of it takes long, and was used
//! to choose the defaults of `ReadAheadOptions`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use candle_core::cuda_backend::cudarc::cublas::CudaBlas;
use candle_core::cuda_backend::cudarc::curand::CudaRng;
use candle_core::cuda_backend::cudarc::driver;
use candle_core::{CudaDevice, DType, Device};
use inferno::device::{self, DeviceChoice};
use inferno::kernels::upload::CopyStream;
use inferno::nn::rope::{RopeFrequencies, RotaryEmbedding};
use inferno::weights::{Checkpoint, ReadAheadOptions, ReadAheadReader};

fn main() -> Result<()> {
    let model = PathBuf::from(
        std::env::var_os("INFERNO_FULL_SIZE")
            .context("cannot find the model: INFERNO_FULL_SIZE is not set; set it to a model directory")?,
    );
    let Device::Cuda(gpu) = initialize()? else { bail!("no GPU") };
    let checkpoint = Checkpoint::open(&model)?;
    let read = |settings| read(&checkpoint, &gpu, settings);
    let standard = ReadAheadOptions::default();
    println!("the first load allocates GPU memory from the driver; later loads reuse memory from the memory pool");
    read(standard)?;
    for threads in [4, 8, 16] {
        for piece_bytes in [2 << 20, 4 << 20] {
            read(ReadAheadOptions { threads, piece_bytes, ..standard })?;
        }
    }
    if cfg!(target_os = "linux") {
        for threads in [8, 16] {
            evict_from_page_cache(&model)?;
            println!("after the model files were evicted from the page cache:");
            read(ReadAheadOptions { threads, ..standard })?;
        }
    }
    Ok(())
}

/// Initializes the first GPU as a load does, and prints how long each step takes.
/// Creates the libraries' handles one by one first, because candle creates them together.
fn initialize() -> Result<Device> {
    let mut last = Instant::now();
    let mut lap = |step: &str| {
        println!("{step}: {:.3} s", last.elapsed().as_secs_f64());
        last = Instant::now();
    };
    ensure!(device::gpu_count() > 0, "no GPU");
    lap("NVIDIA libraries and driver");
    let context = driver::CudaContext::new(0)?;
    lap("context");
    let stream = context.new_stream()?;
    lap("stream");
    let _blas = CudaBlas::new(stream.clone())?;
    lap("cuBLAS");
    let _rng = CudaRng::new(1, stream)?;
    lap("cuRAND");
    let device = device::open(DeviceChoice::FirstCuda)?;
    lap("candle device, with the libraries already initialized");
    let frequencies = RopeFrequencies { inv_freq: vec![0.1; 32], attention_factor: 1.0 };
    RotaryEmbedding::new(&frequencies, 131_072, &device)?;
    lap("RoPE tables for 131,072 positions");
    Ok(device)
}

/// Makes the next load read the files of a folder from disk. `dd` needs no root access for this.
fn evict_from_page_cache(folder: &Path) -> Result<()> {
    for file in std::fs::read_dir(folder)? {
        let status = Command::new("dd")
            .arg(format!("of={}", file?.path().display()))
            .args(["oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"])
            .status();
        ensure!(status?.success(), "dd failed");
    }
    Ok(())
}

/// Reads all tensors of a checkpoint to the GPU with `settings`, and prints how long that takes.
fn read(checkpoint: &Checkpoint, gpu: &CudaDevice, settings: ReadAheadOptions) -> Result<()> {
    let started = Instant::now();
    let requests = checkpoint.read_requests(DType::BF16);
    ensure!(!requests.is_empty(), "the model has no tensors that can be read ahead: it needs safetensors files");
    let sizes: Vec<_> = requests.iter().map(|request| (request.name.clone(), request.bytes())).collect();
    let bytes: usize = sizes.iter().map(|(_, bytes)| bytes).sum();
    let reader = ReadAheadReader::start(CopyStream::new(gpu)?, requests, settings)?;
    let take = |(name, bytes): &(String, usize)| reader.take(name, DType::U8, &[*bytes]);
    let tensors = sizes.iter().map(take).collect::<Result<Vec<_>>>()?;
    let handed_out = started.elapsed().as_secs_f64();
    let device = Device::Cuda(gpu.clone());
    device.synchronize()?;
    let arrived = started.elapsed().as_secs_f64();
    drop(reader);
    let dropped = started.elapsed().as_secs_f64();
    drop(tensors);
    device.synchronize()?;
    println!(
        "{:2} threads, {:5} KiB pieces: tensors returned {handed_out:.3} s, copied {arrived:.3} s = {:.1} GB/s, \
         threads joined {dropped:.3} s",
        settings.threads,
        settings.piece_bytes >> 10,
        bytes as f64 / 1e9 / arrived,
    );
    Ok(())
}
