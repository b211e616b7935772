//! `inferno bench`: measures how fast a model runs.
//!
//! Without `--concurrency`, the prompt and decode tests follow llama-bench: one sequence of random token ids, and one
//! warm-up run per test. Unlike in llama-bench, only the first input token of a decode test is random: each later step
//! continues with the most likely token of the previous step.

mod report;
mod serving;

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::value_parser;

use super::shared::{LoadArgs, note};
use crate::device::{self, GpuFacts};
use crate::engine::{Engine, EngineHandle, GenerateOptions, SamplingParams};
use crate::error::Error;
use crate::hub::{Hub, Snapshot};
use crate::kernels::bandwidth;
use crate::runner::{KernelTime, StepBytes};
use crate::text::{escaped_json, printable};
use report::{
    BenchReport, Build, DeviceFacts, FirstToken, Gaps, MemoryUsage, ModelFacts, Stats, Test, TestKind, TestResult,
};
use serving::{Lengths, Serving, Workload};

/// Measure how fast a model runs
#[derive(clap::Args)]
pub struct Args {
    /// Name, directory or GGUF file of a model
    model: String,
    /// Prompt lengths to measure; 0 for none. Time to first token is also measured for 1 and 512 tokens
    #[arg(short, long, value_delimiter = ',', default_value = "512", value_name = "TOKENS")]
    prompt: Vec<u32>,
    /// Number of tokens to decode; 0 for none
    #[arg(short = 'n', long = "decode", default_value_t = 128, value_name = "TOKENS")]
    decode: u32,
    /// Numbers of tokens in the KV cache before the tests, for example 0,4096; all tests run for each number
    #[arg(short, long, value_delimiter = ',', default_value = "0", value_name = "TOKENS")]
    depth: Vec<u32>,
    /// Measured runs of each test, after one warm-up run
    #[arg(short, long, default_value_t = 5, value_parser = value_parser!(u32).range(1..), value_name = "TIMES")]
    repetitions: u32,
    /// Numbers of concurrent requests to measure, for example 1,8,32; without this flag, one request runs at a time
    #[arg(long, value_delimiter = ',', value_parser = value_parser!(u32).range(1..=4096), value_name = "REQUESTS")]
    #[arg(conflicts_with_all = ["prompt", "decode", "depth", "repetitions", "kernels"])]
    concurrency: Vec<u32>,
    /// Prompt tokens per request
    #[arg(long, default_value_t = 512, value_parser = value_parser!(u32).range(1..), value_name = "TOKENS")]
    #[arg(requires = "concurrency")]
    input: u32,
    /// Tokens to generate per request
    #[arg(long, default_value_t = 128, value_parser = value_parser!(u32).range(1..), value_name = "TOKENS")]
    #[arg(requires = "concurrency")]
    output: u32,
    /// Requests to measure for each value of --concurrency [default: as many as the value]
    #[arg(long, value_parser = value_parser!(u32).range(1..=1_000_000), value_name = "COUNT", requires = "concurrency")]
    requests: Option<u32>,
    /// Mean arrival rate in requests per second [default: submit each request as soon as another one ends]
    #[arg(long, value_parser = positive, value_name = "RATE", requires = "concurrency")]
    rate: Option<f64>,
    /// Prompt and answer lengths: fixed, or like ShareGPT conversations with --input and --output as maximums
    #[arg(long, value_enum, default_value_t = Lengths::Fixed, value_name = "KIND", requires = "concurrency")]
    lengths: Lengths,
    /// Compute each answer independently of other requests; slower
    #[arg(long, requires = "concurrency")]
    deterministic: bool,
    /// Print JSON, with the time or speed of each repetition
    #[arg(long)]
    json: bool,
    /// Also time each kernel of a decode step
    #[arg(long)]
    kernels: bool,
    #[command(flatten)]
    load: LoadArgs,
}

impl Args {
    /// Returns whether to measure concurrent requests instead of single ones.
    fn is_serving(&self) -> bool {
        !self.concurrency.is_empty()
    }
}

/// The prompt length of the first request after loading, in tokens.
/// The time to first token of later requests is also measured with this length.
const FIRST_PROMPT: usize = 512;
/// The context positions that a chat test needs for its first and last token, which it generates but does not time.
const EXTRA_POSITIONS: usize = 2;
/// The first seed for random tokens and for sampling. The runs of a test use consecutive seeds after it, but each run
/// has the same random tokens in the KV cache before the test.
const SEED: u64 = 1;

pub fn run(mut args: Args) -> Result<ExitCode> {
    prepare(&mut args)?;
    let hub = Hub::from_env()?;
    let snapshot = hub.find(&args.model, args.load.revision())?;
    hub.record_use(&snapshot);
    let bench = Bench { engine: args.load.load(&snapshot)?, repetitions: args.repetitions as usize };
    let report = bench.report(&args, &snapshot)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", escaped_json(&serde_json::to_string_pretty(&report)?))?;
    } else {
        write!(out, "{}", printable(&report.table(args.kernels)))?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Sets the load options that the measurements need.
/// Fails if there is nothing to measure, or if --context is too small.
fn prepare(args: &mut Args) -> Result<()> {
    let max = |lengths: &[u32]| lengths.iter().copied().max().unwrap_or(0) as usize;
    let longest = max(&args.prompt).max(args.decode as usize);
    if longest == 0 {
        return Err(
            Error::Usage("cannot run the benchmark: nothing to measure, because -p and -n are both 0".into()).into()
        );
    }
    let positions = if args.is_serving() {
        args.load.warm_up();
        args.input as usize + args.output as usize
    } else {
        (max(&args.depth) + longest).max(FIRST_PROMPT)
    };
    args.load.require_context(positions + EXTRA_POSITIONS)?;
    args.load.set_deterministic(args.deterministic);
    args.load.set_sequences(max(&args.concurrency).max(1));
    Ok(())
}

/// Returns how much less memory is free on the GPU than before loading, in bytes. Returns `None` on a CPU.
/// Also returns `None` with several GPUs, because [`ModelInfo`] has the free memory of only one of them.
///
/// [`ModelInfo`]: crate::engine::ModelInfo
fn memory_in_use(engine: &Engine) -> Result<Option<u64>> {
    let is_one_gpu = engine.device().is_cuda() && engine.info().ranks == 1;
    let free = device::info(engine.device())?.free_bytes;
    Ok(is_one_gpu.then(|| engine.info().device.free_bytes.saturating_sub(free)))
}

fn command_line() -> String {
    let args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once("inferno".to_string()).chain(args).collect::<Vec<_>>().join(" ")
}

/// What was measured: with `--concurrency` only `serving`, otherwise only `first_token` and `tests`.
#[derive(Default)]
struct Results {
    first_token: Option<FirstToken>,
    tests: Vec<TestResult>,
    serving: Vec<Serving>,
}

/// A loaded model to measure.
struct Bench {
    engine: Engine,
    repetitions: usize,
}

impl Bench {
    /// Calls `run` once as a warm-up, then `repetitions` times. Returns the results of the repetitions, in seconds.
    ///
    /// `run` receives the index of the call. The warm-up has index 0.
    fn repeat(&self, mut run: impl FnMut(&EngineHandle, u64) -> Result<f64>) -> Result<Vec<f64>> {
        run(&self.engine, 0)?;
        (1..=self.repetitions as u64).map(|index| run(&self.engine, index)).collect()
    }

    /// Runs all measurements, and returns them together with facts about the model, the device and the build.
    fn report(&self, args: &Args, snapshot: &Snapshot) -> Result<BenchReport> {
        let engine = &self.engine;
        let gpu = GpuFacts::for_device(engine.device())?;
        let before = gpu.as_ref().and_then(GpuFacts::state);
        let after_load_bytes = memory_in_use(engine)?;
        let Results { first_token, mut tests, mut serving } = self.measure(args)?;
        let after = gpu.as_ref().and_then(GpuFacts::state);
        let at_end_bytes = memory_in_use(engine)?;
        let kernels = if args.kernels { self.kernel_times(args.depth.last().copied().unwrap_or(0))? } else { None };
        // Measure the bandwidth after reading `at_end_bytes`: the allocator keeps the buffers of this measurement, so
        // they would count as memory in use.
        let bandwidth = bandwidth::measure(engine.device())?;
        tests.iter_mut().for_each(|result| result.set_bandwidth_share(bandwidth.as_ref()));
        serving.iter_mut().for_each(|result| result.set_bandwidth_share(bandwidth.as_ref()));
        Ok(BenchReport {
            command: command_line(),
            date: jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string(),
            inferno: Build::new(engine),
            model: ModelFacts::new(snapshot, engine),
            device: DeviceFacts::new(engine.info(), gpu, before, after),
            bandwidth,
            load: engine.info().load,
            memory: after_load_bytes.zip(at_end_bytes).map(MemoryUsage::from),
            seed: SEED,
            repetitions: args.repetitions,
            tests,
            first_token,
            serving,
            launches_per_token: engine.with_runner(|runner| runner.launch_counts())??,
            kernels,
        })
    }

    /// Measures what `args` requests, except the times of kernels.
    fn measure(&self, args: &Args) -> Result<Results> {
        if args.is_serving() {
            let serving = args.concurrency.iter().map(|&concurrency| self.measure_serving(args, concurrency as usize));
            return Ok(Results { serving: serving.collect::<Result<_>>()?, ..Results::default() });
        }
        let prompts: Vec<_> = args.prompt.iter().filter(|&&prompt| prompt > 0).map(|&prompt| prompt as usize).collect();
        let first_token = Some(self.measure_first_token(&prompts)?);
        let mut tests = Vec::new();
        for &depth in &args.depth {
            tests.extend(self.measure_tests(&prompts, args.decode as usize, depth as usize)?);
        }
        Ok(Results { first_token, tests, ..Results::default() })
    }

    /// Times each kernel of a decode step after `depth` cached tokens.
    /// Returns `None` if the runner cannot time kernels.
    fn kernel_times(&self, depth: u32) -> Result<Option<Vec<KernelTime>>> {
        let tokens = self.engine.random_tokens(SEED, depth as usize);
        self.engine.with_runner(move |runner| {
            runner.reset();
            runner.fill(&tokens)?;
            runner.kernel_times()
        })?
    }

    /// Runs the prompt, decode and chat tests with `depth` tokens in the KV cache before each test.
    fn measure_tests(&self, prompts: &[usize], decode: usize, depth: usize) -> Result<Vec<TestResult>> {
        self.fill_cache(depth)?;
        let mut tests = prompts.iter().map(|&prompt| self.measure_prompt(prompt, depth)).collect::<Result<Vec<_>>>()?;
        if decode > 0 {
            tests.push(self.measure_decode(decode, depth)?);
            tests.push(self.measure_chat(decode, depth)?);
        }
        Ok(tests)
    }

    /// Returns the bytes that the first GPU, or the CPU, reads in each of `tokens` decode steps.
    /// The first step starts with `depth` cached tokens.
    fn step_bytes(&self, tokens: usize, depth: usize) -> Result<Vec<StepBytes>> {
        self.engine.with_runner(move |runner| (depth..depth + tokens).map(|depth| runner.step_bytes(depth)).collect())
    }

    /// Measures the time to first token: once for the first request after loading, then for several prompt lengths.
    fn measure_first_token(&self, prompts: &[usize]) -> Result<FirstToken> {
        note("time to first token");
        let cold_ms = 1e3 * first_token_s(&self.engine, FIRST_PROMPT, SEED)?;
        let mut lengths = [&[1, FIRST_PROMPT], prompts].concat();
        lengths.sort();
        lengths.dedup();
        let warm = lengths.into_iter().map(|tokens| {
            let seconds = self.repeat(|engine, index| first_token_s(engine, tokens, SEED + 1 + index))?;
            Ok((tokens, Stats::new(seconds.iter().map(|s| 1e3 * s).collect())))
        });
        Ok(FirstToken::new((FIRST_PROMPT, cold_ms), warm.collect::<Result<_>>()?))
    }

    /// Replaces the contents of the KV cache with `depth` random tokens.
    fn fill_cache(&self, depth: usize) -> Result<()> {
        note(&format!("cached tokens before each test: {depth}"));
        let tokens = self.engine.random_tokens(SEED, depth);
        self.engine.with_runner(move |runner| {
            runner.reset();
            runner.fill(&tokens)
        })?
    }

    /// Measures the prefill of a prompt after `depth` cached tokens.
    fn measure_prompt(&self, tokens: usize, depth: usize) -> Result<TestResult> {
        let test = Test { kind: TestKind::Prompt, tokens, depth };
        note(&test.name());
        let seconds = self.repeat(|engine, index| {
            let prompt = engine.random_tokens(SEED + 1 + index, tokens);
            engine.with_runner(move |runner| {
                runner.rewind(depth)?;
                let started = Instant::now();
                runner.fill(&prompt)?;
                Ok(started.elapsed().as_secs_f64())
            })?
        })?;
        Ok(TestResult::of_prompt(test, &seconds))
    }

    /// Measures decoding without sampling or detokenization.
    fn measure_decode(&self, tokens: usize, depth: usize) -> Result<TestResult> {
        let test = Test { kind: TestKind::Decode, tokens, depth };
        note(&test.name());
        let seconds = self.repeat(|engine, index| {
            let first = engine.random_tokens(SEED + 1 + index, 1)[0];
            engine.with_runner(move |runner| {
                runner.rewind(depth)?;
                let started = Instant::now();
                runner.decode_steps(first, tokens)?;
                Ok(started.elapsed().as_secs_f64())
            })?
        })?;
        Ok(TestResult::of_decode(test, &seconds, &self.step_bytes(tokens, depth)?, None))
    }

    /// Measures the requests of `args`, with up to `concurrency` of them running at once.
    /// First runs `concurrency` other requests as a warm-up.
    fn measure_serving(&self, args: &Args, concurrency: usize) -> Result<Serving> {
        note(&format!("measuring with --concurrency {concurrency}"));
        let load = Workload {
            concurrency,
            requests: args.requests.map_or(concurrency, |requests| requests as usize),
            input: args.input as usize,
            output: args.output as usize,
            rate: args.rate,
            lengths: args.lengths,
            seed: SEED + 1,
        };
        serving::measure(&self.engine, &Workload { requests: concurrency, rate: None, seed: SEED, ..load })?;
        // Discard what the runner recorded during the warm-up. `with_runner` also empties the prefix cache.
        self.engine.with_runner(|runner| {
            runner.reset();
            runner.take_step_times();
            runner.take_used_experts()
        })??;
        let preemptions = self.engine.stats().preemptions;
        let mut serving = serving::measure(&self.engine, &load)?;
        serving.preemptions = self.engine.stats().preemptions - preemptions;
        let (sequences, depth) = (concurrency, load.input + load.output / 2);
        let counted = self.engine.with_runner(move |runner| -> Result<_> {
            let (steps, used, chosen) =
                (runner.take_step_times(), runner.take_used_experts()?, runner.chosen_experts());
            let experts = used.or((sequences == 1 || chosen == 0).then_some(chosen as f64));
            Ok((steps, used, experts.map(|experts| runner.batch_bytes(sequences, depth, experts))))
        })??;
        let (steps, experts_per_step, step_bytes) = counted;
        (serving.steps, serving.experts_per_step) = (steps, experts_per_step);
        if let Some(bytes) = step_bytes.filter(|_| load.lengths == Lengths::Fixed && load.rate.is_none()) {
            serving.set_step_bytes(bytes);
        }
        Ok(serving)
    }

    /// Measures decoding as in a chat, with sampling and detokenization.
    fn measure_chat(&self, tokens: usize, depth: usize) -> Result<TestResult> {
        let test = Test { kind: TestKind::Chat, tokens, depth };
        note(&test.name());
        let mut gaps: Vec<Vec<Duration>> = Vec::new();
        let seconds = self.repeat(|engine, index| {
            let prompt = engine.random_tokens(SEED, depth.max(1));
            // Do not time the first and the last token, because their times are not typical of decoding:
            // the prefill produces the first token, and no later step is queued behind the step of the last token.
            let stream = engine.complete_ids(&prompt, chat_options(tokens + 2, SEED + 1 + index))?;
            let mut events = stream.into_iter();
            events.next().transpose()?;
            let mut run_gaps = Vec::with_capacity(tokens);
            let mut last = Instant::now();
            for event in events.take(tokens) {
                event?;
                run_gaps.push(last.elapsed());
                last = Instant::now();
            }
            let seconds = run_gaps.iter().sum::<Duration>().as_secs_f64();
            gaps.push(run_gaps);
            Ok(seconds)
        })?;
        // Skip the gaps of the first run, which is the warm-up.
        let gaps = Gaps::new(gaps[1..].concat());
        Ok(TestResult::of_decode(test, &seconds, &self.step_bytes(tokens, depth)?, Some(gaps)))
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && f64::is_finite(rate) => Ok(rate),
        _ => Err("expected a number above 0".into()),
    }
}

fn first_token_s(engine: &EngineHandle, prompt_tokens: usize, seed: u64) -> Result<f64> {
    engine.with_runner(|runner| runner.reset())?;
    let prompt = engine.random_tokens(seed, prompt_tokens);
    let mut stream = engine.complete_ids(&prompt, chat_options(1, seed))?;
    stream.next_blocking().transpose()?;
    Ok(stream.summary().ttft_s)
}

fn chat_options(max_tokens: usize, seed: u64) -> GenerateOptions {
    let sampling = SamplingParams { temperature: 1.0, top_p: 0.95, seed, ..SamplingParams::greedy() };
    let max_tokens = Some(max_tokens);
    GenerateOptions { max_tokens, ignore_eos: true, ..GenerateOptions::new(sampling) }
}
