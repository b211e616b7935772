//! Creates and registers Prometheus metrics.

use std::collections::HashMap;

use anyhow::Result;
use prometheus::core::Collector;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

/// The name prefix of inferno's metrics.
pub const PREFIX: &str = "inferno_";

/// Registers metrics that have the same prefix and the same labels.
pub struct MetricFactory<'r> {
    pub registry: &'r Registry,
    /// The prefix of every metric name.
    pub prefix: &'static str,
    /// The labels of every metric.
    pub labels: HashMap<String, String>,
}

impl MetricFactory<'_> {
    pub fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(format!("{}{name}", self.prefix), help).const_labels(self.labels.clone())
    }

    pub fn register<M: Collector + Clone + 'static>(&self, metric: M) -> Result<M> {
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    pub fn counter(&self, name: &str, help: &str) -> Result<IntCounter> {
        self.register(IntCounter::with_opts(self.opts(name, help))?)
    }

    /// Creates one counter for each given label value. Other label values can be added later.
    pub fn counters(&self, name: &str, help: &str, label: &str, values: &[&str]) -> Result<IntCounterVec> {
        let counters = self.register(IntCounterVec::new(self.opts(name, help), &[label])?)?;
        values.iter().for_each(|value| drop(counters.with_label_values(&[*value])));
        Ok(counters)
    }

    pub fn gauge(&self, name: &str, help: &str) -> Result<IntGauge> {
        self.register(IntGauge::with_opts(self.opts(name, help))?)
    }

    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram> {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        self.register(Histogram::with_opts(opts)?)
    }
}
