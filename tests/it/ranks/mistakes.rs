//! Classic mistakes of tensor parallelism, each of which must change the logits.
//!
//! The tests in `ranks` compare logits with transformers. The tests in this file show that this comparison finds the
//! mistakes. To imitate a mistake without changing the code, each rank loads its part from its own edited copy of the
//! checkpoint.

use std::fs;
use std::path::Path;

use candle_core::{DType, Device};
use half::bf16;
use inferno::models;
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder};
use inferno::world::share;
use serde_json::Value;
use tempfile::TempDir;

use crate::ranks::{CONTEXT, on_ranks};
use crate::support::{expected_logits, golden, logits_of, relative_error, values};

const RANKS: usize = 2;

/// A tensor in a copy of a checkpoint. Tests edit its values in place.
struct Stored<'t> {
    name: &'t str,
    dtype: &'t str,
    shape: Vec<usize>,
    data: &'t mut [u8],
}

impl Stored<'_> {
    fn has_name_end(&self, end: &str) -> bool {
        self.name.ends_with(end)
    }

    fn double(&mut self) {
        match self.dtype {
            "F32" => self.data.as_chunks_mut().0.iter_mut().for_each(|bytes| {
                *bytes = (2.0 * f32::from_le_bytes(*bytes)).to_le_bytes();
            }),
            "BF16" => self.data.as_chunks_mut().0.iter_mut().for_each(|bytes| {
                *bytes = bf16::from_f32(2.0 * bf16::from_le_bytes(*bytes).to_f32()).to_le_bytes();
            }),
            other => panic!("{}: {other}", self.name),
        }
    }

    /// Replaces each row `i` along dimension `dim` with row `source(i)` of the original tensor.
    fn move_rows(&mut self, dim: usize, source: impl Fn(usize) -> usize) {
        let (outer, rows) = (self.shape[..dim].iter().product::<usize>(), self.shape[dim]);
        let row_bytes = self.data.len() / (outer * rows);
        let old = self.data.to_vec();
        for (index, row) in self.data.chunks_exact_mut(row_bytes).enumerate() {
            let from = index / rows * rows + source(index % rows);
            row.copy_from_slice(&old[from * row_bytes..][..row_bytes]);
        }
    }
}

/// Copies a golden model to a temporary folder, and calls `edit` for each tensor of the copy.
/// Returns the folder and whether `edit` changed a tensor.
fn altered(case: &str, edit: &dyn Fn(&mut Stored)) -> (TempDir, bool) {
    let (folder, mut has_changed) = (TempDir::new().unwrap(), false);
    for file in fs::read_dir(golden(case)).unwrap().map(|file| file.unwrap().path()) {
        let mut bytes = fs::read(&file).unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let (header, data) = bytes[8..].split_at_mut(length);
            let header: Value = serde_json::from_slice(header).unwrap();
            let before = data.to_vec();
            for (name, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
                let numbers = |value: &Value| {
                    let numbers = value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize);
                    numbers.collect::<Vec<_>>()
                };
                let [start, end] = numbers(&tensor["data_offsets"])[..] else { panic!("{tensor}") };
                let (dtype, shape) = (tensor["dtype"].as_str().unwrap(), numbers(&tensor["shape"]));
                edit(&mut Stored { name, dtype, shape, data: &mut data[start..end] });
            }
            has_changed |= *data != before;
        }
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    (folder, has_changed)
}

/// Returns the relative error of the first rank's logits, compared with transformers.
/// Rank i loads its part from `folders[i]`.
fn logits_error(case: &str, folders: &[&Path]) -> f32 {
    let (ids, expected) = expected_logits(&golden(case).join("golden.safetensors"));
    let logits = on_ranks(RANKS, |world| {
        let path = folders[world.rank()];
        let (config, checkpoint) = (models::read_config(path).unwrap(), Checkpoint::open(path).unwrap());
        let progress = LoadProgress::silent();
        let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress);
        let weights = weights.world(world.clone()).share_reads(false).build().unwrap();
        let decoder = config.build(&weights, CONTEXT).unwrap();
        values(&logits_of(&decoder, &ids, DType::F32, &Device::Cpu).unwrap())
    });
    relative_error(&logits[0], &expected)
}

/// Asserts that the logits are correct without the mistake, and that the mistake changes them by more than the tests in
/// `ranks` allow. To imitate the mistake, `edit(rank, tensor)` edits a tensor in the copy of `rank`.
fn assert_found(mistake: &str, case: &str, edit: impl Fn(usize, &mut Stored)) {
    let unchanged: Vec<_> = (0..RANKS).map(|_| altered(case, &|_| ())).collect();
    let folders = |copies: &[(TempDir, bool)]| logits_error(case, &[copies[0].0.path(), copies[1].0.path()]);
    assert!(folders(&unchanged) < 1e-4, "the logits of {case} are wrong without a mistake");
    let changed: Vec<_> = (0..RANKS).map(|rank| altered(case, &|stored| edit(rank, stored))).collect();
    assert!(changed.iter().any(|(_, has_changed)| *has_changed), "{mistake} in {case}: no tensor was changed");
    let error = folders(&changed);
    println!("{mistake} in {case}: the relative error of the logits is {error:e}");
    // The tests in `ranks` allow these models an error of 1e-4. Require twice this error, so that the mistake is not
    // found only by a narrow margin.
    assert!(error > 2e-4, "{mistake} in {case}: the relative error of the logits is only {error:e}");
}

/// Returns a `source` for [`Stored::move_rows`] that copies the first rows to the part of the second rank.
/// This imitates a rank that reads its rows from the start of the tensor. Ranks divide the rows in units of `unit`.
fn unsliced(rows: usize, unit: usize) -> impl Fn(usize) -> usize {
    let start = share(rows, unit, 1, RANKS).start;
    move |row| row.checked_sub(start).unwrap_or(row)
}

#[test]
fn a_bias_that_both_ranks_add_is_found() {
    for (case, biases) in [
        ("gpt_oss", ["o_proj.bias", "down_proj_bias"]),
        ("llama_new", ["o_proj.bias", "down_proj.bias"]),
        ("gpt2", ["attn.c_proj.bias", "mlp.c_proj.bias"]),
    ] {
        for bias in biases {
            assert_found(&format!("{bias} added twice"), case, |_, stored| {
                // Only the first rank adds `down_proj_bias`, so doubling it has the same effect as if both ranks added
                // it. Each rank adds the other biases to the sum over all ranks, as if both parts contained them.
                if stored.has_name_end(bias) {
                    stored.double();
                }
            });
        }
    }
}

#[test]
fn sinks_that_are_not_sliced_are_found() {
    // Ranks divide the query heads by KV heads. Both models have this many query heads for each.
    const HEADS_PER_KV_HEAD: usize = 5;
    for case in ["gpt_oss", "gpt_oss_new"] {
        assert_found("sinks of the wrong heads on rank 1", case, |rank, stored| {
            if rank == 1 && stored.has_name_end("sinks") {
                stored.move_rows(0, unsliced(stored.shape[0], HEADS_PER_KV_HEAD));
            }
        });
    }
}

#[test]
fn gate_and_up_rows_that_are_cut_in_the_wrong_place_are_found() {
    // In gpt-oss, gate rows and up rows alternate. A part that starts at an odd row therefore exchanges gate and up.
    assert_found("gate_up_proj cut at an odd row", "gpt_oss", |rank, stored| {
        if rank == 1
            && ["gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"]
                .iter()
                .any(|e| stored.has_name_end(e))
        {
            let rows = stored.shape[1];
            stored.move_rows(1, |row| (row + 1) % rows);
        }
    });
    // In Phi-3, all gate rows come before all up rows, so a rank's part is two ranges of rows. A single range is wrong.
    assert_found("gate_up_proj cut as one range of rows", "phi3", |rank, stored| {
        if stored.has_name_end("gate_up_proj.weight") {
            let size = stored.shape[0] / 2;
            let share = share(size, 32, rank, RANKS);
            let (start, length) = (share.start, share.len());
            stored.move_rows(0, |row| match row % size {
                part if !share.contains(&part) => row,
                part => 2 * start + part - start + if row < size { 0 } else { length },
            });
        }
    });
}

#[test]
fn scales_that_are_not_cut_are_found() {
    for name in ["gate_proj.weight_scale", "up_proj.weight_scale"] {
        assert_found(&format!("{name} of the first rows"), "compressed/int8_weights", |rank, stored| {
            if rank == 1 && stored.has_name_end(name) {
                stored.move_rows(0, unsliced(stored.shape[0], 32));
            }
        });
    }
    assert_found("MXFP4 scales of the first rows", "gpt_oss", |rank, stored| {
        if rank == 1 && stored.has_name_end("gate_up_proj_scales") {
            stored.move_rows(1, unsliced(stored.shape[1], 64));
        }
    });
    assert_found("MXFP4 scales of the first columns", "gpt_oss", |rank, stored| {
        if rank == 1 && stored.has_name_end("down_proj_scales") {
            stored.move_rows(2, unsliced(stored.shape[2], 1));
        }
    });
}

#[test]
fn an_output_head_in_the_wrong_order_is_found() {
    for case in ["gpt_oss", "phi3", "llama_new"] {
        assert_found("lm_head with the second rank's rows first", case, |_, stored| {
            if stored.has_name_end("lm_head.weight") {
                let (rows, first) = (stored.shape[0], share(stored.shape[0], 1, 0, RANKS).len());
                stored.move_rows(0, |row| (row + first) % rows);
            }
        });
    }
}
