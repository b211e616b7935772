//! Which keys a query sees, and how its scores are scaled.

/// The causal attention mask of one forward pass, with the factors on its scores.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMask {
    /// The position of the first query. Query t has the position `position + t`.
    pub position: usize,
    /// The sliding window: how many keys a query sees, its own included. `None` means all.
    pub window: Option<usize>,
    /// The factor on q·k, usually 1/sqrt(D).
    pub scale: f32,
    /// The soft cap: a score s becomes cap · tanh(s / cap) before the softmax (Gemma 2).
    pub softcap: Option<f32>,
}
