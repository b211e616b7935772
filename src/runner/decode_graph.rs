//! What all builds know of the decode graph: its commands, and the reasons why a runner has none.
//!
//! `gpu/decode_graph/` contains the graph itself. Builds without CUDA do not compile it.

use std::fmt;

use candle_core::DType;

use crate::kernels::sampling::DeviceSampling;
use crate::nn::kv_cache::BlockTables;

/// A command for the decode graph of a rank. [`DecodeGraph::run`](super::gpu::DecodeGraph::run) runs it.
#[derive(Clone)]
pub enum GraphCommand {
    /// Starts decoding a sequence at `position` with `token` as the input of the first step.
    /// Without `sampling`, every step chooses the most likely token.
    Start { sequence: u64, position: usize, token: u32, sampling: Option<DeviceSampling>, tables: BlockTables },
    /// Starts decoding after `tokens` cached tokens, and queues the choice of the first new token from the logits of
    /// the rank's last pass.
    StartFrom { sequence: u64, tokens: usize, sampling: Option<DeviceSampling>, tables: BlockTables },
    /// Copies to the device each block table that has grown.
    SetTables(BlockTables),
    /// Returns the next token. `limit` is the maximum number of tokens still to generate, including the next token.
    Next { limit: usize },
}

/// Why a runner has no decode graph.
/// Without a decode graph, decode steps of one sequence run as batch graphs or operation by operation
/// (see `step/route.rs`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoDecodeGraphReason {
    /// [`RunnerOptions::eager`](crate::runner::RunnerOptions::eager) is true.
    Eager,
    /// [`RunnerOptions::prompt_segments`](crate::runner::RunnerOptions::prompt_segments) is set.
    /// The decode graph does not add in the order `SumOrder::Fixed`.
    Deterministic,
    NotOnGpu,
    /// Several ranks run the model together, and the host copies data between their devices.
    HostCopies,
    /// This rank's part of the output head is empty, or its part of the attention or the MLP in a layer that it runs.
    EmptyPart,
    /// Another rank has no decode graph. Only that rank knows the reason.
    OtherRank,
    /// The dtype of activations is neither bf16 nor f16. The decode graph supports only these dtypes.
    Dtype(DType),
    /// The decode graph has no attention kernel for this head size.
    HeadDim(usize),
    /// The decode graph has no kernel for this part of the model, such as LayerNorm or a quantized router.
    Layer(&'static str),
    /// `gate_proj` and `up_proj` have different formats, or they quantize their inputs differently.
    MixedGateUp,
    /// No single kernel computes the products with `q_proj`, `k_proj` and `v_proj`.
    /// Only some of these matrices are quantized, only some are FP8, or they quantize their inputs differently.
    /// A mix of GGUF types is supported.
    IncompatibleQkv,
    /// The experts of gpt-oss are not in MXFP4, or a scale exceeds 2 or is NaN.
    ExpertFormat,
    /// The decode kernels do not support this number of experts per layer or per token.
    ExpertCount {
        chosen: usize,
        experts: usize,
    },
    /// No decode kernel supports matrices with this many columns: the number is not a multiple of 8, it exceeds the
    /// limit for MXFP4 experts, or input vectors of this length do not fit in the GPU's shared memory.
    RowLength(usize),
    /// The vocabulary is too large for one launch of the sampling kernel on this GPU.
    VocabularySize(usize),
    /// Planning failed with this error message, probably because of a bug in inferno.
    PlanFailed(String),
}

impl NoDecodeGraphReason {
    /// Returns whether the reason is an unexpected error, which the user should report.
    pub fn is_unexpected(&self) -> bool {
        matches!(self, NoDecodeGraphReason::PlanFailed(_))
    }
}

impl fmt::Display for NoDecodeGraphReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoDecodeGraphReason::Eager => f.write_str("--eager was given"),
            NoDecodeGraphReason::Deterministic => f.write_str("--deterministic was given"),
            NoDecodeGraphReason::NotOnGpu => f.write_str("the model is not on a GPU"),
            NoDecodeGraphReason::HostCopies => f.write_str("the host copies data between the GPUs"),
            NoDecodeGraphReason::EmptyPart => f.write_str("a GPU's part of a layer or of the output head is empty"),
            NoDecodeGraphReason::OtherRank => f.write_str("another GPU has no decode graph"),
            NoDecodeGraphReason::Dtype(dtype) => write!(f, "the graph supports bf16 and f16, not {dtype:?}"),
            NoDecodeGraphReason::HeadDim(size) => write!(f, "the graph has no attention kernel for head size {size}"),
            NoDecodeGraphReason::Layer(what) => write!(f, "the graph has no kernel for {what}"),
            NoDecodeGraphReason::MixedGateUp => f.write_str("gate_proj and up_proj are quantized differently"),
            NoDecodeGraphReason::IncompatibleQkv => {
                f.write_str("the graph has no kernel for this combination of q_proj, k_proj and v_proj formats")
            }
            NoDecodeGraphReason::ExpertFormat => {
                f.write_str("the experts are not in MXFP4, or have an MXFP4 scale that is above 2 or NaN")
            }
            NoDecodeGraphReason::ExpertCount { chosen, experts } => {
                write!(f, "the graph does not support choosing {chosen} of {experts} experts")
            }
            NoDecodeGraphReason::RowLength(columns) => {
                write!(f, "no decode kernel supports matrices with {columns} columns")
            }
            NoDecodeGraphReason::VocabularySize(tokens) => {
                write!(f, "the graph cannot sample from a vocabulary of {tokens} tokens on this GPU")
            }
            NoDecodeGraphReason::PlanFailed(error) => write!(f, "planning the decode graph failed: {error}"),
        }
    }
}
