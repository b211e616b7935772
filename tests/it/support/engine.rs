//! Loads engines with the demo model or a golden model, and generates and checks answers.

use std::fs;
use std::path::PathBuf;

use candle_core::{DType, Device, safetensors};
use inferno::device::{self, DeviceChoice, Devices};
use inferno::engine::{EngineBuilder, Summary};
use inferno::runner::ExecutionMode;
use inferno::{Engine, EngineHandle, Event, GenerateOptions, RequestStream, SamplingParams};
use tempfile::TempDir;

use super::program::copy_of_demo;
use super::{demo_dir, golden, token_ids};

/// Loads the demo model on the CPU.
pub fn demo(context: usize) -> Engine {
    Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(context).load().unwrap()
}

/// Returns parameters for sampling at temperature 1, with the changes that `change` makes.
pub fn sampling(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
    change(&mut params);
    params
}

pub fn greedy() -> GenerateOptions {
    GenerateOptions::new(SamplingParams::greedy())
}

/// The text and the token ids of an answer, and the summary from its last event.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub text: String,
    pub tokens: Vec<u32>,
    pub summary: Summary,
}

impl Answer {
    /// Waits for the end of an answer. Panics if the request fails.
    pub fn read(mut stream: RequestStream) -> Self {
        let events: Vec<Event> = (&mut stream).into_iter().map(|event| event.unwrap()).collect();
        Self::from_events(&events)
    }

    pub fn from_events(events: &[Event]) -> Self {
        Self {
            text: events.iter().map(Event::answer).collect(),
            tokens: events.iter().filter_map(Event::token).collect(),
            summary: events.last().and_then(Event::summary).unwrap().clone(),
        }
    }
}

/// A golden model in a temporary folder, with the tokenizer of the demo model.
pub struct GraphModel {
    _folder: TempDir,
    pub dir: PathBuf,
    /// The tensor `greedy_prompt` from the model's golden.safetensors.
    pub prompt: Vec<u32>,
}

impl GraphModel {
    pub fn new(name: &str) -> Self {
        let (_folder, dir) = copy_of_demo();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden(name).join(file), dir.join(file)).unwrap();
        }
        let results = safetensors::load(golden(name).join("golden.safetensors"), &Device::Cpu).unwrap();
        let prompt = token_ids(&results["greedy_prompt"]);
        Self { _folder, dir, prompt }
    }

    /// Returns a builder that loads the model on a GPU.
    pub fn builder(&self) -> EngineBuilder<'static> {
        Engine::builder(&self.dir).device(DeviceChoice::FirstCuda)
    }

    /// Loads the model on a GPU in f16, which rounds less than bf16. Asserts that the engine runs in `mode`.
    pub fn load(&self, context: usize, mode: ExecutionMode) -> Engine {
        let builder = self.builder().dtype(DType::F16);
        let engine = builder.context(context).chunk(16).eager(mode == ExecutionMode::Eager).load().unwrap();
        assert_eq!(engine.execution_mode(), mode, "{:?}", engine.no_decode_graph());
        engine
    }

    /// Loads the model on a GPU, with a context of 110 tokens. Decode steps run as a CUDA graph.
    pub fn graph(&self) -> Engine {
        self.load(110, ExecutionMode::Graph)
    }
}

/// Generates `count` tokens. End-of-sequence tokens do not end the answer.
pub fn generate(engine: &EngineHandle, prompt: &[u32], sampling: SamplingParams, count: usize) -> Answer {
    let options = GenerateOptions { ignore_eos: true, max_tokens: Some(count), ..GenerateOptions::new(sampling) };
    Answer::read(engine.complete_ids(prompt, options).unwrap())
}

/// Checks that each token has the largest logit at its position, according to a prefill without a cached prefix.
/// Allows a gap of 2% of the largest |logit|, because rounding to a 16-bit dtype may change the order of nearly equal
/// logits.
pub fn assert_greedy(engine: &EngineHandle, prompt: &[u32], tokens: &[u32]) {
    assert_greedy_within(engine, prompt, tokens, 2e-2);
}

/// Like [`assert_greedy`], but with a `tolerance` for the gap to the largest logit, relative to the largest |logit|.
pub fn assert_greedy_within(engine: &EngineHandle, prompt: &[u32], tokens: &[u32], tolerance: f32) {
    let ids = [prompt, &tokens[..tokens.len() - 1]].concat();
    let logits = engine.logits(&ids).unwrap().to_vec2::<f32>().unwrap();
    for (index, (row, &token)) in logits[prompt.len() - 1..].iter().zip(tokens).enumerate() {
        let (best, scale) = row.iter().fold((f32::MIN, 0f32), |(a, b), x| (a.max(*x), b.max(x.abs())));
        let gap = best - row[token as usize];
        assert!(
            gap <= tolerance * scale,
            "token {index} is {token}: its logit is {gap} below the largest logit, {best}"
        );
    }
}

/// Submits all prompts before it reads any answer. Returns the answers in the order of the prompts.
pub fn generate_at_once(
    engine: &EngineHandle,
    prompts: &[Vec<u32>],
    sampling: &SamplingParams,
    count: usize,
) -> Vec<Answer> {
    let options =
        || GenerateOptions { ignore_eos: true, max_tokens: Some(count), ..GenerateOptions::new(sampling.clone()) };
    let streams: Vec<_> = prompts.iter().map(|prompt| engine.complete_ids(prompt, options()).unwrap()).collect();
    streams.into_iter().map(Answer::read).collect()
}

/// Returns the CPU as the device of each of `ranks` ranks.
pub fn cpus(ranks: usize) -> Devices {
    vec!["cpu"; ranks].join(",").parse().unwrap()
}

/// Returns the devices of two ranks: two GPUs, or the same GPU twice if there is only one.
/// The calling test must run alone. `tests_of_several_gpus_run_alone` in harness.rs explains why.
pub fn two_gpus() -> Devices {
    assert!(crate::harness::is_alone(), "a test of several GPUs must run alone, but this one does not");
    if device::gpu_count() > 1 { "cuda:0,1" } else { "cuda:0,0" }.parse().unwrap()
}
