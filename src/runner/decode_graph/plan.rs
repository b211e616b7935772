//! Plans the decode graph of a runner, or finds out why there is none.

use anyhow::Result;

use super::DecodeGraph;
use super::no_decode_graph::{NoDecodeGraph, Planned};
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::runner::limits::{RunnerLimits, RunnerOptions};

/// The decode graph, or the reason why the runner has none.
pub type PlannedGraph = Planned<DecodeGraph>;

/// Plans the decode graph. Every rank must call this function, because either all ranks get a graph or none does.
pub fn plan_together(
    decoder: &Decoder,
    cache: &KvCache,
    limits: RunnerLimits,
    options: RunnerOptions,
) -> Result<PlannedGraph> {
    let planned = match options {
        RunnerOptions { eager: true, .. } => Ok(Err(NoDecodeGraph::Eager)),
        RunnerOptions { prompt_segments: Some(_), .. } if decoder.is_on_gpu() => Ok(Err(NoDecodeGraph::Deterministic)),
        _ => plan(decoder, cache, limits.context),
    };
    let has_none = !matches!(planned, Ok(Ok(_)));
    let have_none = decoder.world().all_gather(has_none)?;
    if !has_none && have_none.iter().any(|has_none| **has_none) {
        return Ok(Err(NoDecodeGraph::OtherRank));
    }
    planned
}

/// Plans the decode graph of this rank. The inner error is the reason why there is no graph.
/// Fails if the device runs out of memory. In debug builds, also fails after any other error.
fn plan(decoder: &Decoder, cache: &KvCache, context: usize) -> Result<PlannedGraph> {
    if !decoder.is_on_gpu() {
        return Ok(Err(NoDecodeGraph::NotOnGpu));
    }
    match DecodeGraph::plan(decoder, cache, context) {
        Ok(planned) => Ok(planned),
        Err(error) if crate::device::is_out_of_memory(&error) => Err(error),
        // The error is probably a bug. Debug builds fail, so that tests find it.
        // Release builds run without a decode graph.
        Err(error) if cfg!(debug_assertions) => Err(error.context("cannot plan the decode graph")),
        Err(error) => Ok(Err(NoDecodeGraph::PlanFailed(crate::text::error_message(&error)))),
    }
}
