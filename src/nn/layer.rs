//! One pre-norm decoder layer: attention, then the MLP, each behind a norm.

use anyhow::Result;
use candle_core::Tensor;

use super::attention::Attention;
use super::kv_cache::KvCache;
use super::mlp::Mlp;
use super::norm::Norm;
use super::pass::Pass;

/// Computes x + attention(norm(x)), then x + mlp(norm(x)).
///
/// x is the residual stream. It is f32 whatever the compute dtype, because it is a sum over all layers and would keep
/// the rounding error of each.
pub(crate) struct DecoderLayer {
    pub(crate) input_layernorm: Norm,
    pub(crate) self_attn: Attention,
    /// Norm of the attention output, before it is added (Gemma).
    pub(crate) attention_post_norm: Option<Norm>,
    pub(crate) post_attention_layernorm: Norm,
    pub(crate) mlp: Mlp,
    /// Norm of the MLP output, before it is added (Gemma).
    pub(crate) mlp_post_norm: Option<Norm>,
}

impl DecoderLayer {
    /// Runs the layer on x, the residual stream, and y, the output of the layer before; both f32 \[T, C\].
    ///
    /// Returns the same pair for the next layer. Each y is added by the norm that follows it, which fuses both steps.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        y: Option<&Tensor>,
        index: usize,
        pass: &Pass,
        caches: &mut [&mut KvCache],
    ) -> Result<(Tensor, Tensor)> {
        let (x, normed) = self.input_layernorm.add_norm(x, y, self.self_attn.dtype())?;
        let y = post_norm(&self.attention_post_norm, self.self_attn.forward(&normed, index, pass, caches)?)?;
        let (x, normed) = self.post_attention_layernorm.add_norm(&x, Some(&y), self.mlp.dtype())?;
        let y = post_norm(&self.mlp_post_norm, self.mlp.forward(&normed)?)?;
        Ok((x, y))
    }

    /// Returns the bytes of weights that one token reads.
    pub(super) fn step_bytes(&self) -> u64 {
        let norms = self.norms().map(Norm::bytes).sum::<u64>();
        norms + self.self_attn.bytes() + self.mlp.step_bytes()
    }

    /// Returns every norm of the layer but those of q and k.
    fn norms(&self) -> impl Iterator<Item = &Norm> {
        let post_norms = [&self.attention_post_norm, &self.mlp_post_norm].into_iter().flatten();
        [&self.input_layernorm, &self.post_attention_layernorm].into_iter().chain(post_norms)
    }

    /// Returns whether a norm of the layer is a LayerNorm.
    pub(super) fn has_layer_norm(&self) -> bool {
        let qk_norms = self.self_attn.qk_norm.iter().flat_map(|(q, k)| [q, k]);
        self.norms().chain(qk_norms).any(|norm| norm.bias.is_some())
    }
}

fn post_norm(norm: &Option<Norm>, y: Tensor) -> Result<Tensor> {
    match norm {
        Some(norm) => norm.forward(&y),
        None => Ok(y),
    }
}
