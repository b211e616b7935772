//! The field `usage` of chat completions and text completions in OpenAI's API.

use serde::Serialize;

/// The token counts of a response, under the field names of chat completions.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptDetails,
    pub completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PromptDetails {
    pub cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CompletionDetails {
    pub reasoning_tokens: usize,
}

impl Usage {
    pub fn new(prompt: usize, cached: usize, completion: usize, reasoning: usize) -> Self {
        Self {
            prompt_tokens: prompt,
            completion_tokens: completion,
            total_tokens: prompt + completion,
            prompt_tokens_details: PromptDetails { cached_tokens: cached },
            completion_tokens_details: CompletionDetails { reasoning_tokens: reasoning },
        }
    }
}
