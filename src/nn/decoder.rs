//! The pre-norm decoder that all model families share. Its forward pass runs operation by operation.
//! The decode graph, which can replace the forward pass in decode steps of one sequence, has fused kernels instead
//! (`kernels::decode`).

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};

use super::attention::Attention;
use super::decoder_config::{DecoderConfig, LayerInfo, LearnedPositions};
use super::kv_cache::{CacheLayout, KvCache, LayerSpec};
use super::layer::DecoderLayer;
use super::linear::{Bias, Linear};
use super::mlp::{ExpertCost, Mlp};
use super::norm::Norm;
use super::pass::{Pass, PassBatch, RowSelection};
#[cfg(feature = "cuda")]
use super::product_kernels::ProductKernels;
use super::residual::Residual;
use super::rope::RotaryEmbedding;
use crate::kernels::attention::AttentionBackend;
#[cfg(feature = "cuda")]
use crate::kernels::matmul::{dense_wgmma::LogitsOutput, matmul_best};
use crate::kernels::matrix::Matrix;
use crate::kernels::rows::{embed, soft_cap};
use crate::kernels::{SumOrder, scratch};
use crate::weights::{TensorTable, Weights};
use crate::world::World;

/// A callback for each layer that this rank runs.
/// Receives the layer's index in the model, and the residual stream after the layer, f32 `[tokens, hidden]`.
/// After the model's last layer, the residual stream has only the rows that `PassBatch::rows` selects.
/// If several ranks divide each layer, all ranks must pass a callback, because all ranks together compute the sum
/// of their partial results before each call.
pub type Tap<'t> = &'t mut dyn FnMut(usize, &Tensor) -> Result<()>;

/// A whole model, or a rank's part of it: embedding, layers, final norm and output head.
pub struct Decoder {
    /// The token embedding, `[vocab, hidden]`.
    pub(crate) embed_tokens: Matrix,
    /// The compute dtype, which is also the dtype of the KV cache.
    dtype: DType,
    /// The layers that this rank runs: its stage if the ranks divide the layers (see [`World::stages`]), otherwise all.
    layers: Vec<DecoderLayer>,
    /// The index in the model of the first element of `layers`.
    first_layer: usize,
    /// The number of layers of the whole model.
    layer_count: usize,
    pub(crate) norm: Norm,
    /// This rank's rows of the output head: one row per token id in `own_tokens`.
    pub(crate) lm_head: Linear,
    pub(crate) embed_scale: f32,
    /// The learned position embedding, `[positions, hidden]`, in models that have one.
    pub(crate) embed_positions: Option<Tensor>,
    pub(crate) final_softcap: Option<f32>,
    /// The KV cache spec of each element of `layers`. Counts only the KV heads that this rank holds.
    cache_layers: Vec<LayerSpec>,
    cache_layout: CacheLayout,
    /// The number of positions that the model was loaded for. The RoPE tables have one row per position.
    context: usize,
    backend: AttentionBackend,
    world: World,
    /// The ranks that divide each layer: all ranks, or only this rank if the ranks run stages.
    layer_world: World,
}

impl Decoder {
    /// Loads a decoder for contexts of up to `context` positions.
    ///
    /// `load_sublayers` loads the attention and the MLP of one layer. `config` describes everything else.
    ///
    /// Fails if a tensor is missing or does not match `config`, or if `context` exceeds the model's learned positions.
    /// Also fails if the checkpoint has surplus layers (see [`Weights::check_layer_count`]),
    /// or if a tensor of this rank's layers was not loaded (see [`Weights::check_all_loaded`]).
    /// If ranks divide each layer, only the first rank checks that all tensors were loaded.
    pub fn load(
        weights: &Weights,
        context: usize,
        config: DecoderConfig,
        tensors: TensorTable,
        load_sublayers: impl Fn(&Weights, LayerInfo) -> Result<(Attention, Mlp)>,
    ) -> Result<Self> {
        let DecoderConfig { hidden_size, names, .. } = config;
        if let Some(learned) = config.learned_positions.filter(|learned| learned.positions < context) {
            let positions = learned.positions;
            bail!("cannot load a context of {context} positions: the model has only {positions} learned positions");
        }
        let root = if config.prefix.is_empty() { weights.clone() } else { weights.at(&config.prefix) };
        let layer_weights = root.at(names.layers);
        let layer_count = config.cache_layers.len();
        layer_weights.check_layer_count(layer_count)?;
        let world = weights.world().clone();
        let own_layers = world.stages().map_or(0..layer_count, |stages| stages[world.rank()].clone());
        let embed_tokens = load_embedding(&root, &config)?;
        let load_positions =
            |learned: LearnedPositions| root.at(learned.name).float("weight", &[learned.positions, hidden_size]);
        let layers = load_layers(&root, context, &config, own_layers.clone(), load_sublayers)?;
        let cache_layers: Vec<_> = layers.iter().map(|layer| layer.self_attn.config.spec).collect();
        let decoder = Self {
            cache_layout: match world.stages() {
                Some(_) => CacheLayout::new(&config.cache_layers).of_layers(own_layers.clone()),
                None => CacheLayout::new(&cache_layers),
            },
            cache_layers,
            layers,
            first_layer: own_layers.start,
            layer_count,
            norm: Norm::load(&root.at(names.norm), hidden_size, config.norm)?,
            lm_head: load_head(weights, &embed_tokens, &config)?,
            embed_positions: config.learned_positions.map(load_positions).transpose()?,
            embed_scale: config.embed_scale,
            final_softcap: config.final_softcap,
            embed_tokens,
            dtype: weights.dtype(),
            context,
            backend: AttentionBackend::Auto,
            layer_world: if world.stages().is_some() { World::alone() } else { world.clone() },
            world,
        };
        // A rank that holds no part of a matrix does not load it.
        // If ranks divide each layer, only the first rank is certain to hold a part of every matrix.
        if decoder.world.is_first() || decoder.world.stages().is_some() {
            layer_weights.check_all_loaded(own_layers, layer_count, tensors)?;
        }
        Ok(decoder)
    }

    /// Runs a batch and writes the new keys and values to the blocks of each sequence.
    /// Returns f32 logits `[rows, vocab]`, with one row per token that `batch.rows` selects.
    pub fn forward(&self, batch: &PassBatch, cache: &KvCache) -> Result<Tensor> {
        self.forward_tapped(batch, cache, None)
    }

    /// Runs a batch like `forward`, and calls `tap` after each layer.
    pub fn forward_tapped(&self, batch: &PassBatch, cache: &KvCache, tap: Option<Tap>) -> Result<Tensor> {
        let pass = self.prepare(batch, cache)?;
        let ids = Tensor::new(batch.ids, self.embed_tokens.device())?;
        let hidden = self.hidden_states(&ids, &pass, cache, tap)?;
        self.logits(&hidden, batch.sum_order)
    }

    /// Checks a batch, and copies its positions and block tables to the device.
    pub fn prepare(&self, batch: &PassBatch, cache: &KvCache) -> Result<Pass> {
        self.validate(batch)?;
        Pass::new(batch, cache, self.embed_tokens.device(), self.backend)
    }

    /// Runs a prepared pass without the output head. `ids`, u32 `[tokens]`, are on the device.
    /// Returns the normalized hidden states of the tokens that the pass selects, `[rows, hidden]`.
    /// Logits take far more memory, so a caller may compute the [`logits`](Self::logits) of a few rows at a time.
    ///
    /// With one token per sequence, this function copies nothing from the host to the GPU, so a CUDA graph can capture
    /// it. There are two exceptions:
    /// - The attention backend `CandleFlashAttn` reads block tables on the host.
    /// - Several ranks without an exchange (see [`World::exchange`]) wait on the host for each other's results.
    ///
    /// The ids must be in the vocabulary, the positions in the loaded context, and the blocks in the cache.
    /// [`prepare`](Self::prepare) checks this for a batch, and `BatchGraph::next_inputs` for a batch graph.
    pub fn hidden_states(&self, ids: &Tensor, pass: &Pass, cache: &KvCache, mut tap: Option<Tap>) -> Result<Tensor> {
        scratch::begin_layer();
        let x = self.embed_tokens.embed(ids, self.embed_scale)?;
        let position_embeddings =
            self.embed_positions.as_ref().map(|table| embed(table, pass.queries().positions(), 1.0)).transpose()?;
        let mut residual = Residual::new(x, position_embeddings, &self.layer_world);

        for stage in 0..self.stages() {
            let is_own = self.is_own(stage);
            if is_own {
                for (index, layer) in self.own_layers() {
                    self.world.record_progress();
                    scratch::begin_layer();
                    // Every layer computes attention for all tokens.
                    // In the last layer, o_proj and the MLP run only for the tokens that need logits.
                    let rows = if index + 1 == self.layer_count { pass.rows() } else { RowSelection::All };
                    layer.forward(&mut residual, index, pass, cache, rows)?;
                    if let Some(tap) = &mut tap {
                        tap(index, residual.settle()?)?;
                    }
                }
            }
            if self.stages() > 1 {
                let rows = if stage + 1 == self.stages() { pass.rows() } else { RowSelection::All };
                let x = self.exchange_stage(is_own, residual.settle()?, pass.row_count(rows))?;
                residual = Residual::new(x, None, &self.layer_world);
            }
        }

        scratch::begin_layer();
        let normed = residual.norm(&self.norm, self.dtype)?;
        scratch::end_layers();
        Ok(normed)
    }

    /// Returns the logits of hidden states, f32 `[rows, vocab]`.
    pub fn logits(&self, hidden: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        self.logits_of_ranks(&self.own_logits(hidden, sum_order, None)?)
    }

    /// Returns this rank's part of the logits of hidden states, f32 `[rows, columns]`.
    /// There is one column for each token id in [`own_tokens`](Self::own_tokens).
    /// May write the logits to `out`, which must have this dtype and shape, and return `out`.
    pub fn own_logits(&self, hidden: &Tensor, sum_order: SumOrder, out: Option<&Tensor>) -> Result<Tensor> {
        let out = out.filter(|_| self.final_softcap.is_none());
        let own = self.lm_head.forward_into(hidden, sum_order, out)?;
        Ok(match self.final_softcap {
            Some(cap) => soft_cap(&own, cap)?,
            None => own,
        })
    }

    /// Like [`own_logits`](Self::own_logits), but writes the results to `output`: candidates for the largest of this
    /// rank's logits and, if `output.skips_logits` is 0, the logits. Returns true.
    /// Computes nothing and returns false if the output head is quantized, if the logits have a soft cap,
    /// or if [`matmul_best`](crate::kernels::matmul::matmul_best) does not support the product or the summation order.
    #[cfg(feature = "cuda")]
    pub fn own_best_logits(&self, hidden: &Tensor, sum_order: SumOrder, output: &LogitsOutput) -> Result<bool> {
        match &self.lm_head {
            Linear { weight: Matrix::Dense(weight), bias: None } if self.final_softcap.is_none() => {
                Ok(matmul_best(hidden, weight, sum_order, output)?)
            }
            _ => Ok(false),
        }
    }

    /// Returns the logits over the whole vocabulary, f32 `[rows, vocab]`, from the parts of all ranks.
    /// `own` is this rank's part. All ranks must call this function.
    pub fn logits_of_ranks(&self, own: &Tensor) -> Result<Tensor> {
        Ok(self.world.all_gather_columns(own, self.vocab_size())?)
    }

    /// Returns the token ids whose logits this rank computes.
    pub fn own_tokens(&self) -> Range<usize> {
        self.world.share(self.vocab_size(), 1)
    }

    /// Returns the residual stream after a stage, f32 `[rows, hidden]`, on all ranks.
    /// On the rank that ran the stage (`is_own`), x is this residual stream.
    /// On the other ranks, only the width, dtype and device of x matter.
    fn exchange_stage(&self, is_own: bool, x: &Tensor, rows: usize) -> Result<Tensor> {
        scratch::begin_layer();
        // All other ranks add zeros, so every rank gets the result of the rank that ran the stage.
        let result = if is_own { x.clone() } else { Tensor::zeros((rows, x.dim(1)?), x.dtype(), x.device())? };
        Ok(self.world.all_reduce(&result)?)
    }

    /// Fails if a token id is outside the vocabulary, or if a sequence exceeds the context of the loaded model.
    pub(crate) fn validate(&self, batch: &PassBatch) -> Result<()> {
        let vocab_size = self.vocab_size();
        if let Some(id) = batch.ids.iter().find(|&&id| id as usize >= vocab_size) {
            bail!("token id {id} is outside the model's vocabulary of {vocab_size} tokens");
        }
        let end = batch.sequences.iter().map(|span| span.position + span.tokens).max().unwrap_or(0);
        if end > self.context {
            bail!("the batch needs {end} positions, but the model was loaded for {} positions", self.context);
        }
        Ok(())
    }

    /// Sets the attention backend for later passes and returns it.
    /// For `Auto`, returns the backend that `Auto` chooses for this rank's last layer.
    /// Fails with the reason if a layer of this rank does not support the backend.
    pub fn set_attention_backend(&mut self, backend: AttentionBackend) -> Result<AttentionBackend, String> {
        let mut chosen = backend;
        for layer in &self.layers {
            chosen = layer.self_attn.choose_backend(backend, self.is_on_gpu())?;
        }
        self.backend = backend;
        Ok(chosen)
    }

    /// Returns the attention backend that [`set_attention_backend`](Self::set_attention_backend) set, or `Auto`.
    pub fn attention_backend(&self) -> AttentionBackend {
        self.backend
    }

    /// Returns whether attention in any layer of this rank reads block tables on the host.
    /// If so, a CUDA graph cannot capture a pass.
    #[cfg(feature = "cuda")]
    pub(crate) fn reads_tables_on_host(&self) -> bool {
        self.layers.iter().any(|layer| {
            let chosen = layer.self_attn.choose_backend(self.backend, self.is_on_gpu());
            matches!(chosen, Ok(AttentionBackend::CandleFlashAttn))
        })
    }

    /// Loads the kernels of `qkv_proj`, `o_proj`, dense MLPs and the output head, by running their products on zeros.
    /// Covers steps with up to `tokens` tokens and `rows` rows of logits. Does nothing on a CPU.
    ///
    /// When a product first needs a kernel, cuBLASLt waits until the GPU has finished all queued work, and then loads
    /// the kernel. After this call, these products do not cause such waits in steps with [`SumOrder::Fastest`].
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA load kernels"))]
    pub fn load_product_kernels(&self, tokens: usize, rows: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.is_on_gpu() {
            let mut kernels = ProductKernels::new(tokens, self.dtype, &self.layer_world);
            for layer in &self.layers {
                kernels.load_layer(layer)?;
            }
            kernels.load_head(&self.lm_head, rows)?;
        }
        Ok(())
    }

    /// Returns the compute dtype, which is also the dtype of the KV cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the layers that this rank runs, with their indices in the model.
    pub(crate) fn own_layers(&self) -> impl Iterator<Item = (usize, &DecoderLayer)> {
        (self.first_layer..).zip(&self.layers)
    }

    /// Returns the number of stages: ranges of layers that the ranks run one after another (see [`World::stages`]).
    /// Returns 1 if the ranks divide each layer.
    pub(crate) fn stages(&self) -> usize {
        self.world.stages().map_or(1, <[_]>::len)
    }

    /// Returns whether this rank runs the layers of a stage.
    pub(crate) fn is_own(&self, stage: usize) -> bool {
        self.world.stages().is_none() || stage == self.world.rank()
    }

    /// Returns the KV cache spec of each layer that this rank runs.
    pub fn cache_layers(&self) -> &[LayerSpec] {
        &self.cache_layers
    }

    /// Returns the layout of a KV cache for the layers that this rank runs.
    pub fn cache_layout(&self) -> CacheLayout {
        self.cache_layout.clone()
    }

    /// Returns how many bytes of this rank's weights a decode step reads for one token.
    /// Counts one row of the embedding, the final norm, the output head, and all weights of the layers except experts
    /// that the token does not use.
    pub fn step_bytes(&self) -> u64 {
        let row = self.embed_tokens.bytes() / self.vocab_size() as u64;
        row + self.layers.iter().map(DecoderLayer::step_bytes).sum::<u64>() + self.norm.bytes() + self.lm_head.bytes()
    }

    /// Returns the number of experts per token, and the size in bytes of one expert summed over this rank's layers.
    /// If no layer has experts, both numbers are 0.
    pub fn expert_cost(&self) -> ExpertCost {
        let layers = self.layers.iter().filter_map(|layer| layer.mlp.expert_cost());
        layers.fold(ExpertCost::default(), |sum, layer| ExpertCost {
            per_token: sum.per_token.max(layer.per_token),
            bytes: sum.bytes + layer.bytes,
        })
    }

    /// Returns the mean number of distinct experts that a batch uses per layer, over the batches that `ExpertUsage`
    /// counted since the last call. Returns `None` if `ExpertUsage` counted no batch. Waits for the device.
    pub fn take_used_experts(&self) -> Result<Option<f64>> {
        let usage = self.layers.iter().filter_map(|layer| layer.mlp.usage());
        let counts = usage.map(|usage| usage.take()).collect::<candle_core::Result<Vec<_>>>()?;
        let batches: u64 = counts.iter().map(|count| count.batches).sum();
        let experts: u64 = counts.iter().map(|count| count.experts).sum();
        Ok((batches > 0).then(|| experts as f64 / batches as f64))
    }

    /// Returns the number of rows in the embedding, which can exceed the number of tokens in the tokenizer.
    pub fn vocab_size(&self) -> usize {
        self.embed_tokens.dims().0
    }

    pub fn is_on_gpu(&self) -> bool {
        self.embed_tokens.device().is_cuda()
    }

    /// Returns the connection of this rank to the ranks that run the model together.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Returns the number of positions that the model was loaded for.
    pub fn context(&self) -> usize {
        self.context
    }
}

/// Loads the layers in `own_layers`. Layers with the same RoPE frequencies share one pair of cos and sin tables.
fn load_layers(
    root: &Weights,
    context: usize,
    config: &DecoderConfig,
    own_layers: Range<usize>,
    load_sublayers: impl Fn(&Weights, LayerInfo) -> Result<(Attention, Mlp)>,
) -> Result<Vec<DecoderLayer>> {
    let rotary = |frequencies| RotaryEmbedding::new(frequencies, context, root.device()).map(Arc::new);
    let full_rotary = rotary(&config.frequencies)?;
    let sliding_rotary = match &config.sliding_frequencies {
        Some(frequencies) => rotary(frequencies)?,
        None => full_rotary.clone(),
    };
    // A rank that runs a stage holds whole layers, so it loads every matrix undivided.
    let root = if root.world().stages().is_some() { root.undivided() } else { root.clone() };
    let load_layer = |(index, &spec): (usize, &LayerSpec)| -> Result<DecoderLayer> {
        let (names, weights) = (config.names, root.at(config.names.layers).at(index));
        let norm = |name| Norm::load(&weights.at(name), config.hidden_size, config.norm);
        let rotary = if spec.window.is_some() { &sliding_rotary } else { &full_rotary };
        let (self_attn, mlp) = load_sublayers(&weights, LayerInfo { index, spec, rotary: rotary.clone() })?;
        Ok(DecoderLayer {
            attention_norm: norm(names.attention_norm)?,
            self_attn,
            attention_post_norm: names.attention_post_norm.map(norm).transpose()?,
            mlp_norm: norm(names.mlp_norm)?,
            mlp,
            mlp_post_norm: names.mlp_post_norm.map(norm).transpose()?,
        })
    };
    config.cache_layers.iter().enumerate().take(own_layers.end).skip(own_layers.start).map(load_layer).collect()
}

/// Loads the token embedding, `[vocab, hidden]`.
/// A float embedding stays unquantized unless it is also the output head.
/// Quantization speeds up the output head, which reads all rows, but not the lookup, which reads one row per token.
fn load_embedding(root: &Weights, config: &DecoderConfig) -> Result<Matrix> {
    let weights = root.at(config.names.embed_tokens);
    let weights = if config.tie_word_embeddings { weights } else { weights.unquantized() };
    Weights::matrix(&[(weights, config.vocab_size)], "weight", config.hidden_size)
}

/// Loads this rank's rows of the output head.
fn load_head(weights: &Weights, embed_tokens: &Matrix, config: &DecoderConfig) -> Result<Linear> {
    let share = weights.world().share(config.vocab_size, 1);
    if !config.tie_word_embeddings {
        let head = weights.at("lm_head").rows([share.clone()], config.vocab_size);
        return Linear::load(&head, config.hidden_size, share.len(), Bias::Without);
    }
    // Every rank holds the whole embedding, so a tied output head shares memory with this rank's rows of it.
    match weights.world().size() {
        1 => Ok(Linear::tied(embed_tokens.clone())),
        _ => Ok(Linear::tied(embed_tokens.rows(share.start, share.len())?)),
    }
}
