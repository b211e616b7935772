//! The engine: a snapshot loaded onto a device, generating.

mod bench;
#[cfg(feature = "cuda")]
pub mod executor;
mod generate;
mod gguf;
mod load;
pub mod need;
pub mod sampler;
pub mod sampling;
mod stop;

use std::path::Path;

use anyhow::{Result, bail};
use candle_core::{D, DType, Device, Tensor};

pub use bench::{KernelTime, LaunchCounts, StepBytes};
pub use generate::{Chunk, FinishReason, GenerateOptions, Generation, Summary};
pub use load::{LoadOptions, LoadTimes, ModelInfo};
pub use sampling::SamplingParams;
pub use stop::StopStrings;

use crate::chat::{ChatFormat, Message, RenderOptions, Rendered};
#[cfg(feature = "cuda")]
use crate::device;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::nn::pass::{LogitRows, StepBatch};
use crate::snapshot;
use crate::tokenizer::{ControlTokens, TextStream, Tokenizer};
use generate::Reader;
use sampler::Sampler;

/// A model's words without its weights: tokenizer and chat format.
pub struct Language {
    pub tokenizer: Tokenizer,
    pub chat: Option<ChatFormat>,
}

impl Language {
    /// Needs the tokenizer and config files of a snapshot only, or the metadata of a GGUF file.
    pub fn load(dir: &Path) -> Result<Self> {
        if let Some(file) = snapshot::gguf::find(dir)? {
            return gguf::language(&file);
        }
        let tokenizer = Tokenizer::from_dir(dir)?;
        let chat = ChatFormat::load(dir, &tokenizer)?;
        Ok(Self { tokenizer, chat })
    }

    /// Renders a conversation. Fails for a model without a chat format.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        let Some(chat) = &self.chat else {
            bail!("this model has no chat format, it only continues texts");
        };
        chat.render(&self.tokenizer, messages, options)
    }
}

/// A loaded model.
///
/// ```
/// use inferno::chat::{Message, ReasoningEffort, RenderOptions};
/// use inferno::device::DeviceChoice;
/// use inferno::{Engine, GenerateOptions, LoadOptions, hub};
///
/// # fn main() -> anyhow::Result<()> {
/// let snapshot = hub::Hub::from_env()?.find("demo", None)?;
/// let mut engine = Engine::load(&snapshot.path, &LoadOptions { device: DeviceChoice::Cpu, ..Default::default() })?;
/// let render = RenderOptions {
///     tools: Vec::new(),
///     reasoning_effort: ReasoningEffort::Medium,
///     date: "2026-01-31".into(),
///     add_generation_prompt: true,
/// };
/// let options = GenerateOptions::new(engine.defaults().clone());
/// for chunk in engine.chat(&[Message::user("How do I list my models?")], &render, options)? {
///     print!("{}", chunk?.answer());
/// }
/// # Ok(())
/// # }
/// ```
pub struct Engine {
    language: Language,
    decoder: Decoder,
    cache: KvCache,
    /// The tokens whose keys and values the cache holds.
    cached: Vec<u32>,
    decoding: Decoding,
    device: Device,
    stop_ids: Vec<u32>,
    defaults: SamplingParams,
    info: ModelInfo,
}

/// What runs decode steps.
enum Decoding {
    /// The decoder itself, operation by operation; with the reason why.
    Eager(String),
    #[cfg(feature = "cuda")]
    Graph(Box<executor::Executor>),
}

impl Decoding {
    /// The fastest way there is for a decoder on a cache.
    fn plan(decoder: &Decoder, cache: &KvCache) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if decoder.is_on_gpu() {
            return match executor::Executor::plan(decoder, cache) {
                Ok(Ok(executor)) => Ok(Decoding::Graph(Box::new(executor))),
                Ok(Err(reason)) => Ok(Decoding::Eager(reason)),
                Err(error) if device::is_out_of_memory(&error) => Err(error),
                // A slow answer is better than none; the line under it says that it was slow, and `/stats` why.
                Err(error) => Ok(Decoding::Eager(format!("the graph could not be made: {error:#}"))),
            };
        }
        let _ = (decoder, cache);
        Ok(Decoding::Eager("the model is not on a GPU".into()))
    }
}

/// What reading a prompt came to.
struct Prefilled {
    cached_tokens: usize,
    /// Of the last token, \[1, V\]; none if it was canceled.
    logits: Option<Tensor>,
}

/// Rows of logits computed at once for perplexity: each row has the size of the vocabulary, in f32.
const NLL_ROWS: usize = 256;

impl Engine {
    /// What was loaded, and how.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Sampling as the model's generation_config.json has it; greedy where it says nothing.
    pub fn defaults(&self) -> &SamplingParams {
        &self.defaults
    }

    /// The model's tokenizer and chat format.
    pub fn language(&self) -> &Language {
        &self.language
    }

    /// That of [`language`](Self::language).
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.language.tokenizer
    }

    /// Positions there is room for.
    pub fn context(&self) -> usize {
        self.cache.context()
    }

    /// Positions in use.
    pub fn cached_tokens(&self) -> usize {
        self.cached.len()
    }

    /// Where weights and cache lie.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What runs decode steps: `graph`, a CUDA graph of fused kernels, or `eager`, the decoder operation by operation.
    pub fn executor(&self) -> &'static str {
        match self.decoding {
            Decoding::Eager(_) => "eager",
            #[cfg(feature = "cuda")]
            Decoding::Graph(_) => "graph",
        }
    }

    /// Why decode steps do not run as a graph.
    pub fn why_eager(&self) -> Option<&str> {
        match &self.decoding {
            Decoding::Eager(reason) => Some(reason),
            #[cfg(feature = "cuda")]
            Decoding::Graph(_) => None,
        }
    }

    /// Whether `token` ends a text: the union of what config.json, generation_config.json, the tokenizer and the chat
    /// format name.
    pub fn is_stop(&self, token: u32) -> bool {
        self.stop_ids.contains(&token)
    }

    /// Answers a conversation. What it has in common with the one before, token by token from the start, is still in the
    /// cache and is not read again.
    ///
    /// Fails with [`Error::ContextFull`](crate::error::Error::ContextFull) where it leaves no room for an answer, and for a
    /// model without a chat format or with a template that cannot take these messages.
    pub fn chat(
        &mut self,
        messages: &[Message],
        render: &RenderOptions,
        options: GenerateOptions,
    ) -> Result<Generation<'_>> {
        let rendered = self.language.render(messages, render)?;
        let Some(chat) = &self.language.chat else { bail!("this model has no chat format") };
        let parser = chat.parser(&rendered);
        Generation::start(self, &rendered.ids, Reader::Chat(Box::new(parser)), options)
    }

    /// Continues a text: no template, everything generated is answer. Fails as [`complete_ids`](Self::complete_ids) does.
    pub fn complete(&mut self, text: &str, options: GenerateOptions) -> Result<Generation<'_>> {
        let ids = self.tokenizer().encode(text, ControlTokens::Default)?;
        self.complete_ids(&ids, options)
    }

    /// Continues token ids. Fails with [`Error::ContextFull`](crate::error::Error::ContextFull) where they leave no room for
    /// another one, and if there are none.
    pub fn complete_ids(&mut self, ids: &[u32], options: GenerateOptions) -> Result<Generation<'_>> {
        let stream = TextStream::continuing(ids);
        Generation::start(self, ids, Reader::Raw(stream), options)
    }

    /// Forgets the cached tokens: the next prompt is read from its start.
    pub fn forget(&mut self) {
        self.cached.clear();
        self.cache.reset();
    }

    /// Reads a prompt, from where it parts from what the cache holds.
    fn prefill(&mut self, prompt: &[u32], canceled: &dyn Fn() -> bool) -> Result<Prefilled> {
        // At least the last token is run, for its logits.
        let common = prompt[..prompt.len() - 1].iter().zip(&self.cached).take_while(|(a, b)| a == b).count();
        let cached_tokens = self.cache.truncate(common.min(self.cached.len()))?;
        self.cached.truncate(cached_tokens);
        let mut logits = None;
        let chunks = prompt[cached_tokens..].chunks(self.cache.chunk());
        let last = chunks.len() - 1;
        for (index, chunk) in chunks.enumerate() {
            if canceled() {
                return Ok(Prefilled { cached_tokens, logits: None });
            }
            let of_chunk = self.forward_tensor(chunk, LogitRows::Last)?;
            if index == last {
                logits = Some(of_chunk);
            }
        }
        self.cache.set_checkpoint()?;
        Ok(Prefilled { cached_tokens, logits })
    }

    /// Runs tokens after the cached ones. Returns logits on the host.
    fn forward(&mut self, ids: &[u32], logits: LogitRows) -> Result<Vec<f32>> {
        Ok(self.forward_tensor(ids, logits)?.flatten_all()?.to_vec1()?)
    }

    /// Has the graph take over after the cached tokens, with `token` as its first input. False if there is no graph.
    fn start_steps(&mut self, token: u32) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if let Decoding::Graph(executor) = &mut self.decoding {
            executor.start(self.cache.len(), token, None)?;
            return Ok(true);
        }
        let _ = token;
        Ok(false)
    }

    /// Has the graph take over with the logits \[1, V\] of the last cached token. False if there is no graph.
    fn start_from(&mut self, logits: &Tensor, sampler: &Sampler) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if let Decoding::Graph(executor) = &mut self.decoding {
            executor.start_from(self.cache.len(), logits, sampler.on_device(self.info.vocab_size))?;
            return Ok(true);
        }
        let _ = (logits, sampler);
        Ok(false)
    }

    /// The next token of the graph: that of the step whose input was `input`, or the first, from the logits it started
    /// with. At most `most` more tokens will be asked for, this one included.
    fn next_step(&mut self, input: Option<u32>, most: usize) -> Result<u32> {
        #[cfg(feature = "cuda")]
        if let Decoding::Graph(executor) = &mut self.decoding {
            let steps = self.cache.context() - self.cache.len();
            let room = if input.is_none() { 1 + steps } else { steps };
            let token = match executor.next(room.min(most)) {
                Ok(token) => token,
                Err(error) => {
                    // Queued steps may have written anywhere.
                    self.forget();
                    return Err(error);
                }
            };
            // Steps that are queued beyond have written, or will.
            let beyond = executor.ahead();
            self.cache.advance_written(usize::from(input.is_some()), beyond);
            self.cached.extend(input);
            return Ok(token);
        }
        let _ = (input, most);
        bail!("there is no graph to run")
    }

    fn forward_tensor(&mut self, ids: &[u32], logits: LogitRows) -> Result<Tensor> {
        let batch = StepBatch { ids, tokens: &[ids.len()], logits };
        let logits = self.decoder.forward(&batch, &mut [&mut self.cache])?;
        self.cached.extend(ids);
        Ok(logits)
    }

    /// Logits f32 \[T, V\] of every position of `ids`; fails where they do not fit in the context. Takes twice T × V × 4 bytes on the device.
    pub fn logits(&mut self, ids: &[u32]) -> Result<Tensor> {
        self.forget();
        let rows: Vec<Tensor> = ids
            .chunks(self.cache.chunk())
            .map(|chunk| self.forward_tensor(chunk, LogitRows::All))
            .collect::<Result<_>>()?;
        Ok(Tensor::cat(&rows, 0)?)
    }

    /// Negative log-likelihood (natural log) of each token after the first, given those before it. What is longer than
    /// the context is read in windows that overlap by half, so that each token is judged with at least half a context
    /// behind it.
    pub fn negative_log_likelihood(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let vocab_size = self.info.vocab_size;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            bail!("token id {id} is outside the model's vocabulary of {vocab_size}");
        }
        if ids.len() < 2 {
            bail!("a text of {} tokens has no token to judge: two are needed", ids.len());
        }
        let window = self.context();
        if window < 2 {
            bail!("a context of {window} tokens has no token to judge: two are needed");
        }
        let mut losses = Vec::with_capacity(ids.len() - 1);
        let mut start = 0;
        while losses.len() + 1 < ids.len() {
            let end = (start + window).min(ids.len());
            let of_window = self.window_nll(&ids[start..end])?;
            // The window judges tokens start+1 ..; those already judged had more behind them there.
            let known = losses.len() - start;
            losses.extend(&of_window[known..]);
            start = end - (window / 2).min(end);
        }
        Ok(losses)
    }

    fn window_nll(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        self.forget();
        let mut losses = Vec::with_capacity(ids.len() - 1);
        for (index, inputs) in ids[..ids.len() - 1].chunks(NLL_ROWS.min(self.cache.chunk())).enumerate() {
            let first = index * NLL_ROWS.min(self.cache.chunk());
            let targets = &ids[first + 1..first + 1 + inputs.len()];
            let logits = self.forward_tensor(inputs, LogitRows::All)?;
            let targets = Tensor::new(targets, &self.device)?.unsqueeze(1)?;
            let chosen = logits.gather(&targets, D::Minus1)?.squeeze(1)?;
            let nll = (logits.log_sum_exp(D::Minus1)? - chosen)?;
            losses.extend(nll.to_dtype(DType::F32)?.to_vec1::<f32>()?);
        }
        self.forget();
        Ok(losses)
    }
}
