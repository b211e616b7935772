//! Computes from the file headers how ranks divide the tensors of a model.
//!
//! The `load` functions of the layers in `nn` divide the tensors during loading.
//! This module repeats the rules of the `load` functions to compute the memory of each rank before loading.
//! Tests compare this module with the `load` functions for all model families and formats.

use std::collections::HashMap;

use candle_core::DType;

use super::inventory::{ColumnUnits, Inventory, InventoryTensor};
use super::reading::Axis;
use crate::world::share;

/// Ranks divide an intermediate size at multiples of this number of columns, or of a larger column unit of `down_proj`.
/// An MXFP4 block has 32 columns.
/// Multiples of 32 columns also satisfy the alignment that the kernels for float matrices require.
pub const SHARE_COLUMNS: usize = 32;

/// The part of a model that one rank holds if every layer is divided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankPart {
    /// The size of the loaded weights in memory, in bytes.
    pub weight_bytes: u64,
    /// The number of KV heads that the rank holds in each layer.
    pub kv_heads: Vec<usize>,
}

/// A dimension of a model that is divided among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shared {
    /// The KV heads of a layer, each together with its query heads.
    Heads,
    /// The intermediate size of an MLP or of each expert.
    Intermediate,
    /// The rows of the output head.
    Vocabulary,
}

/// The sizes that determine how ranks divide one layer.
/// Attention depends on `kv_heads` and `o_proj`, and the MLP or the experts depend on `down_proj`.
#[derive(Clone, Copy, Debug, Default)]
struct LayerUnits {
    kv_heads: usize,
    o_proj: Option<ColumnUnits>,
    down_proj: Option<ColumnUnits>,
}

/// Returns the smallest number of KV heads whose query heads fill a multiple of the column unit of `o_proj`.
/// The query heads of one KV head fill `columns` columns, and a unit has `column_unit` columns.
pub fn kv_head_unit(columns: usize, column_unit: usize) -> usize {
    (1..=column_unit).find(|heads| (heads * columns).is_multiple_of(column_unit)).unwrap_or(1)
}

impl LayerUnits {
    /// Returns the number of KV heads of this layer that `rank` holds.
    /// Heads are divided only where a column unit of `o_proj` ends.
    fn kv_share(&self, rank: usize, ranks: usize) -> usize {
        let unit = match self.o_proj {
            Some(ColumnUnits { columns, unit }) if self.kv_heads > 0 => kv_head_unit(columns / self.kv_heads, unit),
            _ => 1,
        };
        share(self.kv_heads, unit, rank, ranks).len()
    }
}

impl InventoryTensor {
    /// Returns the axis and the model dimension by which ranks divide the tensor.
    /// Returns `None` if every rank holds a full copy of the tensor.
    fn division(&self) -> Option<(Axis, Shared)> {
        let parts: Vec<&str> = self.name.split('.').collect();
        let is_bias = self.name.ends_with("bias");
        let has = |names: &[&str]| {
            let is_part = |part: &&str| names.iter().any(|name| part.strip_prefix(name).is_some_and(is_suffix));
            parts.iter().any(is_part)
        };
        let rows = |shared| Some((Axis::Rows, shared));
        let columns = |shared| (!is_bias).then_some((Axis::Columns, shared));
        match self.group() {
            "attention" if has(&["q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "sinks"]) => rows(Shared::Heads),
            "attention" if has(&["o_proj", "c_proj"]) => columns(Shared::Heads),
            "mlp" | "experts" if has(&["gate_proj", "up_proj", "gate_up_proj", "c_fc", "w1", "w3"]) => {
                rows(Shared::Intermediate)
            }
            "mlp" | "experts" if has(&["down_proj", "c_proj", "w2"]) => columns(Shared::Intermediate),
            "head" => rows(Shared::Vocabulary),
            _ => None,
        }
    }

    /// Returns the index of the tensor's layer: the first number in its name. `None` for tensors outside of layers.
    pub(super) fn layer(&self) -> Option<usize> {
        self.name.split('.').find_map(|part| part.parse().ok())
    }

    /// Returns the memory size of a part of the tensor, in bytes.
    /// The part has the fraction `len` / `total` of the rows or columns.
    fn part_bytes(&self, axis: Axis, len: usize, total: usize, dtype: DType) -> u64 {
        let part = |whole: u64| (u128::from(whole) * len as u128 / total.max(1) as u128) as u64;
        match (self.quantized, axis) {
            _ if len == 0 => 0,
            (Some((format, rows, columns)), Axis::Rows) => format.bytes(part(rows as u64), columns as u64),
            (Some((format, rows, columns)), Axis::Columns) => format.bytes(rows as u64, part(columns as u64)),
            (None, _) => part(self.loaded_bytes(dtype)),
        }
    }

    /// Returns `unit` and the number of columns of a matrix. Ranks divide the columns only at multiples of `unit`.
    /// Returns `None` for a vector.
    ///
    /// `shape` is the shape in the file. Callers set `has_bias` only for the unpacked experts of gpt-oss.
    pub(super) fn column_units(&self, shape: &[usize], unit: usize, has_bias: bool) -> Option<ColumnUnits> {
        let is_packed_expert = self.name.ends_with("_blocks") || self.name.ends_with("_scales");
        let columns = match shape {
            // Each MXFP4 group holds 32 columns.
            [_, _, groups, ..] if is_packed_expert => groups * SHARE_COLUMNS,
            // GPT-2 and the unpacked experts of gpt-oss store matrices as `[in, out]`.
            [columns, _] if self.name.contains(".c_") => *columns,
            [_, columns, _] if has_bias => *columns,
            [_, .., columns] => *columns,
            _ => return None,
        };
        Some(ColumnUnits { columns, unit })
    }
}

/// Returns whether `rest`, the text after the name of a projection, is empty or one of the known suffixes.
fn is_suffix(rest: &str) -> bool {
    ["", "_blocks", "_scales", "_bias", "_scale"].contains(&rest)
}

impl Inventory {
    /// Returns the part of the model that each of `ranks` ranks holds if every layer is divided.
    /// `kv_heads` has the number of KV heads of each layer.
    pub fn rank_parts(&self, kv_heads: &[usize], ranks: usize, dtype: DType) -> Vec<RankPart> {
        let mut layers: Vec<LayerUnits> =
            kv_heads.iter().map(|&kv_heads| LayerUnits { kv_heads, ..LayerUnits::default() }).collect();
        let mut vocabulary: Option<usize> = None;
        let divided: Vec<_> = self.tensors.iter().map(|tensor| (tensor, tensor.division())).collect();
        for (tensor, division) in &divided {
            let layer = tensor.layer().and_then(|layer| layers.get_mut(layer));
            match (division, layer) {
                (Some((Axis::Columns, Shared::Heads)), Some(layer)) => {
                    layer.o_proj = layer.o_proj.or(tensor.columns);
                }
                (Some((Axis::Columns, Shared::Intermediate)), Some(layer)) => {
                    layer.down_proj = layer.down_proj.or(tensor.columns);
                }
                (Some((_, Shared::Vocabulary)), _) => vocabulary = vocabulary.or(tensor.rows),
                _ => {}
            }
        }
        let part = |rank: usize| {
            let mut shares: HashMap<(usize, bool), (usize, usize)> = HashMap::new();
            let mut weight_bytes = 0u64;
            for (tensor, division) in &divided {
                let layer = tensor.layer().filter(|&layer| layer < layers.len());
                let share_of = match (division, layer) {
                    (Some((axis, Shared::Vocabulary)), _) => {
                        vocabulary.map(|total| (*axis, (share(total, 1, rank, ranks).len(), total)))
                    }
                    (Some((axis, shared)), Some(layer)) => {
                        let is_heads = *shared == Shared::Heads;
                        let compute = || share_of_layer(&layers[layer], is_heads, rank, ranks);
                        Some((*axis, *shares.entry((layer, is_heads)).or_insert_with(compute)))
                    }
                    // Every rank holds a full copy of the tensor, even if its layer is beyond the model's last layer.
                    _ => None,
                };
                weight_bytes = weight_bytes.saturating_add(match share_of {
                    Some((axis, (len, total))) => tensor.part_bytes(axis, len, total, dtype),
                    None => tensor.loaded_bytes(dtype),
                });
            }
            RankPart { weight_bytes, kv_heads: layers.iter().map(|layer| layer.kv_share(rank, ranks)).collect() }
        };
        (0..ranks).map(part).collect()
    }
}

/// Returns how many KV heads of a layer a rank holds, and how many the layer has.
/// If `is_heads` is false, counts the columns of `down_proj` instead of KV heads.
fn share_of_layer(layer: &LayerUnits, is_heads: bool, rank: usize, ranks: usize) -> (usize, usize) {
    match (is_heads, layer.down_proj) {
        (true, _) => (layer.kv_share(rank, ranks), layer.kv_heads),
        (false, Some(ColumnUnits { columns, unit })) => {
            (share(columns, SHARE_COLUMNS.max(unit), rank, ranks).len(), columns)
        }
        // If the layer has no `down_proj`, assume equal parts.
        (false, None) => (1, ranks),
    }
}
