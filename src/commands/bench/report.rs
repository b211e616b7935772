//! The report of `inferno bench`, as tables or as JSON. The JSON keys of measured times and speeds name the units.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::serving::Serving;
use crate::device::{GpuFacts, GpuState};
use crate::engine::{EngineHandle, LoadTimes, ModelInfo};
use crate::hub::Snapshot;
use crate::kernels::bandwidth::Bandwidth;
use crate::runner::{ExecutionMode, KernelTime, LaunchCounts, StepBytes, StepTime};
use crate::text;

#[derive(Serialize)]
pub struct BenchReport {
    pub command: String,
    pub date: String,
    pub inferno: Build,
    pub model: ModelFacts,
    pub device: DeviceFacts,
    /// The measured memory bandwidth. `None` on a CPU, or if too little GPU memory is free.
    pub bandwidth: Option<Bandwidth>,
    pub load: LoadTimes,
    /// The GPU memory in use. `None` on a CPU, and with several GPUs.
    pub memory: Option<MemoryUsage>,
    pub seed: u64,
    pub repetitions: u32,
    pub tests: Vec<TestResult>,
    /// The time to first token. `None` with `--concurrency`.
    pub first_token: Option<FirstToken>,
    /// One measurement for each value of `--concurrency`.
    pub serving: Vec<Serving>,
    pub launches_per_token: Option<LaunchCounts>,
    pub kernels: Option<Vec<KernelTime>>,
}

#[derive(Serialize)]
pub struct Build {
    version: &'static str,
    commit: &'static str,
    executor: ExecutionMode,
    attention: String,
}

impl Build {
    pub fn new(engine: &EngineHandle) -> Self {
        let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("INFERNO_COMMIT"));
        let attention = engine.info().attention.to_string();
        // Report the executor of decode tests. Without a decode graph, it is eager, even with batch graphs.
        let executor = if engine.no_decode_graph().is_none() { engine.execution_mode() } else { ExecutionMode::Eager };
        Self { version, commit, executor, attention }
    }
}

#[derive(Serialize)]
pub struct ModelFacts {
    name: String,
    revision: Option<String>,
    family: &'static str,
    quantization: Option<String>,
    parameters: u64,
    dtype: &'static str,
    context: usize,
    weight_bytes: u64,
    cache_bytes: u64,
    cache_blocks: usize,
    cache_sequences: usize,
}

impl ModelFacts {
    pub fn new(snapshot: &Snapshot, engine: &EngineHandle) -> Self {
        let info = engine.info();
        Self {
            name: snapshot.name.clone(),
            revision: snapshot.revision.clone(),
            family: info.family,
            quantization: info.quantization.clone(),
            parameters: info.parameters,
            dtype: info.dtype.as_str(),
            context: engine.context(),
            weight_bytes: info.weight_bytes,
            cache_bytes: info.cache_bytes,
            cache_blocks: info.cache_blocks,
            cache_sequences: info.cache_sequences,
        }
    }
}

#[derive(Serialize)]
pub struct DeviceFacts {
    name: String,
    compute_capability: Option<String>,
    #[serde(flatten)]
    gpu: Option<GpuFacts>,
    before: Option<GpuState>,
    after: Option<GpuState>,
}

impl DeviceFacts {
    pub fn new(info: &ModelInfo, gpu: Option<GpuFacts>, before: Option<GpuState>, after: Option<GpuState>) -> Self {
        let capability = info.device.compute_capability.map(|(major, minor)| format!("{major}.{minor}"));
        Self { name: info.device.name.clone(), compute_capability: capability, gpu, before, after }
    }
}

/// The GPU memory in use after loading and after the tests, in bytes: how much less is free than before loading.
#[derive(Serialize)]
pub struct MemoryUsage {
    after_load_bytes: u64,
    at_end_bytes: u64,
}

impl From<(u64, u64)> for MemoryUsage {
    fn from((after_load_bytes, at_end_bytes): (u64, u64)) -> Self {
        Self { after_load_bytes, at_end_bytes }
    }
}

/// The mean, the standard deviation and the samples of one measurement.
#[derive(Serialize)]
pub struct Stats {
    mean: f64,
    /// The sample standard deviation, with n - 1 in the denominator. 0 for a single sample.
    sd: f64,
    samples: Vec<f64>,
}

impl Stats {
    pub fn new(samples: Vec<f64>) -> Self {
        let count = samples.len() as f64;
        let mean = samples.iter().sum::<f64>() / count;
        let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
        Self { mean, sd: (squares / (count - 1.0).max(1.0)).sqrt(), samples }
    }
}

#[derive(Serialize)]
pub struct FirstToken {
    cold: Cold,
    warm: Vec<Warm>,
}

/// The time to first token of the first request after loading.
#[derive(Serialize)]
struct Cold {
    prompt_tokens: usize,
    ms: f64,
}

/// The time to first token of later requests with one prompt length.
#[derive(Serialize)]
struct Warm {
    prompt_tokens: usize,
    ms: Stats,
}

impl FirstToken {
    /// Creates the result from the first request after loading and from later requests (`warm`).
    /// Each tuple has a prompt length and the time or times to first token in milliseconds.
    pub fn new((prompt_tokens, ms): (usize, f64), warm: Vec<(usize, Stats)>) -> Self {
        let warm = warm.into_iter().map(|(prompt_tokens, ms)| Warm { prompt_tokens, ms }).collect();
        Self { cold: Cold { prompt_tokens, ms }, warm }
    }
}

/// What a test measures.
#[derive(Clone, Copy, Serialize)]
pub enum TestKind {
    #[serde(rename = "pp")]
    Prompt,
    #[serde(rename = "tg")]
    Decode,
    #[serde(rename = "chat")]
    Chat,
}

/// A test, such as `pp512`.
#[derive(Clone, Copy, Serialize)]
pub struct Test {
    pub kind: TestKind,
    pub tokens: usize,
    /// The number of cached tokens before the test.
    pub depth: usize,
}

impl Test {
    /// Returns the name of the test in llama-bench style, such as `pp512` or `tg128 @ d4096`.
    pub fn name(&self) -> String {
        let kind = match self.kind {
            TestKind::Prompt => "pp",
            TestKind::Decode => "tg",
            TestKind::Chat => "chat",
        };
        let depth = if self.depth > 0 { format!(" @ d{}", self.depth) } else { String::new() };
        format!("{kind}{}{depth}", self.tokens)
    }
}

/// The results of one test.
#[derive(Serialize)]
pub struct TestResult {
    #[serde(flatten)]
    test: Test,
    tok_per_s: Stats,
    /// The mean number of bytes that the first GPU, or the CPU, reads in a decode step. `None` for a prompt test.
    step_bytes: Option<StepBytes>,
    bytes_per_s: Option<f64>,
    share_of_read_bandwidth: Option<f64>,
    /// The time between consecutive tokens. `None` for all tests except chat tests.
    gaps: Option<Gaps>,
}

impl TestResult {
    /// Creates the result of a prompt test. `seconds` is the duration of each repetition.
    pub fn of_prompt(test: Test, seconds: &[f64]) -> Self {
        let tok_per_s = Stats::new(seconds.iter().map(|seconds| test.tokens as f64 / seconds).collect());
        Self { test, tok_per_s, step_bytes: None, bytes_per_s: None, share_of_read_bandwidth: None, gaps: None }
    }

    /// Creates the result of a decode or chat test. `steps` has the bytes that each step reads, and must not be empty.
    pub fn of_decode(test: Test, seconds: &[f64], steps: &[StepBytes], gaps: Option<Gaps>) -> Self {
        let mean = |part: fn(&StepBytes) -> u64| steps.iter().map(part).sum::<u64>() / steps.len() as u64;
        let step_bytes = StepBytes { weights: mean(|step| step.weights), cache: mean(|step| step.cache) };
        let result = Self::of_prompt(test, seconds);
        let bytes_per_s = step_bytes.total() as f64 * result.tok_per_s.mean;
        Self { step_bytes: Some(step_bytes), bytes_per_s: Some(bytes_per_s), gaps, ..result }
    }

    /// Sets the share of the measured read bandwidth that the test achieved.
    pub fn set_bandwidth_share(&mut self, bandwidth: Option<&Bandwidth>) {
        self.share_of_read_bandwidth =
            self.bytes_per_s.zip(bandwidth).map(|(achieved, bandwidth)| achieved / bandwidth.read_bytes_per_s);
    }
}

/// The distribution of the time between consecutive tokens.
#[derive(Serialize)]
pub struct Gaps {
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
}

impl Gaps {
    /// Computes the nearest-rank percentiles of `gaps`, which must not be empty.
    pub fn new(mut gaps: Vec<Duration>) -> Self {
        gaps.sort();
        let percentile = |share: f64| {
            let rank = (share * gaps.len() as f64).ceil() as usize;
            1e3 * gaps[rank.clamp(1, gaps.len()) - 1].as_secs_f64()
        };
        Self { p50_ms: percentile(0.5), p99_ms: percentile(0.99), max_ms: percentile(1.0) }
    }
}

impl BenchReport {
    /// Formats the report as tables, including the kernel table if `with_kernels` is true.
    pub fn table(&self, with_kernels: bool) -> String {
        let mut parts = vec![self.header()];
        if let Some(first_token) = &self.first_token {
            parts.extend([self.speed(), self.latency(first_token)]);
        }
        if !self.serving.is_empty() {
            parts.push(self.serving());
        }
        if with_kernels {
            parts.push(self.kernel_table());
        }
        parts.join("\n")
    }

    /// Returns the lines above the tables: the model, the device, the build, the sizes of weights and cache,
    /// the load times, the GPU memory in use, the memory bandwidth, and the launches per token.
    fn header(&self) -> String {
        let ModelFacts { name, family, quantization, parameters, dtype, context, weight_bytes, cache_bytes, .. } =
            &self.model;
        let ModelFacts { cache_blocks, cache_sequences, .. } = &self.model;
        let Build { version, commit, executor, attention } = &self.inferno;
        let quantization = quantization.as_deref().unwrap_or("unquantized");
        let (weights, cache) = (text::size(*weight_bytes), text::size(*cache_bytes));
        // With `--concurrency`, each measurement runs only once.
        let repetitions = match (&self.first_token, self.repetitions) {
            (None, _) => String::new(),
            (_, count) => format!(", {}", text::counted(count, "repetition")),
        };
        let mut lines = vec![
            format!(
                "{name}: {family} {quantization}, {} parameters, computed in {dtype}",
                text::parameter_count(*parameters)
            ),
            self.device.line(),
            format!("inferno {version}, commit {commit}, executor {executor}, attention {attention}{repetitions}"),
            format!(
                "weights {weights}, cache {cache}: {cache_blocks} blocks, for {cache_sequences} × {context} tokens"
            ),
            self.load_line(*weight_bytes),
        ];
        if let Some(MemoryUsage { after_load_bytes, at_end_bytes }) = self.memory {
            let (loaded, end) = (text::size(after_load_bytes), text::size(at_end_bytes));
            lines.push(format!("device memory in use: {loaded} after loading, {end} at the end"));
        }
        lines.push(match &self.bandwidth {
            Some(bandwidth) => {
                let [read, copy] = [bandwidth.read_bytes_per_s, bandwidth.copy_bytes_per_s].map(|rate| rate / 1e9);
                format!("measured memory bandwidth: {read:.0} GB/s read, {copy:.0} GB/s copy")
            }
            None => "memory bandwidth: not measured".into(),
        });
        if let Some(LaunchCounts { kernels, graph_nodes, copies }) = self.launches_per_token {
            let copies = if copies == 1 { "1 copy".to_string() } else { format!("{copies} copies") };
            lines.push(format!("per token: {kernels} launches, {graph_nodes} graph nodes, {copies}"));
        }
        lines.join("\n") + "\n"
    }

    fn load_line(&self, weight_bytes: u64) -> String {
        let LoadTimes { headers_s, tokenizer_s, device_s, weights_s, cache_s, graph_s, total_s } = self.load;
        let rate = weight_bytes as f64 / 1e9 / weights_s;
        format!(
            "loaded in {total_s:.2} s: headers {headers_s:.3}, device {device_s:.2}, \
             weights {weights_s:.2} ({rate:.1} GB/s), cache {cache_s:.3}, graph {graph_s:.3}; tokenizer {tokenizer_s:.2}"
        )
    }

    fn speed(&self) -> String {
        let mut rows = vec![["test", "tok/s", "", "MB/token", "GB/s", "of read"].map(String::from)];
        for result in &self.tests {
            rows.push([
                result.test.name(),
                format!("{:.1}", result.tok_per_s.mean),
                format!("± {:.1}", result.tok_per_s.sd),
                result.step_bytes.map_or(String::new(), |bytes| format!("{:.1}", bytes.total() as f64 / 1e6)),
                result.bytes_per_s.map_or(String::new(), |rate| format!("{:.1}", rate / 1e9)),
                result.share_of_read_bandwidth.map_or(String::new(), percent),
            ]);
        }
        aligned(&rows)
    }

    fn latency(&self, first_token: &FirstToken) -> String {
        let mut rows = vec![["time to first token", "ms", ""].map(String::from)];
        let Cold { prompt_tokens, ms } = first_token.cold;
        rows.push([format!("{}, cold", text::counted(prompt_tokens, "token")), format!("{ms:.1}"), String::new()]);
        for Warm { prompt_tokens, ms } in &first_token.warm {
            let tokens = text::counted(*prompt_tokens, "token");
            rows.push([tokens, format!("{:.1}", ms.mean), format!("± {:.1}", ms.sd)]);
        }
        let mut text = aligned(&rows);
        let mut rows = vec![["between tokens, ms", "p50", "p99", "max"].map(String::from)];
        for TestResult { test, gaps, .. } in &self.tests {
            if let Some(Gaps { p50_ms, p99_ms, max_ms }) = gaps {
                let [p50, p99, max] = [p50_ms, p99_ms, max_ms].map(|ms| format!("{ms:.2}"));
                rows.push([test.name(), p50, p99, max]);
            }
        }
        if rows.len() > 1 {
            text += "\n";
            text += &aligned(&rows);
        }
        text
    }

    fn serving(&self) -> String {
        let header = [
            "requests at once",
            "tok/s",
            "decode tok/s",
            "GB/s",
            "of read",
            "first token, ms",
            "p99",
            "between tokens, ms",
            "p99",
        ];
        let mut rows = vec![header.map(String::from)];
        for serving in &self.serving {
            let rate = serving.rate.map_or(String::new(), |rate| format!(", {rate} arrive per s"));
            rows.push([
                format!("{}{rate}", serving.concurrency),
                format!("{:.0}", serving.output_tok_per_s),
                serving.decode_tok_per_s.map_or(String::new(), |rate| format!("{rate:.0}")),
                serving.read_bytes_per_s.map_or(String::new(), |rate| format!("{:.0}", rate / 1e9)),
                serving.bandwidth_share.map_or(String::new(), percent),
                format!("{:.1}", serving.ttft_ms.p50),
                format!("{:.1}", serving.ttft_ms.p99),
                format!("{:.2}", serving.itl_ms.p50),
                format!("{:.2}", serving.itl_ms.p99),
            ]);
        }
        let mut text = aligned(&rows);
        let mut rows = vec![["step", "requests", "steps", "ms", "experts per layer"].map(String::from)];
        for serving in &self.serving {
            for StepTime { sequences, has_prompts, steps, mean_ms } in &serving.steps {
                let experts = serving.experts_per_step.filter(|_| !has_prompts && *sequences >= serving.concurrency);
                rows.push([
                    if *has_prompts { "with prompts" } else { "decode" }.to_string(),
                    format!("up to {sequences} of {}", serving.concurrency),
                    steps.to_string(),
                    format!("{mean_ms:.2}"),
                    experts.map_or(String::new(), |experts| format!("{experts:.1}")),
                ]);
            }
        }
        text += "\n";
        text += &aligned(&rows);
        let hits: usize = self.serving.iter().map(|serving| serving.cached_tokens).sum();
        let preemptions: u64 = self.serving.iter().map(|serving| serving.preemptions).sum();
        text += &format!("\nprompt tokens from the prefix cache: {hits}, preemptions: {preemptions}\n");
        text
    }

    fn kernel_table(&self) -> String {
        let Some(kernels) = &self.kernels else {
            let executor = self.inferno.executor;
            return format!("kernel times: not available; they need a decode graph on one GPU ({executor} executor)\n");
        };
        let mut rows = vec![["kernel", "calls", "µs/token", "MB/token", "GB/s", "of read"].map(String::from)];
        for KernelTime { name, calls, seconds, bytes } in kernels {
            let rate = *bytes as f64 / seconds;
            rows.push([
                name.clone(),
                calls.to_string(),
                format!("{:.1}", seconds * 1e6),
                format!("{:.1}", *bytes as f64 / 1e6),
                format!("{:.0}", rate / 1e9),
                self.bandwidth.map_or(String::new(), |bandwidth| percent(rate / bandwidth.read_bytes_per_s)),
            ]);
        }
        aligned(&rows)
    }
}

impl DeviceFacts {
    /// Formats the device as one line: `NVIDIA H200, compute capability 9.0, 132 multiprocessors, CUDA 13.0, …`.
    fn line(&self) -> String {
        let mut line = self.name.clone();
        if let Some(capability) = &self.compute_capability {
            let _ = write!(line, ", compute capability {capability}");
        }
        if let Some(gpu) = &self.gpu {
            let _ = write!(line, ", {} multiprocessors, CUDA {}", gpu.multiprocessors, gpu.cuda_version);
        }
        if let Some(state) = self.after.as_ref().or(self.before.as_ref()) {
            let number = |value: Option<f64>| value.map_or("?".into(), |value| format!("{value:.0}"));
            let _ = write!(
                line,
                ", driver {}, SM clock {} of {} MHz, memory clock {} MHz, power limit {} W, {} °C",
                state.driver_version,
                number(state.sm_clock_mhz),
                number(state.sm_clock_max_mhz),
                number(state.memory_clock_mhz),
                number(state.power_limit_w),
                number(state.temperature_c),
            );
        }
        line
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Formats rows as columns. The first column is aligned left, and the others are aligned right.
fn aligned<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    // Omit columns that are empty below the header.
    let width = |column: usize| {
        if rows.iter().skip(1).any(|row| !row[column].is_empty()) {
            rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
        } else {
            0
        }
    };
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let line = |row: &[String; COLUMNS]| {
        let mut line = format!("{:width$}", row[0], width = widths[0]);
        for (cell, width) in row.iter().zip(widths).skip(1).filter(|(_, width)| *width > 0) {
            let _ = write!(line, "  {cell:>width$}");
        }
        line.trim_end().to_string() + "\n"
    };
    rows.iter().map(line).collect()
}
