//! The decode executor: the decoder's layers turned once into a fixed list of fused launches on static buffers, and that
//! into a CUDA graph. A token costs the host one graph launch; the token itself stays on the device, and comes to the host
//! through a mailbox while the next step runs.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Tensor};

use super::bench::KernelTime;
use crate::kernels::attention::{AttentionMask, EarlyReads, FLASH_HEAD_DIMS, FlashAttention, FlashTensors};
use crate::kernels::decode::sample::{self, SamplingBuffers, SamplingKernelParams};
use crate::kernels::decode::{
    self, Embedding, ExpertBuffers, PostNorm, Projection, QkvProjection, RmsNorm, StepBuffers,
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

/// Steps that are queued ahead of the one whose token the host waits for.
const AHEAD: usize = 2;

pub struct Executor {
    device: CudaDevice,
    buffers: StepBuffers,
    embedding: Embedding,
    /// Positions that cache and rotary tables have.
    context: usize,
    mailbox: Arc<Mailbox>,
    draw: SamplingBuffers,
    /// All but the choice of a token.
    layers: LaunchSequence,
    greedy: Choice,
    drawn: Choice,
    choosing: Choosing,
    /// Steps queued since the first, and tokens taken: slot s mod slots of the mailbox has the token of step s.
    queued: usize,
    taken: usize,
}

impl Executor {
    /// The plan for `decoder` on `cache`, or why there is none: then the eager decoder runs every step.
    pub fn plan(decoder: &Decoder, cache: &KvCache) -> Result<std::result::Result<Self, String>> {
        let Device::Cuda(device) = decoder.embed_tokens.device() else {
            return Ok(Err("the model is not on a GPU".into()));
        };
        if let Some(reason) = decoder.layers.iter().find_map(|layer| obstacle(decoder, layer)) {
            return Ok(Err(reason));
        }
        let embedding = Embedding { table: decoder.embed_tokens.clone(), scale: decoder.embed_scale };
        let (vocab_size, hidden_size) = decoder.embed_tokens.dims();
        let buffers = StepBuffers::new(device, hidden_size, vocab_size)?;
        if !sample::can_sample(&buffers) {
            return Ok(Err(format!("this GPU is too small to draw from {vocab_size} tokens")));
        }
        let mailbox = Mailbox::new(device, 64)?;
        let mut chain = LaunchSequence::new(device)?;
        let draw = SamplingBuffers::new(&buffers.logits)?;
        let mut scratch = Scratch::default();
        for (index, layer) in decoder.layers.iter().enumerate() {
            attention(&mut chain, &buffers, &mut scratch, layer, cache.layer(index))?;
            match &layer.mlp {
                Mlp::Gated(mlp) => gated(&mut chain, &buffers, &mut scratch, layer, mlp)?,
                Mlp::ClampedMoe(mlp) => experts(&mut chain, &buffers, &mut scratch, layer, mlp)?,
                Mlp::GatedMoe(mlp) => routed(&mut chain, &buffers, &mut scratch, layer, mlp)?,
                Mlp::Plain(_) => bail!("the executor has no kernels for this MLP"),
            }
        }
        let head = &decoder.lm_head.weight;
        decode::head(&mut chain, &buffers, norm(&decoder.norm), head, decoder.dtype(), decoder.final_softcap)?;
        let choice = |add: &dyn Fn(&mut LaunchSequence) -> candle_core::Result<()>| -> Result<Choice> {
            let mut tail = LaunchSequence::new(device)?;
            add(&mut tail)?;
            let graph = LaunchGraph::capture(&chain, &tail).context("cannot capture the decode step")?;
            Ok(Choice { tail, graph })
        };
        let greedy = choice(&|tail| decode::argmax_token(tail, &buffers, &embedding, head, &mailbox))?;
        let drawn = choice(&|tail| sample::sample(tail, &buffers, &draw, &embedding, &mailbox))?;
        Ok(Ok(Self {
            device: device.clone(),
            buffers,
            embedding,
            context: cache.context().min(decoder.context()),
            mailbox,
            draw,
            layers: chain,
            greedy,
            drawn,
            choosing: Choosing::Greedy,
            queued: 0,
            taken: 0,
        }))
    }

    /// Starts at `position` with `token` as the input of the first step. Without `draw` the likeliest token is chosen;
    /// `seen` \[V\] is needed for penalties: 0, or 1 + how often a token was generated.
    pub fn start(
        &mut self,
        position: usize,
        token: u32,
        draw: Option<(SamplingKernelParams, Option<Vec<u32>>)>,
    ) -> Result<()> {
        let vocab_size = self.buffers.logits.dims1()?;
        if token as usize >= vocab_size || position >= self.context {
            bail!("token {token} at position {position}: {vocab_size} tokens and {} positions", self.context);
        }
        self.choose_by(draw)?;
        let id = Tensor::new(&[token], self.buffers.x.device())?;
        copy_rows(&self.buffers.x, &self.embedding.table.embed(&id, self.embedding.scale)?.flatten_all()?, 0)?;
        let state = Tensor::new(&[position as u32, token, 0, 0], self.buffers.x.device())?;
        copy_rows(&self.buffers.state, &state, 0)?;
        (self.queued, self.taken) = (0, 0);
        Ok(())
    }

    /// Starts with logits f32 \[1, V\] of the last of `tokens` tokens: the first token is chosen from them.
    pub fn start_from(
        &mut self,
        tokens: usize,
        logits: &Tensor,
        draw: Option<(SamplingKernelParams, Option<Vec<u32>>)>,
    ) -> Result<()> {
        self.choose_by(draw)?;
        copy_rows(&self.buffers.logits, &logits.flatten_all()?, 0)?;
        let state = Tensor::new(&[tokens as u32 - 1, 0, 0, 0], logits.device())?;
        copy_rows(&self.buffers.state, &state, 0)?;
        // Greedy choice looks at what the head's blocks found, not at logits.
        let tail = match self.choosing {
            Choosing::Greedy => {
                self.draw.set(&SamplingKernelParams::greedy(), None)?;
                &self.drawn.tail
            }
            Choosing::Drawn => &self.drawn.tail,
        };
        tail.enqueue()?;
        (self.queued, self.taken) = (1, 0);
        Ok(())
    }

    fn choose_by(&mut self, draw: Option<(SamplingKernelParams, Option<Vec<u32>>)>) -> Result<()> {
        self.drain()?;
        self.choosing = Choosing::Greedy;
        if let Some((draw, seen)) = draw {
            self.draw.set(&draw, seen)?;
            self.choosing = Choosing::Drawn;
        }
        Ok(())
    }

    fn choice(&self) -> &Choice {
        match self.choosing {
            Choosing::Greedy => &self.greedy,
            Choosing::Drawn => &self.drawn,
        }
    }

    /// The next token. `room` is for how many more tokens there is room or use, this one included; that many steps are
    /// queued ahead, but no more than `AHEAD`.
    pub fn next(&mut self, room: usize) -> Result<u32> {
        if room == 0 {
            bail!("the context is full");
        }
        while self.queued - self.taken < room.min(1 + AHEAD) {
            self.choice().graph.enqueue()?;
            self.queued += 1;
        }
        let token = self.wait()?;
        if token == u32::MAX {
            bail!("the model's logits are not numbers: its weights are broken, or too large for this --dtype");
        }
        Ok(token - 1)
    }

    /// Steps that were run or are queued beyond those whose tokens were taken: they have written to the cache.
    pub fn ahead(&self) -> usize {
        self.queued - self.taken
    }

    /// Waits for queued steps and forgets their tokens.
    pub fn drain(&mut self) -> Result<()> {
        while self.taken < self.queued {
            self.wait()?;
        }
        Ok(())
    }

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
            // Now and then: a device that has failed, or is done, will send nothing more.
            if polls.is_multiple_of(1 << 20) && is_idle(&self.device).context("the GPU failed in a decode step")? {
                let word = self.mailbox.take(slot);
                if word == 0 {
                    bail!("the GPU sent no token");
                }
                self.taken += 1;
                return Ok(word);
            }
        }
    }

    /// Logits f32 \[V\] of the last step that ran.
    pub fn logits(&self) -> &Tensor {
        &self.buffers.logits
    }

    pub fn launches(&self) -> usize {
        self.layers.len() + self.choice().tail.len()
    }

    /// Times each kernel of a step, alone and in order; the step counts as one.
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

    /// Issues the launches of a step one by one instead of as a graph: for tests.
    pub fn next_ungraphed(&mut self) -> Result<u32> {
        self.layers.enqueue()?;
        self.choice().tail.enqueue()?;
        self.queued += 1;
        Ok(self.wait()? - 1)
    }
}

/// The end of a step, and the graph of the whole of it.
struct Choice {
    tail: LaunchSequence,
    graph: LaunchGraph,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choosing {
    Greedy,
    Drawn,
}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Executor>();
};

impl Drop for Executor {
    fn drop(&mut self) {
        // Queued steps write to buffers that go now. An error has nowhere to go from here.
        let _ = self.device.cuda_stream().synchronize();
    }
}

/// Why the executor cannot run a layer.
fn obstacle(decoder: &Decoder, layer: &DecoderLayer) -> Option<String> {
    let dtype = decoder.dtype();
    if !matches!(dtype, DType::BF16 | DType::F16) {
        return Some(format!("it computes in bf16 and f16, not {dtype:?}"));
    }
    if let Some(what) = decoder.unsupported_reason() {
        return Some(format!("it has no kernels for {what}"));
    }
    let config = &layer.self_attn.config;
    let head_dim = config.spec.head_dim;
    if !FLASH_HEAD_DIMS.contains(&head_dim) {
        return Some(format!("it has no attention for heads of {head_dim}"));
    }
    // Weights, and how many inputs they are multiplied with at once.
    let mut weights = vec![(layer.self_attn.qkv_proj.weight.clone(), 1), (layer.self_attn.o_proj.weight.clone(), 1)];
    match &layer.mlp {
        Mlp::Gated(mlp) => {
            let (gate, up) = (&mlp.gate_proj.weight, &mlp.up_proj.weight);
            if gate.format() != up.format() || gate.input_rounding() != up.input_rounding() {
                return Some("it has no kernel for a gate that is quantized in another way than what it is for".into());
            }
            weights.extend([gate, up, &mlp.down_proj.weight].map(|weight| (weight.clone(), 1)));
        }
        Mlp::ClampedMoe(mlp) => {
            let ClampedMoe { gate_up_proj, down_proj, config, .. } = mlp;
            if !matches!((gate_up_proj, down_proj), (ExpertWeights::Mxfp4Tiles(_), ExpertWeights::Mxfp4Tiles(_))) {
                return Some("it runs experts in MXFP4 only, with scales up to 2".into());
            }
            if config.experts_per_token > decode::MAX_CHOSEN_MXFP4 || config.experts > decode::MAX_EXPERTS {
                return Some(format!("it cannot choose {} of {} experts", config.experts_per_token, config.experts));
            }
            let columns = config.intermediate_size;
            if columns % 8 != 0 || columns > decode::MAX_EXPERT_COLUMNS {
                return Some(format!("it cannot multiply rows of {columns}"));
            }
        }
        Mlp::GatedMoe(mlp) => {
            let (Ok(Some(gate_up)), Ok(Some(down))) = (mlp.gate_up_proj.as_matrix(), mlp.down_proj.as_matrix()) else {
                return Some("it has no kernels for such experts".into());
            };
            weights.extend([(gate_up, 1), (down, mlp.config.experts_per_token)]);
        }
        Mlp::Plain(_) => return Some("it has no kernels for this MLP".into()),
    }
    let after = layer.mlp_post_norm.is_some() && !matches!(layer.mlp, Mlp::Gated(_));
    if after {
        return Some("it has no kernels for norms after experts".into());
    }
    let Device::Cuda(device) = decoder.embed_tokens.device() else { return None };
    let fits = |(weight, inputs): &(Matrix, usize)| decode::can_multiply(device, weight, *inputs).unwrap_or(false);
    let bad = weights.into_iter().find(|weight| !fits(weight));
    bad.map(|(weight, _)| match weight {
        Matrix::Mixed(_) => "it has no kernel for queries, keys and values that are quantized in unlike ways".into(),
        _ => format!("it cannot multiply rows of {}", weight.dims().1),
    })
}

/// Buffers between two kernels, the same for all layers of one shape.
#[derive(Default)]
struct Scratch {
    tensors: Vec<Tensor>,
    experts: Vec<ExpertBuffers>,
}

impl Scratch {
    /// A buffer for `slot` of this shape; what another layer made is used again.
    fn tensor(&mut self, slot: usize, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        // The first dimension tells slots of one shape apart.
        let keyed: Vec<usize> = [slot + 1].into_iter().chain(shape.iter().copied()).collect();
        if let Some(found) = self.tensors.iter().find(|t| t.dims() == keyed.as_slice() && t.dtype() == dtype) {
            return Ok(found.get(slot)?);
        }
        self.tensors.push(Tensor::zeros(keyed, dtype, device)?);
        Ok(self.tensors[self.tensors.len() - 1].get(slot)?)
    }
}

fn norm(norm: &NormLayer) -> RmsNorm<'_> {
    RmsNorm { weight: &norm.weight, eps: norm.eps }
}

/// The norm of what is added, if there is one, and room for that.
fn after<'t>(norm_after: &'t Option<NormLayer>, raw: &'t Tensor) -> Option<PostNorm<'t>> {
    norm_after.as_ref().map(|layer| PostNorm { norm: norm(layer), scratch: raw })
}

fn projection(linear: &Linear) -> Projection<'_> {
    Projection { weight: &linear.weight, bias: linear.bias.as_ref() }
}

/// Norm, q, k and v, attention, projection back.
fn attention(
    chain: &mut LaunchSequence,
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
    decode::qkv(chain, buffers, norm(&layer.input_layernorm), &qkv)?;

    let Device::Cuda(cuda) = device else { bail!("the executor is for a GPU") };
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
    // Keys of earlier steps may be read while the projection ahead still runs: they were written before it started.
    let launch = flash.launch(&tensors, EarlyReads::EarlierPositions)?;
    // SAFETY: `decode::qkv` has checked shapes and dtypes, `start` that the position is below the context; rows are taken
    // modulo the cache's.
    unsafe { chain.add(launch)? };

    let raw = scratch.tensor(6, buffers.x.dims(), DType::F32, device)?;
    let after = after(&layer.attention_post_norm, &raw);
    Ok(decode::residual(chain, buffers, &attended.flatten_all()?, &o_proj.weight, o_proj.bias.as_ref(), after)?)
}

fn gated(
    chain: &mut LaunchSequence,
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
    decode::gate_up(chain, buffers, norm(&layer.post_attention_layernorm), gate, up, *activation, &h)?;
    let after = after(&layer.mlp_post_norm, &raw);
    Ok(decode::residual(chain, buffers, &h, &down_proj.weight, down_proj.bias.as_ref(), after)?)
}

fn routed(
    chain: &mut LaunchSequence,
    buffers: &StepBuffers,
    scratch: &mut Scratch,
    layer: &DecoderLayer,
    mlp: &GatedMoe,
) -> Result<()> {
    let GatedMoe { router, gate_up_proj, down_proj, dtype, config } = mlp;
    let (Matrix::Dense(router), Some(gate_up), Some(down)) =
        (&router.weight, gate_up_proj.as_matrix()?, down_proj.as_matrix()?)
    else {
        bail!("the executor has no kernels for such experts");
    };
    let device = buffers.x.device();
    let logits = scratch.tensor(7, &[config.experts], DType::F32, device)?;
    let h = scratch.tensor(4, &[config.experts_per_token, config.intermediate_size], *dtype, device)?;
    let norm = norm(&layer.post_attention_layernorm);
    decode::router(chain, buffers, norm, router, None, &logits, None)?;
    decode::routed_gate_up(chain, buffers, norm, &gate_up, &logits, &h)?;
    Ok(decode::routed_down(chain, buffers, &down, &logits, config.softmax, &h)?)
}

fn experts(
    chain: &mut LaunchSequence,
    buffers: &StepBuffers,
    scratch: &mut Scratch,
    layer: &DecoderLayer,
    mlp: &ClampedMoe,
) -> Result<()> {
    let ClampedMoe { router, gate_up_proj, gate_up_bias, down_proj, down_bias, config } = mlp;
    let (ExpertWeights::Mxfp4Tiles(gate_up), ExpertWeights::Mxfp4Tiles(down)) = (gate_up_proj, down_proj) else {
        bail!("the executor runs experts in MXFP4 only");
    };
    let Matrix::Dense(router_weight) = &router.weight else { bail!("a router is of floats") };
    if scratch.experts.is_empty() {
        let (count, chosen) = (config.experts, config.experts_per_token);
        scratch.experts.push(ExpertBuffers::new(&buffers.x, count, chosen, config.intermediate_size)?);
    }
    let between = &scratch.experts[0];
    let norm = norm(&layer.post_attention_layernorm);
    decode::router(chain, buffers, norm, router_weight, router.bias.as_ref(), &between.logits, Some(between))?;
    let (up_bias, down_bias) = (gate_up_bias.to_dtype(DType::F32)?, down_bias.to_dtype(DType::F32)?);
    decode::expert_gate_up(chain, buffers, gate_up, &up_bias, config.swiglu_limit, between)?;
    Ok(decode::expert_down(chain, buffers, down, &down_bias, between)?)
}
