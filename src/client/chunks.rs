//! Reads the chunks of a streamed chat completion.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::connection::Flow;
use super::refused::error_message;
use crate::chat::{Channel, Delta, ToolCall};
use crate::engine::FinishReason;

/// The maximum number of tool calls in one answer. The client ignores further tool calls.
/// Without the limit, a server could make the client allocate much memory by sending a large index.
const MAX_CALLS: usize = 128;

/// The data of one answer, collected from its chunks, without the reasoning and the answer text.
#[derive(Debug, Default)]
pub struct Chunks {
    pub usage: Option<UsageReport>,
    /// The decode speed in tokens per second, if the server reports it in `timings`, as llama-server does.
    pub tok_per_s: Option<f64>,
    pub tool_calls: Vec<ToolCall>,
    pub finish: Option<FinishReason>,
    pub first_text: Option<Instant>,
    pub last_text: Option<Instant>,
}

/// The token counts of an answer, as reported by the server. Not every server reports the optional counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageReport {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub cached_tokens: Option<usize>,
    pub reasoning_tokens: Option<usize>,
}

impl Chunks {
    /// Reads the data of an event. Returns the new text, and [`Flow::Stop`] if this event ends the stream.
    ///
    /// The data is `[DONE]` or JSON: a chunk of a stream, or a complete answer from a server that does not stream.
    /// Fails if the JSON is invalid or reports an error.
    pub fn push(&mut self, data: &str) -> Result<(Vec<Delta>, Flow)> {
        if data.trim() == "[DONE]" {
            return Ok((Vec::new(), Flow::Stop));
        }
        let chunk: Value =
            serde_json::from_str(data).context("cannot read the answer: the server sent invalid JSON")?;
        if !chunk["error"].is_null() {
            let message = error_message(&chunk).unwrap_or_else(|| "no reason given".to_string());
            bail!("cannot complete the answer: the server reported an error: {message}");
        }
        self.read_usage(&chunk);
        let choice = &chunk["choices"][0];
        let mut deltas = Vec::new();
        for message in [&choice["delta"], &choice["message"]] {
            // vLLM and inferno send `reasoning`; llama-server and SGLang send `reasoning_content`.
            // Some servers send both fields with the same text, so read only one of them.
            let reasoning = message["reasoning"].as_str().or(message["reasoning_content"].as_str());
            deltas.extend(reasoning.map(|text| delta(Channel::Reasoning, text)));
            deltas.extend(message["content"].as_str().map(|text| delta(Channel::Answer, text)));
            for (position, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
                deltas.extend(self.read_call(position, call));
            }
        }
        deltas.retain(|delta| !delta.text.is_empty());
        if !deltas.is_empty() {
            let now = Instant::now();
            self.first_text.get_or_insert(now);
            self.last_text = Some(now);
        }
        match choice["finish_reason"].as_str() {
            Some("length") => self.finish = Some(FinishReason::Length),
            Some("tool_calls") => self.finish = Some(FinishReason::ToolCalls),
            Some(_) => self.finish = Some(FinishReason::Stop),
            None => {}
        }
        Ok((deltas, if choice["message"].is_object() { Flow::Stop } else { Flow::Continue }))
    }

    fn read_call(&mut self, position: usize, call: &Value) -> Option<Delta> {
        let index = call["index"].as_u64().map_or(position, |index| index as usize);
        if index >= MAX_CALLS {
            return None;
        }
        if self.tool_calls.len() <= index {
            self.tool_calls.resize(index + 1, ToolCall::default());
        }
        let (known, function) = (&mut self.tool_calls[index], &call["function"]);
        if let Some(id) = call["id"].as_str() {
            known.id = Some(id.to_string());
        }
        known.name.push_str(function["name"].as_str().unwrap_or_default());
        let arguments = function["arguments"].as_str().unwrap_or_default();
        known.arguments.push_str(arguments);
        Some(delta(Channel::ToolCall, arguments))
    }

    fn read_usage(&mut self, chunk: &Value) {
        let count = |value: &Value| value.as_u64().map(|count| count as usize);
        let usage = &chunk["usage"];
        if let (Some(prompt_tokens), Some(completion_tokens)) =
            (count(&usage["prompt_tokens"]), count(&usage["completion_tokens"]))
        {
            self.usage = Some(UsageReport {
                prompt_tokens,
                completion_tokens,
                cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
                reasoning_tokens: count(&usage["completion_tokens_details"]["reasoning_tokens"]),
            });
        }
        self.tok_per_s = chunk["timings"]["predicted_per_second"].as_f64().or(self.tok_per_s);
    }

    /// Returns the decode speed in tokens per second, or 0 if it is unknown.
    /// If the server does not report a speed, calculates the speed from the times of the first and the last text.
    pub fn tok_per_s(&self) -> f64 {
        if let Some(speed) = self.tok_per_s.filter(|speed| speed.is_finite()) {
            return speed;
        }
        let (Some(first), Some(last), Some(usage)) = (self.first_text, self.last_text, self.usage) else { return 0.0 };
        let decode_s = (last - first).as_secs_f64();
        let tokens = usage.completion_tokens.saturating_sub(1);
        if decode_s > 0.0 { tokens as f64 / decode_s } else { 0.0 }
    }
}

fn delta(channel: Channel, text: &str) -> Delta {
    Delta { channel, text: text.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(deltas: &[Delta]) -> Vec<(Channel, &str)> {
        deltas.iter().map(|delta| (delta.channel, delta.text.as_str())).collect()
    }

    #[test]
    fn chunks_of_all_servers_become_the_same_text() {
        let mut chunks = Chunks::default();
        let mut all = Vec::new();
        for data in [
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}"#,
            r#"{"choices":[{"delta":{"reasoning":"a"}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"b"}}]}"#,
            r#"{"choices":[{"delta":{"reasoning":"c","reasoning_content":"c"}}]}"#,
            r#"{"choices":[{"delta":{"content":"d"}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"x","function":{"name":"f","arguments":""}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"tool_calls"}],"timings":{"predicted_per_second":12.5}}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}"#,
        ] {
            let (deltas, flow) = chunks.push(data).unwrap();
            assert_eq!(flow, Flow::Continue);
            all.extend(deltas);
        }
        use Channel::{Answer, Reasoning, ToolCall as Call};
        assert_eq!(texts(&all), [(Reasoning, "a"), (Reasoning, "b"), (Reasoning, "c"), (Answer, "d"), (Call, "{}")]);
        assert_eq!((chunks.finish, chunks.tok_per_s()), (Some(FinishReason::ToolCalls), 12.5));
        assert_eq!(chunks.tool_calls[0].name, "f");
        assert_eq!(chunks.usage.unwrap().completion_tokens, 4);
        assert_eq!(chunks.push("[DONE]").unwrap().1, Flow::Stop);
    }

    #[test]
    fn whole_answers_and_errors_end_the_stream() {
        let mut chunks = Chunks::default();
        let whole = r#"{"choices":[{"message":{"content":"hi","reasoning":"r"},"finish_reason":"length"}]}"#;
        let (deltas, flow) = chunks.push(whole).unwrap();
        assert_eq!((texts(&deltas), flow), (vec![(Channel::Reasoning, "r"), (Channel::Answer, "hi")], Flow::Stop));
        assert_eq!(chunks.finish, Some(FinishReason::Length));
        for (data, word) in [
            (r#"{"error":{"message":"out of memory"}}"#, "out of memory"),
            (r#"{"error":"gone"}"#, "gone"),
            ("<html>", "invalid JSON"),
        ] {
            assert!(chunks.push(data).unwrap_err().to_string().contains(word), "{data}");
        }
        let many = r#"{"choices":[{"delta":{"tool_calls":[{"index":999999999999,"function":{"arguments":"x"}}]}}]}"#;
        assert!(chunks.push(many).unwrap().0.is_empty());
    }
}
