//! Computes from the file headers how ranks divide the tensors of a model: the method [`Inventory::rank_shares`].
//!
//! The `load` functions of the layers in `nn` divide the tensors during loading.
//! Before loading, this module computes the memory of each rank from the tensor table of the model's family.
//! Tests compare the results with the sizes of the tensors that the `load` functions load.

use candle_core::DType;

use super::Inventory;
use super::tensor::{ColumnUnits, InventoryTensor};
use crate::weights::quantized::QuantizedShape;
use crate::weights::tensor_kind::TensorKind;
use crate::weights::tensor_table::{Dimension, Division};
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

/// The fraction `len / total` of a dimension that a rank holds. Counts KV heads, vocabulary rows, or columns of
/// `down_proj`.
#[derive(Clone, Copy, Debug)]
struct Fraction {
    len: usize,
    total: usize,
}

/// The fractions of a layer's dimensions that a rank holds.
struct LayerFractions {
    heads: Fraction,
    intermediate: Fraction,
}

/// The fractions of a model's dimensions that a rank holds.
struct ModelFractions {
    layers: Vec<LayerFractions>,
    /// `None` if the checkpoint has no output head.
    vocabulary: Option<Fraction>,
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

    fn fractions(&self, rank: usize, ranks: usize) -> LayerFractions {
        let heads = Fraction { len: self.kv_share(rank, ranks), total: self.kv_heads };
        let intermediate = match self.down_proj {
            Some(ColumnUnits { columns, unit }) => {
                Fraction { len: share(columns, SHARE_COLUMNS.max(unit), rank, ranks).len(), total: columns }
            }
            // If the layer has no `down_proj`, assume equal parts.
            None => Fraction { len: 1, total: ranks },
        };
        LayerFractions { heads, intermediate }
    }
}

impl ModelFractions {
    /// Returns the fraction of a tensor that the rank holds.
    /// Returns `None` if ranks do not divide the tensor, or if it belongs to no decoder layer.
    fn of(&self, tensor: &InventoryTensor) -> Option<Fraction> {
        let layer = || self.layers.get(tensor.layer()?);
        match tensor.division().dimension()? {
            Dimension::Vocabulary => self.vocabulary,
            Dimension::Heads => Some(layer()?.heads),
            Dimension::Intermediate => Some(layer()?.intermediate),
        }
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

    /// Returns the memory size of a rank's part of the tensor, in bytes.
    fn part_bytes(&self, fraction: Fraction, dtype: DType) -> u64 {
        let part = |whole: u64| (u128::from(whole) * fraction.len as u128 / fraction.total.max(1) as u128) as u64;
        match (self.quantized, self.division()) {
            _ if fraction.len == 0 => 0,
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
        let layers = self.layer_units(kv_heads);
        let is_vocabulary = |tensor: &&InventoryTensor| tensor.division() == Division::Rows(Dimension::Vocabulary);
        let vocabulary = self.tensors.iter().filter(is_vocabulary).find_map(|tensor| tensor.rows);
        let rank_share = |rank: usize| {
            let vocabulary = vocabulary.map(|total| Fraction { len: share(total, 1, rank, ranks).len(), total });
            let layers: Vec<_> = layers.iter().map(|layer| layer.fractions(rank, ranks)).collect();
            let kv_heads = layers.iter().map(|layer| layer.heads.len).collect();
            RankShare { weight_bytes: self.bytes_of(&ModelFractions { layers, vocabulary }, dtype), kv_heads }
        };
        (0..ranks).map(rank_share).collect()
    }

    fn layer_units(&self, kv_heads: &[usize]) -> Vec<LayerUnits> {
        let units = |&kv_heads: &usize| LayerUnits { kv_heads, ..LayerUnits::default() };
        let mut layers: Vec<LayerUnits> = kv_heads.iter().map(units).collect();
        for tensor in &self.tensors {
            let Some(layer) = tensor.layer().and_then(|layer| layers.get_mut(layer)) else { continue };
            match tensor.division() {
                Division::Columns(Dimension::Heads) => layer.o_proj = layer.o_proj.or(tensor.columns),
                Division::Columns(Dimension::Intermediate) => layer.down_proj = layer.down_proj.or(tensor.columns),
                _ => {}
            }
        }
        layers
    }

    /// Returns the memory size of the weights of a rank that holds `fractions` of the model, in bytes.
    fn bytes_of(&self, fractions: &ModelFractions, dtype: DType) -> u64 {
        let bytes = self.tensors.iter().map(|tensor| match fractions.of(tensor) {
            Some(fraction) => tensor.part_bytes(fraction, dtype),
            None => tensor.loaded_bytes(dtype),
        });
        bytes.fold(0, u64::saturating_add)
    }
}
