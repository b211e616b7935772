//! Computes from the file headers how ranks divide the tensors of a model: the method [`Inventory::rank_shares`].
//!
//! The `load` functions of the layers in `nn` divide the tensors during loading.
//! Before loading, this module computes the memory of each rank from the tensor table of the model's family.
//! Tests compare the results with the sizes of the tensors that the `load` functions load.

use std::collections::HashMap;

use candle_core::DType;

use super::inventory::{ColumnUnits, Inventory, InventoryTensor};
use super::quantized::QuantizedShape;
use super::tensor_kind::TensorKind;
use super::tensor_table::{Dimension, Division};
use crate::world::share;

/// Ranks divide an intermediate size at multiples of this number of columns, or of a larger column unit of `down_proj`.
/// This is the length of an MXFP4 block, and satisfies the alignment required by the kernels for float matrices.
pub const SHARE_COLUMNS: usize = 32;

/// The part of a model that one rank holds if every layer is divided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankShare {
    /// The size of the loaded weights in memory, in bytes.
    pub weight_bytes: u64,
    /// The number of KV heads that the rank holds in each layer.
    pub kv_heads: Vec<usize>,
}

/// The sizes that determine how ranks divide one layer.
/// Attention depends on `kv_heads` and `o_proj`, and the MLP or the experts depend on `down_proj`.
#[derive(Clone, Copy, Debug, Default)]
struct LayerUnits {
    kv_heads: usize,
    o_proj: Option<ColumnUnits>,
    down_proj: Option<ColumnUnits>,
}

/// Returns the smallest number of KV heads whose query heads together fill whole column units of `o_proj`.
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
    /// Returns how ranks divide the tensor. The biases of a matrix that is divided by columns are not divided.
    fn division(&self) -> Division {
        match self.role.division {
            Division::Columns(_) if self.kind == TensorKind::Bias => Division::Whole,
            division => division,
        }
    }

    /// Returns the memory size of a part of the tensor, in bytes.
    /// The part has the fraction `len` / `total` of the rows or columns.
    fn part_bytes(&self, len: usize, total: usize, dtype: DType) -> u64 {
        let part = |whole: u64| (u128::from(whole) * len as u128 / total.max(1) as u128) as u64;
        match (self.quantized, self.division()) {
            _ if len == 0 => 0,
            (Some(QuantizedShape { format, rows, columns }), Division::Rows(_)) => {
                format.bytes(part(rows as u64), columns as u64)
            }
            (Some(QuantizedShape { format, rows, columns }), Division::Columns(_)) => {
                format.bytes(rows as u64, part(columns as u64))
            }
            _ => part(self.loaded_bytes(dtype)),
        }
    }
}

impl Inventory {
    /// Returns the part of the model that each of `ranks` ranks holds if every layer is divided.
    /// `kv_heads` has the number of KV heads of each layer.
    pub fn rank_shares(&self, kv_heads: &[usize], ranks: usize, dtype: DType) -> Vec<RankShare> {
        let mut layers: Vec<LayerUnits> =
            kv_heads.iter().map(|&kv_heads| LayerUnits { kv_heads, ..LayerUnits::default() }).collect();
        let mut vocabulary: Option<usize> = None;
        for tensor in &self.tensors {
            let layer = tensor.layer().and_then(|layer| layers.get_mut(layer));
            match (tensor.division(), layer) {
                (Division::Columns(Dimension::Heads), Some(layer)) => {
                    layer.o_proj = layer.o_proj.or(tensor.columns);
                }
                (Division::Columns(Dimension::Intermediate), Some(layer)) => {
                    layer.down_proj = layer.down_proj.or(tensor.columns);
                }
                (Division::Rows(Dimension::Vocabulary), _) => vocabulary = vocabulary.or(tensor.rows),
                _ => {}
            }
        }
        let part = |rank: usize| {
            let mut shares: HashMap<(usize, Dimension), (usize, usize)> = HashMap::new();
            let mut weight_bytes = 0u64;
            for tensor in &self.tensors {
                let layer = tensor.layer().filter(|&layer| layer < layers.len());
                let share_of = match (tensor.division().dimension(), layer) {
                    (Some(Dimension::Vocabulary), _) => {
                        vocabulary.map(|total| (share(total, 1, rank, ranks).len(), total))
                    }
                    (Some(dimension), Some(layer)) => {
                        let compute = || share_of_layer(&layers[layer], dimension, rank, ranks);
                        Some(*shares.entry((layer, dimension)).or_insert_with(compute))
                    }
                    // Count the whole tensor if ranks do not divide it, or if it belongs to no decoder layer.
                    _ => None,
                };
                weight_bytes = weight_bytes.saturating_add(match share_of {
                    Some((len, total)) => tensor.part_bytes(len, total, dtype),
                    None => tensor.loaded_bytes(dtype),
                });
            }
            RankShare { weight_bytes, kv_heads: layers.iter().map(|layer| layer.kv_share(rank, ranks)).collect() }
        };
        (0..ranks).map(part).collect()
    }
}

/// Returns the length of a rank's part of `dimension` in a layer, and the whole length of `dimension`.
/// Counts KV heads for [`Dimension::Heads`], and columns of `down_proj` for [`Dimension::Intermediate`].
fn share_of_layer(layer: &LayerUnits, dimension: Dimension, rank: usize, ranks: usize) -> (usize, usize) {
    match (dimension, layer.down_proj) {
        (Dimension::Heads, _) => (layer.kv_share(rank, ranks), layer.kv_heads),
        (_, Some(ColumnUnits { columns, unit })) => {
            (share(columns, SHARE_COLUMNS.max(unit), rank, ranks).len(), columns)
        }
        // If the layer has no `down_proj`, assume equal parts.
        (_, None) => (1, ranks),
    }
}
