//! The report of `inferno show`: every value that the command prints, as text or as JSON.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::shown_model::ShownModel;
use super::sizes::ConfigSizes;
use crate::device::{self, DeviceChoice, DeviceInfo, Split};
use crate::engine::memory::{Capacity, DeviceKind, MemoryPlan};
use crate::error::Error;
use crate::models::{self, ModelConfig};
use crate::text::one_line;
use crate::weights::Inventory;
use crate::weights::inventory::TensorGroup;

#[derive(Serialize)]
pub struct ShowReport {
    pub name: String,
    pub revision: Option<String>,
    /// The local path. `None` for a model on the hub.
    pub path: Option<String>,
    #[serde(skip)]
    pub location: &'static str,
    /// The model family. For an unsupported model, the model type or architecture that its config names, if any.
    pub family: Option<String>,
    pub supported: bool,
    /// Why the model is not supported. `None` if it is supported.
    pub reason: Option<String>,
    pub license: Option<String>,
    pub quantization: Option<String>,
    /// `harmony`, or the name of the file or GGUF key that holds the chat template. `None` without a chat format.
    pub chat: Option<&'static str>,
    #[serde(flatten)]
    pub sizes: ConfigSizes,
    pub parameters: Option<u64>,
    pub active_parameters: Option<u64>,
    /// The stored size of all tensors, in bytes. `None` if the list of tensors could not be read.
    pub weight_bytes: Option<u64>,
    /// Why the list of tensors could not be read. `None` if it was read.
    pub weights_problem: Option<String>,
    pub tensors: Vec<TensorGroup>,
    pub files: Vec<ModelFile>,
    pub needs: Option<MemoryNeeds>,
    #[serde(flatten)]
    pub gpu: Gpu,
}

/// The flags of `inferno show` that determine the memory plan.
#[derive(Clone, Copy)]
pub struct Requested {
    /// The context length in tokens. `None` means the context that `inferno play` would choose.
    pub context: Option<usize>,
    /// The number of GPUs that run the model together.
    pub gpus: usize,
    pub split: Split,
}

#[derive(Serialize)]
pub struct ModelFile {
    pub name: String,
    pub bytes: Option<u64>,
}

/// The GPU memory that the model needs, in bytes. With several GPUs, describes the GPU that holds the largest part.
#[derive(Serialize)]
pub struct MemoryNeeds {
    /// The number of GPUs that run the model together.
    pub gpus: usize,
    pub dtype: &'static str,
    pub weight_bytes: u64,
    pub cache_bytes_per_1000_tokens: u64,
    /// The maximum KV cache size of the sliding-window layers for one sequence. It does not depend on `context`.
    pub cache_bytes_of_windows: u64,
    /// The context length, in tokens, for which `cache_bytes`, `workspace_bytes` and `total_bytes` are computed.
    pub context: usize,
    /// The prefill chunk size, in tokens, for which the cache and workspace sizes are computed.
    pub chunk: usize,
    pub cache_bytes: u64,
    /// The number of 64-token blocks in the KV cache.
    pub cache_blocks: usize,
    pub workspace_bytes: u64,
    /// Temporary memory for loading, in addition to the weights. Freed before the KV cache is allocated.
    pub loading_bytes: u64,
    pub total_bytes: u64,
    /// Whether this machine's first GPU has `total_bytes` of free memory. `None` without a GPU.
    pub fits: Option<bool>,
    /// The longest context that fits. `None` without a GPU, or if no context fits.
    pub largest_context: Option<usize>,
    /// The number of sequences of `context` tokens that the KV cache can hold if `--gpu-memory` gives the cache all
    /// free memory that remains after weights and workspace. `None` without a GPU.
    pub largest_sequences: Option<usize>,
    /// Whether the cache size is only an estimate from config.json, because the model is not supported.
    pub estimated: bool,
}

/// This machine's first GPU, for which the memory plan is made, or the reason why no GPU can be used.
#[derive(Serialize)]
pub struct Gpu {
    #[serde(serialize_with = "serialize_gpu")]
    pub gpu: Option<DeviceInfo>,
    /// Why no GPU can be used. `None` if a GPU can be used.
    pub no_gpu: Option<String>,
}

impl Gpu {
    pub fn first() -> Self {
        match device::open(DeviceChoice::FirstCuda).and_then(|device| device::info(&device)) {
            Ok(info) => Self { gpu: Some(info), no_gpu: None },
            Err(error) => {
                let reason = match error.downcast_ref::<Error>() {
                    Some(Error::NoGpu { reason, .. }) => reason.clone(),
                    _ => crate::text::error_message(&error),
                };
                Self { gpu: None, no_gpu: Some(reason) }
            }
        }
    }
}

fn serialize_gpu<S: serde::Serializer>(info: &Option<DeviceInfo>, serializer: S) -> Result<S::Ok, S::Error> {
    let json = info.as_ref().map(
        |info| serde_json::json!({ "name": info.name, "free_bytes": info.free_bytes, "total_bytes": info.total_bytes }),
    );
    json.serialize(serializer)
}

impl ShowReport {
    /// Creates the report. Fails only if the model does not support the requested context or number of GPUs.
    pub fn new(shown: ShownModel, requested: Requested, gpu: Gpu) -> Result<Self> {
        let chat = chat(&shown);
        let (json, parsed) = match shown.metadata.config {
            Ok(json) => (json.clone(), models::parse_config(json)),
            Err(error) => (Value::Null, Err(error)),
        };
        let (model, reason) = match parsed {
            Ok(model) => (Some(model), None),
            Err(error) => (None, Some(one_line(&error))),
        };
        let mut sizes = ConfigSizes::from_config(&json);
        if let Some(model) = &model {
            sizes = sizes.with_architecture(model.architecture.as_ref());
        }
        let (inventory, weights_problem) = match shown.metadata.inventory {
            Ok(inventory) => (Some(inventory), None),
            Err(error) => (None, Some(one_line(&error))),
        };
        let tensors = inventory.as_ref().map(Inventory::groups).unwrap_or_default();
        // Many config files omit `tie_word_embeddings`. Unless a config sets it to true, the list of tensors decides:
        // without an output head, the embeddings are tied.
        if !tensors.is_empty() && sizes.tied_embeddings != Some(true) {
            sizes.tied_embeddings = Some(!tensors.iter().any(|group| group.name == "head"));
        }
        let needs = match &inventory {
            Some(inventory) => needs(inventory, model.as_ref(), &sizes, &json, requested, gpu.gpu.as_ref())?,
            None => None,
        };
        let method = json["quantization_config"]["quant_method"].as_str().map(str::to_string);
        let main_dtype = inventory.as_ref().and_then(Inventory::main_dtype);
        let active_parameters = |inventory: &Inventory| match (sizes.experts_chosen, sizes.experts) {
            (Some(chosen), Some(experts)) => inventory.active_parameters(chosen, experts),
            _ => inventory.parameters(),
        };
        let model_type =
            |json: &Value| json["model_type"].as_str().or(json["architectures"][0].as_str()).map(String::from);
        Ok(Self {
            name: shown.name,
            revision: shown.revision,
            path: shown.path.map(|path| path.display().to_string()),
            location: shown.location,
            family: model.as_ref().map(|model| model.family.model_type.to_string()).or_else(|| model_type(&json)),
            supported: model.is_some(),
            reason,
            license: shown.metadata.license,
            quantization: method.or(main_dtype),
            chat,
            parameters: inventory.as_ref().map(Inventory::parameters),
            active_parameters: inventory.as_ref().map(active_parameters),
            weight_bytes: inventory.as_ref().map(Inventory::bytes),
            sizes,
            weights_problem,
            tensors,
            files: shown.files.into_iter().map(|(name, bytes)| ModelFile { name, bytes }).collect(),
            needs,
            gpu,
        })
    }
}

/// Plans the memory use on this machine's GPU. Without a GPU, or if the model does not fit, uses the smallest chunk.
///
/// Returns `None` for an unsupported model whose config leaves the KV cache size or the context length unknown.
/// Fails if the model does not support the requested context or number of GPUs.
fn needs(
    inventory: &Inventory,
    model: Option<&ModelConfig>,
    sizes: &ConfigSizes,
    config: &Value,
    requested: Requested,
    device: Option<&DeviceInfo>,
) -> Result<Option<MemoryNeeds>> {
    let dtype = candle_core::DType::BF16;
    let plan = match model {
        Some(model) => MemoryPlan::new(inventory, model.architecture.as_ref(), dtype, DeviceKind::Gpu),
        None => {
            let context = sizes.context.and_then(|context| usize::try_from(context).ok());
            // For an unsupported model, no earlier code has checked the values in config.json.
            let max_context = context.filter(|context| (1..=1 << 40).contains(context));
            let (Some(layers), Some(max_context)) = (sizes.cache_layers(config), max_context) else {
                return Ok(None);
            };
            MemoryPlan::from_layers(inventory, layers, max_context, dtype, DeviceKind::Gpu)
        }
    };
    let plan = plan.with_split(requested.split, requested.gpus)?;
    let context = plan.check_context(requested.context)?;
    let smallest = || plan.smallest(context.unwrap_or(plan.default_context()));
    let (capacity, fits): (Capacity, Option<bool>) = match device.map(|device| plan.choose(context, device)) {
        Some(Ok(capacity)) => (capacity, Some(true)),
        Some(Err(_)) => (smallest(), Some(false)),
        None => (smallest(), None),
    };
    let growth = plan.cache_growth(capacity.chunk);
    Ok(Some(MemoryNeeds {
        gpus: requested.gpus,
        dtype: dtype.as_str(),
        weight_bytes: plan.weight_bytes(),
        cache_bytes_per_1000_tokens: growth.bytes_per_1000_tokens,
        cache_bytes_of_windows: growth.sliding_bytes,
        context: capacity.context,
        chunk: capacity.chunk,
        cache_bytes: plan.cache_bytes(capacity),
        cache_blocks: plan.cache_blocks(capacity),
        workspace_bytes: plan.workspace_bytes(capacity),
        loading_bytes: plan.loading_bytes(),
        total_bytes: plan.bytes(capacity),
        fits,
        largest_context: device.and_then(|device| plan.largest_context(device)),
        largest_sequences: device.map(|device| plan.sequences_that_fit(capacity, device)),
        estimated: model.is_none(),
    }))
}

/// Returns `harmony` for gpt-oss, otherwise the name of the file or GGUF key that holds the chat template, if any.
fn chat(shown: &ShownModel) -> Option<&'static str> {
    if shown.metadata.config.as_ref().is_ok_and(|config| config["model_type"] == "gpt_oss") {
        return Some("harmony");
    }
    if shown.has("chat_template.jinja") {
        return Some("chat_template.jinja");
    }
    let template = &shown.metadata.tokenizer_config["chat_template"];
    let has_template = template.as_str().is_some_and(|text| !text.is_empty()) || template.is_array();
    has_template.then_some(shown.metadata.tokenizer_config_name)
}
