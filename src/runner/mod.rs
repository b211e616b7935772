//! One step on the device: prompts are prefilled in chunks, then tokens are decoded one step at a time.
//!
//! A [`Runner`] knows token ids and positions. Requests, text and sampling parameters belong to the floors above it.

mod bench;
mod choose_token;
#[cfg(feature = "cuda")]
pub mod decode_graph;
mod eager;
mod figures;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::nn::pass::{LogitRows, StepBatch};
#[cfg(feature = "cuda")]
use decode_graph::DecodeGraph;
use eager::EagerDecode;

pub use choose_token::ChooseToken;
pub use eager::EagerReason;
pub use figures::{KernelTime, LaunchCounts, StepBytes};

/// One decode step of one sequence.
pub struct DecodeStep<'s> {
    /// The token that the step runs: the one that the step before chose. `None` for the first step of a sequence, whose
    /// token follows from the logits of the prompt.
    pub input: Option<u32>,
    pub sampler: &'s mut dyn ChooseToken,
    /// The most tokens the sequence may still take, this one included. Steps beyond the limit are not queued.
    pub limit: usize,
}

/// A decoder on its device, with the KV cache of one sequence.
pub struct Runner {
    decoder: Decoder,
    cache: KvCache,
    /// The tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    decode: Decode,
    device: Device,
}

/// What runs decode steps.
enum Decode {
    /// The decoder, operation by operation.
    Eager(EagerDecode),
    #[cfg(feature = "cuda")]
    Graph(Box<DecodeGraph>),
}

impl Decode {
    /// Plans the fastest decode step that the decoder allows.
    fn plan(decoder: &Decoder, cache: &KvCache) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if decoder.is_on_gpu() {
            return match DecodeGraph::plan(decoder, cache) {
                Ok(Ok(graph)) => Ok(Decode::Graph(Box::new(graph))),
                Ok(Err(reason)) => Ok(Decode::Eager(EagerDecode::new(reason))),
                Err(error) if crate::device::is_out_of_memory(&error) => Err(error),
                // Tests fail here. A person gets slow answers and a warning.
                Err(error) if is_test() => Err(error.context("cannot plan the decode graph")),
                Err(error) => {
                    Ok(Decode::Eager(EagerDecode::new(EagerReason::PlanFailed(crate::text::error_message(&error)))))
                }
            };
        }
        let _ = (decoder, cache);
        Ok(Decode::Eager(EagerDecode::new(EagerReason::NotOnGpu)))
    }
}

/// Returns whether this process is a test: a unit test, or one that INFERNO_REQUIRE_GPU obliges to use the GPU.
#[cfg(feature = "cuda")]
fn is_test() -> bool {
    cfg!(test) || std::env::var_os("INFERNO_REQUIRE_GPU").is_some()
}

impl Runner {
    /// Plans the decode step of a decoder on its cache. With `force_eager` no graph is made.
    pub fn new(decoder: Decoder, cache: KvCache, device: Device, force_eager: bool) -> Result<Self> {
        let decode = match force_eager {
            true => Decode::Eager(EagerDecode::new(EagerReason::Requested)),
            false => Decode::plan(&decoder, &cache)?,
        };
        Ok(Self { decoder, cache, cached: Vec::new(), decode, device })
    }

    /// The most positions of a sequence.
    pub fn context(&self) -> usize {
        self.cache.context()
    }

    /// The most tokens of a prompt in one pass.
    pub fn chunk(&self) -> usize {
        self.cache.chunk()
    }

    /// Rows of logits.
    pub fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    /// The dtype of activations and of the cache.
    pub fn dtype(&self) -> DType {
        self.decoder.dtype()
    }

    /// Where weights and cache are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The number of tokens in the cache.
    pub fn cached_tokens(&self) -> usize {
        self.cached.len()
    }

    /// What runs decode steps: `graph`, a CUDA graph of fused kernels, or `eager`, the decoder operation by operation.
    pub fn executor(&self) -> &'static str {
        match self.decode {
            Decode::Eager(_) => "eager",
            #[cfg(feature = "cuda")]
            Decode::Graph(_) => "graph",
        }
    }

    /// Why decode steps do not run as a graph; `None` if they do.
    pub fn eager_reason(&self) -> Option<&EagerReason> {
        match &self.decode {
            Decode::Eager(eager) => Some(eager.reason()),
            #[cfg(feature = "cuda")]
            Decode::Graph(_) => None,
        }
    }

    /// Empties the cache: the next prompt is read from its start.
    pub fn reset(&mut self) {
        self.cached.clear();
        self.cache.reset();
    }

    /// Goes back to the longest prefix that the cache shares with `prompt`. Returns its length.
    ///
    /// At least the last token of the prompt is left to run, for its logits.
    pub fn reuse_prefix(&mut self, prompt: &[u32]) -> Result<usize> {
        let last = prompt.len().saturating_sub(1);
        let common = prompt[..last].iter().zip(&self.cached).take_while(|(a, b)| a == b).count();
        let cached_tokens = self.cache.truncate(common)?;
        self.cached.truncate(cached_tokens);
        Ok(cached_tokens)
    }

    /// Runs up to [`chunk`](Self::chunk) tokens of a prompt after the cached ones. Returns the logits f32 \[1, V\] of the
    /// last one.
    pub fn prefill(&mut self, chunk: &[u32]) -> Result<Tensor> {
        self.forward(chunk, LogitRows::Last)
    }

    /// Ends a prompt whose last chunk had these logits \[1, V\]: decoding starts here, and the cache can come back to this
    /// point.
    pub fn start_decode(&mut self, logits: &Tensor, sampler: &dyn ChooseToken) -> Result<()> {
        match &mut self.decode {
            Decode::Eager(eager) => {
                let _ = sampler;
                eager.start(logits)
            }
            #[cfg(feature = "cuda")]
            Decode::Graph(graph) => {
                graph.start_from(self.cache.len(), logits, sampler.on_device(self.decoder.vocab_size()))
            }
        }
    }

    /// Remembers the end of the prompt, so that [`reuse_prefix`](Self::reuse_prefix) can come back to it however many
    /// tokens follow.
    pub fn set_checkpoint(&mut self) -> Result<()> {
        self.cache.set_checkpoint()
    }

    /// Runs one decode step. Returns the token that it chose.
    pub fn step(&mut self, step: &mut DecodeStep) -> Result<u32> {
        match &mut self.decode {
            Decode::Eager(eager) => {
                let mut logits = match step.input {
                    None => eager.take_logits()?,
                    Some(token) => self.forward(&[token], LogitRows::Last)?.flatten_all()?.to_vec1()?,
                };
                eager::choose(&mut logits, step.sampler)
            }
            #[cfg(feature = "cuda")]
            Decode::Graph(_) => self.graph_step(step.input, step.limit),
        }
    }

    /// Returns the next token of the graph: that of the step whose input was `input`, or the first one after a prompt.
    #[cfg(feature = "cuda")]
    fn graph_step(&mut self, input: Option<u32>, limit: usize) -> Result<u32> {
        let Decode::Graph(graph) = &mut self.decode else { anyhow::bail!("there is no graph to run") };
        let free = self.cache.context() - self.cache.len();
        let possible = if input.is_none() { 1 + free } else { free };
        let token = match graph.next(possible.min(limit)) {
            Ok(token) => token,
            Err(error) => {
                // Queued steps may have written anywhere.
                self.reset();
                return Err(error);
            }
        };
        // Queued steps have written to the positions after this one, or will.
        let queued = graph.queued_steps();
        self.cache.advance_written(usize::from(input.is_some()), queued);
        self.cached.extend(input);
        Ok(token)
    }

    /// Runs tokens after the cached ones, operation by operation. Returns f32 logits.
    fn forward(&mut self, ids: &[u32], logits: LogitRows) -> Result<Tensor> {
        let batch = StepBatch { ids, tokens: &[ids.len()], logits };
        let logits = self.decoder.forward(&batch, &mut [&mut self.cache])?;
        self.cached.extend(ids);
        Ok(logits)
    }

    /// Runs a chunk of at most [`chunk`](Self::chunk) tokens after the cached ones. Returns the logits f32 \[T, V\] of
    /// every token.
    pub fn chunk_logits(&mut self, chunk: &[u32]) -> Result<Tensor> {
        self.forward(chunk, LogitRows::All)
    }

    /// Runs `ids` from an empty cache. Returns the logits f32 \[T, V\] of every token.
    ///
    /// Fails if they do not fit in the context. Takes 2 × T × V × 4 bytes on the device.
    pub fn logits(&mut self, ids: &[u32]) -> Result<Tensor> {
        self.reset();
        let rows: Vec<Tensor> =
            ids.chunks(self.cache.chunk()).map(|chunk| self.chunk_logits(chunk)).collect::<Result<_>>()?;
        Ok(Tensor::cat(&rows, 0)?)
    }
}
