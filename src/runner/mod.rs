//! Runs a model on its device. Prompts are prefilled in chunks, then tokens are decoded one step at a time.
//!
//! A [`Runner`] handles token ids and positions. The layers above it handle requests, text and sampling parameters.

mod bench;
mod choose_token;
#[cfg(feature = "cuda")]
pub mod decode_graph;
mod eager;
mod eager_reason;
mod step_cost;

use std::fmt;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use serde::Serialize;

use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::nn::pass::{LogitRows, StepBatch};
#[cfg(feature = "cuda")]
use decode_graph::{DecodeGraph, DecodePlan};
use eager::EagerDecode;

pub use choose_token::ChooseToken;
pub use eager_reason::EagerReason;
pub use step_cost::{KernelTime, LaunchCounts, StepBytes};

/// One decode step of one sequence.
pub struct DecodeStep<'s> {
    /// The input token, which the previous step chose.
    ///
    /// `None` for the first step after a prompt, which chooses its token from the prompt's logits.
    pub input: Option<u32>,
    pub sampler: &'s mut dyn ChooseToken,
    /// The maximum number of tokens still to generate, including this one. Steps beyond the limit are not queued.
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

/// The way in which decode steps run: as a CUDA graph or eagerly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Executor {
    /// A CUDA graph of fused kernels.
    Graph,
    /// Operation by operation.
    Eager,
}

impl fmt::Display for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Graph => "graph",
            Self::Eager => "eager",
        })
    }
}

/// The implementation of decode steps.
enum Decode {
    /// Runs the decoder operation by operation.
    Eager(EagerDecode),
    #[cfg(feature = "cuda")]
    Graph(Box<DecodeGraph>),
}

impl Decode {
    /// Plans the fastest decode step that the decoder supports.
    fn plan(decoder: &Decoder, cache: &KvCache) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if decoder.is_on_gpu() {
            return match DecodeGraph::plan(decoder, cache) {
                Ok(DecodePlan::Graph(graph)) => Ok(Decode::Graph(graph)),
                Ok(DecodePlan::Unsupported(reason)) => Ok(Decode::Eager(EagerDecode::new(reason))),
                Err(error) if crate::device::is_out_of_memory(&error) => Err(error),
                // Debug builds fail here, so that tests find the bug. Release builds warn and decode without a graph.
                Err(error) if cfg!(debug_assertions) => Err(error.context("cannot plan the decode graph")),
                Err(error) => {
                    Ok(Decode::Eager(EagerDecode::new(EagerReason::PlanFailed(crate::text::error_message(&error)))))
                }
            };
        }
        let _ = (decoder, cache);
        Ok(Decode::Eager(EagerDecode::new(EagerReason::NotOnGpu)))
    }
}

impl Runner {
    /// Plans the decode step of `decoder` on `cache`. With `force_eager`, no graph is planned.
    pub fn new(decoder: Decoder, cache: KvCache, device: Device, force_eager: bool) -> Result<Self> {
        let decode = match force_eager {
            true => Decode::Eager(EagerDecode::new(EagerReason::Requested)),
            false => Decode::plan(&decoder, &cache)?,
        };
        Ok(Self { decoder, cache, cached: Vec::new(), decode, device })
    }

    /// Returns the maximum number of positions in a sequence.
    pub fn context(&self) -> usize {
        self.cache.context()
    }

    /// Returns the maximum number of prompt tokens in one forward pass.
    pub fn chunk(&self) -> usize {
        self.cache.chunk()
    }

    /// Returns the vocabulary size, which is the number of logits per token.
    pub fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    /// Returns the dtype of activations and of the KV cache.
    pub fn dtype(&self) -> DType {
        self.decoder.dtype()
    }

    /// Returns the device of the weights and the KV cache.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the number of tokens in the cache.
    pub fn cached_tokens(&self) -> usize {
        self.cached.len()
    }

    /// Returns whether decode steps run as a graph or eagerly.
    pub fn executor(&self) -> Executor {
        match self.decode {
            Decode::Eager(_) => Executor::Eager,
            #[cfg(feature = "cuda")]
            Decode::Graph(_) => Executor::Graph,
        }
    }

    /// Returns the reason that decode steps do not run as a graph, or `None` if they do.
    pub fn eager_reason(&self) -> Option<&EagerReason> {
        match &self.decode {
            Decode::Eager(eager) => Some(eager.reason()),
            #[cfg(feature = "cuda")]
            Decode::Graph(_) => None,
        }
    }

    /// Empties the cache. The next prompt is prefilled from its start.
    pub fn reset(&mut self) {
        self.cached.clear();
        self.cache.reset();
    }

    /// Truncates the cache to the longest reusable prefix of `prompt`. Returns the number of tokens kept.
    ///
    /// Never keeps the last token of the prompt, because its logits are needed.
    pub fn reuse_prefix(&mut self, prompt: &[u32]) -> Result<usize> {
        let last = prompt.len().saturating_sub(1);
        let common = prompt[..last].iter().zip(&self.cached).take_while(|(a, b)| a == b).count();
        let cached_tokens = self.cache.truncate(common)?;
        self.cached.truncate(cached_tokens);
        Ok(cached_tokens)
    }

    /// Prefills up to [`chunk`](Self::chunk) prompt tokens after the cached tokens.
    ///
    /// Returns the logits of the last token, f32 `[1, vocab]`.
    pub fn prefill(&mut self, chunk: &[u32]) -> Result<Tensor> {
        self.forward(chunk, LogitRows::Last)
    }

    /// Starts decoding after a prompt. `logits` are the logits of the prompt's last token, `[1, vocab]`.
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

    /// Sets a savepoint at the current end of the cache, which is usually the end of a prompt.
    ///
    /// [`reuse_prefix`](Self::reuse_prefix) can return to the savepoint after any number of generated tokens.
    pub fn set_savepoint(&mut self) -> Result<()> {
        self.cache.set_savepoint()
    }

    /// Runs one decode step. Returns the chosen token.
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

    /// Returns the token that the graph chose after `input`, or the first token after a prompt if `input` is `None`.
    #[cfg(feature = "cuda")]
    fn graph_step(&mut self, input: Option<u32>, limit: usize) -> Result<u32> {
        let Decode::Graph(graph) = &mut self.decode else { anyhow::bail!("no decode graph was planned") };
        let token = match graph.next(limit) {
            Ok(token) => token,
            Err(error) => {
                // Queued steps may have written to any later position.
                self.reset();
                return Err(error);
            }
        };
        // Steps that are already queued write to the positions after this token.
        let queued = graph.queued_steps();
        self.cache.advance_written(usize::from(input.is_some()), queued);
        self.cached.extend(input);
        Ok(token)
    }

    /// Runs the decoder on `ids` after the cached tokens, operation by operation. Returns f32 logits.
    fn forward(&mut self, ids: &[u32], logits: LogitRows) -> Result<Tensor> {
        let batch = StepBatch { ids, lengths: &[ids.len()], logits };
        let logits = self.decoder.forward(&batch, &mut [&mut self.cache])?;
        self.cached.extend(ids);
        Ok(logits)
    }

    /// Runs up to [`chunk`](Self::chunk) tokens after the cached tokens.
    /// Returns the logits of every token, f32 `[tokens, vocab]`.
    pub fn chunk_logits(&mut self, chunk: &[u32]) -> Result<Tensor> {
        self.forward(chunk, LogitRows::All)
    }

    /// Runs `ids` from an empty cache. Returns the logits of every token, f32 `[tokens, vocab]`.
    ///
    /// Fails if `ids` do not fit in the context. Needs 2 · tokens · vocab · 4 bytes on the device.
    pub fn logits(&mut self, ids: &[u32]) -> Result<Tensor> {
        self.reset();
        let rows: Vec<Tensor> =
            ids.chunks(self.cache.chunk()).map(|chunk| self.chunk_logits(chunk)).collect::<Result<_>>()?;
        Ok(Tensor::cat(&rows, 0)?)
    }
}
