//! Identifies the model files, the build and the settings that determine keys and values.

use std::collections::BTreeMap;
use std::path::Path;

use super::info::ModelInfo;
use super::options::LoadOptions;
use crate::runner::PromptSegments;
use crate::weights::Checkpoint;

/// Returns a string that identifies the model files, the build and the settings that determine keys and values.
///
/// The weight files are identified by path, size and modification time, and config.json by size and modification time.
/// Other files, such as tokenizer.json, do not affect the string.
/// If the engine is deterministic, the string includes the prompt segments, the number of ranks and the split.
pub(super) fn fingerprint(
    dir: &Path,
    checkpoint: &Checkpoint,
    has_long_context: bool,
    options: &LoadOptions,
    info: &ModelInfo,
    prompt_segments: Option<PromptSegments>,
) -> String {
    let state = |path: &Path| std::fs::metadata(path).ok().map(|metadata| (metadata.len(), metadata.modified().ok()));
    let requests = checkpoint.read_requests(info.dtype);
    let sources = requests.iter().flat_map(|request| &request.ranges).map(|range| range.source.path.as_path());
    let paths = sources.chain(checkpoint.gguf().into_iter().flat_map(|file| file.files()));
    let files: BTreeMap<_, _> = paths.map(|path| (path, state(path))).collect();
    let config_json = state(&dir.join("config.json"));
    let quantize = options.quantize.map(|quantize| quantize.to_string());
    let build = (env!("CARGO_PKG_VERSION"), env!("INFERNO_COMMIT"));
    let (dtype, attention) = (info.dtype, info.attention);
    // The number of ranks and the split change how sums are rounded, which matters only for deterministic answers.
    let ranks = prompt_segments.map(|_| (options.devices.count(), options.split));
    format!(
        "{files:?} {config_json:?} {has_long_context} {dtype:?} {quantize:?} {attention} {prompt_segments:?} {ranks:?} {build:?}"
    )
}
