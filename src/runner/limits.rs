//! The limits and options of a runner, and how it divides prompts for deterministic answers.

use crate::kernels::SumOrder;
use crate::nn::kv_cache::BLOCK_TOKENS;

/// The maximum number of sequences in a batch graph or a queued step. The engine plans no steps with more sequences.
/// The buffers for the tokens of queued steps and for the logits of batch graphs have room for this many sequences.
pub const MAX_SEQUENCES: usize = 256;

/// The maximum sizes of a sequence and of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerLimits {
    /// The maximum number of positions in one sequence.
    pub context: usize,
    /// The maximum number of tokens in one step, over all sequences.
    /// Steps with [`PromptSegments`] can exceed this limit, because each segment runs in its own pass.
    pub chunk: usize,
}

/// Options for how a runner runs its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunnerOptions {
    /// Whether to run all steps operation by operation, without CUDA graphs.
    pub eager: bool,
    /// If set, the results of a sequence are deterministic: they do not depend on other sequences. See
    /// [`PromptSegments`].
    pub prompt_segments: Option<PromptSegments>,
    /// Whether to queue steps where the runner can. `None` queues steps on GPUs only.
    /// A CPU runs queued steps immediately. Tests use such steps to check queueing without a GPU.
    pub queue_steps: Option<bool>,
}

impl RunnerOptions {
    /// Returns the order of additions in batch graphs and queued steps, which is fixed if `prompt_segments` is set.
    pub fn sum_order(self) -> SumOrder {
        if self.prompt_segments.is_some() { SumOrder::Fixed } else { SumOrder::Fastest }
    }
}

/// How prompts are divided so that results do not depend on other sequences, on the prefix cache or on preemption.
///
/// The sums that determine a token are always computed in the same order:
/// - The prompt without its last token is divided at multiples of [`tokens`](Self::tokens).
///   Each segment runs in its own forward pass, so the same segment always has the same matrix sizes.
/// - The last token of the prompt and all generated tokens are computed one at a time,
///   in passes that add in a fixed order ([`SumOrder::Fixed`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSegments {
    tokens: usize,
}

impl PromptSegments {
    /// The maximum number of tokens in a segment.
    /// Larger segments would be faster to compute, but prompts reuse only whole segments from the prefix cache.
    const MAX_TOKENS: usize = 512;

    /// Creates prompt segments for passes of at most `chunk` tokens.
    /// Returns `None` if `chunk` is less than [`BLOCK_TOKENS`].
    pub fn new(chunk: usize) -> Option<Self> {
        let tokens = chunk.min(Self::MAX_TOKENS) / BLOCK_TOKENS * BLOCK_TOKENS;
        (tokens > 0).then_some(Self { tokens })
    }

    /// Returns the number of tokens in a whole segment, which is a multiple of the block size.
    pub fn tokens(self) -> usize {
        self.tokens
    }

    /// Returns the last boundary between segments at or before `position`.
    pub fn floor(self, position: usize) -> usize {
        position / self.tokens * self.tokens
    }

    /// Returns the first boundary between segments after `position`.
    pub fn next(self, position: usize) -> usize {
        self.floor(position) + self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_segments_have_whole_blocks() {
        assert_eq!(PromptSegments::new(63), None);
        let tokens = [64, 100, 500, 8192].map(|chunk| PromptSegments::new(chunk).unwrap().tokens());
        assert_eq!(tokens, [64, 64, 448, 512]);
        let prompt_segments = PromptSegments::new(64).unwrap();
        assert_eq!(
            [0, 63, 64, 65].map(|position| (prompt_segments.floor(position), prompt_segments.next(position))),
            [(0, 64), (0, 64), (64, 128), (64, 128)]
        );
    }
}
