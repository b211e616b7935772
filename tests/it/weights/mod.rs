//! Tests of reading weights: ahead of use, with several threads, and together with other ranks.
//! The values of the loaded tensors must not depend on how they are read.
//! Failed reads, failed allocations and panics of read-ahead threads must become errors.

mod compressed;
mod dtypes;
mod gguf;
mod hostile;
mod truncated;

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use ::safetensors::tensor::{Dtype, TensorView};
use candle_core::{DType, Device, Result, Tensor, bail, safetensors};
use inferno::kernels::matrix::Matrix;
use inferno::kernels::upload::UploadTarget;
use inferno::weights::ggml::GgmlType;
use inferno::weights::{
    Checkpoint, LoadProgress, PartReader, ReadAheadOptions, ReadAheadReader, Weights, WeightsBuilder,
};
use inferno::world::World;
use tempfile::TempDir;

use crate::harness::TestCase;
use crate::ranks::{on_ranks, read_bytes};
use crate::support::gguf::models::saved;
use crate::support::gguf::writer::Writer;
use crate::support::{Random, golden, gpu, gpu_if_expected, named_cases};

/// An upload target in host memory that counts its live allocations.
#[derive(Clone, Default)]
struct Host {
    live: Arc<AtomicUsize>,
    /// The largest size that `allocate` accepts, in bytes. `None` means that there is no limit.
    limit: Option<usize>,
    panics: bool,
}

/// A value that counts as a live allocation until it is dropped.
struct Counted<T>(T, Arc<AtomicUsize>);

impl Host {
    fn count<T>(&self, value: T) -> Counted<T> {
        self.live.fetch_add(1, Ordering::SeqCst);
        Counted(value, self.live.clone())
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

impl UploadTarget for Host {
    /// The bytes of a tensor, the number of bytes already copied into it, and whether the tensor is complete.
    type Memory = Counted<Mutex<(Vec<u8>, usize, bool)>>;
    type Staging = Counted<Vec<u8>>;

    fn staging(&self, bytes: usize) -> Result<Self::Staging> {
        Ok(self.count(vec![0; bytes]))
    }

    fn allocate(&self, bytes: usize) -> Result<Self::Memory> {
        if self.limit.is_some_and(|limit| bytes > limit) {
            bail!("out of memory");
        }
        Ok(self.count(Mutex::new((vec![0xaa; bytes], 0, false))))
    }

    fn buffer<'s>(&self, staging: &'s mut Self::Staging) -> Result<&'s mut [u8]> {
        assert!(!self.panics, "the target panics on purpose");
        Ok(&mut staging.0)
    }

    fn copy(&self, staging: &mut Self::Staging, bytes: usize, memory: &Self::Memory, offset: usize) -> Result<()> {
        let mut memory = memory.0.lock().unwrap();
        memory.0[offset..offset + bytes].copy_from_slice(&staging.0[..bytes]);
        memory.1 += bytes;
        Ok(())
    }

    fn complete(&self, memory: &mut Self::Memory) -> Result<()> {
        let memory = memory.0.get_mut().unwrap();
        assert_eq!((memory.1, memory.2), (memory.0.len(), false), "a tensor was completed early or twice");
        memory.2 = true;
        Ok(())
    }

    fn tensor(&self, memory: Self::Memory, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let memory = memory.0.lock().unwrap();
        assert!(memory.2);
        Tensor::from_raw_buffer(&memory.0, dtype, shape, &Device::Cpu)
    }
}

/// Returns options with tiny pieces and a tiny read-ahead limit.
fn small(threads: usize) -> ReadAheadOptions {
    ReadAheadOptions { threads, piece_bytes: 8, ahead_bytes: 64 }
}

/// Writes a checkpoint that contains `tensors`.
fn snapshot(tensors: impl IntoIterator<Item = (String, Tensor)>) -> TempDir {
    let folder = TempDir::new().unwrap();
    let tensors: HashMap<String, Tensor> = tensors.into_iter().collect();
    safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    folder
}

/// Returns a vector of random numbers, none of them negative. Each call returns other numbers.
fn random(elements: usize, dtype: DType) -> Tensor {
    static SEED: AtomicU64 = AtomicU64::new(0);
    let values = Random(SEED.fetch_add(1, Ordering::Relaxed)).tensor(&[elements], DType::F32);
    (values.abs().unwrap() * 50.0).unwrap().to_dtype(dtype).unwrap()
}

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

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    values.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
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
    let far_apart = (0..names.len()).map(|i| names[i * 7919 % names.len()].clone()).collect();
    let twice = names.iter().flat_map(|name| [name.clone(), name.clone()]).collect();
    vec![names.to_vec(), reversed, far_apart, twice]
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

/// The ranks read `whole` and the short rows of `short` together.
/// Each rank reads only its own columns of `long`, whose rows are long, and only its own rows of `rows`.
#[test]
fn ranks_that_share_reads_get_their_parts_and_read_every_byte_once() {
    let tensors = [("long", [7, 200_000]), ("short", [3000, 700]), ("rows", [4000, 300])];
    let tensors = tensors.map(|(name, [rows, columns])| {
        (format!("{name}.weight"), random(rows * columns, DType::F32).reshape((rows, columns)).unwrap())
    });
    let whole = random(500_000, DType::F32);
    let folder = snapshot(tensors.into_iter().chain([("whole.weight".into(), whole)]));
    for (ranks, has_part_reader) in [(2, false), (3, false), (2, true), (3, true)] {
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let load = |weights: &Weights| {
            let share = |total, unit| weights.world().share(total, unit);
            let part = |name, rows: usize, columns: usize| {
                let weights = weights.at(name);
                let parts = match name {
                    "rows" => [(weights.rows([share(rows, 1)], rows), share(rows, 1).len())],
                    _ => [(weights.columns(share(columns, 100), columns), rows)],
                };
                let columns = if name == "rows" { columns } else { share(columns, 100).len() };
                match Weights::matrix(&parts, "weight", columns).unwrap() {
                    Matrix::Dense(tensor) => tensor,
                    _ => panic!("the loaded matrix is not dense"),
                }
            };
            let whole = weights.at("whole").float("weight", &[500_000]).unwrap();
            [part("long", 7, 200_000), part("short", 3000, 700), whole, part("rows", 4000, 300)]
        };
        let before = read_bytes(&checkpoint);
        let parts = on_ranks(ranks, |world| {
            let progress = LoadProgress::silent();
            let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).world(world.clone());
            let options = ReadAheadOptions { threads: 3, piece_bytes: 100_003, ahead_bytes: 0 };
            let weights =
                if has_part_reader { weights.read_parts(PartReader::new(Host::default(), options)) } else { weights };
            load(&weights.build().unwrap())
        });
        let case = format!("{ranks} ranks, with a part reader: {has_part_reader}");
        assert_eq!(read_bytes(&checkpoint) - before, checkpoint.bytes(), "{case}");
        let expected = on_ranks(ranks, |world| {
            let progress = LoadProgress::silent();
            let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress);
            load(&weights.world(world.clone()).share_reads(false).build().unwrap())
        });
        for (part, expected) in parts.iter().flatten().zip(expected.iter().flatten()) {
            assert_eq!(part.dims(), expected.dims(), "{case}");
            assert!(bits(part) == bits(expected), "{case}");
        }
    }
}

/// Each rank converts some of the rows of a matrix. It keeps the whole matrix, or its part of the columns, which may be
/// empty.
/// Each row is at least as long as the read window of `weights/reading/source.rs` (64 KiB),
/// so that no thread reads more bytes than it converts.
#[test]
fn ranks_that_convert_rows_together_get_their_parts_and_read_every_byte_once() {
    let (rows, columns) = (40, 65_536);
    let floats = snapshot([("x.weight".into(), random(rows * columns, DType::F32).reshape((rows, columns)).unwrap())]);
    let gguf = {
        let blocks = Random(1).bytes(&[rows * columns / 32 * 34], 0..30).to_vec1::<u8>().unwrap();
        let shape = [columns as u64, rows as u64];
        let writer = Writer::new().string("general.architecture", "llama").u32("llama.block_count", 1);
        saved(&writer.tensor("blk.0.ffn_down.weight", &shape, GgmlType::Q8_0.id(), &blocks))
    };
    let eight_bit = eight_bit_matrix(rows, columns);
    let down = "model.layers.0.mlp.down_proj";
    for (path, module, target) in [
        (floats.path(), "x", Some("int8")),
        (floats.path(), "x", Some("q4_k")),
        (gguf.1.as_path(), down, None),
        (eight_bit.path(), down, None),
    ] {
        let checkpoint = Checkpoint::open(path).unwrap();
        // Loads the matrix on `ranks` ranks: either whole on each rank, or divided. If it is divided, the ranks divide
        // its first 2048 columns and keep no others.
        let load = |ranks: usize, is_divided: bool, is_shared: bool| {
            on_ranks(ranks, |world| {
                let progress = LoadProgress::silent();
                let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress);
                let weights = weights.quantize(target.map(|target| target.parse().unwrap()));
                let weights = weights.world(world.clone()).share_reads(is_shared).build().unwrap();
                // A Q4_K matrix can be divided only between blocks of 256 columns. 2048 columns have 8 blocks,
                // so one of nine ranks gets none.
                let kept = if is_divided { world.share(2048, 256) } else { 0..columns };
                let weights = weights.at(module);
                let weights = if is_divided { weights.columns(kept.clone(), columns) } else { weights };
                match Weights::matrix(&[(weights, rows)], "weight", kept.len()).unwrap() {
                    Matrix::Dense(empty) => vec![bits(&empty)],
                    Matrix::Quantized(parts) => parts.iter().flat_map(|part| part.tensors().map(bits)).collect(),
                    Matrix::Concatenated(_) => panic!("a single matrix was concatenated"),
                }
            })
        };
        for (ranks, is_divided) in [(2, true), (3, true), (9, true), (2, false), (3, false)] {
            let before = read_bytes(&checkpoint);
            let parts = load(ranks, is_divided, true);
            let read = read_bytes(&checkpoint) - before;
            // Each rank reads all scales of an 8-bit matrix.
            let scale_bytes = if path == eight_bit.path() { (ranks * rows * size_of::<f32>()) as u64 } else { 0 };
            let matrix_bytes = checkpoint.bytes() - scale_bytes / ranks as u64;
            assert_eq!(read, matrix_bytes + scale_bytes, "bytes read of {module} as {target:?} on {ranks} ranks");
            let alone = load(ranks, is_divided, false);
            assert!(parts == alone, "shared reads changed {module} as {target:?} on {ranks} ranks");
        }
    }
}

/// Each rank reads and converts only its own rows of a float matrix in a GGUF file.
/// Covers a matrix that is stored in the compute dtype, one that is converted, and one whose rows are reordered.
/// Each row is at least as long as the read window of `weights/reading/source.rs` (64 KiB).
#[test]
fn ranks_read_only_their_rows_of_float_matrices_in_gguf_files() {
    let (rows, columns, heads) = (24, 40_000, 4);
    let bytes = |tensor: Tensor| -> Vec<u8> {
        let values = tensor.to_vec1::<half::f16>().unwrap();
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    };
    let mut writer = Writer::new().string("general.architecture", "llama").u32("llama.block_count", 1);
    writer = writer.u32("llama.attention.head_count", heads as u32);
    for name in ["blk.0.attn_q.weight", "blk.0.ffn_up.weight"] {
        let values = bytes(random(rows * columns, DType::F16));
        writer = writer.tensor(name, &[columns as u64, rows as u64], GgmlType::F16.id(), &values);
    }
    let (_folder, path) = saved(&writer);
    let checkpoint = Checkpoint::open(&path).unwrap();
    for dtype in [DType::F16, DType::F32] {
        // Loads the rows of whole heads of both matrices.
        let load = |world: &World| {
            let progress = LoadProgress::silent();
            let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, dtype, &progress).world(world.clone());
            let weights = weights.build().unwrap().at("model.layers.0");
            let own = world.share(rows, rows / heads);
            ["self_attn.q_proj", "mlp.up_proj"].map(|module| {
                let parts = [(weights.at(module).rows([own.clone()], rows), own.len())];
                match Weights::matrix(&parts, "weight", columns).unwrap() {
                    Matrix::Dense(tensor) => bits(&tensor),
                    _ => panic!("the loaded matrix is not dense"),
                }
            })
        };
        let whole = load(&World::alone());
        for ranks in [2, 3, 5] {
            let before = read_bytes(&checkpoint);
            let parts = on_ranks(ranks, load);
            assert_eq!(read_bytes(&checkpoint) - before, checkpoint.bytes(), "{ranks} ranks, {dtype:?}");
            for (index, whole) in whole.iter().enumerate() {
                let joined: Vec<u32> = parts.iter().flat_map(|part| part[index].clone()).collect();
                assert!(joined == *whole, "{ranks} ranks, {dtype:?}, matrix {index}");
            }
        }
    }
}

/// Writes a checkpoint with one int8 matrix and a scale for each of its rows.
fn eight_bit_matrix(rows: usize, columns: usize) -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::copy(golden("compressed/int8_weights/config.json"), folder.path().join("config.json")).unwrap();
    let codes = Random(2).bytes(&[rows * columns], 0..256).to_vec1::<u8>().unwrap();
    let scales: Vec<u8> = (0..rows).flat_map(|row| (row as f32 + 1.0).to_le_bytes()).collect();
    let views = [
        ("weight", TensorView::new(Dtype::I8, vec![rows, columns], &codes).unwrap()),
        ("weight_scale", TensorView::new(Dtype::F32, vec![rows, 1], &scales).unwrap()),
    ];
    let views = views.map(|(name, view)| (format!("model.layers.0.mlp.down_proj.{name}"), view));
    ::safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// A rank that waits for another rank gives up after a time limit. The limit starts again when the other rank reports
/// progress. A rank that loads tensors alone, such as its own layers, must therefore report each of them.
#[test]
fn each_tensor_of_a_gguf_file_that_a_rank_loads_counts_as_progress() {
    let (rows, columns) = (4, 64);
    let blocks = Random(4).bytes(&[rows * columns / 32 * 34], 0..30).to_vec1::<u8>().unwrap();
    let norm: Vec<u8> = (0..columns).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let writer = Writer::new().string("general.architecture", "llama").u32("llama.block_count", 1);
    let writer = writer.tensor("blk.0.ffn_norm.weight", &[columns as u64], GgmlType::F32.id(), &norm);
    let shape = [columns as u64, rows as u64];
    let (_folder, path) = saved(&writer.tensor("blk.0.ffn_down.weight", &shape, GgmlType::Q8_0.id(), &blocks));
    let (checkpoint, progress) = (Checkpoint::open(&path).unwrap(), LoadProgress::silent());
    let world = World::threads(2).remove(0);
    let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).world(world.clone());
    let weights = weights.build().unwrap().at("model.layers.0").undivided();

    let start = world.progress(0);
    weights.at("post_attention_layernorm").float("weight", &[columns]).unwrap();
    let after_norm = world.progress(0);
    assert!(after_norm > start, "the norm does not count as progress");
    Weights::matrix(&[(weights.at("mlp.down_proj"), rows)], "weight", columns).unwrap();
    assert!(world.progress(0) > after_norm, "the matrix does not count as progress");
}

/// Loads a quantized GGUF tensor as floats.
/// Each row is longer than the read window of `weights/reading/source.rs` (64 KiB).
/// With shorter rows, a thread could also read rows that another thread dequantizes, and these bytes would count twice.
#[test]
fn ranks_that_dequantize_rows_together_read_every_byte_once() {
    let (rows, columns) = (33, 65_536);
    let blocks = Random(3).bytes(&[rows * columns / 32 * 34], 0..30).to_vec1::<u8>().unwrap();
    let writer = Writer::new().string("general.architecture", "llama").u32("llama.block_count", 1);
    let shape = [columns as u64, rows as u64];
    let (_folder, path) = saved(&writer.tensor("token_embd.weight", &shape, GgmlType::Q8_0.id(), &blocks));
    let checkpoint = Checkpoint::open(&path).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        for ranks in [1, 2, 3] {
            let before = read_bytes(&checkpoint);
            let floats = on_ranks(ranks, |world| {
                let progress = LoadProgress::silent();
                let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, dtype, &progress).world(world.clone());
                bits(&weights.build().unwrap().at("model.embed_tokens").float("weight", &[rows, columns]).unwrap())
            });
            assert_eq!(read_bytes(&checkpoint) - before, checkpoint.bytes(), "{ranks} ranks, {dtype:?}");
            let mut expected = vec![0.0; rows * columns];
            GgmlType::Q8_0.dequantize(&blocks, &mut expected).unwrap();
            let expected = Tensor::from_vec(expected, (rows, columns), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            assert!(floats.iter().all(|floats| *floats == bits(&expected)), "{ranks} ranks, {dtype:?}");
        }
    }
}

/// Loads a whole matrix, ranges of its rows, a range of its columns, and ranges of stacked vectors.
/// Pieces of the whole matrix and of the row ranges end inside rows. All other pieces consist of whole rows.
#[test]
fn parts_read_by_several_threads_equal_parts_read_at_once() {
    let matrix = random(1000 * 700, DType::F32).reshape((1000, 700)).unwrap();
    let vectors = random(400 * 2000, DType::F32).reshape((400, 2000)).unwrap();
    let folder = snapshot([("a.weight".into(), matrix), ("a.bias".into(), vectors)]);
    let (checkpoint, progress) = (Checkpoint::open(folder.path()).unwrap(), LoadProgress::silent());
    let world = World::threads(2).remove(0);
    let builder = || {
        let builder = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress);
        builder.world(world.clone()).share_reads(false)
    };
    let dense = |weights: Weights, rows, columns| match Weights::matrix(&[(weights, rows)], "weight", columns).unwrap()
    {
        Matrix::Dense(tensor) => tensor,
        _ => panic!("the loaded matrix is not dense"),
    };
    let load = |weights: &Weights| {
        let weights = weights.at("a");
        [
            weights.float("weight", &[1000, 700]).unwrap(),
            dense(weights.rows([100..300, 500..900], 1000), 600, 700),
            dense(weights.columns(64..600, 700), 1000, 536),
            weights.rows([3..4, 500..1700], 2000).stacked_vectors("bias", 400, 1201).unwrap(),
        ]
    };
    let expected = load(&builder().build().unwrap());
    for (threads, piece_bytes) in [(1, 1 << 20), (4, 100_003), (4, 1000)] {
        let host = Host::default();
        let options = ReadAheadOptions { threads, piece_bytes, ahead_bytes: 0 };
        let reader = PartReader::new(host.clone(), options);
        let parts = load(&builder().read_parts(reader).build().unwrap());
        for (part, expected) in parts.iter().zip(&expected) {
            assert_eq!(part.dims(), expected.dims());
            assert!(
                bits(part) == bits(expected),
                "wrong values with {threads} threads and pieces of {piece_bytes} bytes"
            );
        }
        assert_eq!(host.live.load(Ordering::SeqCst), 0, "some memory was not freed");
    }
    let reader = PartReader::new(Host { limit: Some(1000), ..Host::default() }, small(2));
    let weights = builder().read_parts(reader).build().unwrap();
    let error = format!("{:#}", weights.float("a.weight", &[1000, 700]).unwrap_err());
    assert!(error.contains("a.weight") && error.contains("out of memory"), "{error}");
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
