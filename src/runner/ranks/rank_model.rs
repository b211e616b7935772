//! [`RankModel`]: what one rank holds of a model, and the plan of its decode graph.

use anyhow::Result;

use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::runner::decode_graph::NoDecodeGraphReason;
use crate::runner::gpu::DecodeGraph;
use crate::runner::limits::{RunnerLimits, RunnerOptions};

/// The part of a model that one rank holds, and the rank's KV cache.
pub struct RankModel {
    pub decoder: Decoder,
    pub cache: KvCache,
}

/// The decode graph of a rank, or the reason why the rank has none.
pub type PlannedGraph = Result<Box<DecodeGraph>, NoDecodeGraphReason>;

impl RankModel {
    /// Plans the decode graph of this rank. Every rank must call this function, because either all ranks get a graph or
    /// none does. Fails if the device runs out of memory. In debug builds, also fails after any other error.
    pub fn plan_decode_graph(&self, limits: RunnerLimits, options: RunnerOptions) -> Result<PlannedGraph> {
        let planned = self.plan_own_graph(limits, options);
        let has_none = !matches!(planned, Ok(Ok(_)));
        let have_none = self.decoder.world().gather_values(has_none)?;
        if !has_none && have_none.iter().any(|has_none| **has_none) {
            return Ok(Err(NoDecodeGraphReason::OtherRank));
        }
        planned
    }

    /// Plans the decode graph of this rank, whether or not the other ranks get one.
    fn plan_own_graph(&self, limits: RunnerLimits, options: RunnerOptions) -> Result<PlannedGraph> {
        if options.eager {
            return Ok(Err(NoDecodeGraphReason::Eager));
        }
        if options.prompt_segments.is_some() && self.decoder.is_on_gpu() {
            return Ok(Err(NoDecodeGraphReason::Deterministic));
        }
        match DecodeGraph::plan(&self.decoder, &self.cache, limits.context) {
            Ok(planned) => Ok(planned),
            Err(error) if crate::device::is_out_of_memory(&error) => Err(error),
            // The error is probably a bug. Debug builds fail, so that tests find it.
            // Release builds run without a decode graph.
            Err(error) if cfg!(debug_assertions) => Err(error.context("cannot plan the decode graph")),
            Err(error) => Ok(Err(NoDecodeGraphReason::PlanFailed(crate::text::error_message(&error)))),
        }
    }
}
