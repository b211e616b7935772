//! The names of layer tensors and of RoPE factors in GGUF files.

/// The names of the tensors with RoPE factors for all contexts, for short contexts, and for long contexts.
/// RoPE factors do not count as parameters or weights, because Hugging Face models have no tensors for them.
pub const ROPE_FACTOR_TENSORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

/// A tensor name of the form `blk.N.module.suffix`.
pub struct LayerTensorName<'n> {
    pub layer: usize,
    /// The module of the tensor within the layer, such as `attn_q`.
    pub module: &'n str,
    /// The text after the last dot of the tensor name, such as `weight` or `bias`.
    pub suffix: &'n str,
}

impl<'n> LayerTensorName<'n> {
    /// Parses a tensor name. Returns `None` if the name does not have the form `blk.N.module.suffix`.
    pub fn parse(name: &'n str) -> Option<Self> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (module, suffix) = rest.rsplit_once('.')?;
        // `str::parse` also accepts `+1` and `01`. Reject them, so that a tensor has only one name.
        let layer = layer.parse().ok().filter(|number: &usize| number.to_string() == layer)?;
        Some(Self { layer, module, suffix })
    }
}
