//! Quantizes one row of floats, packs one row of blocks into planes, and reads one row of floats.

use anyhow::{Context, Result, bail};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use float8::F8E4M3;
use safetensors::tensor::Dtype;

use crate::kernels::quantized::{E4M3_MAX, GROUP_COLUMNS, WeightFormat, pack};
use crate::weights::ggml::{self, GgmlType, split_group, super_scales};

/// Quantizes a row to blocks of a ggml type. The blocks dequantize to the same values as those of ggml's quantizers.
pub fn quantize_row(ggml_type: GgmlType, values: Vec<f32>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; values.len() / ggml_type.block_length() * ggml_type.block_bytes()];
    let mut blocks = bytes.chunks_exact_mut(ggml_type.block_bytes()).zip(values.chunks_exact(ggml_type.block_length()));
    if blocks.all(|(block, values)| ggml::quantize(ggml_type, values, block)) {
        return Ok(bytes);
    }
    // `ggml::quantize` supports only K-quants. For the other types, candle's quantizers match the results of ggml.
    let columns = values.len();
    let row = Tensor::from_vec(values, columns, &Device::Cpu)?;
    Ok(QTensor::quantize(&row, candle_type(ggml_type)?)?.data()?.to_vec())
}

/// Returns the candle type for a legacy ggml type (Q4_0 to Q8_0). Fails for all other types.
fn candle_type(ggml_type: GgmlType) -> Result<GgmlDType> {
    Ok(match ggml_type {
        GgmlType::Q4_0 => GgmlDType::Q4_0,
        GgmlType::Q4_1 => GgmlDType::Q4_1,
        GgmlType::Q5_0 => GgmlDType::Q5_0,
        GgmlType::Q5_1 => GgmlDType::Q5_1,
        GgmlType::Q8_0 => GgmlDType::Q8_0,
        other => bail!("cannot quantize to {other}"),
    })
}

/// Packs a row of ggml blocks into the planes of a memory format.
pub fn pack_row(ggml_type: GgmlType, format: WeightFormat, bytes: &[u8], planes: [&mut [u8]; 4]) {
    let sizes = format.plane_bytes();
    let [low, high, scales, supers] = planes;
    let groups = ggml_type.block_length() / GROUP_COLUMNS;
    for (index, block) in bytes.chunks_exact(ggml_type.block_bytes()).enumerate() {
        for group in 0..groups {
            let at = index * groups + group;
            let q = split_group(ggml_type, block, group, &mut scales[at * sizes.scales..][..sizes.scales]);
            let high = if sizes.high == 0 { &mut [][..] } else { &mut high[at * sizes.high..][..sizes.high] };
            pack(&q, &mut low[at * sizes.low..][..sizes.low], high);
        }
        let super_scales = super_scales(ggml_type, block);
        supers[index * sizes.supers..][..super_scales.len()].copy_from_slice(super_scales);
    }
}

/// Quantizes a row to int8 or E4M3. The scale maps the largest magnitude to 127 (int8) or 448 (E4M3).
pub fn quantize_row_8bit(format: WeightFormat, values: &[f32], planes: [&mut [u8]; 4]) {
    let [low, _, scales, _] = planes;
    let max = values.iter().fold(0.0f32, |max, value| max.max(value.abs()));
    let scale = if format == WeightFormat::Int8 { max / 127.0 } else { max / E4M3_MAX };
    for (q, value) in low.iter_mut().zip(values) {
        let value = if scale > 0.0 { value / scale } else { 0.0 };
        *q = match format {
            WeightFormat::Int8 => value.round_ties_even() as i8 as u8,
            _ => F8E4M3::from_f32(value).to_bits(),
        };
    }
    scales.copy_from_slice(&scale.to_le_bytes());
}

/// Converts F32, F16, BF16 or E4M3 elements to f32.
/// Fails for other dtypes, or if the number of bytes does not match the number of values.
pub fn read_floats(dtype: Dtype, bytes: &[u8], values: &mut [f32]) -> Result<()> {
    let ggml_type = match dtype {
        Dtype::F32 => GgmlType::F32,
        Dtype::F16 => GgmlType::F16,
        Dtype::BF16 => GgmlType::Bf16,
        Dtype::F8_E4M3 if bytes.len() == values.len() => {
            values.iter_mut().zip(bytes).for_each(|(value, byte)| *value = F8E4M3::from_bits(*byte).to_f32());
            return Ok(());
        }
        other => bail!("cannot read {other} as floats"),
    };
    ggml_type.dequantize(bytes, values).context("cannot read a row of floats")
}
