//! Measures many requests at once: throughput, time to first token, and time between tokens.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::engine::sampling::uniform;
use crate::engine::{EngineHandle, GenerateOptions, SamplingParams};
use crate::kernels::bandwidth::Bandwidth;
use crate::runner::{StepBytes, StepTime};

/// How the prompt and answer lengths of requests are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Lengths {
    /// Every request has --input prompt tokens and --output answer tokens.
    Fixed,
    /// Log-normal lengths as in ShareGPT, with means of 215 prompt and 198 answer tokens before the maximums apply.
    SharegptLike,
}

/// The number, lengths and timing of the requests in one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// The maximum number of requests that run at once.
    pub concurrency: usize,
    pub requests: usize,
    /// Prompt tokens per request. The maximum if `lengths` is `SharegptLike`.
    pub input: usize,
    /// Generated tokens per request. The maximum if `lengths` is `SharegptLike`.
    pub output: usize,
    /// Mean arrival rate in requests per second.
    /// `None` submits `concurrency` requests at once, and each later request as soon as another one ends.
    pub rate: Option<f64>,
    pub lengths: Lengths,
    pub seed: u64,
}

/// The results of running the requests of a [`Workload`].
#[derive(Clone, Debug, Serialize)]
pub struct Serving {
    pub concurrency: usize,
    pub requests: usize,
    pub input_tokens: usize,
    pub output_tokens: usize,
    pub rate: Option<f64>,
    /// The time from the start of the measurement to the last token.
    pub seconds: f64,
    /// Generated tokens of all requests, divided by `seconds`.
    pub output_tok_per_s: f64,
    /// Generated tokens per second while all requests are decoding.
    /// Measured from the moment when every request has its first token until the first request ends.
    /// `None` if a request ended before every request had its first token.
    pub decode_tok_per_s: Option<f64>,
    pub ttft_ms: Percentiles,
    /// The time between consecutive tokens of a request.
    pub itl_ms: Percentiles,
    /// Prompt tokens reused from the prefix cache.
    pub cached_tokens: usize,
    /// `cached_tokens` divided by `input_tokens`.
    pub hit_rate: f64,
    /// The number of times that the scheduler preempted a request because the KV cache was full.
    pub preemptions: u64,
    /// The mean durations of the engine's steps, by kind of step.
    pub steps: Vec<StepTime>,
    /// The mean number of distinct experts that a batch uses per layer.
    /// Counted only for gpt-oss models, and only in batches that a GPU routes in one launch, usually decode steps.
    /// `None` if no batch was counted.
    pub experts_per_step: Option<f64>,
    /// The bytes that the first GPU, or the CPU, reads in a decode step of `concurrency` requests that have each
    /// generated half of their answer. `None` with `--rate` or with varying lengths.
    /// Also `None` for a model with experts if `concurrency` is above 1 and `experts_per_step` is `None`.
    pub step_bytes: Option<StepBytes>,
    /// `step_bytes` divided by the time of a decode step. `None` if `step_bytes` or `decode_tok_per_s` is `None`.
    pub read_bytes_per_s: Option<f64>,
    /// `read_bytes_per_s` divided by the measured read bandwidth of the GPU memory.
    /// `None` if `read_bytes_per_s` is `None` or if the read bandwidth was not measured.
    pub bandwidth_share: Option<f64>,
}

/// The median and the 99th percentile of a time, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p99: f64,
}

impl Serving {
    /// Sets the bytes that a decode step of `concurrency` requests reads, and computes the bytes read per second.
    pub fn set_step_bytes(&mut self, bytes: StepBytes) {
        let steps_per_s = self.decode_tok_per_s.map(|tok_per_s| tok_per_s / self.concurrency as f64);
        self.step_bytes = Some(bytes);
        self.read_bytes_per_s = steps_per_s.map(|steps_per_s| steps_per_s * bytes.total() as f64);
    }

    /// Sets the share of the measured read bandwidth that the decode steps used.
    pub fn set_bandwidth_share(&mut self, bandwidth: Option<&Bandwidth>) {
        self.bandwidth_share =
            self.read_bytes_per_s.zip(bandwidth).map(|(rate, bandwidth)| rate / bandwidth.read_bytes_per_s);
    }
}

impl Percentiles {
    fn of_ms(mut values: Vec<Duration>) -> Self {
        values.sort_unstable();
        let at = |share: f64| match values.len() {
            0 => 0.0,
            count => values[((count - 1) as f64 * share).round() as usize].as_secs_f64() * 1e3,
        };
        Self { p50: at(0.5), p99: at(0.99) }
    }
}

/// When one request was submitted, when each of its generated tokens arrived, and the token counts of its prompt.
struct RequestTimes {
    submitted: Instant,
    tokens: Vec<Instant>,
    prompt_tokens: usize,
    cached_tokens: usize,
}

/// Runs the requests of `load`. Leaves `preemptions` and all later fields of the result empty, because they come from
/// other measurements.
pub fn measure(engine: &EngineHandle, load: &Workload) -> Result<Serving> {
    let lengths: Vec<(usize, usize)> = (0..load.requests as u64).map(|index| load.request_lengths(index)).collect();
    let prompts: Vec<Vec<u32>> = lengths
        .iter()
        .zip(1..)
        .map(|(&(input, _), index)| engine.random_tokens(load.seed.wrapping_mul(1 << 20).wrapping_add(index), input))
        .collect();
    let arrivals = load.arrivals();
    let jobs = Mutex::new(prompts.into_iter().zip(lengths).zip(arrivals).collect::<Vec<_>>().into_iter());
    let started = Instant::now();
    let run_next = || -> Result<Option<RequestTimes>> {
        let next = jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(((prompt, (_, output)), arrival)) = next else { return Ok(None) };
        thread::sleep(arrival.saturating_sub(started.elapsed()));
        // With an arrival rate, measure time to first token from the arrival, to include the wait for a free thread.
        let submitted = if load.rate.is_some() { started + arrival } else { Instant::now() };
        let options = GenerateOptions {
            max_tokens: Some(output),
            ignore_eos: true,
            ..GenerateOptions::new(SamplingParams::greedy())
        };
        let mut stream = engine.complete_ids(&prompt, options)?;
        let mut tokens = Vec::with_capacity(output);
        while let Some(event) = stream.next_blocking() {
            if event?.token().is_some() {
                tokens.push(Instant::now());
            }
        }
        let summary = stream.summary();
        let (prompt_tokens, cached_tokens) = (summary.prompt_tokens, summary.cached_tokens);
        Ok(Some(RequestTimes { submitted, tokens, prompt_tokens, cached_tokens }))
    };
    let client = || -> Result<Vec<RequestTimes>> {
        let mut times = Vec::new();
        while let Some(request) = run_next()? {
            times.push(request);
        }
        Ok(times)
    };
    let times: Vec<RequestTimes> = thread::scope(|scope| {
        let clients: Vec<_> = (0..load.concurrency.min(load.requests)).map(|_| scope.spawn(client)).collect();
        let results =
            clients.into_iter().map(|client| client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        results.collect::<Result<Vec<_>>>()
    })?
    .into_iter()
    .flatten()
    .collect();
    Ok(load.summarize(started, &times))
}

impl Workload {
    /// Returns the prompt length and the answer length of a request.
    fn request_lengths(&self, index: u64) -> (usize, usize) {
        match self.lengths {
            Lengths::Fixed => (self.input, self.output),
            Lengths::SharegptLike => (
                log_normal(self.seed, 2 * index, 215.0).min(self.input),
                log_normal(self.seed, 2 * index + 1, 198.0).min(self.output),
            ),
        }
    }

    /// Returns the earliest submission time of each request, relative to the start. Without a rate, all times are 0.
    fn arrivals(&self) -> Vec<Duration> {
        let mut at = 0.0_f64;
        let mut next = |index| {
            let Some(rate) = self.rate else { return Duration::ZERO };
            // Arrivals form a Poisson process, so the times between them are exponentially distributed.
            at += -(1.0_f64 - uniform(self.seed.wrapping_add(1), index)).ln() / rate;
            Duration::from_secs_f64(at)
        };
        (0..self.requests as u64).map(&mut next).collect()
    }

    fn summarize(&self, started: Instant, times: &[RequestTimes]) -> Serving {
        let all = || times.iter().flat_map(|request| &request.tokens);
        let last = all().max().copied().unwrap_or(started);
        let seconds = (last - started).as_secs_f64();
        let generated = all().count();
        let ttft = times.iter().filter_map(|request| Some(*request.tokens.first()? - request.submitted));
        let gaps = times.iter().flat_map(|request| request.tokens.windows(2).map(|pair| pair[1] - pair[0]));
        let last_start = times.iter().filter_map(|request| request.tokens.first()).max();
        let first_end = times.iter().filter_map(|request| request.tokens.last()).min();
        let decode_tok_per_s = last_start.zip(first_end).filter(|(start, end)| start < end).map(|(start, end)| {
            let decoded = all().filter(|&at| at > start && at <= end).count();
            decoded as f64 / (*end - *start).as_secs_f64()
        });
        let input_tokens = times.iter().map(|request| request.prompt_tokens).sum();
        let cached_tokens = times.iter().map(|request| request.cached_tokens).sum();
        Serving {
            concurrency: self.concurrency,
            requests: times.len(),
            input_tokens,
            output_tokens: generated,
            rate: self.rate,
            seconds,
            output_tok_per_s: generated as f64 / seconds.max(f64::MIN_POSITIVE),
            decode_tok_per_s,
            ttft_ms: Percentiles::of_ms(ttft.collect()),
            itl_ms: Percentiles::of_ms(gaps.collect()),
            cached_tokens,
            hit_rate: cached_tokens as f64 / input_tokens.max(1) as f64,
            preemptions: 0,
            steps: Vec::new(),
            experts_per_step: None,
            step_bytes: None,
            read_bytes_per_s: None,
            bandwidth_share: None,
        }
    }
}

/// Draws a length of at least 1 from a log-normal distribution with this mean.
/// The logarithm of the length has a standard deviation of 1.2, so lengths vary widely:
/// their standard deviation is 1.8 times the mean.
fn log_normal(seed: u64, index: u64, mean: f64) -> usize {
    const SIGMA: f64 = 1.2;
    // The Box-Muller transform gives a normally distributed number from two uniform ones.
    let (a, b) = (uniform(seed, 2 * index), uniform(seed, 2 * index + 1));
    let normal = (-2.0 * (1.0_f64 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    let length = (mean.ln() - SIGMA * SIGMA / 2.0 + SIGMA * normal).exp();
    (length.round() as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Workload = Workload {
        concurrency: 4,
        requests: 2000,
        input: 1 << 20,
        output: 1 << 20,
        rate: Some(10.0),
        lengths: Lengths::SharegptLike,
        seed: 1,
    };

    #[test]
    fn lengths_have_the_means_of_sharegpt() {
        let lengths: Vec<_> = (0..20_000).map(|index| LOAD.request_lengths(index)).collect();
        let mean = |part: fn(&(usize, usize)) -> usize| lengths.iter().map(part).sum::<usize>() as f64 / 20_000.0;
        assert!((195.0..235.0).contains(&mean(|lengths| lengths.0)), "{}", mean(|lengths| lengths.0));
        assert!((180.0..216.0).contains(&mean(|lengths| lengths.1)), "{}", mean(|lengths| lengths.1));
    }

    #[test]
    fn arrivals_have_the_requested_rate() {
        let arrivals = LOAD.arrivals();
        assert!(arrivals.is_sorted());
        assert!((180.0..220.0).contains(&arrivals[1999].as_secs_f64()), "{:?}", arrivals[1999]);
        assert_eq!(Workload { rate: None, ..LOAD }.arrivals(), [Duration::ZERO; 2000]);
    }

    #[test]
    fn times_become_rates() {
        let started = Instant::now();
        let at = |ms| started + Duration::from_millis(ms);
        let request = |tokens: &[u64]| RequestTimes {
            submitted: started,
            tokens: tokens.iter().map(|&ms| at(ms)).collect(),
            prompt_tokens: 10,
            cached_tokens: 3,
        };
        let serving = LOAD.summarize(started, &[request(&[100, 200, 300, 400]), request(&[200, 300, 400, 500])]);
        assert_eq!((serving.requests, serving.output_tokens, serving.cached_tokens), (2, 8, 6));
        assert!((serving.output_tok_per_s - 16.0).abs() < 1e-6);
        // Both requests decode from 200 ms to 400 ms, and together generate four tokens in that time.
        assert!((serving.decode_tok_per_s.unwrap() - 20.0).abs() < 1e-6);
        assert!((serving.ttft_ms.p99 - 200.0).abs() < 1e-6 && (serving.itl_ms.p50 - 100.0).abs() < 1e-6);
    }
}
