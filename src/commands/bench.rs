//! `inferno bench`: how fast a model runs here, by llama-bench's definitions: random tokens, batch 1, no tokenizer, one
//! warm-up before what is counted.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::value_parser;

use super::bench_report::{Build, DeviceFacts, FirstToken, Gaps, Memory, Model, Report, Stats, Test, TestKind};
use super::{LoadArgs, note};
use crate::device::{self, GpuFacts};
use crate::engine::{Engine, EngineHandle, GenerateOptions, SamplingParams};
use crate::error::Error;
use crate::hub::Hub;
use crate::kernels::bandwidth;
use crate::runner::StepBytes;
use crate::text::printable;

/// Measure how fast a model runs
#[derive(clap::Args)]
pub struct Args {
    /// Name or directory of a model
    model: String,
    /// Lengths of prompts to read; 0 for none. Requests of 512 tokens are timed in any case
    #[arg(short, long, value_delimiter = ',', default_value = "512", value_name = "TOKENS")]
    prompt: Vec<u32>,
    /// Tokens to decode; 0 for none
    #[arg(short = 'n', long = "decode", default_value_t = 128, value_name = "TOKENS")]
    decode: u32,
    /// Tokens in the cache before each test
    #[arg(short, long, value_delimiter = ',', default_value = "0", value_name = "TOKENS")]
    depth: Vec<u32>,
    /// How often each test runs, after a warm-up
    #[arg(short, long, default_value_t = 5, value_parser = value_parser!(u32).range(1..), value_name = "TIMES")]
    repetitions: u32,
    /// Print JSON, with every single figure
    #[arg(long)]
    json: bool,
    /// Time each kernel of a decode step too
    #[arg(long)]
    kernels: bool,
    #[command(flatten)]
    load: LoadArgs,
}

/// The prompt of the first request, and one of those after it.
const REQUEST: usize = 512;
/// A generation reads one token at least, and ends when no position is free.
const SPARE: usize = 2;
/// All tokens and draws derive from it.
const SEED: u64 = 1;

pub fn run(mut args: Args) -> Result<ExitCode> {
    let lengths = |given: &[u32]| given.iter().map(|&length| length as usize).collect::<Vec<_>>();
    let (mut prompts, depths) = (lengths(&args.prompt), lengths(&args.depth));
    prompts.retain(|&prompt| prompt > 0);
    let decode = args.decode as usize;
    let longest = prompts.iter().copied().max().unwrap_or(0).max(decode);
    if longest == 0 {
        return Err(Error::Usage("there is nothing to measure: give -p or -n".into()).into());
    }
    let last_depth = depths.last().copied().unwrap_or(0);
    let deepest = depths.iter().copied().max().unwrap_or(0);
    args.load.make_room((deepest + longest).max(REQUEST) + SPARE)?;

    let hub = Hub::from_env()?;
    let snapshot = hub.find(&args.model, args.load.revision())?;
    hub.record_use(&snapshot);
    let engine = args.load.load(&snapshot)?;
    let gpu = GpuFacts::for_device(engine.device())?;
    let before = gpu.as_ref().and_then(GpuFacts::state);
    let after_load_bytes = memory_in_use(&engine)?;

    let bench = Bench { engine, repetitions: args.repetitions as usize };
    let first_token = bench.first_tokens(&prompts)?;
    let mut tests = Vec::new();
    for &depth in &depths {
        bench.go_to(depth)?;
        for &prompt in &prompts {
            tests.push(bench.prompt(prompt, depth)?);
        }
        if decode > 0 {
            tests.push(bench.decode(decode, depth)?);
            tests.push(bench.chat(decode, depth)?);
        }
    }
    let engine = bench.engine;
    let after = gpu.as_ref().and_then(GpuFacts::state);
    let at_end_bytes = memory_in_use(&engine)?;
    let mut kernels = None;
    if args.kernels {
        kernels = engine.with_runner(move |runner| {
            runner.rewind(last_depth)?;
            runner.kernel_times()
        })??;
    }
    // Last, because the memory that it takes stays with the allocator.
    let bandwidth = bandwidth::measure(engine.device())?;
    tests.iter_mut().for_each(|test| test.compare_with(bandwidth.as_ref()));

    let report = Report {
        command: command_line(),
        date: jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string(),
        inferno: Build::this(&engine),
        model: Model::of(&snapshot, &engine),
        device: DeviceFacts::new(engine.info(), gpu, before, after),
        bandwidth,
        load: engine.info().load,
        memory: after_load_bytes.zip(at_end_bytes).map(Memory::from),
        seed: SEED,
        repetitions: args.repetitions,
        tests,
        first_token,
        launches_per_token: engine.with_runner(|runner| runner.launch_counts())?,
        kernels,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{}", printable(&report.table(args.kernels)))?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Device memory taken since before the model was loaded; `None` on a CPU, whose memory is everyone's.
fn memory_in_use(engine: &Engine) -> Result<Option<u64>> {
    let free = device::info(engine.device())?.free_bytes;
    Ok(engine.device().is_cuda().then(|| engine.info().device.free_bytes.saturating_sub(free)))
}

fn command_line() -> String {
    let args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once("inferno".to_string()).chain(args).collect::<Vec<_>>().join(" ")
}

/// A loaded model under test.
struct Bench {
    engine: Engine,
    repetitions: usize,
}

impl Bench {
    /// Seconds that `run` says it took, `repetitions` times after a warm-up. It hears which time it is, from 0 on.
    fn repeat(&self, mut run: impl FnMut(&EngineHandle, u64) -> Result<f64>) -> Result<Vec<f64>> {
        run(&self.engine, 0)?;
        (1..=self.repetitions as u64).map(|time| run(&self.engine, time)).collect()
    }

    /// Bytes that each of `tokens` steps reads after `depth` cached tokens.
    fn step_bytes(&self, tokens: usize, depth: usize) -> Result<Vec<StepBytes>> {
        self.engine.with_runner(move |runner| (depth..depth + tokens).map(|depth| runner.step_bytes(depth)).collect())
    }

    /// Seconds to the first token of the first request, then of prompts of several lengths.
    fn first_tokens(&self, prompts: &[usize]) -> Result<FirstToken> {
        note("first tokens");
        let cold_ms = 1e3 * first_token_s(&self.engine, REQUEST, SEED)?;
        let mut lengths = [&[1, REQUEST], prompts].concat();
        lengths.sort();
        lengths.dedup();
        let warm = lengths.into_iter().map(|tokens| {
            let seconds = self.repeat(|engine, time| first_token_s(engine, tokens, SEED + 1 + time))?;
            Ok((tokens, Stats::of(seconds.iter().map(|s| 1e3 * s).collect())))
        });
        Ok(FirstToken::new((REQUEST, cold_ms), warm.collect::<Result<_>>()?))
    }

    /// Fills the cache with random tokens.
    fn go_to(&self, depth: usize) -> Result<()> {
        note(&format!("reading {depth} tokens"));
        let tokens = self.engine.random_tokens(SEED, depth);
        self.engine.with_runner(move |runner| {
            runner.reset();
            runner.fill(&tokens)
        })?
    }

    /// Reads a prompt behind what the cache holds.
    fn prompt(&self, tokens: usize, depth: usize) -> Result<Test> {
        let test = Test::new(TestKind::Prompt, tokens, depth);
        note(&test.name());
        let seconds = self.repeat(|engine, time| {
            let prompt = engine.random_tokens(SEED + 1 + time, tokens);
            engine.with_runner(move |runner| {
                runner.rewind(depth)?;
                let started = Instant::now();
                runner.fill(&prompt)?;
                Ok(started.elapsed().as_secs_f64())
            })?
        })?;
        Ok(test.timed(&seconds))
    }

    /// Decodes without sampling or text: the model and its executor alone.
    fn decode(&self, tokens: usize, depth: usize) -> Result<Test> {
        let test = Test::new(TestKind::Decode, tokens, depth);
        note(&test.name());
        let seconds = self.repeat(|engine, time| {
            let first = engine.random_tokens(SEED + 1 + time, 1)[0];
            engine.with_runner(move |runner| {
                runner.rewind(depth)?;
                let started = Instant::now();
                runner.decode_steps(first, tokens)?;
                Ok(started.elapsed().as_secs_f64())
            })?
        })?;
        Ok(test.reading(&self.step_bytes(tokens, depth)?).timed(&seconds))
    }

    /// Decodes as a chat does: samples, brings tokens to the host, and makes text of them.
    fn chat(&self, tokens: usize, depth: usize) -> Result<Test> {
        let test = Test::new(TestKind::Chat, tokens, depth);
        note(&test.name());
        let mut gaps: Vec<Vec<Duration>> = Vec::new();
        let seconds = self.repeat(|engine, time| {
            let prompt = engine.random_tokens(SEED, depth.max(1));
            // Two more than are counted: the first token comes from the prompt, and nothing is run after the last one.
            let stream = engine.complete_ids(&prompt, chat_options(tokens + 2, SEED + 1 + time))?;
            let mut events = stream.into_iter();
            events.next().transpose()?;
            let mut of_run = Vec::with_capacity(tokens);
            let mut before = Instant::now();
            for event in events.take(tokens) {
                event?;
                of_run.push(before.elapsed());
                before = Instant::now();
            }
            let seconds = of_run.iter().sum::<Duration>().as_secs_f64();
            gaps.push(of_run);
            Ok(seconds)
        })?;
        // The first run was the warm-up.
        Ok(test.reading(&self.step_bytes(tokens, depth)?).timed(&seconds).with_gaps(Gaps::of(gaps[1..].concat())))
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
