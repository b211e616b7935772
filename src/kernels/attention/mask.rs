//! The attention mask, and the scaling of the scores.

/// The causal attention mask of one layer, with the scale and the soft cap of the attention scores.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMask {
    /// The sliding window: the maximum number of keys that a query attends to, including its own key.
    /// `None` means no limit.
    pub window: Option<usize>,
    /// The factor applied to q·k, usually 1/sqrt(head_dim).
    pub scale: f32,
    /// The soft cap: a score s becomes cap · tanh(s / cap) before the softmax (Gemma 2). `None` means no soft cap.
    pub softcap: Option<f32>,
}

impl AttentionMask {
    /// Returns the position of the first key that a query at `position` attends to.
    pub fn first_key(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}
