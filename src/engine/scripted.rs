//! [`ScriptedEngine`]: an engine without a model, for tests and fuzz targets of the server.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device};

use super::engine_loop::{Counters, EngineCommand, stats};
use super::handle::{EngineHandle, SharedEngineState};
use super::loading::{LoadTimes, ModelInfo};
use super::requests::{FinishReason, Outbox, Sequence};
use super::sampling::SamplingParams;
use crate::device::DeviceInfo;
use crate::kernels::attention::AttentionBackend;
use crate::language::Language;
use crate::runner::{ChosenToken, ExecutionMode, TokenLogprobs};

/// The context length and the chunk size of the engine, in tokens.
const CONTEXT: usize = 32_768;

/// The answer to every request.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// The tokens of the answer, each with the log probability 0.
    /// A stop token or a token limit can end the answer earlier.
    pub tokens: Vec<u32>,
    /// Whether the request fails after these tokens if neither a stop token nor a token limit has ended the answer.
    pub fails: bool,
}

/// An engine whose answers follow a script. It answers requests, and ignores all other commands.
pub struct ScriptedEngine {
    handle: EngineHandle,
    script: Arc<Mutex<Script>>,
}

impl ScriptedEngine {
    /// Starts the engine. Its thread ends when the last handle is dropped.
    pub fn start(language: Language, vocab_size: usize) -> Result<Self> {
        let (commands, receiver) = mpsc::channel();
        let (script, counters) = (Arc::new(Mutex::new(Script::default())), Arc::new(Counters::default()));
        let shared = SharedEngineState {
            language: Arc::new(language),
            info: info(vocab_size),
            defaults: SamplingParams::greedy(),
            device: Device::Cpu,
            fingerprint: String::new(),
            counters: counters.clone(),
            failure: Arc::default(),
            grammars: OnceLock::new(),
        };
        let played = script.clone();
        let run = move || play(&receiver, &played, &counters);
        thread::Builder::new().name("inferno-script".into()).spawn(run).context("cannot start the engine thread")?;
        Ok(Self { handle: EngineHandle::new(commands, shared), script })
    }

    /// Returns a handle to the engine.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Sets the answer to all requests that the engine thread has not received yet.
    pub fn set_script(&self, script: Script) {
        *self.script.lock().unwrap_or_else(PoisonError::into_inner) = script;
    }
}

fn info(vocab_size: usize) -> ModelInfo {
    ModelInfo {
        family: "scripted",
        quantization: None,
        parameters: 0,
        vocab_size,
        max_context: CONTEXT,
        context: CONTEXT,
        chunk: CONTEXT,
        dtype: DType::F32,
        attention: AttentionBackend::Auto,
        execution_mode: ExecutionMode::Eager,
        no_decode_graph: None,
        is_deterministic: true,
        request_segments: None,
        device: DeviceInfo::cpu(),
        ranks: 1,
        weight_bytes: 0,
        cache_bytes: 0,
        cache_blocks: 0,
        cache_sequences: 0,
        max_sequences: 1,
        ignored_defaults: Vec::new(),
        load: LoadTimes::default(),
    }
}

/// Answers requests until all handles are dropped. Drops other commands, so callers that wait for a reply get an error.
fn play(commands: &Receiver<EngineCommand>, script: &Mutex<Script>, counters: &Counters) {
    while let Ok(command) = commands.recv() {
        let EngineCommand::Submit(sequences) = command else { continue };
        stats::subtract(&counters.waiting, sequences.len() as u64);
        let script = script.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for sequence in sequences {
            answer(sequence, &script);
        }
    }
}

fn answer(mut sequence: Sequence, script: &Script) {
    let mut outbox = Outbox::default();
    sequence.start(0, &mut outbox);
    let mut finish = sequence.is_prefill_only().then_some(FinishReason::Length);
    for &id in &script.tokens {
        outbox.flush();
        if finish.is_some() || sequence.is_canceled() {
            break;
        }
        let logprobs = Some(TokenLogprobs { chosen: 0.0, top: vec![(id, 0.0)] });
        finish = sequence.push(ChosenToken { id, logprobs }, CONTEXT, &mut outbox);
    }
    match finish {
        None if script.fails => sequence.fail(anyhow!("the script ended with an error"), &mut outbox),
        reason => sequence.finish(reason.unwrap_or(FinishReason::Stop), &mut outbox),
    }
    outbox.flush();
}
