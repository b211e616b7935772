//! The metrics of the engine: its counters, gauges and histograms at the time of a scrape.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use prometheus::proto::{Bucket, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Gauge, Histogram, IntCounter, IntGauge, IntGaugeVec};

use super::factory::{MetricFactory, PREFIX};
use super::vllm::VllmMetrics;
use crate::engine::{BLOCK_TOKENS, EngineHandle, EngineHistograms, EngineStats, HistogramStats};

const CANCEL_SECONDS: &[f64] = &[0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

/// A function that reads one of the engine's counters.
type ReadTotal = fn(&EngineStats) -> u64;

/// Copies of the engine's counters, gauges and cancellation times, updated at each scrape of the metrics.
pub struct EngineMetrics {
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

impl EngineMetrics {
    pub fn new(make: &MetricFactory, has_vllm_names: bool) -> Result<Self> {
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
    pub fn histograms(&self, engine: &EngineHandle) -> [MetricFamily; 2] {
        let EngineHistograms { step_tokens, preemptions } = engine.histograms();
        let preemptions_help = "Number of times that an answer was preempted.";
        [
            family("iteration_tokens", "Tokens that a step computed.", &self.labels, &step_tokens),
            family("request_num_preemptions", preemptions_help, &self.labels, &preemptions),
        ]
    }

    /// Copies the current values of the engine.
    pub fn update(&self, engine: &EngineHandle) {
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
