//! The metrics of a server, in version 0.0.4 of Prometheus's text format.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use prometheus::core::Collector;
use prometheus::proto::{Bucket, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::chat::{FormatViolation, FormatViolations};
use crate::engine::{BLOCK_TOKENS, EngineHandle, EngineHistograms, EngineStats, HistogramStats, Summary};

/// The name prefix of inferno's metrics.
const PREFIX: &str = "inferno_";
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

const TOKEN_SECONDS: &[f64] =
    &[0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
const FIRST_TOKEN_SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0];
const REQUEST_SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0];
const TOKENS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5];

const CANCEL_SECONDS: &[f64] = &[0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];
const CHOICES: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];

/// The values of the label `source` for computed and for cached prompt tokens, the same as in vLLM.
const COMPUTED: &str = "local_compute";
const CACHED: &str = "local_cache_hit";

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

/// The sizes of requests: prompt tokens, generated tokens, and the values of `n` and `max_tokens`.
pub struct RequestSizes {
    prompt_tokens: Histogram,
    computed_tokens: Histogram,
    pub generation_tokens: Histogram,
    pub max_generation_tokens: Histogram,
    pub choices: Histogram,
    pub max_tokens: Histogram,
}

/// The prompt tokens of all requests, in total and by source.
struct PromptMetrics {
    tokens: IntCounter,
    cached: IntCounter,
    by_source: IntCounterVec,
}

/// A function that reads one of the engine's counters.
type ReadTotal = fn(&EngineStats) -> u64;

/// Copies of the engine's counters, gauges and cancellation times, updated at each scrape of the metrics.
struct EngineMetrics {
    running: IntGauge,
    waiting: IntGauge,
    /// The metrics that exist only under vLLM's names. `None` if metrics under vLLM's names are disabled.
    vllm: Option<VllmMetrics>,
    /// The labels that `histograms` adds to the engine's histograms.
    labels: HashMap<String, String>,
    cancel_latency: Histogram,
    cache_usage: Gauge,
    cache_config: IntGaugeVec,
    totals: Vec<(IntCounter, ReadTotal)>,
    /// Locked during an update, so that two concurrent scrapes do not add the same increase twice.
    updating: Mutex<()>,
}

/// Metrics that add no information to inferno's own metrics, but that dashboards and routers for vLLM expect.
struct VllmMetrics {
    waiting_by_reason: IntGaugeVec,
    lora_info: IntGaugeVec,
    sleep_state: IntGaugeVec,
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
        self.prompts.tokens.inc_by(tokens as u64);
        self.prompts.cached.inc_by(cached as u64);
        self.prompts.by_source.with_label_values(&[COMPUTED]).inc_by(computed as u64);
        self.prompts.by_source.with_label_values(&[CACHED]).inc_by(cached as u64);
        self.sizes.prompt_tokens.observe(tokens as f64);
        self.sizes.computed_tokens.observe(computed as f64);
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

    fn new(make: &MetricFactory) -> Result<Self> {
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

impl RequestSizes {
    fn new(make: &MetricFactory) -> Result<Self> {
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
            choices: make.histogram("request_params_n", "Answers per prompt that a request asked for.", CHOICES)?,
            max_tokens: make.histogram(
                "request_params_max_tokens",
                "Limit on the generated tokens of an answer, if the request has one.",
                TOKENS,
            )?,
        })
    }
}

impl PromptMetrics {
    fn new(make: &MetricFactory) -> Result<Self> {
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

impl VllmMetrics {
    fn new(make: &MetricFactory) -> Result<Self> {
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

    fn update(&self, stats: &EngineStats) {
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

impl EngineMetrics {
    fn new(make: &MetricFactory, has_vllm_names: bool) -> Result<Self> {
        Ok(Self {
            vllm: if has_vllm_names { Some(VllmMetrics::new(make)?) } else { None },
            running: make.gauge("num_requests_running", "Running sequences.")?,
            waiting: make.gauge("num_requests_waiting", "Waiting sequences.")?,
            labels: make.labels.clone(),
            cancel_latency: make.histogram(
                "cancel_latency_seconds",
                "Time from a client's cancellation of a sequence to the end of the sequence.",
                CANCEL_SECONDS,
            )?,
            cache_usage: {
                let help = "Share of the KV cache's blocks in use, from 0 to 1.";
                make.register(Gauge::with_opts(make.opts("kv_cache_usage_perc", help))?)?
            },
            cache_config: {
                let opts = make
                    .opts("cache_config_info", "The labels contain the size of the KV cache. The value is always 1.");
                make.register(IntGaugeVec::new(opts, &["block_size", "num_gpu_blocks"])?)?
            },
            totals: Self::totals(make)?,
            updating: Mutex::new(()),
        })
    }

    /// Creates the counters that copy counters of the engine, each with the function that reads the engine's value.
    fn totals(make: &MetricFactory) -> Result<Vec<(IntCounter, ReadTotal)>> {
        let total = |name, help, read: ReadTotal| Ok((make.counter(name, help)?, read));
        [
            total("generation_tokens_total", "Generated tokens.", |stats| stats.generated_tokens),
            total("num_preemptions_total", "Preemptions of running sequences.", |stats| stats.preemptions),
            total("prefix_cache_queries_total", "Tokens looked up in the prefix cache.", |s| s.queried_tokens),
            total("prefix_cache_hits_total", "Tokens found in the prefix cache.", |stats| stats.hit_tokens),
            total("engine_steps_total", "Engine steps, including failed ones.", |stats| stats.steps),
            total("canceled_sequences_total", "Sequences that clients canceled.", |stats| stats.canceled),
            total("failed_sequences_total", "Sequences that ended with an error.", |stats| stats.failed),
            total(
                "tokens_after_cancel_total",
                "Tokens of a request from steps that began after the request had been completed or canceled.",
                |stats| stats.tokens_after_cancel,
            ),
        ]
        .into_iter()
        .collect()
    }

    /// Returns the engine's histograms in Prometheus's type.
    fn histograms(&self, engine: &EngineHandle) -> [MetricFamily; 2] {
        let EngineHistograms { step_tokens, preemptions } = engine.histograms();
        let preemptions_help = "Number of times that an answer was preempted.";
        [
            family("iteration_tokens", "Tokens that a step computed.", &self.labels, &step_tokens),
            family("request_num_preemptions", preemptions_help, &self.labels, &preemptions),
        ]
    }

    fn update(&self, engine: &EngineHandle) {
        let _guard = self.updating.lock().unwrap_or_else(PoisonError::into_inner);
        let stats = engine.stats();
        self.running.set(stats.running as i64);
        self.waiting.set(stats.waiting as i64);
        if let Some(vllm) = &self.vllm {
            vllm.update(&stats);
        }
        engine.take_cancel_times().into_iter().for_each(|time_s| self.cancel_latency.observe(time_s));
        self.cache_usage.set(cache_usage(&stats));
        // One of the blocks is the scratch block, which no sequence can use.
        let blocks = engine.info().cache_blocks.saturating_sub(1);
        self.cache_config.with_label_values(&[&BLOCK_TOKENS.to_string(), &blocks.to_string()]).set(1);
        for (counter, read) in &self.totals {
            counter.inc_by(read(&stats).saturating_sub(counter.get()));
        }
    }
}

/// Returns a copy of a metric under vLLM's name, or `None` if the metric is not in [`VLLM_NAMES`].
fn with_vllm_name(family: &MetricFamily) -> Option<MetricFamily> {
    let name = family.name().trim_start_matches(PREFIX);
    if !VLLM_NAMES.contains(&name) {
        return None;
    }
    let name = if name == "iteration_tokens" { "iteration_tokens_total" } else { name };
    let mut copy = family.clone();
    copy.set_name(format!("{VLLM_PREFIX}{name}"));
    Some(copy)
}

/// Converts a histogram of the engine to Prometheus's type.
fn family(name: &str, help: &str, labels: &HashMap<String, String>, stats: &HistogramStats) -> MetricFamily {
    let bucket = |(bound, count): (&u64, &u64)| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound as f64);
        bucket.set_cumulative_count(*count);
        bucket
    };
    let mut histogram = prometheus::proto::Histogram::default();
    histogram.set_bucket(stats.bounds.iter().zip(&stats.cumulative).map(bucket).collect());
    histogram.set_sample_count(stats.count);
    histogram.set_sample_sum(stats.sum as f64);
    let label = |(name, value): (&String, &String)| {
        let mut label = LabelPair::default();
        label.set_name(name.clone());
        label.set_value(value.clone());
        label
    };
    let mut labels: Vec<LabelPair> = labels.iter().map(label).collect();
    labels.sort();
    let mut metric = Metric::from_label(labels);
    metric.set_histogram(histogram);
    let mut family = MetricFamily::default();
    family.set_name(format!("{PREFIX}{name}"));
    family.set_help(help.to_string());
    family.set_field_type(MetricType::HISTOGRAM);
    family.set_metric(vec![metric]);
    family
}

/// Returns the share of the KV cache's blocks that sequences use, from 0 to 1.
pub fn cache_usage(stats: &EngineStats) -> f64 {
    stats.used_blocks as f64 / stats.blocks.max(1) as f64
}

/// Registers metrics that have the same prefix and the same labels.
struct MetricFactory<'r> {
    registry: &'r Registry,
    /// The prefix of every metric name.
    prefix: &'static str,
    /// The labels of every metric.
    labels: HashMap<String, String>,
}

impl MetricFactory<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(format!("{}{name}", self.prefix), help).const_labels(self.labels.clone())
    }

    fn register<M: Collector + Clone + 'static>(&self, metric: M) -> Result<M> {
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter> {
        self.register(IntCounter::with_opts(self.opts(name, help))?)
    }

    /// Creates one counter for each given label value. Other label values can be added later.
    fn counters(&self, name: &str, help: &str, label: &str, values: &[&str]) -> Result<IntCounterVec> {
        let counters = self.register(IntCounterVec::new(self.opts(name, help), &[label])?)?;
        values.iter().for_each(|value| drop(counters.with_label_values(&[*value])));
        Ok(counters)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge> {
        self.register(IntGauge::with_opts(self.opts(name, help))?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram> {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        self.register(Histogram::with_opts(opts)?)
    }
}
