//! Tests of ranks that read their parts of the weights, each rank alone or all ranks together.
//! The parts must not depend on how they are read, and ranks that read together must read every byte once.

use std::sync::atomic::Ordering;

use candle_core::{DType, Device, Tensor};
use inferno::kernels::matrix::Matrix;
use inferno::weights::ggml::GgmlType;
use inferno::weights::{Checkpoint, LoadProgress, PartReader, ReadAheadOptions, Weights, WeightsBuilder};
use inferno::world::World;
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use super::{Host, bits, random, small, snapshot};
use crate::ranks::{on_ranks, read_bytes};
use crate::support::gguf::models::saved;
use crate::support::gguf::writer::Writer;
use crate::support::{Random, golden};

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
            assert_eq!(
                read,
                matrix_bytes + scale_bytes,
                "bytes read for {module}, quantized to {target:?}, on {ranks} ranks"
            );
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
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
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
