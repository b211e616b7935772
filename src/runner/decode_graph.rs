//! The decode step as a CUDA graph.
//!
//! Planning turns the decoder's layers into a fixed list of launches of fused kernels on static buffers.
//! It then captures the list as a graph.
//!
//! Each token costs the host one graph launch. The token stays on the device as the input of the next step.
//! The host reads the token from a mailbox while that step runs.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Tensor};

use super::{EagerReason, KernelTime};
use crate::kernels::attention::{AttentionMask, EarlyReads, FLASH_HEAD_DIMS, FlashAttention, FlashTensors};
use crate::kernels::decode::sample::{self, SamplingBuffers, SamplingKernelParams};
use crate::kernels::decode::{
    self, Embedding, ExpertBuffers, PostNorm, Projection, QkvProjection, RmsNormParams, StepBuffers,
};
use crate::kernels::launch::{LaunchGraph, LaunchSequence, Mailbox, is_idle};
use crate::kernels::moe::experts::ExpertWeights;
use crate::kernels::quantized::Matrix;
use crate::kernels::rows::copy_rows;
use crate::nn::attention::Attention;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{KvCache, LayerCache};
use crate::nn::layer::DecoderLayer;
use crate::nn::linear::Linear;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::nn::moe::{ClampedMoe, GatedMoe};
use crate::nn::norm::Norm as NormLayer;

/// The number of extra steps to queue while the host waits for a token.
const AHEAD: usize = 2;

/// A captured decode step for one sequence.
pub struct DecodeGraph {
    device: CudaDevice,
    buffers: StepBuffers,
    embedding: Embedding,
    /// The number of positions that fit in both the cache and the rotary tables.
    context: usize,
    mailbox: Arc<Mailbox>,
    draw: SamplingBuffers,
    /// The launches of a step, up to its logits.
    layers: LaunchSequence,
    greedy: Choice,
    sampled: Choice,
    sampling: Sampling,
    /// Steps queued since the start. Step s writes its token to slot s mod `mailbox.slots()`.
    queued: usize,
    /// Tokens taken from the mailbox since the start.
    taken: usize,
}

impl DecodeGraph {
    /// Plans and captures the decode step of `decoder` on `cache`. Returns the reason if the decoder must run eagerly.
    pub fn plan(decoder: &Decoder, cache: &KvCache) -> Result<std::result::Result<Self, EagerReason>> {
        let Device::Cuda(device) = decoder.embed_tokens.device() else {
            return Ok(Err(EagerReason::NotOnGpu));
        };
        for layer in &decoder.layers {
            if let Some(reason) = unsupported_reason(decoder, layer)? {
                return Ok(Err(reason));
            }
        }
        let embedding = Embedding { table: decoder.embed_tokens.clone(), scale: decoder.embed_scale };
        let (vocab_size, hidden_size) = decoder.embed_tokens.dims();
        let buffers = StepBuffers::new(device, hidden_size, vocab_size)?;
        if !sample::can_sample(&buffers) {
            return Ok(Err(EagerReason::VocabularySize(vocab_size)));
        }
        let mailbox = Mailbox::new(device, 64)?;
        let mut sequence = LaunchSequence::new(device)?;
        let draw = SamplingBuffers::new(&buffers.logits)?;
        let mut scratch = Scratch::default();
        for (index, layer) in decoder.layers.iter().enumerate() {
            add_attention(&mut sequence, &buffers, &mut scratch, layer, cache.layer(index))?;
            match &layer.mlp {
                Mlp::Gated(mlp) => add_gated_mlp(&mut sequence, &buffers, &mut scratch, layer, mlp)?,
                Mlp::ClampedMoe(mlp) => add_clamped_moe(&mut sequence, &buffers, &mut scratch, layer, mlp)?,
                Mlp::GatedMoe(mlp) => add_gated_moe(&mut sequence, &buffers, &mut scratch, layer, mlp)?,
                Mlp::Plain(_) => bail!("the decode graph has no kernel for an MLP without a gate"),
            }
        }
        let head = &decoder.lm_head.weight;
        decode::add_head(
            &mut sequence,
            &buffers,
            rms_norm(&decoder.norm),
            head,
            decoder.dtype(),
            decoder.final_softcap,
        )?;
        let choice = |add: &dyn Fn(&mut LaunchSequence) -> candle_core::Result<()>| -> Result<Choice> {
            let mut tail = LaunchSequence::new(device)?;
            add(&mut tail)?;
            let graph = LaunchGraph::capture(&sequence, &tail).context("cannot capture the decode step")?;
            Ok(Choice { tail, graph })
        };
        let greedy = choice(&|tail| decode::add_greedy_sampling(tail, &buffers, &embedding, head, &mailbox))?;
        let sampled = choice(&|tail| sample::add_sample(tail, &buffers, &draw, &embedding, &mailbox))?;
        Ok(Ok(Self {
            device: device.clone(),
            buffers,
            embedding,
            context: cache.context().min(decoder.context()),
            mailbox,
            draw,
            layers: sequence,
            greedy,
            sampled,
            sampling: Sampling::Greedy,
            queued: 0,
            taken: 0,
        }))
    }

    /// Starts at `position` with `token` as the input of the first step.
    ///
    /// Without `draw`, every step chooses the most likely token.
    ///
    /// With penalties, the second part of `draw` has one entry per vocabulary token.
    /// An entry is 0 if the token was never seen, and otherwise 1 + the number of times it was generated.
    pub fn start(
        &mut self,
        position: usize,
        token: u32,
        draw: Option<(SamplingKernelParams, Option<Vec<u32>>)>,
    ) -> Result<()> {
        let vocab_size = self.buffers.logits.dims1()?;
        if token as usize >= vocab_size || position >= self.context {
            bail!(
                "cannot decode token {token} at position {position}: the limits are {vocab_size} tokens, {} positions",
                self.context
            );
        }
        self.set_sampling(draw)?;
        let id = Tensor::new(&[token], self.buffers.x.device())?;
        copy_rows(&self.buffers.x, &self.embedding.table.embed(&id, self.embedding.scale)?.flatten_all()?, 0)?;
        let state = Tensor::new(&[position as u32, token, 0, 0], self.buffers.x.device())?;
        copy_rows(&self.buffers.state, &state, 0)?;
        (self.queued, self.taken) = (0, 0);
        Ok(())
    }

    /// Starts after `tokens` cached tokens. Chooses the first new token from the last token's `logits`, f32 \[1, V\].
    pub fn start_from(
        &mut self,
        tokens: usize,
        logits: &Tensor,
        draw: Option<(SamplingKernelParams, Option<Vec<u32>>)>,
    ) -> Result<()> {
        self.set_sampling(draw)?;
        copy_rows(&self.buffers.logits, &logits.flatten_all()?, 0)?;
        let state = Tensor::new(&[tokens as u32 - 1, 0, 0, 0], logits.device())?;
        copy_rows(&self.buffers.state, &state, 0)?;
        // The argmax kernel reads the maxima that the head kernel writes, but no head kernel ran for these logits.
        // The sampling kernel reads only the logits, so it also makes the first greedy choice.
        let tail = match self.sampling {
            Sampling::Greedy => {
                self.draw.set(&SamplingKernelParams::greedy(), None)?;
                &self.sampled.tail
            }
            Sampling::Sampled => &self.sampled.tail,
        };
        tail.enqueue()?;
        (self.queued, self.taken) = (1, 0);
        Ok(())
    }

    /// Waits for all queued steps, then sets the sampling mode and parameters of later steps.
    fn set_sampling(&mut self, draw: Option<(SamplingKernelParams, Option<Vec<u32>>)>) -> Result<()> {
        self.drain()?;
        self.sampling = Sampling::Greedy;
        if let Some((draw, seen)) = draw {
            self.draw.set(&draw, seen)?;
            self.sampling = Sampling::Sampled;
        }
        Ok(())
    }

    /// Returns the tail and the graph for the current sampling mode.
    fn choice(&self) -> &Choice {
        match self.sampling {
            Sampling::Greedy => &self.greedy,
            Sampling::Sampled => &self.sampled,
        }
    }

    /// Waits for the next token. First queues up to `AHEAD` steps after it, but none beyond `limit`.
    ///
    /// `limit` is the maximum number of tokens still to generate, including this one.
    pub fn next(&mut self, limit: usize) -> Result<u32> {
        if limit == 0 {
            bail!("the context is full");
        }
        while self.queued - self.taken < limit.min(1 + AHEAD) {
            self.choice().graph.enqueue()?;
            self.queued += 1;
        }
        let token = self.wait()?;
        if token == u32::MAX {
            bail!("cannot choose a token: the logits are NaN; the weights are corrupt or overflow in this --dtype");
        }
        Ok(token - 1)
    }

    /// Returns the number of queued steps whose tokens have not been taken. These steps also write to the cache.
    pub fn queued_steps(&self) -> usize {
        self.queued - self.taken
    }

    /// Waits for the queued steps and discards their tokens.
    pub fn drain(&mut self) -> Result<()> {
        while self.taken < self.queued {
            self.wait()?;
        }
        Ok(())
    }

    /// Waits for the next word in the mailbox: 1 + the token, or `u32::MAX` if the logits are NaN.
    fn wait(&mut self) -> Result<u32> {
        let slot = self.taken % self.mailbox.slots();
        let mut polls = 0u32;
        loop {
            let word = self.mailbox.take(slot);
            if word != 0 {
                self.taken += 1;
                return Ok(word);
            }
            std::hint::spin_loop();
            polls += 1;
            // A device that failed or ran out of work sends no more words. Queries are slow, so they are rare.
            if polls.is_multiple_of(1 << 20) && is_idle(&self.device).context("a decode step failed on the GPU")? {
                let word = self.mailbox.take(slot);
                if word == 0 {
                    bail!("the GPU finished without sending a token");
                }
                self.taken += 1;
                return Ok(word);
            }
        }
    }

    /// Returns the logits of the last step that ran, f32 \[V\].
    pub fn logits(&self) -> &Tensor {
        &self.buffers.logits
    }

    /// Returns the number of launches in a step.
    pub fn launches(&self) -> usize {
        self.layers.len() + self.choice().tail.len()
    }

    /// Runs one step as individual launches and times each kernel.
    pub fn kernel_times(&mut self) -> Result<Vec<KernelTime>> {
        let mut times: Vec<KernelTime> = Vec::new();
        let mut timed = self.layers.time_each()?;
        timed.extend(self.choice().tail.time_each()?);
        self.queued += 1;
        self.wait()?;
        for kernel in timed {
            let known = times.iter().position(|time| time.name == kernel.name);
            let index = known.unwrap_or_else(|| {
                times.push(KernelTime { name: kernel.name.clone(), calls: 0, seconds: 0.0, bytes: 0 });
                times.len() - 1
            });
            let time = &mut times[index];
            (time.calls, time.seconds, time.bytes) =
                (time.calls + 1, time.seconds + kernel.seconds, time.bytes + kernel.bytes);
        }
        Ok(times)
    }

    /// Runs one step as individual launches instead of the graph, for tests. Returns its token.
    pub fn next_ungraphed(&mut self) -> Result<u32> {
        self.layers.enqueue()?;
        self.choice().tail.enqueue()?;
        self.queued += 1;
        Ok(self.wait()? - 1)
    }
}

/// One way to choose the token of a step.
struct Choice {
    /// The launches after the logits.
    tail: LaunchSequence,
    /// The whole step with this tail.
    graph: LaunchGraph,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sampling {
    Greedy,
    Sampled,
}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<DecodeGraph>();
};

impl Drop for DecodeGraph {
    fn drop(&mut self) {
        // Queued steps write to the buffers that are about to be freed. `drop` cannot return an error.
        let _ = self.device.cuda_stream().synchronize();
    }
}

/// Returns the reason that the graph cannot run a layer, or `None` if it can.
fn unsupported_reason(decoder: &Decoder, layer: &DecoderLayer) -> Result<Option<EagerReason>> {
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
            } else if chosen > decode::MAX_CHOSEN_MXFP4 || experts > decode::MAX_EXPERTS {
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
            } else if chosen > decode::MAX_CHOSEN_EXPERTS || experts > decode::MAX_EXPERTS {
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

/// Buffers between kernels. Layers with the same shapes share them.
#[derive(Default)]
struct Scratch {
    tensors: Vec<Tensor>,
    experts: Vec<ExpertBuffers>,
}

impl Scratch {
    /// Returns the buffer of `slot` with this shape. Allocates it on first use.
    fn tensor(&mut self, slot: usize, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        // The first dimension differs for each slot, so slots with the same shape get different tensors.
        let keyed: Vec<usize> = [slot + 1].into_iter().chain(shape.iter().copied()).collect();
        if let Some(found) = self.tensors.iter().find(|t| t.dims() == keyed.as_slice() && t.dtype() == dtype) {
            return Ok(found.get(slot)?);
        }
        self.tensors.push(Tensor::zeros(keyed, dtype, device)?);
        Ok(self.tensors[self.tensors.len() - 1].get(slot)?)
    }
}

fn rms_norm(norm: &NormLayer) -> RmsNormParams<'_> {
    RmsNormParams { weight: &norm.weight, eps: norm.eps }
}

/// Returns the parameters and scratch buffer f32 \[C\] of a post-norm, or `None` if the layer has no such norm.
fn post_norm<'t>(norm: &'t Option<NormLayer>, scratch: &'t Tensor) -> Option<PostNorm<'t>> {
    norm.as_ref().map(|norm| PostNorm { norm: rms_norm(norm), scratch })
}

fn projection(linear: &Linear) -> Projection<'_> {
    Projection { weight: &linear.weight, bias: linear.bias.as_ref() }
}

/// Adds the attention of a layer: norm, QKV projection, attention, output projection.
fn add_attention(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    scratch: &mut Scratch,
    layer: &DecoderLayer,
    cache: &LayerCache,
) -> Result<()> {
    let Attention { qkv_proj, o_proj, sinks, qk_norm, rotary, config, .. } = &layer.self_attn;
    let (device, dtype) = (buffers.x.device(), layer.self_attn.dtype());
    let (heads, head_dim) = (config.heads, config.spec.head_dim);
    let q = scratch.tensor(0, &[heads, head_dim], dtype, device)?;
    let attended = scratch.tensor(1, &[heads, head_dim], dtype, device)?;
    let raw = scratch.tensor(5, &[heads + config.spec.kv_heads, head_dim], DType::F32, device)?;
    let qk_norm =
        qk_norm.as_ref().map(|(q, k)| decode::QkNorm { q: &q.weight, k: &k.weight, eps: q.eps, scratch: &raw });
    let qkv = QkvProjection {
        weight: &qkv_proj.weight,
        bias: qkv_proj.bias.as_ref(),
        cos: &rotary.cos,
        sin: &rotary.sin,
        q: &q,
        k: cache.k(),
        v: cache.v(),
        qk_norm,
    };
    decode::add_qkv(sequence, buffers, rms_norm(&layer.input_layernorm), &qkv)?;

    let Device::Cuda(cuda) = device else { bail!("the decode graph needs a GPU") };
    let mask = AttentionMask { position: 0, window: config.spec.window, scale: config.scale, softcap: config.softcap };
    let flash = FlashAttention::new(cuda, &q.unsqueeze(0)?, cache.k(), mask)?;
    let tensors = FlashTensors {
        q: &q,
        k: cache.k(),
        v: cache.v(),
        sinks: sinks.as_ref(),
        positions: &buffers.state,
        out: &attended,
        partials: &scratch.tensor(2, &[flash.partials.max(1)], DType::F32, device)?,
        arrivals: &scratch.tensor(3, &[flash.arrivals.max(1)], DType::U32, device)?,
    };
    // The kernel may read the keys and values of earlier positions during the QKV projection.
    // They were written before the projection started.
    let launch = flash.launch(&tensors, EarlyReads::EarlierPositions)?;
    // SAFETY: `decode::add_qkv` checked the shapes and dtypes.
    // `start` checks that the position is less than the context length.
    // The kernel wraps positions modulo the number of cache rows.
    unsafe { sequence.add(launch)? };

    let raw = scratch.tensor(6, buffers.x.dims(), DType::F32, device)?;
    let post_norm = post_norm(&layer.attention_post_norm, &raw);
    Ok(decode::add_residual(
        sequence,
        buffers,
        &attended.flatten_all()?,
        &o_proj.weight,
        o_proj.bias.as_ref(),
        post_norm,
    )?)
}

/// Adds an MLP with a gate: norm, gate and up projections, down projection.
fn add_gated_mlp(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    scratch: &mut Scratch,
    layer: &DecoderLayer,
    mlp: &GatedMlp,
) -> Result<()> {
    let GatedMlp { gate_proj, up_proj, down_proj, activation, .. } = mlp;
    let (intermediate, _) = gate_proj.weight.dims();
    let h = scratch.tensor(4, &[intermediate], mlp.dtype(), buffers.x.device())?;
    let raw = scratch.tensor(6, buffers.x.dims(), DType::F32, buffers.x.device())?;
    let (gate, up) = (projection(gate_proj), projection(up_proj));
    decode::add_gate_up(sequence, buffers, rms_norm(&layer.post_attention_layernorm), gate, up, *activation, &h)?;
    let post_norm = post_norm(&layer.mlp_post_norm, &raw);
    Ok(decode::add_residual(sequence, buffers, &h, &down_proj.weight, down_proj.bias.as_ref(), post_norm)?)
}

/// Adds the experts of Mixtral and Qwen3-MoE: router, gate and up projections, down projection.
fn add_gated_moe(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    scratch: &mut Scratch,
    layer: &DecoderLayer,
    mlp: &GatedMoe,
) -> Result<()> {
    let GatedMoe { router, gate_up_proj, down_proj, dtype, config } = mlp;
    let (Matrix::Dense(router), Some(gate_up), Some(down)) =
        (&router.weight, gate_up_proj.as_matrix()?, down_proj.as_matrix()?)
    else {
        bail!("the decode graph has no kernel for experts in this format");
    };
    let device = buffers.x.device();
    let logits = scratch.tensor(7, &[config.experts], DType::F32, device)?;
    let h = scratch.tensor(4, &[config.experts_per_token, config.intermediate_size], *dtype, device)?;
    let norm = rms_norm(&layer.post_attention_layernorm);
    decode::add_router(sequence, buffers, norm, router, None, &logits, None)?;
    decode::add_routed_gate_up(sequence, buffers, norm, &gate_up, &logits, &h)?;
    Ok(decode::add_routed_down(sequence, buffers, &down, &logits, config.softmax, &h)?)
}

/// Adds the MXFP4 experts of gpt-oss: router, gate and up projections, down projection.
fn add_clamped_moe(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    scratch: &mut Scratch,
    layer: &DecoderLayer,
    mlp: &ClampedMoe,
) -> Result<()> {
    let ClampedMoe { router, gate_up_proj, gate_up_bias, down_proj, down_bias, config } = mlp;
    let (ExpertWeights::Mxfp4Tiles(gate_up), ExpertWeights::Mxfp4Tiles(down)) = (gate_up_proj, down_proj) else {
        bail!("the decode graph supports only MXFP4 experts");
    };
    let Matrix::Dense(router_weight) = &router.weight else { bail!("the decode graph needs an unquantized router") };
    if scratch.experts.is_empty() {
        let (count, chosen) = (config.experts, config.experts_per_token);
        scratch.experts.push(ExpertBuffers::new(&buffers.x, count, chosen, config.intermediate_size)?);
    }
    let expert_buffers = &scratch.experts[0];
    let norm = rms_norm(&layer.post_attention_layernorm);
    decode::add_router(
        sequence,
        buffers,
        norm,
        router_weight,
        router.bias.as_ref(),
        &expert_buffers.logits,
        Some(expert_buffers),
    )?;
    let (up_bias, down_bias) = (gate_up_bias.to_dtype(DType::F32)?, down_bias.to_dtype(DType::F32)?);
    decode::add_mxfp4_gate_up(sequence, buffers, gate_up, &up_bias, config.swiglu_limit, expert_buffers)?;
    Ok(decode::add_mxfp4_down(sequence, buffers, down, &down_bias, expert_buffers)?)
}
