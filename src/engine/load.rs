//! From a snapshot directory to an engine: what it needs is known before anything is allocated.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use serde::Serialize;
use serde_json::Value;

use super::{Decoding, Engine, Language, SamplingParams, gguf};
use crate::device::{self, DeviceChoice, DeviceInfo};
use crate::error::Error;
use crate::hub;
use crate::kernels::attention::Backend;
use crate::models::{self, ModelConfig};
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{self, KvCache, LayerSpec};
use crate::weights::{Checkpoint, Loaded, Weights};

/// How to load a model.
pub struct LoadOptions<'o> {
    pub device: DeviceChoice,
    /// What to compute in; bf16 on a GPU and f32 on a CPU if not given.
    pub dtype: Option<DType>,
    /// Positions to make room for; if not given, as many as the model and the memory allow, up to 32,768.
    pub context: Option<usize>,
    /// Most tokens of a prompt in one pass; if not given, as many as help and fit.
    pub chunk: Option<usize>,
    /// Run decode steps operation by operation, even where a graph could.
    pub eager: bool,
    /// Whose attention kernel reads prompts on a GPU, and runs decode steps without a graph.
    pub attention: Backend,
    /// Hears bytes loaded and bytes in all.
    pub progress: &'o dyn Fn(u64, u64),
    /// Hears about the device once it is open.
    pub on_device: &'o dyn Fn(&DeviceInfo),
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        let (device, dtype, context, chunk) = (DeviceChoice::default(), None, None, None);
        let attention = Backend::Auto;
        Self { device, dtype, context, chunk, eager: false, attention, progress: &|_, _| (), on_device: &|_| () }
    }
}

/// What was loaded.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    pub family: &'static str,
    pub quantisation: Option<String>,
    pub parameters: u64,
    pub vocab_size: usize,
    /// The longest context that the model was made for.
    pub max_context: usize,
    pub dtype: DType,
    /// Whose kernel attends, but for decode steps in a graph: those have their own.
    pub attention: Backend,
    pub device: DeviceInfo,
    /// On the device.
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

const DEFAULT_CONTEXT: usize = 32_768;
/// A context that is chosen for want of memory is no smaller than this.
const SMALLEST_CONTEXT: usize = 2048;

/// Bytes for activations: in any case, and for each token of a chunk.
const WORKSPACE: (u64, u64) = (192 << 20, 448 << 10);

/// Tokens in one pass of prefill: more is faster until the matrix units are full, and takes more memory.
fn chunk_sizes(device: &Device) -> &'static [usize] {
    if device.is_cuda() { &[8192, 2048, 512] } else { &[256] }
}

impl Engine {
    /// Loads the snapshot in `dir`, which may be a GGUF file itself. Fails before allocating if the model is not supported or does not fit.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let started = Instant::now();
        let config = models::read_config(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        let mut times = LoadTimes { headers_s: started.elapsed().as_secs_f64(), ..Default::default() };

        let no_language = AtomicBool::new(false);
        let (language, model) = thread::scope(|scope| {
            let language = scope.spawn(|| {
                let started = Instant::now();
                let language = Language::load(dir);
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

        let (generation, stop_ids) = match hub::gguf::find(dir)? {
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
            quantisation: config.quantisation,
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
        let defaults = default_sampling(&generation);
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
    attention: Backend,
    device_info: DeviceInfo,
    weight_bytes: u64,
    cache_bytes: u64,
}

impl Model {
    /// Stops short once `cancelled`.
    fn load(
        config: &ModelConfig,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        cancelled: &AtomicBool,
        times: &mut LoadTimes,
    ) -> Result<Self> {
        let architecture = &config.architecture;
        let started = Instant::now();
        let device = device::open(options.device)?;
        let device_info = device::info(&device)?;
        times.device_s = started.elapsed().as_secs_f64();
        if cancelled.load(Ordering::Relaxed) {
            bail!("loading was cancelled");
        }
        (options.on_device)(&device_info);
        let dtype = options.dtype.unwrap_or_else(|| device::default_dtype(&device));

        let layers = architecture.cache_layers();
        if options.chunk == Some(0) {
            return Err(Error::Usage("--chunk 0 reads nothing".into()).into());
        }
        let need = Need {
            weight_bytes: weight_bytes(checkpoint, dtype),
            loading_bytes: if device.is_cuda() { largest_expert_layer(checkpoint, dtype) } else { 0 },
            layers: &layers,
            chunks: options.chunk.as_ref().map_or(chunk_sizes(&device), std::slice::from_ref),
            dtype,
            max_context: architecture.max_position_embeddings(),
            usual_context: architecture.usual_context(),
        };
        let room = need.choose(options.context, &device_info)?;
        let Room { context, chunk } = room;

        let total = checkpoint.bytes();
        let report = |bytes| (options.progress)(bytes, total);
        let mut allocate = || -> Result<_> {
            let started = Instant::now();
            let loaded = Loaded::new(&report);
            let weights = Weights::new(checkpoint, &device, dtype, &loaded)?;
            let mut decoder = architecture.build(&weights, context)?;
            let attention = decoder.attend_with(options.attention)?;
            drop(weights);
            device.synchronize()?;
            times.weights_s = started.elapsed().as_secs_f64();
            let started = Instant::now();
            let cache = KvCache::new(&layers, context, chunk, dtype, &device)?;
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
            allocate().map_err(|error| match format!("{error:#}").contains("OUT_OF_MEMORY") {
                // Another process may have taken the memory since it was counted; what failed is told too.
                true => {
                    let device_info = device::info_without_ours(&device).unwrap_or(device_info.clone());
                    error.context(need.out_of_memory(context, &device_info))
                }
                false => error,
            })?;
        let (weight_bytes, cache_bytes) = (need.weight_bytes, need.cache_bytes(room));
        Ok(Self { decoder, cache, decoding, device, dtype, attention, device_info, weight_bytes, cache_bytes })
    }
}

/// Bytes of the weights once loaded: floats in the compute dtype, packed ones as they are.
fn weight_bytes(checkpoint: &Checkpoint, dtype: DType) -> u64 {
    let bytes = |info: &crate::weights::TensorInfo| match info.candle_dtype() {
        Some(DType::U8) | None => info.bytes() as u64,
        Some(_) => (info.elements() * dtype.size_in_bytes()) as u64,
    };
    checkpoint.tensors().map(|(_, info)| bytes(info)).sum()
}

/// Bytes of the experts of the layer that has most of them: they are laid out anew or stacked, one layer at a time.
fn largest_expert_layer(checkpoint: &Checkpoint, dtype: DType) -> u64 {
    let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, info) in checkpoint.tensors() {
        let packed = info.candle_dtype() == Some(DType::U8);
        let expert = name.split_once(".experts.").map(|(layer, _)| layer);
        if packed || expert.is_some() {
            let bytes = if packed { info.bytes() } else { info.elements() * dtype.size_in_bytes() };
            *layers.entry(expert.unwrap_or(name)).or_default() += bytes as u64;
        }
    }
    layers.into_values().max().unwrap_or(0)
}

/// What a model takes.
struct Need<'l> {
    weight_bytes: u64,
    /// What loading takes beside the weights, before cache and activations do: a layer's experts as stored.
    loading_bytes: u64,
    layers: &'l [LayerSpec],
    /// Tokens in one pass of prefill that may be chosen, the best first.
    chunks: &'l [usize],
    dtype: DType,
    max_context: usize,
    /// Chosen up to this if nobody asks for more.
    usual_context: usize,
}

/// What is made room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    /// Positions.
    context: usize,
    /// Tokens in one pass of prefill.
    chunk: usize,
}

impl Need<'_> {
    fn cache_bytes(&self, room: Room) -> u64 {
        kv_cache::bytes(self.layers, room.context, room.chunk, self.dtype)
    }

    /// Everything, with the activations of one chunk.
    fn bytes(&self, room: Room) -> u64 {
        let running = self.cache_bytes(room) + room.chunk as u64 * WORKSPACE.1;
        self.weight_bytes + WORKSPACE.0 + running.max(self.loading_bytes)
    }

    /// This context with the largest chunk that fits.
    fn fit(&self, context: usize, device: &DeviceInfo) -> Option<Room> {
        let rooms = self.chunks.iter().map(|&chunk| Room { context, chunk: chunk.min(context) });
        let fits = |room: &Room| device.total_bytes == 0 || self.bytes(*room) <= device.free_bytes;
        rooms.into_iter().find(fits)
    }

    /// The context asked for, or the largest up to the default that fits. Where memory is short, prompts are read in
    /// smaller chunks before the context shrinks.
    fn choose(&self, asked: Option<usize>, device: &DeviceInfo) -> Result<Room> {
        let context = match asked {
            Some(0) => return Err(Error::Usage("--context 0 has no room for anything".into()).into()),
            Some(asked) if asked > self.max_context => {
                let limit = self.max_context;
                let problem = format!("--context {asked} is more than the {limit} that this model was made for");
                return Err(Error::Usage(problem).into());
            }
            Some(asked) => asked,
            None => {
                let most = self.max_context.min(self.usual_context).min(DEFAULT_CONTEXT);
                return self.halvings(most).find_map(|context| self.fit(context, device)).ok_or_else(|| {
                    let smallest = self.halvings(most).last().unwrap_or(most);
                    self.out_of_memory(smallest, device).into()
                });
            }
        };
        self.fit(context, device).ok_or_else(|| self.out_of_memory(context, device).into())
    }

    /// `most`, half of it, and so on, down to the smallest context that is chosen for want of memory.
    fn halvings(&self, most: usize) -> impl Iterator<Item = usize> {
        let smallest = SMALLEST_CONTEXT.min(most);
        let next = move |&context: &usize| (context > smallest).then(|| (context / 2).max(smallest));
        std::iter::successors(Some(most), next)
    }

    fn out_of_memory(&self, context: usize, device: &DeviceInfo) -> Error {
        let what = format!("this model with a context of {context} tokens");
        let smallest = self.chunks.last().copied().unwrap_or(context).min(context);
        let (needed_bytes, free_bytes) = (self.bytes(Room { context, chunk: smallest }), device.free_bytes);
        let smaller = self.halvings(context).skip(1);
        let fitting_context = smaller.into_iter().find(|&context| self.fit(context, device).is_some());
        Error::OutOfMemory { what, device: device.name.clone(), needed_bytes, free_bytes, fitting_context }
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

/// generation_config.json's sampling. `do_sample` absent or false means greedy, as in transformers.
fn default_sampling(generation: &Value) -> SamplingParams {
    let greedy = SamplingParams::greedy();
    let number = |name: &str| generation[name].as_f64().map(|value| value as f32);
    let repetition_penalty = number("repetition_penalty").unwrap_or(greedy.repetition_penalty);
    if generation["do_sample"].as_bool() != Some(true) {
        return SamplingParams { repetition_penalty, ..greedy };
    }
    SamplingParams {
        temperature: number("temperature").unwrap_or(1.0),
        top_k: generation["top_k"].as_u64().unwrap_or(0) as usize,
        top_p: number("top_p").unwrap_or(1.0),
        min_p: number("min_p").unwrap_or(0.0),
        repetition_penalty,
        ..greedy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need() -> Need<'static> {
        const FULL: LayerSpec = LayerSpec { kv_heads: 8, head_dim: 64, window: None };
        const SLIDING: LayerSpec = LayerSpec { kv_heads: 8, head_dim: 64, window: Some(128) };
        Need {
            weight_bytes: 10 << 30,
            loading_bytes: 0,
            layers: &[FULL, SLIDING],
            chunks: &[2048, 512],
            dtype: DType::BF16,
            max_context: 131_072,
            usual_context: 131_072,
        }
    }

    fn device(free_bytes: u64) -> DeviceInfo {
        DeviceInfo { name: "a GPU".into(), compute_capability: None, free_bytes, total_bytes: 80 << 30 }
    }

    #[test]
    fn room_shrinks_by_chunk_first_and_by_context_then() {
        let need = need();
        let all = Room { context: DEFAULT_CONTEXT, chunk: 2048 };
        assert_eq!(need.choose(None, &device(80 << 30)).unwrap(), all);
        assert_eq!(need.choose(None, &device(need.bytes(all))).unwrap(), all);
        let small = Room { chunk: 512, ..all };
        assert_eq!(need.choose(None, &device(need.bytes(all) - 1)).unwrap(), small);
        assert_eq!(need.choose(None, &device(need.bytes(small))).unwrap(), small);
        let half = need.choose(None, &device(need.bytes(small) - 1)).unwrap();
        assert_eq!(half, Room { context: DEFAULT_CONTEXT / 2, chunk: 512 });
        assert_eq!(need.choose(Some(100), &device(80 << 30)).unwrap(), Room { context: 100, chunk: 100 });
    }

    #[test]
    fn loading_may_take_more_than_running() {
        let room = Room { context: 100, chunk: 100 };
        let running = need().bytes(room);
        let need = Need { loading_bytes: 5 << 30, ..need() };
        assert_eq!(need.bytes(room), (10 << 30) + WORKSPACE.0 + (5 << 30));
        assert!(running < need.bytes(room));
    }

    #[test]
    fn what_does_not_fit_says_what_would() {
        let need = need();
        let fits = need.bytes(Room { context: 4096, chunk: 512 });
        let error = need.choose(Some(16_384), &device(fits)).unwrap_err();
        assert!(error.to_string().contains("--context 4096"), "{error}");
        let error = need.choose(None, &device(1 << 30)).unwrap_err();
        let Some(Error::OutOfMemory { fitting_context, .. }) = error.downcast_ref() else { panic!("{error}") };
        assert_eq!(*fitting_context, None);
    }
}
