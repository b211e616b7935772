//! Decode steps that run operation by operation, on any device.
//!
//! They are the reference for the decode graph, and the fallback for models and devices that it does not support.

use anyhow::{Context, Result, bail};
use candle_core::Tensor;

use super::EagerReason;
use super::choose_token::{ChooseToken, NAN_LOGITS};

/// The state of decoding without a graph.
pub(super) struct EagerDecode {
    reason: EagerReason,
    /// The logits of a prompt's last token, until a token is chosen from them.
    logits: Option<Vec<f32>>,
}

impl EagerDecode {
    pub(super) fn new(reason: EagerReason) -> Self {
        Self { reason, logits: None }
    }

    pub(super) fn reason(&self) -> &EagerReason {
        &self.reason
    }

    /// Stores the logits of a prompt's last token, `[1, vocab]`.
    pub(super) fn start(&mut self, logits: &Tensor) -> Result<()> {
        self.logits = Some(logits.flatten_all()?.to_vec1()?);
        Ok(())
    }

    pub(super) fn take_logits(&mut self) -> Result<Vec<f32>> {
        self.logits.take().context("no prompt was prefilled")
    }
}

/// Chooses a token on the host. Fails if all logits are NaN.
pub(super) fn choose(logits: &mut [f32], sampler: &mut dyn ChooseToken) -> Result<u32> {
    if logits.iter().all(|logit| logit.is_nan()) {
        bail!(NAN_LOGITS);
    }
    Ok(sampler.choose(logits))
}
