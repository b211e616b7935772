//! Checks requests before the engine receives them.

use anyhow::Result;

use super::EngineHandle;
use crate::engine::requests::GenerateOptions;
use crate::error::Error;
use crate::kernels::sampling::MAX_LOGPROBS;
use crate::runner::PromptSegments;

/// The maximum size of a prompt above [`MIN_TEXT_BYTES`], in bytes per token of context.
/// Text rarely has more bytes per token, so a longer text is unlikely to fit in the context.
const MAX_BYTES_PER_TOKEN: usize = 32;

/// Prompts of up to this many bytes are always encoded.
/// If such a prompt is too long, the error [`Error::ContextFull`] therefore states the number of its tokens.
const MIN_TEXT_BYTES: usize = 1 << 20;

/// The maximum number of answers to one request, as in OpenAI's API.
const MAX_ANSWERS: usize = 128;

impl EngineHandle {
    /// Checks the prompt's length and token ids, and that the options are in range.
    pub(super) fn check_request(&self, ids: &[u32], options: &GenerateOptions) -> Result<()> {
        self.check_options(options)?;
        if ids.is_empty() {
            return Err(Error::invalid_request("cannot generate text: the prompt is empty"));
        }
        let vocab_size = self.info().vocab_size;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(Error::invalid_request(format!(
                "cannot generate text: token id {id} is outside the model's vocabulary of {vocab_size} tokens"
            )));
        }
        let (prompt_tokens, context_tokens) = (ids.len(), self.context());
        if prompt_tokens >= context_tokens {
            let limit_tokens = self.info().max_context;
            return Err(Error::ContextFull { prompt_tokens, context_tokens, limit_tokens }.into());
        }
        Ok(())
    }

    fn check_options(&self, options: &GenerateOptions) -> Result<()> {
        options.sampling.validate().map_err(Error::invalid_request)?;
        let vocab_size = self.info().vocab_size;
        let ids = options.logit_bias.keys().chain(&options.stop_token_ids);
        if let Some(id) = ids.copied().find(|&id| id as usize >= vocab_size) {
            return Err(Error::invalid_request(format!(
                "token id {id} in the options is outside the model's vocabulary of {vocab_size} tokens"
            )));
        }
        if let Some((id, bias)) = options.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(*bias)) {
            let problem = format!("the logit bias of token id {id} is {bias}: expected a number from -100 to 100");
            return Err(Error::invalid_request(problem));
        }
        for (name, count) in [("logprobs", options.logprobs), ("prompt_logprobs", options.prompt_logprobs)] {
            if let Some(count) = count.filter(|&count| count > MAX_LOGPROBS) {
                let problem = format!("{name} is {count}: expected a number from 0 to {MAX_LOGPROBS}");
                return Err(Error::invalid_request(problem));
            }
        }
        Ok(())
    }

    /// Fails if the text of a prompt is far too long for the context, to avoid the cost of encoding the text.
    pub(crate) fn check_prompt_bytes(&self, prompt_bytes: usize) -> Result<()> {
        let context_tokens = self.context();
        if prompt_bytes > MIN_TEXT_BYTES.max(context_tokens.saturating_mul(MAX_BYTES_PER_TOKEN)) {
            return Err(Error::PromptTooLong { prompt_bytes, context_tokens }.into());
        }
        Ok(())
    }

    /// Returns how to divide the prompt of a deterministic request.
    ///
    /// Returns `None` if the request is not deterministic, or if the engine answers all requests deterministically.
    /// Fails if the request is deterministic, but the engine cannot answer individual requests deterministically.
    pub(super) fn request_segments(&self, options: &GenerateOptions) -> Result<Option<PromptSegments>> {
        let info = self.info();
        match info.request_segments {
            _ if !options.deterministic || info.is_deterministic => Ok(None),
            None => {
                let reason = "the engine's chunk size or attention kernel does not support determinism".to_string();
                Err(Error::NotDeterministic { reason }.into())
            }
            prompt_segments => Ok(prompt_segments),
        }
    }

    /// Fails if `n` is not between 1 and [`MAX_ANSWERS`].
    pub(super) fn check_answer_count(n: usize) -> Result<()> {
        if !(1..=MAX_ANSWERS).contains(&n) {
            return Err(Error::invalid_request(format!("n is {n}: expected a number from 1 to {MAX_ANSWERS}")));
        }
        Ok(())
    }
}
