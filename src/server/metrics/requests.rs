//! The durations and sizes of requests, and the sources of their prompt tokens.

use anyhow::Result;
use prometheus::{Histogram, IntCounter, IntCounterVec};

use super::factory::MetricFactory;
use crate::engine::Summary;

const TOKEN_SECONDS: &[f64] =
    &[0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
const FIRST_TOKEN_SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0];
const REQUEST_SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0];
const TOKENS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5];
const ANSWERS_PER_PROMPT: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];

/// The values of the label `source` for computed and for cached prompt tokens, the same as in vLLM.
const COMPUTED: &str = "local_compute";
const CACHED: &str = "local_cache_hit";

/// The durations of requests and of their phases, and the times between tokens.
pub struct RequestDurations {
    pub first_token: Histogram,
    pub inter_token: Histogram,
    pub per_output_token: Histogram,
    pub end_to_end: Histogram,
    pub queue: Histogram,
    pub prefill: Histogram,
    pub decode: Histogram,
    pub inference: Histogram,
}

impl RequestDurations {
    /// Adds the times of an answer that ended `total_s` seconds after its request was submitted.
    pub fn observe_answer(&self, summary: &Summary, total_s: f64) {
        self.queue.observe(summary.queue_s);
        self.prefill.observe((summary.ttft_s - summary.queue_s).max(0.0));
        self.decode.observe((total_s - summary.ttft_s).max(0.0));
        self.inference.observe((total_s - summary.queue_s).max(0.0));
        if summary.tok_per_s > 0.0 {
            self.per_output_token.observe(summary.tok_per_s.recip());
        }
    }

    pub fn new(make: &MetricFactory) -> Result<Self> {
        Ok(Self {
            first_token: make.histogram("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_SECONDS)?,
            inter_token: make.histogram("inter_token_latency_seconds", "Time between tokens.", TOKEN_SECONDS)?,
            per_output_token: make.histogram(
                "request_time_per_output_token_seconds",
                "Mean time between the tokens of an answer.",
                TOKEN_SECONDS,
            )?,
            end_to_end: make.histogram("e2e_request_latency_seconds", "Total time of a request.", REQUEST_SECONDS)?,
            queue: make.histogram(
                "request_queue_time_seconds",
                "Waiting time before the prefill.",
                FIRST_TOKEN_SECONDS,
            )?,
            prefill: make.histogram("request_prefill_time_seconds", "Duration of the prefill.", FIRST_TOKEN_SECONDS)?,
            decode: make.histogram(
                "request_decode_time_seconds",
                "Time from the first token to the end of the answer.",
                REQUEST_SECONDS,
            )?,
            inference: make.histogram(
                "request_inference_time_seconds",
                "Time from the start of the prefill to the end of the answer.",
                REQUEST_SECONDS,
            )?,
        })
    }
}

/// The sizes of requests: prompt tokens, generated tokens, and the values of `n` and `max_tokens`.
pub struct RequestSizes {
    prompt_tokens: Histogram,
    computed_tokens: Histogram,
    pub generation_tokens: Histogram,
    pub max_generation_tokens: Histogram,
    pub answers_per_prompt: Histogram,
    pub max_tokens: Histogram,
}

impl RequestSizes {
    /// Adds the tokens of a prompt. `computed` of these tokens were not found in the KV cache.
    pub fn observe_prompt(&self, tokens: usize, computed: usize) {
        self.prompt_tokens.observe(tokens as f64);
        self.computed_tokens.observe(computed as f64);
    }

    pub fn new(make: &MetricFactory) -> Result<Self> {
        Ok(Self {
            prompt_tokens: make.histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)?,
            computed_tokens: make.histogram(
                "request_prefill_kv_computed_tokens",
                "Tokens of a prompt that were not found in the KV cache.",
                TOKENS,
            )?,
            generation_tokens: make.histogram("request_generation_tokens", "Generated tokens of an answer.", TOKENS)?,
            max_generation_tokens: make.histogram(
                "request_max_num_generation_tokens",
                "Generated tokens of the longest answer to a request.",
                TOKENS,
            )?,
            answers_per_prompt: make.histogram(
                "request_params_n",
                "Answers per prompt that a request asked for.",
                ANSWERS_PER_PROMPT,
            )?,
            max_tokens: make.histogram(
                "request_params_max_tokens",
                "Limit on the generated tokens of an answer, if the request has one.",
                TOKENS,
            )?,
        })
    }
}

/// The prompt tokens of all requests, in total and by source.
pub struct PromptMetrics {
    tokens: IntCounter,
    cached: IntCounter,
    by_source: IntCounterVec,
}

impl PromptMetrics {
    /// Counts the tokens of a prompt. `cached` of these tokens were found in the KV cache, and `computed` were not.
    pub fn count(&self, tokens: usize, cached: usize, computed: usize) {
        self.tokens.inc_by(tokens as u64);
        self.cached.inc_by(cached as u64);
        self.by_source.with_label_values(&[COMPUTED]).inc_by(computed as u64);
        self.by_source.with_label_values(&[CACHED]).inc_by(cached as u64);
    }

    pub fn new(make: &MetricFactory) -> Result<Self> {
        Ok(Self {
            tokens: make.counter("prompt_tokens_total", "Prompt tokens, including cached ones.")?,
            cached: make.counter("prompt_tokens_cached_total", "Prompt tokens found in the KV cache.")?,
            by_source: make.counters(
                "prompt_tokens_by_source_total",
                "Prompt tokens by source: computed, or found in the KV cache.",
                "source",
                &[COMPUTED, CACHED],
            )?,
        })
    }
}
