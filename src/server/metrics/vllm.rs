//! The metrics under vLLM's names, for dashboards and routers that were made for vLLM.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use prometheus::IntGaugeVec;
use prometheus::proto::MetricFamily;

use super::factory::{MetricFactory, PREFIX};
use crate::engine::EngineStats;

/// The name prefix of the additional metrics for dashboards that were made for vLLM.
const VLLM_PREFIX: &str = "vllm:";

/// The metrics that inferno can also export under vLLM's prefix. The names are given without a prefix.
/// The histogram `iteration_tokens` has the name `iteration_tokens_total` in vLLM.
/// inferno omits the ending `_total`, because Prometheus reserves it for counters.
const VLLM_NAMES: &[&str] = &[
    "cache_config_info",
    "e2e_request_latency_seconds",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "iteration_tokens",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_by_source_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_num_preemptions",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
];

/// Metrics that add no information to inferno's own metrics, but that dashboards and routers for vLLM expect.
pub struct VllmMetrics {
    waiting_by_reason: IntGaugeVec,
    lora_info: IntGaugeVec,
    sleep_state: IntGaugeVec,
}

impl VllmMetrics {
    pub fn new(make: &MetricFactory) -> Result<Self> {
        let make = MetricFactory { registry: make.registry, prefix: VLLM_PREFIX, labels: make.labels.clone() };
        let gauges =
            |name: &str, help: &str, labels: &[&str]| make.register(IntGaugeVec::new(make.opts(name, help), labels)?);
        Ok(Self {
            waiting_by_reason: gauges(
                "num_requests_waiting_by_reason",
                "Waiting sequences by reason. All of them count under the reason capacity.",
                &["reason"],
            )?,
            lora_info: gauges(
                "lora_requests_info",
                "The current Unix time. The labels name no adapters, because inferno does not support LoRA.",
                &["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            )?,
            sleep_state: gauges(
                "engine_sleep_state",
                "1 for the current sleep state. The engine is always awake.",
                &["sleep_state"],
            )?,
        })
    }

    /// Sets the gauges from the counters of the engine.
    pub fn update(&self, stats: &EngineStats) {
        // All waiting sequences count under the reason `capacity`. They wait for free KV cache blocks, for a place among
        // the `--max-sequences` running sequences, for room in the token budget of a step, or for the prefill of a
        // prompt that they share with another answer.
        self.waiting_by_reason.with_label_values(&["capacity"]).set(stats.waiting as i64);
        self.waiting_by_reason.with_label_values(&["deferred"]).set(0);
        for (state, value) in [("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)] {
            self.sleep_state.with_label_values(&[state]).set(value);
        }
        // The value of `lora_info` is the current time, as in vLLM.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        self.lora_info.with_label_values(&["0", "", ""]).set(now as i64);
    }
}

/// Returns a copy of a metric under vLLM's name, or `None` if the metric is not in [`VLLM_NAMES`].
pub fn with_vllm_name(family: &MetricFamily) -> Option<MetricFamily> {
    let name = family.name().trim_start_matches(PREFIX);
    if !VLLM_NAMES.contains(&name) {
        return None;
    }
    let name = if name == "iteration_tokens" { "iteration_tokens_total" } else { name };
    let mut copy = family.clone();
    copy.set_name(format!("{VLLM_PREFIX}{name}"));
    Some(copy)
}
