//! [`NoDecodeGraph`]: why a runner has no decode graph.

use std::fmt;

use candle_core::DType;

/// A planned decode graph of type `T`, or the reason why the runner has none.
pub type Planned<T> = Result<Box<T>, NoDecodeGraph>;

/// Why a runner has no decode graph.
/// Without a decode graph, decode steps of one sequence run as batch graphs or operation by operation
/// (see `step/route.rs`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoDecodeGraph {
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

impl NoDecodeGraph {
    /// Returns whether the reason is an unexpected error, which the user should report.
    pub fn is_unexpected(&self) -> bool {
        matches!(self, NoDecodeGraph::PlanFailed(_))
    }
}

impl fmt::Display for NoDecodeGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoDecodeGraph::Eager => f.write_str("--eager was given"),
            NoDecodeGraph::Deterministic => f.write_str("--deterministic was given"),
            NoDecodeGraph::NotOnGpu => f.write_str("the model is not on a GPU"),
            NoDecodeGraph::HostCopies => f.write_str("the host copies data between the GPUs"),
            NoDecodeGraph::EmptyPart => f.write_str("a GPU's part of a layer or of the output head is empty"),
            NoDecodeGraph::OtherRank => f.write_str("another GPU has no decode graph"),
            NoDecodeGraph::Dtype(dtype) => write!(f, "the graph supports bf16 and f16, not {dtype:?}"),
            NoDecodeGraph::HeadDim(size) => write!(f, "the graph has no attention kernel for head size {size}"),
            NoDecodeGraph::Layer(what) => write!(f, "the graph has no kernel for {what}"),
            NoDecodeGraph::MixedGateUp => f.write_str("gate_proj and up_proj are quantized differently"),
            NoDecodeGraph::IncompatibleQkv => {
                f.write_str("the graph has no kernel for this combination of q_proj, k_proj and v_proj formats")
            }
            NoDecodeGraph::ExpertFormat => {
                f.write_str("the experts are not in MXFP4, or have an MXFP4 scale that is above 2 or NaN")
            }
            NoDecodeGraph::ExpertCount { chosen, experts } => {
                write!(f, "the graph does not support choosing {chosen} of {experts} experts")
            }
            NoDecodeGraph::RowLength(columns) => write!(f, "no decode kernel supports matrices with {columns} columns"),
            NoDecodeGraph::VocabularySize(tokens) => {
                write!(f, "the graph cannot sample from a vocabulary of {tokens} tokens on this GPU")
            }
            NoDecodeGraph::PlanFailed(error) => write!(f, "planning the decode graph failed: {error}"),
        }
    }
}
