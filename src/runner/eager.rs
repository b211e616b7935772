//! Decode steps operation by operation, on any device: the reference for the decode graph, and what runs where there is
//! none.

use std::fmt;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor};

use super::choose_token::ChooseToken;

/// Why decode steps run operation by operation instead of as a CUDA graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EagerReason {
    /// `--eager`.
    Requested,
    NotOnGpu,
    /// The graph computes in bf16 and f16.
    Dtype(DType),
    /// No decode attention kernel has this head size.
    HeadDim(usize),
    /// A kind of layer without a decode kernel, such as LayerNorm.
    Layer(&'static str),
    /// `gate_proj` and `up_proj` are quantized differently.
    UnlikeGate,
    /// The projections of queries, keys and values are quantized differently.
    UnlikeQkv,
    /// Experts that are not in MXFP4 with scales of at most 2.
    ExpertFormat,
    /// More experts than the routing kernel can choose.
    ExpertCount {
        chosen: usize,
        experts: usize,
    },
    /// No matrix-vector kernel takes rows of this length.
    RowLength(usize),
    /// The vocabulary has more tokens than this GPU can draw from in one launch.
    VocabularySize(usize),
    /// Planning failed for a reason that is not in this list. A bug: [`is_unexpected`](Self::is_unexpected).
    PlanFailed(String),
}

impl EagerReason {
    /// Returns whether this is a bug that a person should hear about.
    pub fn is_unexpected(&self) -> bool {
        matches!(self, EagerReason::PlanFailed(_))
    }
}

impl fmt::Display for EagerReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EagerReason::Requested => f.write_str("--eager was given"),
            EagerReason::NotOnGpu => f.write_str("the model is not on a GPU"),
            EagerReason::Dtype(dtype) => write!(f, "the graph computes in bf16 and f16, not {dtype:?}"),
            EagerReason::HeadDim(size) => write!(f, "the graph has no attention kernel for heads of {size}"),
            EagerReason::Layer(what) => write!(f, "the graph has no kernel for {what}"),
            EagerReason::UnlikeGate => f.write_str("gate_proj and up_proj are quantized differently"),
            EagerReason::UnlikeQkv => f.write_str("q_proj, k_proj and v_proj are quantized differently"),
            EagerReason::ExpertFormat => f.write_str("the graph runs experts in MXFP4 only, with scales up to 2"),
            EagerReason::ExpertCount { chosen, experts } => {
                write!(f, "the graph cannot choose {chosen} of {experts} experts")
            }
            EagerReason::RowLength(columns) => write!(f, "the graph cannot multiply rows of {columns}"),
            EagerReason::VocabularySize(tokens) => write!(f, "this GPU is too small to draw from {tokens} tokens"),
            EagerReason::PlanFailed(error) => write!(f, "the decode graph could not be planned: {error}"),
        }
    }
}

/// The state of decoding without a graph.
pub(super) struct EagerDecode {
    reason: EagerReason,
    /// Logits of the last token of a prompt, until a token is chosen from them.
    logits: Option<Vec<f32>>,
}

impl EagerDecode {
    pub(super) fn new(reason: EagerReason) -> Self {
        Self { reason, logits: None }
    }

    pub(super) fn reason(&self) -> &EagerReason {
        &self.reason
    }

    /// Takes the logits \[1, V\] of a prompt's last token.
    pub(super) fn start(&mut self, logits: &Tensor) -> Result<()> {
        self.logits = Some(logits.flatten_all()?.to_vec1()?);
        Ok(())
    }

    pub(super) fn take_logits(&mut self) -> Result<Vec<f32>> {
        self.logits.take().context("no prompt was read")
    }
}

/// Chooses a token on the host. Fails if all logits are NaN.
pub(super) fn choose(logits: &mut [f32], sampler: &mut dyn ChooseToken) -> Result<u32> {
    if logits.iter().all(|logit| logit.is_nan()) {
        bail!("the model's logits are not numbers: its weights are broken, or too large for this --dtype");
    }
    Ok(sampler.choose(logits))
}
