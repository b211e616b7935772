//! The decode step as a CUDA graph.
//!
//! [`DecodeGraph::plan`] turns the decoder's layers and output head into a list of launches of fused kernels, which
//! work on static buffers. It captures two graphs: this list followed by launches that choose the most likely token,
//! and this list followed by launches that sample a token.
//!
//! For each decode step, the host launches one of these graphs. The chosen token stays on the device as the input of
//! the next step, and the host also reads the token from a mailbox.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Tensor};

use super::layers::{LayerBuffers, add_attention, add_clamped_moe, add_gated_mlp, add_gated_moe, rms_norm};
use super::support::unsupported_reason;
use crate::kernels::decode::sample::{self, SamplingBuffers};
use crate::kernels::decode::{self, Embedding, StepBuffers};
use crate::kernels::exchange::add_sum;
use crate::kernels::launch::{HostMailbox, LaunchGraph, LaunchList};
use crate::kernels::rows::copy_rows;
use crate::kernels::sampling::DeviceSampling;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BLOCK_TOKENS, BlockTables, KvCache};
use crate::nn::mlp::Mlp;
use crate::runner::decode_graph::{GraphCommand, NoDecodeGraphReason};
use crate::runner::gpu::sampling::token_in_word;
use crate::runner::step::{KernelTime, LaunchCounts};

/// The maximum number of steps that the host queues beyond the step whose token it waits for.
/// These steps keep the GPU busy while the host handles the token.
/// A larger number would waste more steps if the sequence ends early, for example at a stop token.
const STEPS_AHEAD: usize = 2;
/// The number of mailbox slots. Each queued step needs its own slot.
/// Up to `1 + STEPS_AHEAD` steps are queued at once, so any larger number works. A slot takes only 4 bytes.
const MAILBOX_SLOTS: usize = 64;
const _: () = assert!(MAILBOX_SLOTS > 1 + STEPS_AHEAD);

/// The sequence that a decode graph continues.
#[derive(Clone, Copy)]
struct CurrentSequence {
    id: u64,
    /// The position of the token that is the input of the first step.
    /// After `start_from`, the first step only chooses the first token, and its input is the last cached token.
    start: usize,
}

/// A captured decode step for one sequence.
pub struct DecodeGraph {
    device: CudaDevice,
    buffers: StepBuffers,
    embedding: Embedding,
    /// The maximum number of positions in a sequence. The RoPE tables cover all of them.
    context: usize,
    mailbox: Arc<HostMailbox>,
    sampling_buffers: SamplingBuffers,
    /// The kernel launches of a step, up to its logits.
    layers: LaunchList,
    /// Chooses the most likely token.
    greedy: StepTail,
    sampled: StepTail,
    /// Chooses the first token after a prefill, whose logits `start_from` has copied to `buffers.logits`.
    first_choice: LaunchList,
    sampling: Sampling,
    /// The number of steps queued so far for the current sequence, including finished steps.
    /// Step s, counted from 0, writes its token to slot s mod `mailbox.slots()`.
    queued: usize,
    /// The number of tokens of the current sequence that were taken from the mailbox.
    taken: usize,
    /// The maximum value of `queued`: the number of steps for which the context and the block tables have room.
    max_queued: usize,
    sequence: Option<CurrentSequence>,
    /// The sequence's block table of each layer group on the device, u32 `[1, blocks of the context]`.
    tables: Vec<Tensor>,
    /// For each layer group, the number of block table entries that were copied to `tables`.
    copied_entries: Vec<usize>,
    /// The number of blocks in the KV cache.
    cache_blocks: usize,
}

impl DecodeGraph {
    /// Plans and captures the decode step of `decoder` on `cache`.
    ///
    /// A sequence can have up to `context` positions, but not more than `decoder.context()`.
    /// The inner error is the reason why the decode graph does not support the decoder.
    pub fn plan(decoder: &Decoder, cache: &KvCache, context: usize) -> Result<Result<Box<Self>, NoDecodeGraphReason>> {
        let Device::Cuda(device) = decoder.embed_tokens.device() else { return Ok(Err(NoDecodeGraphReason::NotOnGpu)) };
        if let Some(reason) = unsupported_reason(decoder, device)? {
            return Ok(Err(reason));
        }
        let embedding = Embedding { table: decoder.embed_tokens.clone(), scale: decoder.embed_scale };
        let (vocab_size, hidden_size) = decoder.embed_tokens.dims();
        let buffers = StepBuffers::new(device, hidden_size, vocab_size, decoder.world())?;
        if !sample::can_sample(&buffers) {
            return Ok(Err(NoDecodeGraphReason::VocabularySize(vocab_size)));
        }
        let mailbox = HostMailbox::new(device, MAILBOX_SLOTS)?;
        let sampling_buffers = SamplingBuffers::new(&buffers.logits)?;
        let context = context.min(decoder.context());
        let table = |_| Tensor::zeros((1, context.div_ceil(BLOCK_TOKENS)), DType::U32, decoder.embed_tokens.device());
        let tables = (0..cache.layout().groups()).map(table).collect::<candle_core::Result<Vec<_>>>()?;

        let layers = record_layers(device, decoder, cache, &buffers, &tables)?;
        let add_sample =
            |tail: &mut LaunchList| sample::add_sample(tail, &buffers, &sampling_buffers, &embedding, &mailbox);
        let greedy = StepTail::capture(device, &layers, |tail| {
            decode::add_greedy_sampling(tail, &buffers, &embedding, &mailbox)
        })?;
        let sampled = StepTail::capture(device, &layers, |tail| {
            decode::add_logits_of_ranks(tail, &buffers)?;
            add_sample(tail)
        })?;
        let mut first_choice = LaunchList::new(device)?;
        add_sample(&mut first_choice)?;
        Ok(Ok(Box::new(Self {
            device: device.clone(),
            buffers,
            embedding,
            context,
            mailbox,
            sampling_buffers,
            layers,
            greedy,
            sampled,
            first_choice,
            sampling: Sampling::Greedy,
            queued: 0,
            taken: 0,
            max_queued: 0,
            sequence: None,
            copied_entries: vec![0; tables.len()],
            tables,
            cache_blocks: cache.blocks(),
        })))
    }

    /// Runs a command. Only [`GraphCommand::StartFrom`] needs `logits`, f32 `[1, vocab]`, of the rank's last pass.
    /// Returns the token of a [`GraphCommand::Next`], or `None` for other commands.
    pub(in crate::runner) fn run(&mut self, command: &GraphCommand, logits: Option<&Tensor>) -> Result<Option<u32>> {
        match command {
            GraphCommand::Start { sequence, position, token, sampling, tables } => {
                self.start(*sequence, *position, *token, sampling.clone(), tables)?;
            }
            GraphCommand::StartFrom { sequence, tokens, sampling, tables } => {
                let logits =
                    logits.context("internal error: the last pass did not return exactly one row of logits")?;
                self.start_from(*sequence, *tokens, logits, sampling.clone(), tables)?;
            }
            GraphCommand::SetTables(tables) => self.set_tables(tables)?,
            GraphCommand::Next { limit } => return self.next(*limit).map(Some),
        }
        Ok(None)
    }

    /// Starts decoding a sequence at `position` with `token` as the input of the first step.
    ///
    /// Without `sampling`, every step chooses the most likely token.
    pub fn start(
        &mut self,
        sequence_id: u64,
        position: usize,
        token: u32,
        sampling: Option<DeviceSampling>,
        tables: &BlockTables,
    ) -> Result<()> {
        let vocab_size = self.buffers.logits.dims1()?;
        if token as usize >= vocab_size || position >= self.context {
            bail!(
                "cannot decode token {token} at position {position}: \
                 the vocabulary has {vocab_size} tokens, and the context has {} positions",
                self.context
            );
        }
        // Stop first. If a call below fails, the graph must not continue the previous sequence.
        self.stop();
        self.set_sampling(sampling)?;
        let id = Tensor::new(&[token], self.buffers.x.device())?;
        copy_rows(&self.buffers.x, &self.embedding.table.embed(&id, self.embedding.scale)?.flatten_all()?, 0)?;
        self.buffers.set_state(position, token)?;
        self.begin(sequence_id, position, 0, tables)
    }

    /// Makes `sequence_id` the current sequence: sets the step counts and copies the block tables to the device.
    /// `queued` is the number of the sequence's steps that the caller has already queued.
    fn begin(&mut self, sequence_id: u64, position: usize, queued: usize, tables: &BlockTables) -> Result<()> {
        (self.queued, self.taken) = (queued, 0);
        self.sequence = Some(CurrentSequence { id: sequence_id, start: position });
        self.copied_entries.fill(0);
        self.set_tables(tables)
    }

    /// Returns whether [`next`](Self::next) would return the token that follows `position` in `sequence_id`.
    pub fn continues(&self, sequence_id: u64, position: usize) -> bool {
        self.sequence.is_some_and(|current| current.id == sequence_id && current.start + self.taken == position)
    }

    /// Forgets the current sequence.
    /// Before the next step, call [`start`](Self::start) or [`start_from`](Self::start_from).
    pub fn stop(&mut self) {
        self.sequence = None;
    }

    /// Copies to the device each block table that has grown, so that later steps can use positions in the new blocks.
    /// Fails if no sequence was started, or if a block is not in the KV cache.
    pub fn set_tables(&mut self, tables: &BlockTables) -> Result<()> {
        let Some(CurrentSequence { start, .. }) = self.sequence else {
            bail!("cannot set block tables: no sequence was started")
        };
        for ((device, copied), table) in self.tables.iter().zip(&mut self.copied_entries).zip(tables.iter()) {
            let used = table.len().min(device.dim(1)?);
            if used != *copied {
                if let Some(block) = table[..used].iter().find(|&&block| block as usize >= self.cache_blocks) {
                    bail!(
                        "cannot set block tables: block {block} is not one of the {} blocks of the KV cache",
                        self.cache_blocks
                    );
                }
                let values = Tensor::new(&table[..used], device.device())?;
                copy_rows(&device.flatten_all()?, &values, 0)?;
                *copied = used;
            }
        }
        self.max_queued = self.context.min(tables.positions()).saturating_sub(start);
        Ok(())
    }

    /// Starts decoding after `tokens` cached tokens, and queues the choice of the first new token.
    /// `logits`, f32 `[1, vocab]`, are the logits of the last cached token.
    pub fn start_from(
        &mut self,
        sequence_id: u64,
        tokens: usize,
        logits: &Tensor,
        sampling: Option<DeviceSampling>,
        tables: &BlockTables,
    ) -> Result<()> {
        let logits = logits.flatten_all()?;
        let vocab_size = self.buffers.logits.dims1()?;
        let context = self.context;
        if tokens == 0 || tokens > context || logits.dims1()? != vocab_size {
            bail!(
                "cannot decode after {tokens} tokens with {} logits: \
                 expected 1 to {context} tokens and {vocab_size} logits",
                logits.dims1()?
            );
        }
        self.stop();
        self.set_sampling(sampling)?;
        copy_rows(&self.buffers.logits, &logits, 0)?;
        self.buffers.set_state(tokens - 1, 0)?;
        // The argmax kernel needs maxima from the head kernel, which has not run for these logits.
        // The sampling kernel needs only the logits, so it makes the first choice even if sampling is greedy.
        if self.sampling == Sampling::Greedy {
            self.sampling_buffers.set(DeviceSampling::greedy())?;
        }
        self.first_choice.enqueue()?;
        self.begin(sequence_id, tokens - 1, 1, tables)
    }

    /// Waits for all queued steps, then sets how later steps choose tokens.
    fn set_sampling(&mut self, sampling: Option<DeviceSampling>) -> Result<()> {
        self.drain()?;
        self.sampling = match sampling {
            None => Sampling::Greedy,
            Some(sampling) => {
                self.sampling_buffers.set(sampling)?;
                Sampling::Sampled
            }
        };
        Ok(())
    }

    /// Returns the launches and the graph for the current kind of sampling.
    fn tail(&self) -> &StepTail {
        match self.sampling {
            Sampling::Greedy => &self.greedy,
            Sampling::Sampled => &self.sampled,
        }
    }

    /// Waits for the next token and returns it.
    /// Before the wait, queues the token's step, if it is not queued yet, and up to `STEPS_AHEAD` later steps.
    ///
    /// `limit` is the maximum number of tokens still to generate, including the next token.
    /// Never queues steps after the last of these tokens, or at positions beyond the context or the block tables.
    /// Fails if no step is left, or with `NoToken` if every logit of the token's step is NaN or -inf.
    pub fn next(&mut self, limit: usize) -> Result<u32> {
        let limit = self.steps_left(limit)?;
        while self.queued - self.taken < limit.min(1 + STEPS_AHEAD) {
            self.count_step()?;
            self.buffers.world.launch_together(|| self.tail().graph.enqueue())?;
        }
        self.take_token()
    }

    /// Returns how many more tokens can be generated, at most `limit`. Fails if the number is 0.
    pub fn steps_left(&self, limit: usize) -> Result<usize> {
        match limit.min(self.max_queued - self.taken) {
            0 => bail!("cannot decode a token: the context or block table is full, or the request's limit is reached"),
            left => Ok(left),
        }
    }

    /// Returns whether [`set_tables`](Self::set_tables) would copy a table.
    pub fn needs_tables(&self, tables: &BlockTables) -> bool {
        let used = self.tables.iter().zip(tables.iter()).map(|(device, table)| table.len().min(device.dims()[1]));
        !used.eq(self.copied_entries.iter().copied())
    }

    /// Counts one more queued step. Fails if the context or the block tables have no room for the step.
    fn count_step(&mut self) -> Result<()> {
        if self.queued == self.max_queued {
            bail!("cannot decode a token: the context or block table is full");
        }
        self.queued += 1;
        Ok(())
    }

    /// Waits for the next token and returns it.
    /// Fails with `NoToken` if every logit of the token's step is NaN or -inf.
    fn take_token(&mut self) -> Result<u32> {
        token_in_word(self.wait()?)
    }

    /// Returns the number of queued steps whose tokens have not been taken. Such steps may still write to the KV cache.
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

    /// Waits for the next mailbox word (see [`token_in_word`]).
    fn wait(&mut self) -> Result<u32> {
        let slot = self.taken % self.mailbox.slots();
        let word = self.mailbox.wait(slot).context("cannot decode a token: the step failed on the GPU")?;
        self.taken += 1;
        Ok(word)
    }

    /// Returns the buffer for the logits, f32 `[vocab]`. Each step overwrites the buffer with its logits,
    /// except greedy steps of several ranks.
    pub fn logits(&self) -> &Tensor {
        &self.buffers.logits
    }

    /// Counts the kernels and the graph nodes of a step.
    pub fn launch_counts(&self) -> Result<LaunchCounts> {
        let kernels = self.layers.len() + self.tail().launches.len();
        let graph_nodes = self.tail().graph.nodes()?;
        Ok(LaunchCounts { kernels, graph_nodes, copies: graph_nodes - kernels })
    }

    /// Runs one step as individual launches, without overlap.
    /// For each kernel, returns the number of its launches, and the sums of their times and bytes.
    pub fn kernel_times(&mut self) -> Result<Vec<KernelTime>> {
        self.count_step()?;
        let mut times: Vec<KernelTime> = Vec::new();
        let mut timed = self.layers.time_each()?;
        timed.extend(self.tail().launches.time_each()?);
        self.wait()?;
        for kernel in timed {
            let known = times.iter().position(|time| time.name == kernel.name);
            let index = known.unwrap_or_else(|| {
                times.push(KernelTime { name: kernel.name.clone(), calls: 0, seconds: 0.0, bytes: 0 });
                times.len() - 1
            });
            let time = &mut times[index];
            time.calls += 1;
            time.seconds += kernel.seconds;
            time.bytes += kernel.bytes;
        }
        Ok(times)
    }

    /// Runs one step as individual kernel launches, for comparison with the graph. Returns the step's token.
    pub fn next_ungraphed(&mut self) -> Result<u32> {
        self.count_step()?;
        self.layers.enqueue()?;
        self.tail().launches.enqueue()?;
        self.take_token()
    }
}

/// Records the launches of a step up to its logits. `tables` has the sequence's block table of each layer group.
fn record_layers(
    device: &CudaDevice,
    decoder: &Decoder,
    cache: &KvCache,
    buffers: &StepBuffers,
    tables: &[Tensor],
) -> Result<LaunchList> {
    let mut launches = LaunchList::new(device)?;
    let mut layer_buffers = LayerBuffers::default();
    for stage in 0..decoder.stages() {
        let is_own = decoder.is_own(stage);
        for (index, layer) in decoder.own_layers().filter(|_| is_own) {
            let table = &tables[cache.layout().group(index)];
            add_attention(&mut launches, buffers, &mut layer_buffers, layer, cache.layer(index), table)?;
            match &layer.mlp {
                Mlp::Gated(mlp) => add_gated_mlp(&mut launches, buffers, &mut layer_buffers, layer, mlp)?,
                Mlp::ClampedMoe(moe) => add_clamped_moe(&mut launches, buffers, &mut layer_buffers, layer, moe)?,
                Mlp::GatedMoe(moe) => add_gated_moe(&mut launches, buffers, &mut layer_buffers, layer, moe)?,
                Mlp::Plain(_) => bail!("the decode graph has no kernel for an MLP without a gate"),
            }
        }
        if decoder.stages() > 1 {
            let result = if is_own { buffers.x.clone() } else { layer_buffers.zeros(&buffers.x)? };
            add_sum(&mut launches, &buffers.world, &result, &buffers.x)?;
        }
    }
    let (norm, head) = (rms_norm(&decoder.norm), &decoder.lm_head.weight);
    decode::add_head(&mut launches, buffers, norm, head, decoder.dtype(), decoder.final_softcap)?;
    Ok(launches)
}

/// The end of a step: chooses the token, either greedily or by sampling.
struct StepTail {
    /// The kernel launches that follow the logits.
    launches: LaunchList,
    /// The graph of the whole step: `DecodeGraph::layers`, then `launches`.
    graph: LaunchGraph,
}

impl StepTail {
    /// Records the launches that `add` adds, and captures them after the launches in `layers`.
    fn capture(
        device: &CudaDevice,
        layers: &LaunchList,
        add: impl FnOnce(&mut LaunchList) -> candle_core::Result<()>,
    ) -> Result<Self> {
        let mut launches = LaunchList::new(device)?;
        add(&mut launches)?;
        // SAFETY: the `DecodeGraph` owns the tail and the `StepBuffers`, which keep the world and its mailboxes alive.
        // Once the weights are loaded, only the thread of this rank uses the stream.
        let graph = unsafe { LaunchGraph::capture(layers, &launches) }.context("cannot capture the decode step")?;
        Ok(Self { launches, graph })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sampling {
    Greedy,
    Sampled,
}

impl Drop for DecodeGraph {
    fn drop(&mut self) {
        // Queued steps write to buffers that are freed next, so wait for these steps.
        // Ignore the result, because `drop` cannot return an error.
        let _ = self.device.cuda_stream().synchronize();
    }
}
