//! Chooses tokens on the host.

use anyhow::{Result, anyhow};

use super::logprobs::TokenLogprobs;
use super::token_sampler::{ChosenToken, NO_ALLOWED_TOKEN, NoToken, TokenSampler};

/// Chooses a token on the host. Fails if every logit is NaN or -inf after the logit edits and the token mask.
/// Also fails if [`TokenSampler::allowed_tokens`] fails.
pub fn choose_on_host(logits: &mut [f32], sampler: &mut dyn TokenSampler) -> Result<ChosenToken> {
    let allowed = sampler.allowed_tokens()?;
    let unedited = sampler.top_logprobs().map(|count| (logits.to_vec(), count));
    for (id, value) in sampler.logit_edits() {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += value;
        }
    }
    if let Some(allowed) = &allowed {
        allowed.apply(logits);
    }
    if !logits.iter().any(|&logit| logit > f32::NEG_INFINITY) {
        return Err(if allowed.is_some() { anyhow!(NO_ALLOWED_TOKEN) } else { NoToken.into() });
    }
    let id = sampler.choose(logits);
    let logprobs = unedited.map(|(logits, count)| TokenLogprobs::from_logits(&logits, id, count));
    Ok(ChosenToken { id, logprobs })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sampler that chooses the last token whose logit is neither NaN nor -inf.
    #[derive(Clone)]
    struct Last;

    impl TokenSampler for Last {
        fn choose(&mut self, logits: &mut [f32]) -> u32 {
            logits.iter().rposition(|&logit| logit > f32::NEG_INFINITY).unwrap() as u32
        }

        fn choose_queued(&self, logits: &[f32], _: u32) -> u32 {
            self.clone().choose(&mut logits.to_vec())
        }

        fn record(&mut self, _: u32) {}

        fn on_device(&self) -> Option<crate::kernels::sampling::DeviceSampling> {
            None
        }
    }

    #[test]
    fn step_fails_if_no_token_can_be_chosen() {
        const INF: f32 = f32::INFINITY;
        for logits in [[f32::NAN; 3], [-INF; 3], [f32::NAN, -INF, f32::NAN]] {
            let error = choose_on_host(&mut logits.clone(), &mut Last).unwrap_err();
            // On a GPU, `choose_on_device` fails with the same error.
            assert!(error.is::<NoToken>(), "{error}");
        }
        assert_eq!(choose_on_host(&mut [f32::NAN, -1.0, -INF], &mut Last).unwrap().id, 1);
        assert_eq!(choose_on_host(&mut [INF, f32::NAN, -INF], &mut Last).unwrap().id, 0);
    }
}
