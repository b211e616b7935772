//! Chooses the next tokens of sequences from their logits.
//!
//! - `token_sampler`: the interface of samplers
//! - `on_host`: chooses tokens on the host
//! - `logprobs`: the log probabilities of a token
//!
//! Where the next tokens are chosen depends on how the step runs:
//!
//! - On a CPU, `on_host` chooses them.
//! - In a step on a GPU that is neither queued nor on the decode graph, `gpu/sampling.rs` chooses them.
//!   The samplers know all earlier tokens, so the host sends the token counts for penalties and the masks of
//!   constraints after the pass. The host then waits for the tokens.
//! - In a queued step on a GPU, `gpu/queued_step_buffers.rs` chooses them. The host does not know the previous token
//!   yet, so the GPU adds this token to the counts for penalties, and no constraint can limit the choice.
//!   The host does not wait: the GPU sends the tokens through a mailbox.
//!   The sampling kernel is the same as in `gpu/sampling.rs` (`kernels/sampling/sample_rows.cu`).
//!   If all sequences need only the largest logit, a smaller kernel chooses the tokens (`best_logits.cu`).
//! - The decode graph chooses its own tokens, and the first token after the prompt of its sequence.
//!   It has only one row of logits, so its sampling kernel (`kernels/decode/sample.cu`) divides the row among all
//!   multiprocessors. This kernel also counts the tokens for penalties, and writes the embedding of the chosen token,
//!   which is the input of the next step.

mod logprobs;
mod on_host;
mod token_sampler;

pub use logprobs::TokenLogprobs;
pub(super) use on_host::choose_on_host;
#[cfg(feature = "cuda")]
pub(super) use token_sampler::NO_ALLOWED_TOKEN;
pub(super) use token_sampler::NoToken;
pub use token_sampler::{ChosenToken, SamplerResult, TokenSampler};
