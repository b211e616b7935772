//! [`QuantizationTarget`]: the format to which loading quantizes float matrices.

use std::fmt;
use std::str::FromStr;

use crate::kernels::quantized::WeightFormat;
use crate::weights::ggml::GgmlType;

/// The format to which loading quantizes float matrices (see [`WeightsBuilder`](crate::weights::WeightsBuilder)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizationTarget {
    /// Blocks of a ggml type.
    Blocks(GgmlType),
    /// E4M3 with one scale per row.
    Fp8,
    /// Int8 with one scale per row.
    Int8,
}

impl QuantizationTarget {
    const NAMES: [(&str, Self); 12] = [
        ("q8_0", Self::Blocks(GgmlType::Q8_0)),
        ("q6_k", Self::Blocks(GgmlType::Q6K)),
        ("q5_k", Self::Blocks(GgmlType::Q5K)),
        ("q4_k", Self::Blocks(GgmlType::Q4K)),
        ("q3_k", Self::Blocks(GgmlType::Q3K)),
        ("q2_k", Self::Blocks(GgmlType::Q2K)),
        ("q5_1", Self::Blocks(GgmlType::Q5_1)),
        ("q5_0", Self::Blocks(GgmlType::Q5_0)),
        ("q4_1", Self::Blocks(GgmlType::Q4_1)),
        ("q4_0", Self::Blocks(GgmlType::Q4_0)),
        ("fp8", Self::Fp8),
        ("int8", Self::Int8),
    ];

    /// Returns the format of a matrix with `columns` columns, or `None` if the matrix is loaded as floats.
    pub fn weight_format(self, columns: usize) -> Option<WeightFormat> {
        match self {
            Self::Fp8 => Some(WeightFormat::Fp8),
            Self::Int8 => Some(WeightFormat::Int8),
            Self::Blocks(ggml_type) => weight_format(Self::fitting_type(ggml_type, columns)?),
        }
    }

    /// Returns `ggml_type` if a row of `columns` values consists of whole blocks of this type.
    /// Otherwise, returns the fallback type if a row consists of whole blocks of that type, or else `None`.
    /// Only K-quants have a fallback type, which has shorter blocks and more bits per value.
    /// The fallback types are those of llama.cpp, except Q4_0 (IQ4_NL in llama.cpp).
    pub fn fitting_type(ggml_type: GgmlType, columns: usize) -> Option<GgmlType> {
        let fallback = match ggml_type {
            GgmlType::Q2K | GgmlType::Q3K => GgmlType::Q4_0,
            GgmlType::Q4K => GgmlType::Q5_0,
            GgmlType::Q5K => GgmlType::Q5_1,
            GgmlType::Q6K => GgmlType::Q8_0,
            other => other,
        };
        [ggml_type, fallback].into_iter().find(|ggml_type| columns.is_multiple_of(ggml_type.block_length()))
    }
}

impl FromStr for QuantizationTarget {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        known.map(|(_, target)| *target).ok_or_else(|| {
            let names: Vec<_> = Self::NAMES.iter().map(|(name, _)| *name).collect();
            format!("choose one of {}", names.join(", "))
        })
    }
}

impl fmt::Display for QuantizationTarget {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, target)| target == self).map_or("", |(name, _)| name);
        f.pad(name)
    }
}

/// Returns the memory format of a quantized ggml type. Returns `None` for float types and for MXFP4.
pub fn weight_format(ggml_type: GgmlType) -> Option<WeightFormat> {
    Some(match ggml_type {
        GgmlType::Q4_0 => WeightFormat::Q4_0,
        GgmlType::Q4_1 => WeightFormat::Q4_1,
        GgmlType::Q5_0 => WeightFormat::Q5_0,
        GgmlType::Q5_1 => WeightFormat::Q5_1,
        GgmlType::Q8_0 => WeightFormat::Q8_0,
        GgmlType::Q2K => WeightFormat::Q2K,
        GgmlType::Q3K => WeightFormat::Q3K,
        GgmlType::Q4K => WeightFormat::Q4K,
        GgmlType::Q5K => WeightFormat::Q5K,
        GgmlType::Q6K => WeightFormat::Q6K,
        GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 | GgmlType::Mxfp4 => return None,
    })
}
