//! The `Encode` trait, and how encoders treat control tokens.

use anyhow::Result;
use serde::{Deserialize, Serialize};

/// How `encode` treats control tokens in a text, such as `<|start|>` and `</s>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ControlTokens {
    /// Parse control tokens, and add the special tokens that the tokenizer puts around a text, such as `<s>` before it.
    /// `Default` matches the default of `encode` in Hugging Face libraries.
    Default,
    /// Parse control tokens, but add no special tokens. Suits rendered chat templates, which already contain them.
    Parse,
    /// Encode control tokens as ordinary text, and add no special tokens.
    /// Suits messages from users and tools, which must not forge control tokens.
    Text,
}

/// Encodes text to token ids, in this process or in a sandbox process.
pub trait Encode: Send + Sync {
    fn encode(&self, text: &str, controls: ControlTokens) -> Result<Vec<u32>>;
}
