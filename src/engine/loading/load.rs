//! Loads a model from a snapshot directory or a GGUF file, and describes the loaded model.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::Result;

use super::fingerprint::fingerprint;
use super::info::{LoadTimes, ModelInfo};
use super::on_device::{LoadedRunner, deterministic_segments, load_onto_device};
use super::options::LoadOptions;
use crate::engine::sampling::SamplingParams;
use crate::language::Language;
use crate::models::{self, ModelConfig};
use crate::runner::{MAX_SEQUENCES, Runner};
use crate::sandbox;
use crate::weights::Checkpoint;

/// A loaded model: the parts from which `Engine::load` builds an engine.
pub struct EngineParts {
    pub language: Language,
    pub runner: Runner,
    pub defaults: SamplingParams,
    pub info: ModelInfo,
    /// Identifies the model files, the build and the settings that determine keys and values.
    /// A saved prefix is valid only with the same fingerprint.
    pub fingerprint: String,
}

/// Loads the model at `path`: a snapshot directory or a GGUF file.
///
/// Fails if the architecture is not supported, or if the memory plan exceeds the free memory. In both cases, fails
/// before it allocates memory for the model.
pub fn load(path: &Path, options: &LoadOptions) -> Result<EngineParts> {
    let started = Instant::now();
    let (config, checkpoint) = models::open(path)?;
    let headers_s = started.elapsed().as_secs_f64();

    let (language, model) = load_language_and_model(path, &config, &checkpoint, options)?;
    let times = LoadTimes { headers_s, total_s: started.elapsed().as_secs_f64(), ..model.times };

    let (defaults, ignored) = SamplingParams::from_generation_config(&language.generation_config);
    let source = if checkpoint.gguf().is_some() { "the GGUF metadata" } else { "generation_config.json" };
    let ignored_defaults = ignored.into_iter().map(|reason| format!("in {source}, {reason}")).collect();
    let info = model_info(&config, &checkpoint, options, &model, ignored_defaults, times);
    log(&info);
    tracing::debug!(stop_ids = ?language.stop_ids(), ?defaults, "generation");
    let runner = model.runner;
    // With LongRoPE, a context longer than `default_context` selects other RoPE factors, so keys and values differ.
    let has_long_context = runner.limits().context > config.architecture.default_context();
    let fingerprint = fingerprint(path, &checkpoint, has_long_context, options, &info, runner.prompt_segments());
    Ok(EngineParts { language, runner, defaults, info, fingerprint })
}

/// Loads the tokenizer and the chat format on another thread, and at the same time the model on this thread.
fn load_language_and_model(
    path: &Path,
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
) -> Result<(Language, LoadedRunner)> {
    let is_refused = AtomicBool::new(false);
    let check = options.check_language;
    let (language, model) = thread::scope(|scope| {
        let language = scope.spawn(|| {
            let started = Instant::now();
            let language = sandbox::load_language_of(path, checkpoint);
            let language = language.and_then(|language| check(&language).map(|()| language));
            is_refused.store(language.is_err(), Ordering::Relaxed);
            language.map(|language| (language, started.elapsed().as_secs_f64()))
        });
        let model = load_onto_device(config, checkpoint, options, &is_refused);
        (language.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), model)
    });
    // If both have failed, report the error of `language`. The error of `model` may only say that loading was canceled.
    let (language, tokenizer_s) = language?;
    let model = model?;
    Ok((language, LoadedRunner { times: LoadTimes { tokenizer_s, ..model.times }, ..model }))
}

/// Describes a loaded model. `ignored_defaults` explains why some of the model's sampling parameters were ignored.
fn model_info(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    model: &LoadedRunner,
    ignored_defaults: Vec<String>,
    load: LoadTimes,
) -> ModelInfo {
    let runner = &model.runner;
    ModelInfo {
        family: config.family.model_type,
        quantization: match (config.quantization.clone(), options.quantize) {
            (Some(stored), Some(quantize)) => Some(format!("{stored} and {quantize}")),
            (stored, quantize) => stored.or(quantize.map(|quantize| quantize.to_string())),
        },
        parameters: checkpoint.parameters(),
        vocab_size: config.architecture.vocab_size(),
        max_context: config.architecture.max_position_embeddings(),
        context: runner.limits().context,
        chunk: runner.limits().chunk,
        dtype: runner.dtype(),
        attention: model.attention,
        execution_mode: runner.execution_mode(),
        no_decode_graph: runner.no_decode_graph().cloned(),
        is_deterministic: runner.prompt_segments().is_some(),
        request_segments: deterministic_segments(runner.limits().chunk, model.attention).ok(),
        device: model.device_info.clone(),
        ranks: options.devices.count(),
        weight_bytes: model.weight_bytes,
        cache_bytes: model.cache_bytes,
        cache_blocks: runner.cache().blocks(),
        cache_sequences: model.cache_sequences,
        max_sequences: options
            .max_sequences
            .unwrap_or(MAX_SEQUENCES)
            .clamp(1, MAX_SEQUENCES.min(runner.limits().chunk)),
        ignored_defaults,
        load,
    }
}

fn log(info: &ModelInfo) {
    tracing::info!(
        family = info.family,
        quantization = info.quantization.as_deref().unwrap_or("none"),
        device = info.device.name,
        dtype = ?info.dtype,
        weight_bytes = info.weight_bytes,
        cache_bytes = info.cache_bytes,
        seconds = info.load.total_s,
        "loaded"
    );
    let no_decode_graph = info.no_decode_graph.as_ref().map(tracing::field::display);
    tracing::info!(attention = %info.attention, no_decode_graph, "execution mode: {}", info.execution_mode);
}
