//! Turns: the methods of [`Session`] that send questions to the model, and keep its answers.

use anyhow::{Result, bail};

use super::Session;
use crate::chat::{Channel, Delta, Message};
use crate::conversation::attachment::with_attachments;
use crate::conversation::backend::{BackendAnswer, OnDelta, TurnPrompt, TurnRequest};
use crate::conversation::journal::ConversationChange;
use crate::conversation::overflow::{self, CannotDropOldest, Overflow, visible_messages};
use crate::conversation::turn::{Turn, TurnSummary};
use crate::engine::{FinishReason, GenerateOptions};
use crate::text::counted;

impl Session {
    /// Sends `text` and the attached files to the model. Passes each piece of generated text to `on_delta`.
    ///
    /// If the turn fails, the messages and the attached files do not change.
    /// If the turn is interrupted, stores the partial answer. If there is no answer text yet, discards the turn and
    /// keeps the attached files. With `raw`, stores no messages.
    pub fn answer(&mut self, text: &str, on_delta: &mut OnDelta) -> Result<Turn> {
        let text = with_attachments(&self.attached, text);
        let turn = self.run_turn(self.messages.clone(), &text, on_delta)?;
        if has_answer(&turn.summary, &turn.text) {
            self.attached.clear();
        }
        Ok(turn)
    }

    /// Answers the last question again. Fails if there is no question.
    /// Keeps the old answer if the turn fails or is interrupted before the new answer starts.
    pub fn regenerate(&mut self, on_delta: &mut OnDelta) -> Result<Turn> {
        let Some(question) = self.last_question() else { bail!("cannot answer again: no question yet") };
        let text = self.messages[question].content.clone();
        self.run_turn(self.messages[..question].to_vec(), &text, on_delta)
    }

    /// Generates the answer to `text` after `history` or, with `raw`, the continuation of `text` alone.
    ///
    /// `history`, `text` and the answer replace the messages of the conversation.
    /// The messages do not change with `raw`, if the turn fails, or if it is interrupted before its answer starts.
    fn run_turn(&mut self, history: Vec<Message>, text: &str, on_delta: &mut OnDelta) -> Result<Turn> {
        let is_new_turn = history.len() == self.messages.len();
        let mut messages = history;
        messages.push(Message::user(text));
        let mut notes = Vec::new();
        let visible = if self.raw { Vec::new() } else { self.fit_context(&messages, &mut notes)? };

        let render = self.render_options();
        let options = self.next_options();
        let chosen = self.all_settings();
        let prompt = if self.raw { TurnPrompt::Text(text) } else { TurnPrompt::Chat(&visible) };
        let request = TurnRequest { prompt, render, options, chosen: &chosen };
        let (mut answer, mut reasoning) = (String::new(), String::new());
        let mut collect = |delta: &Delta| {
            match delta.channel {
                Channel::Answer => answer.push_str(&delta.text),
                Channel::Reasoning => reasoning.push_str(&delta.text),
                Channel::ToolCall => {}
            }
            on_delta(delta)
        };
        let BackendAnswer { tokens, summary } = self.backend().answer(request, &mut collect)?;

        if !self.raw && has_answer(&summary, &answer) {
            let mut message = Message::assistant(&answer);
            message.reasoning = (!reasoning.is_empty()).then(|| reasoning.clone());
            message.tool_calls = summary.tool_calls.clone();
            messages.push(message);
            self.messages = messages;
            let recorded =
                self.record(if is_new_turn { ConversationChange::Turn } else { ConversationChange::Messages });
            // Keep the answer even if it cannot be saved, for example on a full disk.
            notes.extend(recorded.err().map(|error| format!("this turn is not saved for --resume: {error:#}")));
        }
        Ok(Turn { text: answer, reasoning, tokens, summary, notes })
    }

    /// Returns the generation options for the next turn and counts the turn.
    fn next_options(&mut self) -> GenerateOptions {
        let mut sampling = self.settings.sampling.clone();
        sampling.seed = sampling.seed.wrapping_add(self.turns);
        self.turns += 1;
        GenerateOptions {
            max_tokens: self.settings.max_tokens,
            stop: self.settings.stop.clone(),
            ignore_eos: self.ignore_eos,
            cancel: Some(self.cancel.clone()),
            ..GenerateOptions::new(sampling)
        }
    }

    /// Returns the messages to send to the model. Adds a note if more messages were dropped than in earlier turns.
    /// With `drop-oldest`, fails with [`CannotDropOldest`] if the number of tokens or the context length is unknown.
    fn fit_context(&mut self, messages: &[Message], notes: &mut Vec<String>) -> Result<Vec<Message>> {
        if self.settings.overflow == Overflow::Stop {
            return Ok(messages.to_vec());
        }
        let count_tokens = |messages: &[Message]| Ok(self.count_tokens(messages)?.ok_or(CannotDropOldest)?);
        let context = self.backend().context().ok_or(CannotDropOldest)?;
        let max_tokens = self.settings.max_tokens;
        let (visible, dropped) = overflow::drop_oldest(messages, self.dropped, context, max_tokens, &count_tokens)?;
        if dropped > self.dropped {
            notes.push(format!(
                "the conversation does not fit in the context: the model no longer sees the oldest {}",
                counted(dropped, "message")
            ));
        }
        self.dropped = dropped;
        Ok(visible)
    }

    /// Returns whether the system prompt, the attached files and `text` fit in the context without earlier messages.
    ///
    /// Also returns true with `raw`, and if the number of tokens or the context length is unknown.
    pub fn fits_alone(&self, text: &str) -> bool {
        let mut messages = visible_messages(&self.messages, usize::MAX);
        messages.push(Message::user(with_attachments(&self.attached, text)));
        let context = self.backend().context().unwrap_or(usize::MAX);
        self.raw || self.count_tokens(&messages).is_ok_and(|tokens| tokens.is_none_or(|tokens| tokens < context))
    }
}

/// Returns whether to keep a turn: false if the turn was interrupted before its answer started.
fn has_answer(summary: &TurnSummary, answer: &str) -> bool {
    summary.finish_reason != FinishReason::Canceled || !answer.is_empty()
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::chat::RenderOptions;
    use crate::conversation::attachment::Attachment;
    use crate::conversation::backend::Backend;
    use crate::conversation::model_source::{LoadedModel, ModelId, ModelSource};
    use crate::conversation::settings::SettingValues;
    use crate::engine::{Engine, SamplingParams};

    /// A model that echoes the last message, or ends without an answer if the turn is interrupted.
    /// Every message has 20 tokens.
    struct Echo;

    impl Backend for Echo {
        fn answer(&self, request: TurnRequest<'_>, on_delta: &mut OnDelta) -> Result<BackendAnswer> {
            let TurnPrompt::Chat(messages) = request.prompt else { bail!("the tests send only chat messages") };
            let is_canceled = request.options.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed));
            if !is_canceled {
                let text = messages.last().map(|message| message.content.clone()).unwrap_or_default();
                on_delta(&Delta { channel: Channel::Answer, text })?;
            }
            let summary = TurnSummary {
                finish_reason: if is_canceled { FinishReason::Canceled } else { FinishReason::Stop },
                prompt_tokens: None,
                completion_tokens: None,
                ttft_s: 0.0,
                tok_per_s: 0.0,
                context: None,
                execution_mode: None,
                tool_calls: Vec::new(),
                format_violations: 0,
            };
            Ok(BackendAnswer { tokens: None, summary })
        }

        fn count_tokens(&self, messages: &[Message], _: &RenderOptions) -> Result<Option<usize>> {
            Ok(Some(20 * messages.len()))
        }

        fn count_text(&self, _: &str) -> Option<usize> {
            None
        }

        fn context(&self) -> Option<usize> {
            Some(100)
        }

        fn defaults(&self) -> Option<SamplingParams> {
            None
        }

        fn stats(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn context_stats(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn last_context_used(&self) -> Option<usize> {
            None
        }

        fn engine(&self) -> Option<&Engine> {
            None
        }
    }

    struct NoModels;

    impl ModelSource for NoModels {
        fn find(&self, _: &str) -> Result<ModelId> {
            bail!("there are no models")
        }

        fn load(&self, _: &ModelId) -> Result<LoadedModel> {
            bail!("there are no models")
        }

        fn names(&self) -> Vec<String> {
            Vec::new()
        }
    }

    fn session() -> Session {
        let (sampling, configured) = (SamplingParams::greedy(), SettingValues::new());
        let loaded = LoadedModel { backend: Box::new(Echo), sampling, configured };
        Session::new(ModelId::Remote("echo".to_owned()), loaded, Rc::new(NoModels), "2026-11-30".to_owned())
    }

    #[test]
    fn with_overflow_stop_no_message_is_dropped() {
        let mut session = session();
        session.change_setting("overflow", "drop-oldest").unwrap();
        for question in ["One?", "Two?", "Three?"] {
            session.answer(question, &mut |_| Ok(())).unwrap();
        }
        assert_eq!((session.dropped(), session.visible_messages().len()), (4, 2));
        session.change_setting("temperature", "0.5").unwrap();
        assert_eq!(session.dropped(), 4);
        session.change_setting("overflow", "stop").unwrap();
        assert_eq!((session.dropped(), session.visible_messages().len()), (0, 6));
    }

    #[test]
    fn a_turn_that_is_interrupted_before_its_answer_keeps_the_attached_files() {
        let mut session = session();
        session.attach(Attachment { path: "notes.txt".to_owned(), text: "My name is Ada".to_owned() });
        session.cancel_flag().store(true, Ordering::Relaxed);
        assert_eq!(session.answer("What is in it?", &mut |_| Ok(())).unwrap().text, "");
        assert!(session.messages().is_empty() && session.attached().len() == 1);
        session.cancel_flag().store(false, Ordering::Relaxed);
        let answer = session.answer("What is in it?", &mut |_| Ok(())).unwrap().text;
        assert!(answer.contains("My name is Ada") && answer.contains("What is in it?"), "{answer}");
        assert!(session.messages().len() == 2 && session.attached().is_empty());
    }
}
