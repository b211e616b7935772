//! Predicts whether a request would start now, without running the request.

use std::sync::mpsc;

use anyhow::Result;

use super::EngineHandle;
use crate::engine::engine_loop::EngineCommand;
use crate::engine::requests::{GenerateOptions, Request};
use crate::engine::scheduler::{NewSequence, Preview, SequenceId};

/// The prediction of [`EngineHandle::preview`] for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestPreview {
    pub prompt_tokens: usize,
    /// The maximum number of tokens in each answer.
    pub max_tokens: usize,
    /// Whether the request would start now, how many sequences are ahead of it, and how many blocks it needs.
    pub preview: Preview,
}

impl EngineHandle {
    /// Predicts whether a request for `answers` answers would start at once if it were submitted now.
    ///
    /// Fails like [`submit_n`](Self::submit_n), but does not check the constraint or whether the engine is draining.
    /// Waits until the engine thread plans its next step.
    pub fn preview(&self, request: Request, answers: usize) -> Result<RequestPreview> {
        Self::check_answer_count(answers)?;
        let ids = self.encode(request.prompt)?;
        let options = request.options.unwrap_or_else(|| GenerateOptions::new(self.defaults().clone()));
        self.check_request(&ids, &options)?;
        let prompt_tokens = ids.len();
        let prompt_segments = self.request_segments(&options)?;
        let max_tokens = options.max_tokens.unwrap_or(usize::MAX).min(self.context() - prompt_tokens);
        let (sender, result) = mpsc::sync_channel(1);
        self.send(EngineCommand::CallScheduler(Box::new(move |scheduler, now| {
            let new = NewSequence {
                // With ids larger than all ids in use, the request comes after requests of equal priority and arrival.
                id: SequenceId::MAX - answers as SequenceId,
                prompt: ids,
                cache_salt: options.cache_salt,
                prompt_segments,
                computes_whole_prompt: options.prompt_logprobs.is_some(),
                forks: (1..answers as SequenceId).map(|fork| SequenceId::MAX - fork).collect(),
                max_tokens,
                tenant: options.tenant,
                priority: options.priority,
                arrival: now,
                deadline: None,
            };
            // The send fails only if the caller no longer waits for the result.
            let _ = sender.send(scheduler.preview(&new));
        })))?;
        let preview = self.wait_for(&result)?;
        Ok(RequestPreview { prompt_tokens, max_tokens, preview })
    }
}
