//! Which decoders the decode graph supports.

use anyhow::Result;
use candle_core::{DType, Device};

use crate::kernels::attention::FLASH_HEAD_DIMS;
use crate::kernels::decode;
use crate::kernels::matrix::Matrix;
use crate::kernels::moe::{self, experts::ExpertWeights};
use crate::nn::decoder::Decoder;
use crate::nn::layer::DecoderLayer;
use crate::nn::mlp::Mlp;
use crate::nn::moe::ClampedMoe;
use crate::runner::EagerReason;

/// Returns the reason that the graph cannot run a layer, or `None` if it can.
pub(super) fn unsupported_reason(decoder: &Decoder, layer: &DecoderLayer) -> Result<Option<EagerReason>> {
    let dtype = decoder.dtype();
    if !matches!(dtype, DType::BF16 | DType::F16) {
        return Ok(Some(EagerReason::Dtype(dtype)));
    }
    if let Some(what) = decoder.unsupported_reason() {
        return Ok(Some(EagerReason::Layer(what)));
    }
    let head_dim = layer.self_attn.config.spec.head_dim;
    if !FLASH_HEAD_DIMS.contains(&head_dim) {
        return Ok(Some(EagerReason::HeadDim(head_dim)));
    }
    let mut products = vec![(layer.self_attn.qkv_proj.weight.clone(), 1), (layer.self_attn.o_proj.weight.clone(), 1)];
    match mlp_products(&layer.mlp)? {
        Ok(mlp_products) => products.extend(mlp_products),
        Err(reason) => return Ok(Some(reason)),
    }
    if layer.mlp_post_norm.is_some() && !matches!(layer.mlp, Mlp::Gated(_)) {
        return Ok(Some(EagerReason::Layer("a norm after the experts")));
    }
    let Device::Cuda(device) = decoder.embed_tokens.device() else { return Ok(Some(EagerReason::NotOnGpu)) };
    for (weight, inputs) in products {
        if !decode::has_decode_kernel(device, &weight, inputs)? {
            return Ok(Some(match weight {
                Matrix::Concatenated(_) => EagerReason::MixedQkv,
                _ => EagerReason::RowLength(weight.dims().1),
            }));
        }
    }
    Ok(None)
}

/// The weight matrices of one MLP, each with its number of input vectors.
type Products = Vec<(Matrix, usize)>;

/// Returns the weight matrices of an MLP for the matrix-vector kernels, or the reason that no kernel supports it.
fn mlp_products(mlp: &Mlp) -> Result<std::result::Result<Products, EagerReason>> {
    Ok(match mlp {
        Mlp::Gated(mlp) => {
            let (gate, up) = (&mlp.gate_proj.weight, &mlp.up_proj.weight);
            match gate.format() == up.format() && gate.input_rounding() == up.input_rounding() {
                true => Ok([gate, up, &mlp.down_proj.weight].map(|weight| (weight.clone(), 1)).into()),
                false => Err(EagerReason::MixedGateUp),
            }
        }
        Mlp::ClampedMoe(mlp) => {
            let ClampedMoe { gate_up_proj, down_proj, config, .. } = mlp;
            let (chosen, experts, columns) = (config.experts_per_token, config.experts, config.intermediate_size);
            if !matches!(mlp.router.weight, Matrix::Dense(_)) {
                Err(EagerReason::Layer("a quantized router"))
            } else if !matches!((gate_up_proj, down_proj), (ExpertWeights::Mxfp4Tiles(_), ExpertWeights::Mxfp4Tiles(_)))
            {
                Err(EagerReason::ExpertFormat)
            } else if chosen > decode::MAX_CHOSEN_MXFP4 || experts > moe::MAX_EXPERTS {
                Err(EagerReason::ExpertCount { chosen, experts })
            } else if columns % 8 != 0 || columns > decode::MAX_EXPERT_COLUMNS {
                Err(EagerReason::RowLength(columns))
            } else {
                Ok(Vec::new())
            }
        }
        Mlp::GatedMoe(mlp) => {
            let (chosen, experts) = (mlp.config.experts_per_token, mlp.config.experts);
            if !matches!(mlp.router.weight, Matrix::Dense(_)) {
                Err(EagerReason::Layer("a quantized router"))
            } else if chosen > moe::MAX_CHOSEN_EXPERTS || experts > moe::MAX_EXPERTS {
                Err(EagerReason::ExpertCount { chosen, experts })
            } else {
                match (mlp.gate_up_proj.as_matrix()?, mlp.down_proj.as_matrix()?) {
                    (Some(gate_up), Some(down)) => Ok(vec![(gate_up, 1), (down, chosen)]),
                    _ => Err(EagerReason::Layer("experts in this format")),
                }
            }
        }
        Mlp::Plain(_) => Err(EagerReason::Layer("an MLP without a gate")),
    })
}
