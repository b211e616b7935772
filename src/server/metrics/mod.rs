//! The metrics of a server, in version 0.0.4 of Prometheus's text format.
//!
//! - `requests`: the durations and sizes of requests, and the sources of their prompt tokens
//! - `engine`: the counters, gauges and histograms of the engine
//! - `vllm`: the metrics under vLLM's names
//! - `factory`: creates and registers metrics

mod engine;
mod factory;
mod requests;
mod vllm;

use std::collections::HashMap;

use anyhow::Result;
use prometheus::proto::MetricFamily;
use prometheus::{Encoder, IntCounter, IntCounterVec, IntGauge, Registry, TextEncoder};

use crate::chat::{FormatViolation, FormatViolations};
use crate::engine::EngineHandle;
use engine::EngineMetrics;
use factory::{MetricFactory, PREFIX};
use requests::{PromptMetrics, RequestDurations, RequestSizes};
use vllm::with_vllm_name;

pub use engine::cache_usage;

/// The label values whose counters start at 0 when the server starts, so that Prometheus sees their first increase.
const FINISH_REASONS: &[&str] = &["stop", "length", "tool_calls"];
const REJECTION_REASONS: &[&str] = &["queue"];
const STATUS_CODES: &[&str] =
    &["200", "304", "400", "401", "403", "404", "405", "408", "413", "415", "429", "499", "500", "503"];

/// All metrics of a server.
pub struct Metrics {
    registry: Registry,
    has_vllm_names: bool,
    pub requests: IntCounterVec,
    pub admission_rejections: IntCounterVec,
    pub joined_retries: IntCounter,
    pub http: HttpMetrics,
    pub times: RequestDurations,
    pub sizes: RequestSizes,
    prompts: PromptMetrics,
    format_violations: IntCounterVec,
    is_alive: IntGauge,
    engine: EngineMetrics,
}

/// The metrics of connections and HTTP responses.
pub struct HttpMetrics {
    pub responses: IntCounterVec,
    pub connections: IntGauge,
    pub refused_connections: IntCounter,
}

impl Metrics {
    /// Creates the metrics of a server. `model` is the name of the served model.
    pub fn new(model: &str, has_vllm_names: bool) -> Result<Self> {
        let labels: HashMap<String, String> =
            HashMap::from([("model_name".to_string(), model.to_string()), ("engine".into(), "0".into())]);
        let registry = Registry::new();
        let make = MetricFactory { registry: &registry, prefix: PREFIX, labels };
        Ok(Self {
            has_vllm_names,
            requests: make.counters("request_success_total", "Finished answers.", "finished_reason", FINISH_REASONS)?,
            admission_rejections: make.counters(
                "admission_rejections_total",
                "Requests rejected because the queue was full or their API key had too many answers in progress.",
                "reason",
                REJECTION_REASONS,
            )?,
            joined_retries: make
                .counter("joined_retries_total", "Retries that received the answer to an earlier attempt.")?,
            http: HttpMetrics::new(&make)?,
            times: RequestDurations::new(&make)?,
            sizes: RequestSizes::new(&make)?,
            prompts: PromptMetrics::new(&make)?,
            format_violations: make.counters(
                "chat_format_violations_total",
                "Violations of the chat format by the model.",
                "kind",
                &FormatViolation::ALL.map(FormatViolation::name),
            )?,
            is_alive: make
                .gauge("engine_alive", "0 if the engine has stopped or a step takes too long, otherwise 1.")?,
            engine: EngineMetrics::new(&make, has_vllm_names)?,
            registry,
        })
    }

    /// Adds the tokens of a prompt to the metrics. `cached` of these tokens were found in the KV cache.
    pub fn count_prompt(&self, tokens: usize, cached: usize) {
        let computed = tokens.saturating_sub(cached);
        self.prompts.count(tokens, cached, computed);
        self.sizes.observe_prompt(tokens, computed);
    }

    /// Adds the format violations of an answer to the metrics.
    pub fn count_violations(&self, violations: &FormatViolations) {
        for kind in FormatViolation::ALL {
            self.format_violations.with_label_values(&[kind.name()]).inc_by(violations.of(kind) as u64);
        }
    }

    /// Returns all metrics in Prometheus's text format. `engine` is `None` while the model loads.
    /// `is_alive` is false if the engine has stopped or makes no progress.
    pub fn render(&self, engine: Option<&EngineHandle>, is_alive: bool) -> Result<Vec<u8>> {
        self.is_alive.set(is_alive.into());
        if let Some(engine) = engine {
            self.engine.update(engine);
        }
        let mut families = self.registry.gather();
        if let Some(engine) = engine {
            families.extend(self.engine.histograms(engine));
        }
        if self.has_vllm_names {
            let copies: Vec<MetricFamily> = families.iter().filter_map(with_vllm_name).collect();
            families.extend(copies);
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&families, &mut text)?;
        Ok(text)
    }
}

impl HttpMetrics {
    fn new(make: &MetricFactory) -> Result<Self> {
        Ok(Self {
            responses: make.counters("http_responses_total", "HTTP responses.", "code", STATUS_CODES)?,
            connections: make.gauge("open_connections", "Open connections.")?,
            refused_connections: make.counter(
                "refused_connections_total",
                "Connections above the limit. They serve only health checks and metrics, or are closed at once.",
            )?,
        })
    }
}
