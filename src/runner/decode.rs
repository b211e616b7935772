//! Plans the decode graph.

use std::fmt;

use anyhow::Result;
use serde::Serialize;

use super::decode_graph::{DecodeGraph, DecodePlan};
use super::limits::{RunnerLimits, RunnerOptions};
use super::no_decode_graph::NoDecodeGraph;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;

/// How decode steps run while only one request is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Executor {
    /// As a CUDA graph: the decode graph, or a batch graph of one sequence.
    Graph,
    /// One operation at a time, without a CUDA graph.
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

/// The decode graph, or the reason why the runner has none.
pub(super) enum Decode {
    Graph(Box<DecodeGraph>),
    NoGraph(NoDecodeGraph),
}

impl Decode {
    /// Plans the decode graph. Every rank must call this function, because either all ranks get a graph or none does.
    pub fn plan_together(
        decoder: &Decoder,
        cache: &KvCache,
        limits: RunnerLimits,
        options: RunnerOptions,
    ) -> Result<Self> {
        let planned = match options {
            RunnerOptions { eager: true, .. } => Ok(Decode::NoGraph(NoDecodeGraph::Requested)),
            RunnerOptions { prompt_parts: Some(_), .. } if decoder.is_on_gpu() => {
                Ok(Decode::NoGraph(NoDecodeGraph::Deterministic))
            }
            _ => Decode::plan(decoder, cache, limits.context),
        };
        let has_none = matches!(planned, Err(_) | Ok(Decode::NoGraph(_)));
        let have_none = decoder.world().all_gather(has_none)?;
        if !has_none && have_none.iter().any(|has_none| **has_none) {
            return Ok(Decode::NoGraph(NoDecodeGraph::SeveralDevices));
        }
        planned
    }

    /// Plans the decode graph of this rank. Returns `NoGraph` with the reason if the decoder is not supported.
    fn plan(decoder: &Decoder, cache: &KvCache, context: usize) -> Result<Self> {
        if !decoder.is_on_gpu() {
            return Ok(Decode::NoGraph(NoDecodeGraph::NotOnGpu));
        }
        match DecodeGraph::plan(decoder, cache, context) {
            Ok(DecodePlan::Graph(graph)) => Ok(Decode::Graph(graph)),
            Ok(DecodePlan::Unsupported(reason)) => Ok(Decode::NoGraph(reason)),
            Err(error) if crate::device::is_out_of_memory(&error) => Err(error),
            // Debug builds fail here, so that tests find the bug. Release builds warn and decode without a graph.
            Err(error) if cfg!(debug_assertions) => Err(error.context("cannot plan the decode graph")),
            Err(error) => Ok(Decode::NoGraph(NoDecodeGraph::PlanFailed(crate::text::error_message(&error)))),
        }
    }
}
