//! The pre-norm decoder that all families assemble, and its eager forward pass.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};

use super::attention::Attention;
use super::kv_cache::{KvCache, LayerSpec};
use super::linear::{Bias, Linear};
use super::mlp::Mlp;
use super::norm::RmsNorm;
use super::rope::{Frequencies, Rotary};
use crate::error::Error;
use crate::kernels::{self, attention::Backend, rows::embed};
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

impl<'b> Batch<'b> {
    /// One sequence.
    pub fn one(ids: &'b [u32], logits: LogitsOf, tokens: &'b [usize; 1]) -> Self {
        Self { ids, tokens, logits }
    }
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

/// One layer: x + attention(norm(x)), then x + mlp(norm(x)). x, the residual stream, is f32 whatever the dtype computed
/// in: it is a sum over all layers, and each rounding would stay in it.
pub(crate) struct Layer {
    pub(crate) input_layernorm: RmsNorm,
    pub(crate) self_attn: Attention,
    pub(crate) post_attention_layernorm: RmsNorm,
    pub(crate) mlp: Mlp,
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
        let y = self.self_attn.forward(&normed, index, pass, caches)?;
        let (x, normed) = self.post_attention_layernorm.add(&x, Some(&y), self.mlp.dtype())?;
        let y = self.mlp.forward(&normed)?;
        Ok((x, y))
    }

    fn step_bytes(&self) -> u64 {
        let norms = self.input_layernorm.bytes() + self.post_attention_layernorm.bytes();
        norms + self.self_attn.bytes() + self.mlp.step_bytes()
    }
}

/// What all decoders have around and inside their layers, besides attention and MLP.
pub struct Frame {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub rms_norm_eps: f64,
    /// Whether the embedding is the output head as well.
    pub tie_word_embeddings: bool,
    pub frequencies: Frequencies,
    pub cache_layers: Vec<LayerSpec>,
}

/// Sees the residual stream, f32 \[T, C\], after the layer of the given place.
pub type Tap<'t> = &'t mut dyn FnMut(usize, &Tensor) -> Result<()>;

/// A whole model.
pub struct Decoder {
    /// `[V, C]`
    pub(crate) embed_tokens: Tensor,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: RmsNorm,
    pub(crate) lm_head: Linear,
    cache_layers: Vec<LayerSpec>,
    /// Positions that the rotary tables reach to.
    context: usize,
    backend: Backend,
}

impl Decoder {
    /// Loads `model.*` and `lm_head` by their Hugging Face names, for contexts of up to `context` positions. `parts`
    /// loads attention and MLP of the layer at the given place.
    pub fn load(
        weights: &Weights,
        context: usize,
        frame: Frame,
        parts: impl Fn(&Weights, LayerSpec, Arc<Rotary>) -> Result<(Attention, Mlp)>,
    ) -> Result<Self> {
        let Frame { vocab_size, hidden_size, rms_norm_eps: eps, tie_word_embeddings, frequencies, cache_layers } =
            frame;
        let model = weights.at("model");
        let rotary = Arc::new(Rotary::new(&frequencies, context, weights.device())?);
        let layer = |(index, spec): (usize, &LayerSpec)| -> Result<Layer> {
            let weights = model.at(format!("layers.{index}"));
            let (self_attn, mlp) = parts(&weights, *spec, rotary.clone())?;
            Ok(Layer {
                input_layernorm: RmsNorm::load(&weights.at("input_layernorm"), hidden_size, eps)?,
                self_attn,
                post_attention_layernorm: RmsNorm::load(&weights.at("post_attention_layernorm"), hidden_size, eps)?,
                mlp,
            })
        };
        let embed_tokens = model.float("embed_tokens.weight", &[vocab_size, hidden_size])?;
        Ok(Self {
            layers: cache_layers.iter().enumerate().map(layer).collect::<Result<_>>()?,
            norm: RmsNorm::load(&model.at("norm"), hidden_size, eps)?,
            lm_head: if tie_word_embeddings {
                Linear::tied(embed_tokens.clone())
            } else {
                Linear::load(&weights.at("lm_head"), hidden_size, vocab_size, Bias::Without)?
            },
            embed_tokens,
            cache_layers,
            context,
            backend: Backend::Auto,
        })
    }

    /// From here on, passes attend with this backend. Returns what it comes to; fails if a layer cannot use it.
    pub fn attend_with(&mut self, backend: Backend) -> Result<Backend> {
        let (on_gpu, mut chosen) = (self.is_on_gpu(), backend);
        for layer in &self.layers {
            let (dtype, head_dim) = (layer.self_attn.dtype(), layer.self_attn.config.spec.head_dim);
            chosen = match backend.choose(on_gpu, dtype, head_dim) {
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
        let row = kernels::bytes(&self.embed_tokens) / self.embed_tokens.dims()[0] as u64;
        row + self.layers.iter().map(Layer::step_bytes).sum::<u64>() + self.norm.bytes() + self.lm_head.bytes()
    }

    /// V
    pub fn vocab_size(&self) -> usize {
        self.embed_tokens.dims()[0]
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
        let vocab_size = self.embed_tokens.dim(0)?;
        if let Some(id) = batch.ids.iter().find(|&&id| id as usize >= vocab_size) {
            bail!("token id {id} is outside the model's vocabulary of {vocab_size}");
        }
        if let Some(cache) = caches.iter().find(|cache| cache.context() > self.context) {
            bail!("a cache of {} positions for a model loaded for {}", cache.context(), self.context);
        }
        let pass = Pass::new(batch, caches, device, self.backend)?;
        let ids = Tensor::new(batch.ids, device)?;
        let mut x = embed(&self.embed_tokens, &ids)?;
        let mut y = None;
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
        let (_, normed) = self.norm.add(&x, y.as_ref(), self.embed_tokens.dtype())?;
        self.lm_head.forward(&normed)
    }
}
