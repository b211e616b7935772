//! Records of requests and answers. A record contains everything needed to recompute its answers.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::request::GenerateOptions;
use crate::engine::constraint::{ChatPrompt, Constraint};
use crate::engine::loading::ModelInfo;
use crate::engine::sampling::SamplingParams;

/// The version of the record format. Records of other versions cannot be read.
const VERSION: u32 = 1;

/// The version and the commit of this build.
const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("INFERNO_COMMIT"), ")");

/// A record of all answers to one client request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The request id that the server assigned.
    pub id: String,
    /// The time when the answers ended, in RFC 3339 format. Empty in older records.
    #[serde(default)]
    pub created: String,
    /// The name of the model.
    pub model: String,
    /// The commit of the model, or a hash of the demo's files. `None` for a model loaded from a path.
    pub revision: Option<String>,
    pub engine: EngineRecord,
    /// One entry for each prompt.
    pub requests: Vec<RecordedRequest>,
    /// The error that ended the request. `None` if the request succeeded.
    pub error: Option<String>,
}

/// The engine settings that the tokens of an answer can depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineRecord {
    pub build: String,
    pub device: String,
    pub dtype: String,
    pub quantization: Option<String>,
    pub attention: String,
    pub executor: String,
    pub context: usize,
    pub chunk: usize,
    pub deterministic: bool,
}

/// A prompt with its options and its answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RecordedRequest {
    pub request: RequestRecord,
    pub answers: Vec<RecordedAnswer>,
}

/// A prompt and all options that affect the tokens of its answers. Answer i uses the seed plus i.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RequestRecord {
    pub prompt: Vec<u32>,
    /// The rendered conversation, if the answer has a constraint.
    pub chat: Option<ChatPrompt>,
    pub sampling: SamplingParams,
    pub stop_token_ids: Vec<u32>,
    pub min_tokens: usize,
    pub logit_bias: BTreeMap<u32, f32>,
    pub logprobs: Option<usize>,
    pub constraint: Option<Constraint>,
    pub ignore_eos: bool,
    pub deterministic: bool,
}

/// The part of an answer that the client received.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RecordedAnswer {
    pub tokens: Vec<u32>,
    /// The log probability of each token, if the request asked for log probabilities.
    pub logprobs: Vec<f32>,
    /// How the answer ended: a finish reason, `canceled` or `error`.
    pub finish: String,
    pub cached_tokens: usize,
    /// Seconds to the first token.
    pub ttft_s: f64,
}

impl Record {
    /// Creates a record without requests.
    pub fn new(id: String, model: String, revision: Option<String>, info: &ModelInfo) -> Self {
        let (created, engine) = (jiff::Timestamp::now().to_string(), EngineRecord::new(info));
        Self { version: VERSION, id, created, model, revision, engine, requests: Vec::new(), error: None }
    }

    /// Fails if this build cannot read the version of the record.
    pub fn check_version(&self) -> Result<()> {
        match self.version {
            VERSION => Ok(()),
            other => bail!("the record has version {other}, but this build reads version {VERSION}"),
        }
    }
}

impl EngineRecord {
    pub fn new(info: &ModelInfo) -> Self {
        Self {
            build: BUILD.to_string(),
            device: info.device.name.clone(),
            dtype: format!("{:?}", info.dtype),
            quantization: info.quantization.clone(),
            attention: info.attention.to_string(),
            executor: info.executor.to_string(),
            context: info.context,
            chunk: info.chunk,
            deterministic: info.is_deterministic,
        }
    }

    /// Describes each setting that differs from `now` and can affect the tokens.
    pub fn differences(&self, now: &Self) -> Vec<String> {
        let none = || "none".to_string();
        let settings = [
            ("build", self.build.clone(), now.build.clone()),
            ("device", self.device.clone(), now.device.clone()),
            ("dtype", self.dtype.clone(), now.dtype.clone()),
            (
                "quantization",
                self.quantization.clone().unwrap_or_else(none),
                now.quantization.clone().unwrap_or_else(none),
            ),
            ("attention", self.attention.clone(), now.attention.clone()),
            ("executor", self.executor.clone(), now.executor.clone()),
            ("chunk", self.chunk.to_string(), now.chunk.to_string()),
            ("deterministic", self.deterministic.to_string(), now.deterministic.to_string()),
        ];
        let differ = settings.into_iter().filter(|(_, then, now)| then != now);
        differ.map(|(name, then, now)| format!("{name}: {then} in the record, {now} now")).collect()
    }
}

impl RequestRecord {
    /// Creates the record of a request. `options` must still contain the request's constraint.
    pub fn new(prompt: &[u32], chat: Option<&ChatPrompt>, options: &GenerateOptions) -> Self {
        Self {
            prompt: prompt.to_vec(),
            chat: chat.filter(|_| options.constraint.is_some()).cloned(),
            sampling: options.sampling.clone(),
            stop_token_ids: options.stop_token_ids.clone(),
            min_tokens: options.min_tokens,
            logit_bias: options.logit_bias.clone(),
            logprobs: options.logprobs,
            constraint: options.constraint.clone(),
            ignore_eos: options.ignore_eos,
            deterministic: options.deterministic,
        }
    }

    /// Returns the approximate size in memory, in bytes.
    pub fn bytes(&self) -> usize {
        let constraint = self.constraint.as_ref().and_then(|constraint| serde_json::to_string(constraint).ok());
        // In memory, a JSON value takes several times the size of its text.
        let constraint = constraint.map_or(0, |text| 8 * text.len());
        let chat = self.chat.as_ref().map_or(0, |chat| chat.text.len());
        size_of::<Self>() + 4 * self.prompt.len() + chat + constraint
    }
}
