//! A pre-norm decoder layer: attention followed by an MLP, each with a norm on its input.

use anyhow::Result;
use candle_core::Tensor;

use super::attention::Attention;
use super::kv_cache::KvCache;
use super::mlp::Mlp;
use super::norm::Norm;
use super::pass::{LogitRows, Pass};
use crate::kernels::{norm::Addend, rows::add_bias};

/// A decoder layer. It computes x + attention(norm(x)), then x + mlp(norm(x)).
///
/// x is the residual stream: the sum of the embedding and the outputs of all earlier layers.
/// The residual stream is f32 in every compute dtype, because rounding errors in a narrower dtype would accumulate.
pub(crate) struct DecoderLayer {
    pub(crate) attention_norm: Norm,
    pub(crate) self_attn: Attention,
    /// The norm of the attention output, before the residual addition (Gemma).
    pub(crate) attention_post_norm: Option<Norm>,
    pub(crate) mlp_norm: Norm,
    pub(crate) mlp: Mlp,
    /// The norm of the MLP output, before the residual addition (Gemma).
    pub(crate) mlp_post_norm: Option<Norm>,
}

impl DecoderLayer {
    /// Runs the layer on the residual stream x and the output y of the previous layer, both f32 `[tokens, hidden]`.
    ///
    /// Returns the rows of x and y that `needed` selects. The returned y is the output of the MLP.
    /// The next norm kernel adds y to x.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        y: Option<&Tensor>,
        index: usize,
        pass: &Pass,
        cache: &KvCache,
        needed: LogitRows,
    ) -> Result<(Tensor, Tensor)> {
        let (x, normed) = self.attention_norm.add_norm(x, y.map(Addend::from), self.self_attn.dtype())?;
        let (y, bias) = self.self_attn.forward(&normed, index, pass, cache, needed)?;
        let x = pass.select(needed, &x)?;
        let (x, normed) = match &self.attention_post_norm {
            None => self.mlp_norm.add_norm(&x, Some(Addend { rows: &y, bias }), self.mlp.dtype())?,
            Some(post_norm) => {
                let y = match bias {
                    Some(bias) => add_bias(&y, bias)?,
                    None => y,
                };
                self.mlp_norm.add_norm(&x, Some(Addend::from(&post_norm.forward(&y)?)), self.mlp.dtype())?
            }
        };
        let y = self.mlp.forward(&normed, pass.sum_order())?;
        Ok((x, self.mlp_post_norm.as_ref().map(|norm| norm.forward(&y)).transpose()?.unwrap_or(y)))
    }

    /// Returns how many bytes of this rank's weights a decode step reads for one token.
    pub(super) fn step_bytes(&self) -> u64 {
        let norms = self.norms().map(Norm::bytes).sum::<u64>();
        norms + self.self_attn.bytes() + self.mlp.step_bytes()
    }

    /// Returns all norms of the layer except the q/k norms.
    pub(crate) fn norms(&self) -> impl Iterator<Item = &Norm> {
        let post_norms = [&self.attention_post_norm, &self.mlp_post_norm].into_iter().flatten();
        [&self.attention_norm, &self.mlp_norm].into_iter().chain(post_norms)
    }
}
