//! A pre-norm decoder layer: attention followed by an MLP, each with a norm on its input.

use anyhow::Result;

use super::attention::Attention;
use super::kv_cache::KvCache;
use super::mlp::Mlp;
use super::norm::Norm;
use super::pass::{Pass, RowSelection};
use super::residual::Residual;

/// A decoder layer. It computes x + attention(norm(x)), then x + mlp(norm(x)), where x is the residual stream.
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
    /// Runs the layer, which has the index `index` in the model.
    /// Keeps only the rows of the residual stream that `rows` selects: o_proj and the MLP run only for these tokens.
    pub(super) fn forward<'l>(
        &'l self,
        residual: &mut Residual<'l>,
        index: usize,
        pass: &Pass,
        cache: &KvCache,
        rows: RowSelection,
    ) -> Result<()> {
        let normed = residual.norm(&self.attention_norm, self.self_attn.dtype())?;
        let form = residual.partial_form(pass.row_count(rows), self.attention_post_norm.as_ref())?;
        let output = self.self_attn.forward(&normed, index, pass, cache, rows, form)?;
        residual.select(pass, rows)?;
        residual.add(output, self.attention_post_norm.as_ref())?;
        let normed = residual.norm(&self.mlp_norm, self.mlp.dtype())?;
        let form = residual.partial_form(pass.row_count(rows), self.mlp_post_norm.as_ref())?;
        residual.add(self.mlp.forward(&normed, pass.sum_order(), form)?, self.mlp_post_norm.as_ref())
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
