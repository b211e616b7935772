//! Parameters of causal attention: query positions, sliding window, scale and soft cap.

/// The causal attention mask of one forward pass, and the scaling of the scores.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMask {
    /// The position of the first query. Query t is at `position + t`.
    pub position: usize,
    /// The sliding window: the number of keys that a query sees, including its own. `None` means no limit.
    pub window: Option<usize>,
    /// The factor applied to q·k, usually 1/sqrt(head_dim).
    pub scale: f32,
    /// The soft cap: a score s becomes cap · tanh(s / cap) before the softmax (Gemma 2).
    pub softcap: Option<f32>,
}
