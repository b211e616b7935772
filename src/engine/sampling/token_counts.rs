//! [`TokenCounts`]: how often each token of a sequence was generated.

use std::collections::HashMap;

use crate::kernels::sampling::Penalties;

/// The distinct tokens of a prompt and its answer, and how often each token was generated.
///
/// The counts are in a list, because steps with penalties pass them to the GPU as a list.
/// The list is in the order of first occurrence, so that equal sequences give equal lists.
#[derive(Default)]
pub struct TokenCounts {
    counts: Vec<(u32, u32)>,
    /// The index of each token in `counts`.
    indices: HashMap<u32, usize>,
}

impl TokenCounts {
    /// Creates the counts of a prompt: 0 for each of its tokens.
    pub fn of_prompt(prompt: &[u32]) -> Self {
        let mut counts = Self::default();
        for &token in prompt {
            counts.count_mut(token);
        }
        counts
    }

    /// Counts a generated token.
    pub fn add_generated(&mut self, token: u32) {
        *self.count_mut(token) += 1;
    }

    /// Returns the tokens whose logits the penalties change, and how often each token was generated.
    /// Includes tokens that occur only in the prompt if there is a repetition penalty.
    pub fn with_penalties(&self, penalties: Penalties) -> impl Iterator<Item = (u32, u32)> {
        let counts = if penalties == Penalties::NONE { &[] } else { &self.counts[..] };
        counts.iter().copied().filter(move |&(_, generated)| generated > 0 || penalties.repetition != 1.0)
    }

    fn count_mut(&mut self, token: u32) -> &mut u32 {
        let index = *self.indices.entry(token).or_insert(self.counts.len());
        if index == self.counts.len() {
            self.counts.push((token, 0));
        }
        &mut self.counts[index].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_in_the_order_of_their_first_occurrence() {
        let mut counts = TokenCounts::of_prompt(&[7, 3, 7]);
        [9, 3, 9].into_iter().for_each(|token| counts.add_generated(token));
        let list = |penalties| counts.with_penalties(penalties).collect::<Vec<_>>();
        assert_eq!(list(Penalties { repetition: 1.1, ..Penalties::NONE }), [(7, 0), (3, 1), (9, 2)]);
        // Without a repetition penalty, no penalty applies to tokens that occur only in the prompt.
        assert_eq!(list(Penalties { presence: -0.5, ..Penalties::NONE }), [(3, 1), (9, 2)]);
        assert_eq!(list(Penalties::NONE), []);
    }
}
