//! A set of allowed tokens, stored as a bit mask.

/// A set of allowed tokens, such as the tokens that a grammar allows.
/// Bit `id % 32` of word `id / 32` is 1 if token `id` is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// Creates a mask that allows no token of a vocabulary.
    pub fn none(vocab_size: usize) -> Self {
        Self { words: vec![0; vocab_size.div_ceil(32)] }
    }

    /// Creates a mask from its words. Missing words allow no tokens, and words past the vocabulary are dropped.
    pub fn from_words(words: &[u32], vocab_size: usize) -> Self {
        let mut words = words.to_vec();
        words.resize(vocab_size.div_ceil(32), 0);
        Self { words }
    }

    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Allows a token. Ignores an id for which the mask has no word.
    pub fn allow(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word |= 1 << (id % 32);
        }
    }

    /// Forbids a token. Ignores an id for which the mask has no word.
    pub fn forbid(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }

    pub fn is_allowed(&self, id: u32) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Returns whether the mask allows no token.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Sets the logit of each token that is not allowed to -inf, as `mask_logits` in `sampling/logits.cu` does.
    pub fn apply(&self, logits: &mut [f32]) {
        for (id, logit) in logits.iter_mut().enumerate() {
            if !self.is_allowed(id as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_allowed_tokens_keep_their_logits() {
        let mut mask = TokenMask::none(70);
        assert!(mask.is_empty());
        [0, 31, 32, 69, 33, 500].into_iter().for_each(|id| mask.allow(id));
        mask.forbid(33);
        let mut logits = vec![1.0; 70];
        mask.apply(&mut logits);
        let kept: Vec<usize> = (0..70).filter(|&id| logits[id] == 1.0).collect();
        assert_eq!(kept, [0, 31, 32, 69]);
        assert!(logits.iter().all(|&logit| logit == 1.0 || logit == f32::NEG_INFINITY));
        assert_eq!(TokenMask::from_words(mask.words(), 70), mask);
        assert_eq!(TokenMask::from_words(&mask.words()[..1], 70).words(), [1 | 1 << 31, 0, 0]);
    }
}
