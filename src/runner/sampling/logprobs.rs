//! Log probabilities of tokens, computed from the logits before biases, constraints, penalties and temperature apply.

use std::cmp::Ordering;

/// The log probabilities of a chosen token, or of a scored prompt token, and of the most likely tokens at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The log probability of the chosen or scored token, in nats.
    pub chosen: f32,
    /// The most likely tokens with their log probabilities, in descending order of probability.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Computes the log probabilities of `chosen` and of the `count` most likely tokens from `logits`, `[vocab]`.
    ///
    /// NaN logits count as -inf. Of tokens with equal logits, the token with the lower id comes first.
    pub fn from_logits(logits: &[f32], chosen: u32, count: usize) -> Self {
        let value = |id: usize| if logits[id].is_nan() { f32::NEG_INFINITY } else { logits[id] };
        let largest = (0..logits.len()).map(value).fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = (0..logits.len()).map(|id| f64::from(value(id) - largest).exp()).sum();
        let logprob = |id: usize| (f64::from(value(id) - largest) - sum.ln()) as f32;
        let by_logit = |&a: &usize, &b: &usize| -> Ordering { value(b).total_cmp(&value(a)).then(a.cmp(&b)) };
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        if count < ids.len() {
            ids.select_nth_unstable_by(count, by_logit);
            ids.truncate(count);
        }
        ids.sort_unstable_by(by_logit);
        let top = ids.into_iter().map(|id| (id as u32, logprob(id))).collect();
        Self { chosen: logprob(chosen as usize), top }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_match_the_softmax() {
        let logits = [1.0f32, 3.0, f32::NAN, 3.0, f32::NEG_INFINITY];
        let got = TokenLogprobs::from_logits(&logits, 0, 3);
        let sum = 1f64.exp() + 2.0 * 3f64.exp();
        let expected = |logit: f64| (logit - sum.ln()) as f32;
        assert_eq!(got.top.iter().map(|top| top.0).collect::<Vec<_>>(), [1, 3, 0]);
        assert!((got.chosen - expected(1.0)).abs() < 1e-6);
        assert!((got.top[0].1 - expected(3.0)).abs() < 1e-6);
        assert_eq!(TokenLogprobs::from_logits(&logits, 4, 0).chosen, f32::NEG_INFINITY);
    }
}
