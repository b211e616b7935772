//! All that `inferno show` tells, as one object.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::sizes::Sizes;
use super::source::Source;
use crate::device::{self, DeviceChoice, DeviceInfo};
use crate::engine::memory::{Capacity, DeviceKind, MemoryPlan};
use crate::error::Error;
use crate::models::{self, ModelConfig};
use crate::text::one_line;
use crate::weights::Inventory;
use crate::weights::inventory::Group;

#[derive(Serialize)]
pub struct Report {
    pub name: String,
    pub revision: Option<String>,
    /// `None` for a model on the hub.
    pub path: Option<String>,
    #[serde(skip)]
    pub place: &'static str,
    /// As config.json names it, supported or not.
    pub family: Option<String>,
    pub supported: bool,
    /// Why it is not supported.
    pub reason: Option<String>,
    pub license: Option<String>,
    pub quantization: Option<String>,
    /// `harmony`, or where the template is; `None` for a base model.
    pub chat: Option<&'static str>,
    #[serde(flatten)]
    pub sizes: Sizes,
    pub parameters: Option<u64>,
    pub active_parameters: Option<u64>,
    /// Of the tensors as stored.
    pub weight_bytes: Option<u64>,
    /// Why there is nothing to be said of the weights.
    pub weights_problem: Option<String>,
    pub tensors: Vec<Group>,
    pub files: Vec<File>,
    pub needs: Option<Needs>,
    #[serde(flatten)]
    pub gpu: Gpu,
}

#[derive(Serialize)]
pub struct File {
    pub name: String,
    pub bytes: Option<u64>,
}

/// What the model takes of a GPU's memory, in bytes.
#[derive(Serialize)]
pub struct Needs {
    pub dtype: &'static str,
    pub weight_bytes: u64,
    pub cache_bytes_per_1000_tokens: u64,
    /// What sliding layers keep however long the context is.
    pub cache_bytes_of_windows: u64,
    /// The context that all below is counted for, and the tokens of a prompt read at once.
    pub context: usize,
    pub chunk: usize,
    pub cache_bytes: u64,
    pub workspace_bytes: u64,
    /// What loading takes beside the weights, before there are a cache and a workspace.
    pub loading_bytes: u64,
    pub total_bytes: u64,
    /// Whether that much is free; `None` without a GPU.
    pub fits: Option<bool>,
    /// The longest context that fits; `None` without a GPU, or if none does.
    pub largest_context: Option<usize>,
    /// Whether a family that inferno knows said what a layer keeps; else it is worked out from config.json alone.
    pub estimated: bool,
}

/// The GPU that the model would run on.
#[derive(Serialize)]
pub struct Gpu {
    #[serde(serialize_with = "device")]
    pub gpu: Option<DeviceInfo>,
    /// Why there is none.
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

fn device<S: serde::Serializer>(info: &Option<DeviceInfo>, serializer: S) -> Result<S::Ok, S::Error> {
    let json = info.as_ref().map(
        |info| serde_json::json!({ "name": info.name, "free_bytes": info.free_bytes, "total_bytes": info.total_bytes }),
    );
    json.serialize(serializer)
}

impl Report {
    /// Fails only for a `context` that the model cannot have.
    pub fn new(source: Source, context: Option<usize>, gpu: Gpu) -> Result<Self> {
        let chat = chat(&source);
        let (json, read) = match source.said.config {
            Ok(json) => (json.clone(), models::parse_config(json)),
            Err(error) => (Value::Null, Err(error)),
        };
        let (model, reason) = match read {
            Ok(model) => (Some(model), None),
            Err(error) => (None, Some(one_line(&error))),
        };
        let mut sizes = Sizes::of(&json);
        if let Some(model) = &model {
            sizes = sizes.read_by(model.architecture.as_ref());
        }
        let (inventory, weights_problem) = match source.said.inventory {
            Ok(inventory) => (Some(inventory), None),
            Err(error) => (None, Some(one_line(&error))),
        };
        let tensors = inventory.as_ref().map(Inventory::groups).unwrap_or_default();
        // Many files leave it out.
        if !tensors.is_empty() && sizes.tied_embeddings != Some(true) {
            sizes.tied_embeddings = Some(!tensors.iter().any(|group| group.name == "head"));
        }
        let needs = match &inventory {
            Some(inventory) => needs(inventory, model.as_ref(), &sizes, &json, context, gpu.gpu.as_ref())?,
            None => None,
        };
        let method = json["quantization_config"]["quant_method"].as_str().map(str::to_string);
        let main_dtype = inventory.as_ref().and_then(Inventory::main_dtype);
        let active = |inventory: &Inventory| match (sizes.experts_chosen, sizes.experts) {
            (Some(chosen), Some(experts)) => inventory.active_parameters(chosen, experts),
            _ => inventory.parameters(),
        };
        let type_of =
            |json: &Value| json["model_type"].as_str().or(json["architectures"][0].as_str()).map(String::from);
        Ok(Self {
            name: source.name,
            revision: source.revision,
            path: source.path.map(|path| path.display().to_string()),
            place: source.place,
            family: model.as_ref().map(|model| model.family.model_type.to_string()).or_else(|| type_of(&json)),
            supported: model.is_some(),
            reason,
            license: source.said.license,
            quantization: method.or(main_dtype),
            chat,
            parameters: inventory.as_ref().map(Inventory::parameters),
            active_parameters: inventory.as_ref().map(active),
            weight_bytes: inventory.as_ref().map(Inventory::bytes),
            sizes,
            weights_problem,
            tensors,
            files: source.files.into_iter().map(|(name, bytes)| File { name, bytes }).collect(),
            needs,
            gpu,
        })
    }
}

/// On the GPU that is here, or on one with memory enough. `None` if nobody can say what a layer keeps.
fn needs(
    inventory: &Inventory,
    model: Option<&ModelConfig>,
    sizes: &Sizes,
    config: &Value,
    context: Option<usize>,
    device: Option<&DeviceInfo>,
) -> Result<Option<Needs>> {
    let dtype = candle_core::DType::BF16;
    let need = match model {
        Some(model) => MemoryPlan::new(inventory, model.architecture.as_ref(), dtype, DeviceKind::Gpu),
        None => {
            let context = sizes.context.and_then(|context| usize::try_from(context).ok());
            // Nobody has checked these figures.
            let max_context = context.filter(|context| (1..=1 << 40).contains(context));
            let (Some(layers), Some(max_context)) = (sizes.cache_layers(config), max_context) else {
                return Ok(None);
            };
            MemoryPlan::from_layers(inventory, layers, max_context, dtype, DeviceKind::Gpu)
        }
    };
    let asked = need.checked(context)?;
    let smallest = || need.smallest(asked.unwrap_or(need.default_context()));
    let (room, fits): (Capacity, Option<bool>) = match device.map(|device| need.choose(asked, device)) {
        Some(Ok(room)) => (room, Some(true)),
        Some(Err(_)) => (smallest(), Some(false)),
        None => (smallest(), None),
    };
    let (per_1000, of_windows) = need.cache_growth(room.chunk);
    Ok(Some(Needs {
        dtype: dtype.as_str(),
        weight_bytes: need.weight_bytes(),
        cache_bytes_per_1000_tokens: per_1000,
        cache_bytes_of_windows: of_windows,
        context: room.context,
        chunk: room.chunk,
        cache_bytes: need.cache_bytes(room),
        workspace_bytes: need.workspace_bytes(room),
        loading_bytes: need.loading_bytes(),
        total_bytes: need.bytes(room),
        fits,
        largest_context: device.and_then(|device| need.largest_context(device)),
        estimated: model.is_none(),
    }))
}

/// What a conversation with the model is written in.
fn chat(source: &Source) -> Option<&'static str> {
    if source.said.config.as_ref().is_ok_and(|config| config["model_type"] == "gpt_oss") {
        return Some("harmony");
    }
    if source.has("chat_template.jinja") {
        return Some("chat_template.jinja");
    }
    let template = &source.said.tokenizer_config["chat_template"];
    let there = template.as_str().is_some_and(|text| !text.is_empty()) || template.is_array();
    there.then_some(source.said.tokenizer_config_is)
}
