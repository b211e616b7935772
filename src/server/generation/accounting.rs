//! Counts the answers to one HTTP request, and adds them to the metrics, the log and the records.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::answer_stream::AnswerStream;
use super::pieces::{AnswerUpdate, Finish};
use super::usage::Usage;
use crate::engine::{Event, GenerationRecord, ModelInfo, RecordedRequest, Summary};
use crate::server::http::log::{AnswerLog, RequestLog};
use crate::server::state::ServerState;
use crate::tokenizer::Tokenizer;

/// Where to count the answers to one HTTP request.
pub struct Accounting {
    pub server: Arc<ServerState>,
    pub log: Arc<RequestLog>,
    pub answers_per_prompt: usize,
    pub is_stream: bool,
    pub submitted: Instant,
}

/// How the generation of all answers to one HTTP request ended.
pub struct GenerationEnd {
    /// The error message if generating the answers failed.
    pub failure: Option<String>,
    /// Whether another HTTP request canceled the answers.
    pub is_canceled: bool,
}

impl Accounting {
    /// Returns the time since the request was submitted.
    pub fn elapsed(&self) -> Duration {
        self.submitted.elapsed()
    }

    /// Passes an event to the answer, and adds the event to the metrics. Returns the update of the answer.
    pub fn push(&self, answer: &mut AnswerStream, event: Event, tokenizer: &Tokenizer) -> AnswerUpdate {
        let is_token = event.token().is_some();
        let last_token = answer.last_token;
        let update = answer.push(event, tokenizer);
        if let (true, Some(now)) = (is_token, answer.last_token) {
            self.count_token(last_token, now);
        }
        if let (Some(summary), Some(finish)) = (&answer.summary, update.finish) {
            self.count_end(summary, finish);
        }
        update
    }

    /// Adds the time of a token to the metrics. `last` is the time of the answer's previous token.
    fn count_token(&self, last: Option<Instant>, now: Instant) {
        let times = &self.server.metrics.times;
        match last {
            None => times.first_token.observe((now - self.submitted).as_secs_f64()),
            Some(last) => times.inter_token.observe((now - last).as_secs_f64()),
        }
    }

    /// Adds an answer that has ended to the metrics.
    fn count_end(&self, summary: &Summary, finish: Finish) {
        let metrics = &self.server.metrics;
        metrics.requests.with_label_values(&[finish.as_str()]).inc();
        metrics.times.observe_answer(summary, self.elapsed().as_secs_f64());
    }

    /// Returns the token counts so far. Prompt tokens count once per prompt, not once per answer.
    pub fn usage(&self, answers: &[AnswerStream]) -> Usage {
        let mut prompt_tokens = 0;
        let mut cached_tokens = 0;
        let mut completion_tokens = 0;
        let mut reasoning_tokens = 0;
        for (index, answer) in answers.iter().enumerate() {
            let progress = answer.stream.progress();
            if index % self.answers_per_prompt == 0 {
                prompt_tokens += progress.prompt_tokens;
                cached_tokens += progress.cached_tokens;
            }
            completion_tokens += progress.completion_tokens;
            reasoning_tokens += answer.reasoning_tokens();
        }
        Usage::new(prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens)
    }

    /// Adds all answers to the metrics, the log and the records, including canceled and failed ones.
    /// The caller calls this function once, when no answer changes any more.
    pub fn finish(&self, answers: &mut [AnswerStream], end: GenerationEnd, model: &ModelInfo) {
        self.count_sizes(answers);
        self.log_answers(answers, &end);
        self.record(answers, end, model);
    }

    fn count_sizes(&self, answers: &[AnswerStream]) {
        let metrics = &self.server.metrics;
        metrics.times.end_to_end.observe(self.elapsed().as_secs_f64());
        for (index, answer) in answers.iter().enumerate() {
            let progress = answer.stream.progress();
            if index % self.answers_per_prompt == 0 {
                metrics.count_prompt(progress.prompt_tokens, progress.cached_tokens);
            }
            metrics.sizes.generation_tokens.observe(progress.completion_tokens as f64);
            metrics.count_violations(&answer.stream.violations());
        }
        let longest = answers.iter().map(|answer| answer.stream.progress().completion_tokens).max();
        metrics.sizes.max_generation_tokens.observe(longest.unwrap_or(0) as f64);
    }

    /// Adds the answers to the log line of the request. All answers share the line,
    /// with the finish reason of the first answer or the reason for an early end.
    fn log_answers(&self, answers: &[AnswerStream], end: &GenerationEnd) {
        let has_ended = answers.iter().all(|answer| answer.summary.is_some());
        let finish = answers.first().and_then(|answer| answer.finish);
        let finish = finish.filter(|_| has_ended && end.failure.is_none());
        let usage = self.usage(answers);
        self.log.set_answer(AnswerLog {
            answer_count: answers.len(),
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            completion_tokens: usage.completion_tokens,
            ttft_s: answers.first().map_or(0.0, |answer| answer.stream.progress().ttft_s),
            is_stream: self.is_stream,
            finish: end.finish_name(finish),
        });
    }

    /// Adds a record of the request and its answers to the server's recorder, if the request is recorded.
    fn record(&self, answers: &mut [AnswerStream], end: GenerationEnd, model: &ModelInfo) {
        let requests = answers.chunks_mut(self.answers_per_prompt).map(|answers| {
            let request = answers.first()?.stream.record()?.clone();
            let answers = answers.iter_mut().map(|answer| answer.take_record(end.finish_name(answer.finish))).collect();
            Some(RecordedRequest { request: Arc::unwrap_or_clone(request), answers })
        });
        let Some(requests) = requests.collect::<Option<Vec<_>>>() else { return };
        let options = &self.server.options;
        let id = self.log.id.clone();
        let name = options.model.clone();
        let revision = options.record.revision.clone();
        let mut record = GenerationRecord::new(id, name, revision, model);
        record.requests = requests;
        record.error = end.failure;
        self.server.recorder.add(self.log.tenant(), record);
    }
}

impl GenerationEnd {
    /// Returns how an answer ended, for the log and the records: its finish reason, `error` or `canceled`.
    ///
    /// In a record, `finish` is `None` if the answer failed, or was dropped before it ended.
    /// For the log line, which covers all answers, `finish` is `None` if this applies to any of them.
    fn finish_name(&self, finish: Option<Finish>) -> &'static str {
        match finish {
            None if self.failure.is_some() => "error",
            None => "canceled",
            Some(_) if self.is_canceled => "canceled",
            Some(finish) => finish.as_str(),
        }
    }
}
