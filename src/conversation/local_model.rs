//! A model in this process, as the backend of a conversation.

use anyhow::Result;

use super::backend::{Backend, BackendAnswer, OnDelta, TurnPrompt, TurnRequest};
use super::turn::TurnSummary;
use crate::chat::{Message, RenderOptions};
use crate::engine::{Engine, SamplingParams};
use crate::runner::ExecutionMode;
use crate::text;
use crate::tokenizer::ControlTokens;

/// Answers the turns of a conversation with an engine in this process.
pub struct LocalModel(pub Engine);

impl Backend for LocalModel {
    fn answer(&self, request: TurnRequest<'_>, on_delta: &mut OnDelta) -> Result<BackendAnswer> {
        let mut stream = match request.prompt {
            TurnPrompt::Text(text) => self.0.complete(text, request.options)?,
            TurnPrompt::Chat(messages) => self.0.chat(messages, &request.render, request.options)?,
        };
        let mut tokens = Vec::new();
        for event in &mut stream {
            let event = event?;
            tokens.extend(event.token());
            for delta in event.deltas() {
                on_delta(delta)?;
            }
        }
        Ok(BackendAnswer { tokens: Some(tokens), summary: TurnSummary::from(stream.summary()) })
    }

    fn count_tokens(&self, messages: &[Message], render: &RenderOptions) -> Result<Option<usize>> {
        Ok(Some(self.0.render(messages, render)?.ids.len()))
    }

    fn count_text(&self, text: &str) -> Option<usize> {
        self.0.tokenizer().encode(text, ControlTokens::Text).ok().map(|ids| ids.len())
    }

    fn context(&self) -> Option<usize> {
        Some(self.0.context())
    }

    fn defaults(&self) -> Option<SamplingParams> {
        Some(self.0.defaults().clone())
    }

    fn stats(&self) -> Vec<(&'static str, String)> {
        let (engine, info) = (&self.0, self.0.info());
        let mode = match (engine.execution_mode(), engine.no_decode_graph()) {
            (mode, None) => mode.to_string(),
            (ExecutionMode::Graph, Some(reason)) => format!("graph, but not the decode graph, because {reason}"),
            (ExecutionMode::Eager, Some(reason)) => format!("eager, because {reason}"),
        };
        let chat_format = engine.language().chat.as_ref().map_or("none", |chat| chat.name());
        vec![
            ("family", format!("{} {}", info.family, info.quantization.as_deref().unwrap_or("unquantized"))),
            ("executor", mode),
            ("attention", info.attention.to_string()),
            ("parameters", info.parameters.to_string()),
            ("device", info.device.name.clone()),
            ("dtype", format!("{:?}", info.dtype).to_lowercase()),
            ("weights", text::size(info.weight_bytes)),
            ("cache", format!("{} for {}", text::size(info.cache_bytes), text::counted(engine.context(), "token"))),
            ("context used", engine.cached_tokens().to_string()),
            ("chat format", chat_format.to_string()),
            ("loaded in", format!("{:.2} s", info.load.total_s)),
        ]
    }

    fn context_stats(&self) -> Vec<(&'static str, String)> {
        vec![
            ("cached", format!("{} of the last prompt and answer", text::counted(self.0.cached_tokens(), "token"))),
            ("model allows", self.0.info().max_context.to_string()),
        ]
    }

    fn last_context_used(&self) -> Option<usize> {
        Some(self.0.cached_tokens())
    }

    fn engine(&self) -> Option<&Engine> {
        Some(&self.0)
    }
}
