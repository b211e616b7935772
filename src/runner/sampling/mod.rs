//! Chooses the next tokens of sequences from their logits.
//!
//! - `token_sampler`: the interface of samplers
//! - `chosen_token`: the token that a sampler chose, and how the GPU sends it to the host
//! - `on_host`, `on_device`: choose tokens on the host or on a GPU
//! - `logprobs`: the log probabilities of a token
//! - `no_cuda`: replaces `on_device` in builds without CUDA
//!
//! On a GPU, `queued_steps/` chooses the tokens of queued steps, and `decode_graph/` the tokens of the decode graph.

mod chosen_token;
mod logprobs;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
#[cfg(feature = "cuda")]
mod on_device;
mod on_host;
mod token_sampler;

#[cfg(feature = "cuda")]
pub(super) use chosen_token::token_in_word;
pub use chosen_token::{Chosen, ChosenToken};
pub use logprobs::TokenLogprobs;
#[cfg(not(feature = "cuda"))]
pub(super) use no_cuda::{choose_on_device, logprobs_on_device};
#[cfg(feature = "cuda")]
pub(super) use on_device::{choose_on_device, logprobs_on_device};
pub(super) use on_host::choose_on_host;
pub(super) use token_sampler::NoToken;
pub use token_sampler::TokenSampler;
