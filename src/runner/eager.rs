//! Decode steps that run operation by operation, on any device.
//!
//! Eager decode is the reference for the decode graph and the fallback for models and devices without graph support.

use anyhow::{Context, Result, bail};
use candle_core::Tensor;

use super::EagerReason;
use super::choose_token::{ChooseToken, NO_TOKEN};

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

/// Chooses a token on the host. Fails if every logit is NaN or -inf, as the kernels in `head.cu` and `sample.cu` do.
pub(super) fn choose(logits: &mut [f32], sampler: &mut dyn ChooseToken) -> Result<u32> {
    if !logits.iter().any(|&logit| logit > f32::NEG_INFINITY) {
        bail!(NO_TOKEN);
    }
    Ok(sampler.choose(logits))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chooses the last token whose logit is neither NaN nor -inf.
    struct Last;

    impl ChooseToken for Last {
        fn choose(&mut self, logits: &mut [f32]) -> u32 {
            logits.iter().rposition(|&logit| logit > f32::NEG_INFINITY).unwrap() as u32
        }

        #[cfg(feature = "cuda")]
        fn on_device(&self, _: usize) -> Option<crate::kernels::decode::sample::DeviceSampling> {
            None
        }
    }

    #[test]
    fn step_fails_if_no_token_can_be_chosen() {
        const INF: f32 = f32::INFINITY;
        for logits in [[f32::NAN; 3], [-INF; 3], [f32::NAN, -INF, f32::NAN]] {
            let error = choose(&mut logits.clone(), &mut Last).unwrap_err();
            assert!(error.to_string().contains("every logit is NaN or -inf"), "{error}");
        }
        assert_eq!(choose(&mut [f32::NAN, -1.0, -INF], &mut Last).unwrap(), 1);
        assert_eq!(choose(&mut [INF, f32::NAN, -INF], &mut Last).unwrap(), 0);
    }
}
