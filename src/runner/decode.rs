//! Chooses how the decode steps of a single sequence run.

use std::fmt;

use anyhow::Result;
use serde::Serialize;

#[cfg(feature = "cuda")]
use super::decode_graph::{DecodeGraph, DecodePlan};
use super::eager_reason::EagerReason;
use super::limits::{RunnerLimits, RunnerOptions};
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;

/// How the decode steps of a single sequence run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Executor {
    /// A CUDA graph: the decode graph, or with `--deterministic` a batch graph of one sequence.
    Graph,
    /// One operation at a time, without a graph.
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

/// Runs the decode steps of a single sequence. `BatchGraphs` runs steps of several sequences.
pub(super) enum Decode {
    /// Runs the decoder one operation at a time. The reason says why there is no decode graph.
    Eager(EagerReason),
    /// Runs the steps as batches of one sequence, because the decode graph adds in another order than larger batches.
    /// `BatchGraphs` has the graphs.
    #[cfg(feature = "cuda")]
    BatchGraph,
    #[cfg(feature = "cuda")]
    Graph(Box<DecodeGraph>),
}

impl Decode {
    /// Chooses how the decode steps run. Every rank must call this function, so that all ranks make the same choice.
    pub fn plan_together(
        decoder: &Decoder,
        cache: &KvCache,
        limits: RunnerLimits,
        options: RunnerOptions,
    ) -> Result<Self> {
        let planned = match options {
            RunnerOptions { eager: true, .. } => Ok(Decode::Eager(EagerReason::Requested)),
            #[cfg(feature = "cuda")]
            RunnerOptions { prompt_parts: Some(_), .. } if decoder.is_on_gpu() => Ok(Decode::BatchGraph),
            _ => Decode::plan(decoder, cache, limits.context),
        };
        let is_eager = matches!(planned, Err(_) | Ok(Decode::Eager(_)));
        let are_eager = decoder.world().all_gather(is_eager)?;
        if !is_eager && are_eager.iter().any(|is_eager| **is_eager) {
            return Ok(Decode::Eager(EagerReason::SeveralDevices));
        }
        planned
    }

    /// Plans the decode graph, or returns `Eager` with the reason if the decoder is not supported.
    fn plan(decoder: &Decoder, cache: &KvCache, context: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if decoder.is_on_gpu() {
            return match DecodeGraph::plan(decoder, cache, context) {
                Ok(DecodePlan::Graph(graph)) => Ok(Decode::Graph(graph)),
                Ok(DecodePlan::Unsupported(reason)) => Ok(Decode::Eager(reason)),
                Err(error) if crate::device::is_out_of_memory(&error) => Err(error),
                // Debug builds fail here, so that tests find the bug. Release builds warn and decode without a graph.
                Err(error) if cfg!(debug_assertions) => Err(error.context("cannot plan the decode graph")),
                Err(error) => Ok(Decode::Eager(EagerReason::PlanFailed(crate::text::error_message(&error)))),
            };
        }
        let _ = (decoder, cache, context);
        Ok(Decode::Eager(EagerReason::NotOnGpu))
    }
}
