//! The pre-norm decoder that all families assemble, and its eager forward pass.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

use super::attention::Attention;
use super::kv_cache::{KvCache, LayerSpec};
use super::linear::{Bias, Linear};
use super::mlp::Mlp;
use super::norm::{Norm, NormConfig};
use super::rope::{Frequencies, Rotary};
use crate::error::Error;
use crate::kernels::{
    attention::Backend,
    quantized::Matrix,
    rows::{embed, soft_cap},
};
use crate::weights::Weights;

/// Tokens of one or more sequences, to be run through the model in one pass.
#[derive(Clone, Debug)]
pub struct Batch<'b> {
    /// All sequences' tokens, one after the other.
    pub ids: &'b [u32],
    /// How many tokens each sequence has in this pass; their positions follow what its cache holds.
    pub tokens: &'b [usize],
    pub logits: LogitsOf,
}

/// Which rows of logits a pass returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsOf {
    /// The last token of each sequence.
    Last,
    /// Every token.
    All,
}

/// What the layers need to know of a pass.
pub struct Pass {
    /// u32 `[T]`
    positions: Tensor,
    spans: Vec<Range<usize>>,
    backend: Backend,
}

impl Pass {
    fn new(batch: &Batch, caches: &[&mut KvCache], device: &Device, backend: Backend) -> Result<Self> {
        if batch.tokens.len() != caches.len() || batch.tokens.iter().sum::<usize>() != batch.ids.len() {
            bail!("a batch of {:?} tokens for {} caches and {} ids", batch.tokens, caches.len(), batch.ids.len());
        }
        let mut spans = Vec::new();
        let mut positions = Vec::with_capacity(batch.ids.len());
        for (&tokens, cache) in batch.tokens.iter().zip(caches) {
            cache.check_room(tokens)?;
            spans.push(positions.len()..positions.len() + tokens);
            positions.extend((cache.len()..cache.len() + tokens).map(|position| position as u32));
        }
        let count = positions.len();
        Ok(Self { positions: Tensor::from_vec(positions, count, device)?, spans, backend })
    }

    /// Position of every token, u32 \[T\].
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// Each sequence's rows among the T tokens.
    pub fn spans(&self) -> impl Iterator<Item = Range<usize>> {
        self.spans.iter().cloned()
    }

    /// Whose attention kernel runs.
    pub fn backend(&self) -> Backend {
        self.backend
    }
}

/// One layer: x + attention(norm(x)), then x + mlp(norm(x)); Gemma norms what is added, too. x, the residual stream, is
/// f32 whatever the dtype computed in: it is a sum over all layers, and each rounding would stay in it.
pub(crate) struct Layer {
    pub(crate) input_layernorm: Norm,
    pub(crate) self_attn: Attention,
    /// Of what attention adds.
    pub(crate) after_attention: Option<Norm>,
    pub(crate) post_attention_layernorm: Norm,
    pub(crate) mlp: Mlp,
    /// Of what the MLP adds.
    pub(crate) after_mlp: Option<Norm>,
}

impl Layer {
    /// x and y, f32 \[T, C\]: the residual stream and what the layer before adds to it. Returns the same for the next one:
    /// each addition is made where the sum is normed.
    fn forward(
        &self,
        x: &Tensor,
        y: Option<&Tensor>,
        index: usize,
        pass: &Pass,
        caches: &mut [&mut KvCache],
    ) -> Result<(Tensor, Tensor)> {
        let (x, normed) = self.input_layernorm.add(x, y, self.self_attn.dtype())?;
        let y = normed_by(&self.after_attention, self.self_attn.forward(&normed, index, pass, caches)?)?;
        let (x, normed) = self.post_attention_layernorm.add(&x, Some(&y), self.mlp.dtype())?;
        let y = normed_by(&self.after_mlp, self.mlp.forward(&normed)?)?;
        Ok((x, y))
    }

    fn step_bytes(&self) -> u64 {
        let after = [&self.after_attention, &self.after_mlp].into_iter().flatten();
        let norms = [&self.input_layernorm, &self.post_attention_layernorm].into_iter().chain(after);
        norms.map(Norm::bytes).sum::<u64>() + self.self_attn.bytes() + self.mlp.step_bytes()
    }
}

fn normed_by(norm: &Option<Norm>, y: Tensor) -> Result<Tensor> {
    match norm {
        Some(norm) => norm.apply(&y),
        None => Ok(y),
    }
}

/// What all decoders have around and inside their layers, besides attention and MLP.
pub struct Frame {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub norm: NormConfig,
    /// Whether the embedding is the output head as well.
    pub tie_word_embeddings: bool,
    pub frequencies: Frequencies,
    /// Of layers with a window, where theirs are others.
    pub sliding_frequencies: Option<Frequencies>,
    pub cache_layers: Vec<LayerSpec>,
    /// Where all but the head lies in the checkpoint; empty for its root.
    pub model: String,
    pub names: Names,
    /// Factor on the embeddings.
    pub embed_scale: f32,
    /// Name of a learned embedding of positions, and how many it knows.
    pub learned_positions: Option<(&'static str, usize)>,
    /// Logits l become cap · tanh(l / cap).
    pub final_softcap: Option<f32>,
}

impl Frame {
    /// What all but the sizes and frequencies is in most families.
    pub fn new(vocab_size: usize, hidden_size: usize, norm: NormConfig, frequencies: Frequencies) -> Self {
        Self {
            vocab_size,
            hidden_size,
            norm,
            tie_word_embeddings: false,
            frequencies,
            sliding_frequencies: None,
            cache_layers: Vec::new(),
            model: "model".into(),
            names: Names::USUAL,
            embed_scale: 1.0,
            learned_positions: None,
            final_softcap: None,
        }
    }
}

/// What a checkpoint calls its parts.
#[derive(Clone, Copy)]
pub struct Names {
    pub embed_tokens: &'static str,
    pub layers: &'static str,
    /// The norm before attention.
    pub input_layernorm: &'static str,
    /// The norm before the MLP.
    pub post_attention_layernorm: &'static str,
    /// Norms of what attention and the MLP add.
    pub after: Option<(&'static str, &'static str)>,
    /// The last norm.
    pub norm: &'static str,
}

impl Names {
    pub const USUAL: Self = Self {
        embed_tokens: "embed_tokens",
        layers: "layers",
        input_layernorm: "input_layernorm",
        post_attention_layernorm: "post_attention_layernorm",
        after: None,
        norm: "norm",
    };
}

/// Where a layer stands.
pub struct Place {
    pub index: usize,
    pub spec: LayerSpec,
    pub rotary: Arc<Rotary>,
}

/// Sees the residual stream, f32 \[T, C\], after the layer of the given place.
pub type Tap<'t> = &'t mut dyn FnMut(usize, &Tensor) -> Result<()>;

/// A whole model.
pub struct Decoder {
    /// `[V, C]`
    pub(crate) embed_tokens: Matrix,
    /// Of activations and the cache.
    dtype: DType,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Norm,
    pub(crate) lm_head: Linear,
    pub(crate) embed_scale: f32,
    /// `[P, C]`
    embed_positions: Option<Tensor>,
    pub(crate) final_softcap: Option<f32>,
    cache_layers: Vec<LayerSpec>,
    /// Positions that the rotary tables reach to.
    context: usize,
    backend: Backend,
}

impl Decoder {
    /// Loads all by the names in `frame`, for contexts of up to `context` positions. `parts` loads attention and MLP of the
    /// layer at the given place.
    pub fn load(
        weights: &Weights,
        context: usize,
        frame: Frame,
        parts: impl Fn(&Weights, Place) -> Result<(Attention, Mlp)>,
    ) -> Result<Self> {
        let Frame { vocab_size, hidden_size, names, cache_layers, .. } = frame;
        let model = if frame.model.is_empty() { weights.clone() } else { weights.at(&frame.model) };
        let rotary =
            |frequencies| Ok::<_, anyhow::Error>(Arc::new(Rotary::new(frequencies, context, weights.device())?));
        let (everywhere, sliding) =
            (rotary(&frame.frequencies)?, frame.sliding_frequencies.as_ref().map(rotary).transpose()?);
        let norm = |weights: &Weights, name| Norm::load(&weights.at(name), hidden_size, frame.norm);
        let layer = |(index, spec): (usize, &LayerSpec)| -> Result<Layer> {
            let weights = model.at(names.layers).at(index);
            let rotary = sliding.as_ref().filter(|_| spec.window.is_some()).unwrap_or(&everywhere).clone();
            let (self_attn, mlp) = parts(&weights, Place { index, spec: *spec, rotary })?;
            let after = |name: Option<&'static str>| name.map(|name| norm(&weights, name)).transpose();
            Ok(Layer {
                input_layernorm: norm(&weights, names.input_layernorm)?,
                self_attn,
                after_attention: after(names.after.map(|(attention, _)| attention))?,
                post_attention_layernorm: norm(&weights, names.post_attention_layernorm)?,
                mlp,
                after_mlp: after(names.after.map(|(_, mlp)| mlp))?,
            })
        };
        let embed_tokens =
            embedding(&model.at(names.embed_tokens), vocab_size, hidden_size, frame.tie_word_embeddings)?;
        if let Some(positions) = frame.learned_positions.filter(|&(_, positions)| positions < context) {
            bail!("a context of {context} positions for a model that knows {}", positions.1);
        }
        let learned = |(name, positions)| model.at(name).float("weight", &[positions, hidden_size]);
        Ok(Self {
            layers: cache_layers.iter().enumerate().map(layer).collect::<Result<_>>()?,
            norm: norm(&model, names.norm)?,
            lm_head: if frame.tie_word_embeddings {
                Linear::tied(embed_tokens.clone())
            } else {
                Linear::load(&weights.at("lm_head"), hidden_size, vocab_size, Bias::Without)?
            },
            embed_positions: frame.learned_positions.map(learned).transpose()?,
            embed_scale: frame.embed_scale,
            final_softcap: frame.final_softcap,
            embed_tokens,
            dtype: weights.dtype(),
            cache_layers,
            context,
            backend: Backend::Auto,
        })
    }

    /// Of activations and the cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What this has that no kernel of the decode step knows.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn peculiarity(&self) -> Option<&'static str> {
        let of_layer = |layer: &'_ Layer| {
            let [after_attention, after_mlp] = [&layer.after_attention, &layer.after_mlp].map(Option::as_ref);
            let (q, k) = layer.self_attn.qk_norm.as_ref().map(|(q, k)| (q, k)).unzip();
            let maybe = [after_attention, after_mlp, q, k].into_iter().flatten();
            maybe.chain([&layer.input_layernorm, &layer.post_attention_layernorm]).any(|norm| norm.bias.is_some())
        };
        if self.norm.bias.is_some() || self.layers.iter().any(of_layer) {
            return Some("LayerNorm");
        }
        self.embed_positions.as_ref().map(|_| "learned positions")
    }

    /// From here on, passes attend with this backend. Returns what it comes to; fails if a layer cannot use it.
    pub fn attend_with(&mut self, backend: Backend) -> Result<Backend> {
        let (on_gpu, mut chosen) = (self.is_on_gpu(), backend);
        for layer in &self.layers {
            let config = &layer.self_attn.config;
            chosen = match backend.choose(on_gpu, layer.self_attn.dtype(), config.spec.head_dim, config.softcap) {
                Ok(chosen) => chosen,
                Err(reason) => return Err(Error::Usage(format!("--attention {backend}: {reason}")).into()),
            };
        }
        self.backend = backend;
        Ok(chosen)
    }

    /// What each layer keeps in the cache.
    pub fn cache_layers(&self) -> &[LayerSpec] {
        &self.cache_layers
    }

    /// Bytes of the weights that one token meets: every dense one once, the chosen experts, one row of the embedding.
    pub fn step_bytes(&self) -> u64 {
        let row = self.embed_tokens.bytes() / self.vocab_size() as u64;
        row + self.layers.iter().map(Layer::step_bytes).sum::<u64>() + self.norm.bytes() + self.lm_head.bytes()
    }

    /// V
    pub fn vocab_size(&self) -> usize {
        self.embed_tokens.dims().0
    }

    pub fn is_on_gpu(&self) -> bool {
        self.embed_tokens.device().is_cuda()
    }

    /// Positions that the model was loaded for.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Runs a batch; writes each sequence's cache. Returns logits f32 \[rows, V\], rows as `batch.logits` says.
    pub fn forward(&self, batch: &Batch, caches: &mut [&mut KvCache]) -> Result<Tensor> {
        self.forward_tapped(batch, caches, None)
    }

    /// The same; `tap` sees the residual stream, f32 \[T, C\], after each layer.
    pub fn forward_tapped(&self, batch: &Batch, caches: &mut [&mut KvCache], mut tap: Option<Tap>) -> Result<Tensor> {
        let device = self.embed_tokens.device();
        let vocab_size = self.vocab_size();
        if let Some(id) = batch.ids.iter().find(|&&id| id as usize >= vocab_size) {
            bail!("token id {id} is outside the model's vocabulary of {vocab_size}");
        }
        if let Some(cache) = caches.iter().find(|cache| cache.context() > self.context) {
            bail!("a cache of {} positions for a model loaded for {}", cache.context(), self.context);
        }
        let pass = Pass::new(batch, caches, device, self.backend)?;
        let ids = Tensor::new(batch.ids, device)?;
        let mut x = self.embed_tokens.embed(&ids, self.embed_scale)?;
        let mut y = self.embed_positions.as_ref().map(|table| embed(table, pass.positions(), 1.0)).transpose()?;
        for (index, layer) in self.layers.iter().enumerate() {
            let (sum, more) = layer.forward(&x, y.as_ref(), index, &pass, caches)?;
            if let Some(tap) = &mut tap {
                tap(index, &(&sum + &more)?)?;
            }
            (x, y) = (sum, Some(more));
        }
        for (&tokens, cache) in batch.tokens.iter().zip(caches.iter_mut()) {
            cache.advance(tokens);
        }
        if batch.logits == LogitsOf::Last {
            let last = |rows: &Tensor| -> Result<Tensor> {
                let rows = pass.spans().map(|span| rows.narrow(0, span.end - 1, 1));
                Ok(Tensor::cat(&rows.collect::<candle_core::Result<Vec<_>>>()?, 0)?.contiguous()?)
            };
            (x, y) = (last(&x)?, y.as_ref().map(last).transpose()?);
        }
        let (_, normed) = self.norm.add(&x, y.as_ref(), self.dtype)?;
        let logits = self.lm_head.forward(&normed)?;
        Ok(match self.final_softcap {
            Some(cap) => soft_cap(&logits, cap)?,
            None => logits,
        })
    }
}

/// An embedding. One of floats is quantized only where it is the head, too: a row of it costs nothing.
fn embedding(weights: &Weights, vocab_size: usize, hidden_size: usize, is_head: bool) -> Result<Matrix> {
    let weights = if is_head { weights.clone() } else { weights.unquantized() };
    Weights::matrix(&[(weights, vocab_size)], "weight", hidden_size)
}
