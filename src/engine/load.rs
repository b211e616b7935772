//! From a snapshot directory to an engine: what it needs is known before anything is allocated.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use serde::Serialize;
use serde_json::Value;

use super::need::{Need, Place, Room};
use super::{Decoding, Engine, Language, SamplingParams, gguf};
use crate::device::{self, DeviceChoice, DeviceInfo};
use crate::kernels::attention::AttentionBackend;
use crate::models::{self, ModelConfig};
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::snapshot;
use crate::weights::quantized::QuantizationTarget;
use crate::weights::{Checkpoint, Inventory, LoadProgress, Weights};

/// How to load a model.
pub struct LoadOptions<'o> {
    pub device: DeviceChoice,
    /// What to compute in; bf16 on a GPU and f32 on a CPU if not given.
    pub dtype: Option<DType>,
    /// Positions to make room for; if not given, as many as the model and the memory allow, up to 32,768.
    pub context: Option<usize>,
    /// Most tokens of a prompt in one pass; if not given, as many as help and fit.
    pub chunk: Option<usize>,
    /// What matrices of floats become while they are loaded.
    pub quantize: Option<QuantizationTarget>,
    /// Run decode steps operation by operation, even where a graph could.
    pub eager: bool,
    /// Whose attention kernel reads prompts on a GPU, and runs decode steps without a graph.
    pub attention: AttentionBackend,
    /// Hears bytes loaded and bytes in all.
    pub progress: &'o dyn Fn(u64, u64),
    /// Hears about the device once it is open.
    pub on_device: &'o dyn Fn(&DeviceInfo),
    /// Refuses a model for what it speaks, while its weights are still on their way.
    pub check_language: &'o (dyn Fn(&Language) -> Result<()> + Sync),
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        Self {
            device: DeviceChoice::default(),
            dtype: None,
            context: None,
            chunk: None,
            quantize: None,
            eager: false,
            attention: AttentionBackend::Auto,
            progress: &|_, _| (),
            on_device: &|_| (),
            check_language: &|_| Ok(()),
        }
    }
}

/// What was loaded.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// config.json's `model_type`.
    pub family: &'static str,
    /// What the weights are packed or rounded to, such as `mxfp4` or `Q4_K_M`; none for plain floats.
    pub quantization: Option<String>,
    /// How many, packed ones counted as what they stand for.
    pub parameters: u64,
    /// Rows of logits.
    pub vocab_size: usize,
    /// The longest context that the model was made for.
    pub max_context: usize,
    /// What activations are computed in.
    pub dtype: DType,
    /// Whose kernel attends, but for decode steps in a graph: those have their own.
    pub attention: AttentionBackend,
    pub device: DeviceInfo,
    /// Bytes on the device, of weights and of the key/value cache.
    pub weight_bytes: u64,
    pub cache_bytes: u64,
    pub load: LoadTimes,
}

/// What loading spent its time on, in seconds. The tokenizer is parsed while the device is opened and the weights are
/// read, so the parts come to more than the total.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LoadTimes {
    /// config.json and the headers of the weights.
    pub headers_s: f64,
    /// Tokenizer and chat format.
    pub tokenizer_s: f64,
    /// Opening the device.
    pub device_s: f64,
    /// Until every weight is where and as the model uses it.
    pub weights_s: f64,
    /// Making room for keys and values.
    pub cache_s: f64,
    /// Planning and capturing the decode step.
    pub graph_s: f64,
    pub total_s: f64,
}

impl Engine {
    /// Loads the snapshot in `dir`, which may be a GGUF file itself. Fails before allocating if the model is not supported or
    /// does not fit.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let started = Instant::now();
        let config = models::read_config(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        let mut times = LoadTimes { headers_s: started.elapsed().as_secs_f64(), ..Default::default() };

        let no_language = AtomicBool::new(false);
        let check = options.check_language;
        let (language, model) = thread::scope(|scope| {
            let language = scope.spawn(|| {
                let started = Instant::now();
                let language = Language::load(dir).and_then(|language| check(&language).map(|()| language));
                no_language.store(language.is_err(), Ordering::Relaxed);
                language.map(|language| (language, started.elapsed().as_secs_f64()))
            });
            let model = Model::load(&config, &checkpoint, options, &no_language, &mut times);
            (language.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), model)
        });
        // What is wrong with the snapshot is said before what is wrong with the machine.
        let (language, tokenizer_s) = language?;
        times.tokenizer_s = tokenizer_s;
        let Model { decoder, cache, decoding, device, dtype, attention, device_info, weight_bytes, cache_bytes } =
            model?;

        let (generation, stop_ids) = match snapshot::gguf::find(dir)? {
            Some(file) => gguf::generation(&file, &language)?,
            None => {
                let generation = read_json(dir, "generation_config.json")?;
                let stop_ids = stop_ids(dir, &generation, &language)?;
                (generation, stop_ids)
            }
        };
        times.total_s = started.elapsed().as_secs_f64();
        let info = ModelInfo {
            family: config.family.model_type,
            quantization: match (config.quantization, options.quantize) {
                (Some(stored), Some(quantize)) => Some(format!("{stored} and {quantize}")),
                (stored, quantize) => stored.or(quantize.map(|quantize| quantize.to_string())),
            },
            parameters: checkpoint.parameters(),
            vocab_size: config.architecture.vocab_size(),
            max_context: config.architecture.max_position_embeddings(),
            dtype,
            attention,
            device: device_info,
            weight_bytes,
            cache_bytes,
            load: times,
        };
        let defaults = SamplingParams::from_generation_config(&generation);
        tracing::info!(
            family = info.family,
            quantization = info.quantization.as_deref().unwrap_or("none"),
            device = info.device.name,
            dtype = ?info.dtype,
            weight_bytes,
            cache_bytes,
            seconds = info.load.total_s,
            "loaded"
        );
        match &decoding {
            Decoding::Eager(why) => tracing::info!(attention = %info.attention, why, "executor eager"),
            #[cfg(feature = "cuda")]
            Decoding::Graph(_) => tracing::info!(attention = %info.attention, "executor graph"),
        }
        tracing::debug!(?stop_ids, ?defaults, "generation");
        Ok(Self { language, decoder, cache, cached: Vec::new(), decoding, device, stop_ids, defaults, info })
    }
}

/// What of an engine is on the device.
struct Model {
    decoder: Decoder,
    cache: KvCache,
    decoding: Decoding,
    device: Device,
    dtype: DType,
    attention: AttentionBackend,
    device_info: DeviceInfo,
    weight_bytes: u64,
    cache_bytes: u64,
}

impl Model {
    /// Stops short once `canceled`.
    fn load(
        config: &ModelConfig,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        canceled: &AtomicBool,
        times: &mut LoadTimes,
    ) -> Result<Self> {
        let architecture = &config.architecture;
        let started = Instant::now();
        let device = device::open(options.device)?;
        let device_info = device::info(&device)?;
        times.device_s = started.elapsed().as_secs_f64();
        if canceled.load(Ordering::Relaxed) {
            bail!("loading was canceled");
        }
        (options.on_device)(&device_info);
        let dtype = options.dtype.unwrap_or_else(|| device::default_dtype(&device));

        let place = if device.is_cuda() { Place::Gpu } else { Place::Cpu };
        let inventory = Inventory::from_checkpoint(checkpoint, options.quantize);
        let need = Need::new(&inventory, architecture.as_ref(), dtype, place).with_chunk(options.chunk)?;
        let room = need.choose(options.context, &device_info)?;
        let Room { context, chunk } = room;

        let total = checkpoint.bytes();
        let report = |bytes| (options.progress)(bytes, total);
        let mut allocate = || -> Result<_> {
            let started = Instant::now();
            let loaded = LoadProgress::new(&report);
            let weights = match options.quantize {
                Some(quantize) => Weights::quantizing(checkpoint, &device, dtype, &loaded, quantize),
                None => Weights::new(checkpoint, &device, dtype, &loaded)?,
            };
            let mut decoder = architecture.build(&weights, context)?;
            let attention = decoder.set_attention_backend(options.attention)?;
            drop(weights);
            device.synchronize()?;
            times.weights_s = started.elapsed().as_secs_f64();
            let started = Instant::now();
            let cache = KvCache::new(need.layers(), context, chunk, dtype, &device)?;
            device.synchronize()?;
            times.cache_s = started.elapsed().as_secs_f64();
            let started = Instant::now();
            let decoding = match options.eager {
                true => Decoding::Eager("it was asked for".into()),
                false => Decoding::plan(&decoder, &cache)?,
            };
            times.graph_s = started.elapsed().as_secs_f64();
            Ok((decoder, cache, decoding, attention))
        };
        let (decoder, cache, decoding, attention) =
            allocate().map_err(|error| match device::is_out_of_memory(&error) {
                // Another process may have taken the memory since it was counted; what failed is told too.
                true => {
                    let device_info = device::info_after_trim(&device).unwrap_or(device_info.clone());
                    error.context(need.out_of_memory(context, &device_info))
                }
                false => error,
            })?;
        let (weight_bytes, cache_bytes) = (need.weight_bytes(), need.cache_bytes(room));
        Ok(Self { decoder, cache, decoding, device, dtype, attention, device_info, weight_bytes, cache_bytes })
    }
}

/// A JSON file of the snapshot; null if it is not there.
fn read_json(dir: &Path, name: &str) -> Result<Value> {
    let path = dir.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("broken {}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// The union of all that names an end: taking one file's word alone makes some models talk without end.
fn stop_ids(dir: &Path, generation: &Value, language: &Language) -> Result<Vec<u32>> {
    let mut ids = BTreeSet::new();
    for json in [&read_json(dir, "config.json")?, generation] {
        match &json["eos_token_id"] {
            Value::Array(several) => ids.extend(several.iter().filter_map(Value::as_u64)),
            one => ids.extend(one.as_u64()),
        }
    }
    let mut ids: BTreeSet<u32> = ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect();
    let tokenizer_config = read_json(dir, "tokenizer_config.json")?;
    let eos = &tokenizer_config["eos_token"];
    let eos = eos.as_str().or_else(|| eos["content"].as_str());
    ids.extend(eos.and_then(|eos| language.tokenizer.token_id(eos)));
    ids.extend(language.chat.iter().flat_map(|chat| chat.stop_ids()));
    Ok(ids.into_iter().collect())
}
