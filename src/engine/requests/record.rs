//! Records of requests and answers. With a record and the model, the answers can be recomputed.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::request::GenerateOptions;
use crate::engine::constraint::{ChatPrompt, Constraint};
use crate::engine::loading::ModelInfo;
use crate::engine::sampling::SamplingParams;

/// The version of the record format. This build cannot read records of other versions.
const VERSION: u32 = 1;

/// The version and the commit of this build.
const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("INFERNO_COMMIT"), ")");

/// The estimated overhead of a memory allocation, in bytes.
const ALLOCATION_BYTES: usize = 16;

/// A record of all answers to one client request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GenerationRecord {
    version: u32,
    /// The request id: the client's `x-request-id`, or an id that the server assigned.
    pub id: String,
    /// The time when the record was created, in RFC 3339 format. Empty in records of older builds.
    #[serde(default)]
    pub created: String,
    pub model: String,
    /// The commit of the model, or a hash of the demo model's files. `None` if the model was loaded from a path.
    pub revision: Option<String>,
    pub engine: EngineRecord,
    /// The prompts of the client request, each with its answers.
    pub requests: Vec<RecordedRequest>,
    /// The message of the error that ended the request. `None` if the request succeeded or was canceled.
    pub error: Option<String>,
}

/// The build, the device and the engine settings that can affect the tokens of an answer.
/// The number of ranks and the split can affect the tokens too, but are not recorded.
/// With several devices, `device` is the one that had the least free memory before the weights were loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineRecord {
    pub build: String,
    pub device: String,
    pub dtype: String,
    pub quantization: Option<String>,
    /// The [record name](crate::kernels::attention::AttentionBackend::record_name) of the attention kernel.
    pub attention: String,
    /// The [`ExecutionMode`](crate::runner::ExecutionMode): `graph` or `eager`.
    pub executor: String,
    pub context: usize,
    pub chunk: usize,
    pub deterministic: bool,
}

/// A request of the engine, and its answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RecordedRequest {
    pub request: RequestRecord,
    pub answers: Vec<RecordedAnswer>,
}

/// A prompt, and the options that affect the tokens of its answers.
/// Answer i, counted from 0, uses the recorded seed plus i.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RequestRecord {
    pub prompt: Vec<u32>,
    /// The rendered conversation, if the prompt is a conversation and the request has a constraint.
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

/// An answer, or the part of it that the server had received from the engine when the request was canceled or failed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RecordedAnswer {
    pub tokens: Vec<u32>,
    /// The log probability of each token. Empty if the request did not ask for log probabilities.
    pub logprobs: Vec<f32>,
    /// How the answer ended, such as `stop`, `canceled` or `error`.
    pub finish: String,
    pub cached_tokens: usize,
    /// Seconds from submission to the first token. 0 if no token was generated.
    pub ttft_s: f64,
}

impl GenerationRecord {
    /// Creates a record without requests, dated now.
    pub fn new(id: String, model: String, revision: Option<String>, info: &ModelInfo) -> Self {
        let (created, engine) = (jiff::Timestamp::now().to_string(), EngineRecord::new(info));
        Self { version: VERSION, id, created, model, revision, engine, requests: Vec::new(), error: None }
    }

    /// Returns the approximate size of the record in memory, in bytes.
    pub fn bytes(&self) -> usize {
        let texts =
            [Some(&self.id), Some(&self.created), Some(&self.model), self.revision.as_ref(), self.error.as_ref()];
        let texts = texts.into_iter().flatten().map(|text| ALLOCATION_BYTES + text.capacity()).sum::<usize>();
        let requests = self.requests.iter().map(RecordedRequest::heap_bytes).sum::<usize>();
        let entries = ALLOCATION_BYTES + self.requests.capacity() * size_of::<RecordedRequest>();
        size_of::<Self>() + texts + self.engine.heap_bytes() + entries + requests
    }

    /// Returns an error if this build cannot read the record's version.
    pub fn check_version(&self) -> Result<()> {
        match self.version {
            VERSION => Ok(()),
            other => bail!("cannot read the record: it has version {other}, but this build reads version {VERSION}"),
        }
    }
}

impl RecordedRequest {
    /// Returns the approximate size of the heap allocations for the request and its answers, in bytes.
    fn heap_bytes(&self) -> usize {
        let of_answer = |answer: &RecordedAnswer| {
            let (tokens, logprobs) = (4 * answer.tokens.capacity(), 4 * answer.logprobs.capacity());
            3 * ALLOCATION_BYTES + tokens + logprobs + answer.finish.capacity()
        };
        let answers = self.answers.iter().map(of_answer).sum::<usize>();
        self.request.heap_bytes() + ALLOCATION_BYTES + self.answers.capacity() * size_of::<RecordedAnswer>() + answers
    }
}

impl EngineRecord {
    /// Describes an engine and this build.
    pub fn new(info: &ModelInfo) -> Self {
        Self {
            build: BUILD.to_string(),
            device: info.device.name.clone(),
            dtype: format!("{:?}", info.dtype),
            quantization: info.quantization.clone(),
            attention: info.attention.record_name().to_string(),
            executor: info.execution_mode.to_string(),
            context: info.context,
            chunk: info.chunk,
            deterministic: info.is_deterministic,
        }
    }

    fn heap_bytes(&self) -> usize {
        let Self { build, device, dtype, quantization, attention, executor, .. } = self;
        let texts = [Some(build), Some(device), Some(dtype), quantization.as_ref(), Some(attention), Some(executor)];
        texts.into_iter().flatten().map(|text| ALLOCATION_BYTES + text.capacity()).sum()
    }

    /// Describes each recorded setting that differs from `now`.
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
            ("context", self.context.to_string(), now.context.to_string()),
            ("chunk", self.chunk.to_string(), now.chunk.to_string()),
            ("deterministic", self.deterministic.to_string(), now.deterministic.to_string()),
        ];
        let differ = settings.into_iter().filter(|(_, then, now)| then != now);
        differ.map(|(name, then, now)| format!("{name}: {then} in the record, {now} now")).collect()
    }
}

impl RequestRecord {
    /// Creates the record of a request. Call this function before `prepare_constraint`, which takes the constraint out
    /// of `options`.
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

    /// Returns the approximate size of the record's heap allocations, in bytes.
    fn heap_bytes(&self) -> usize {
        let constraint = self.constraint.as_ref().and_then(|constraint| serde_json::to_string(constraint).ok());
        // A parsed JSON value takes several times the memory of its text. The factor 8 is an estimate.
        let constraint = constraint.map_or(0, |text| 8 * text.len());
        let chat = self.chat.as_ref().map_or(0, |chat| chat.text.len());
        let stop_and_bias = 4 * self.stop_token_ids.capacity() + 16 * self.logit_bias.len();
        3 * ALLOCATION_BYTES + 4 * self.prompt.capacity() + stop_and_bias + chat + constraint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> EngineRecord {
        EngineRecord {
            build: BUILD.into(),
            device: "d".repeat(100),
            dtype: String::new(),
            quantization: None,
            attention: String::new(),
            executor: String::new(),
            context: 1000,
            chunk: 64,
            deterministic: false,
        }
    }

    #[test]
    fn settings_that_differ_are_described() {
        assert!(engine().differences(&engine()).is_empty());
        let now = EngineRecord { context: 2000, ..engine() };
        assert_eq!(engine().differences(&now), ["context: 1000 in the record, 2000 now"]);
        let now = EngineRecord { quantization: Some("q8_0".into()), deterministic: true, ..engine() };
        let expected = ["quantization: none in the record, q8_0 now", "deterministic: false in the record, true now"];
        assert_eq!(engine().differences(&now), expected);
    }

    /// The estimate must count more than the tokens, which are only a small part of a short request's record.
    #[test]
    fn the_size_of_a_record_includes_all_its_parts() {
        let request = RequestRecord::new(&[1, 2, 3], None, &GenerateOptions::new(SamplingParams::greedy()));
        let answer = RecordedAnswer { tokens: vec![7; 1000], logprobs: vec![0.0; 500], ..RecordedAnswer::default() };
        let with = |answers: Vec<RecordedAnswer>| GenerationRecord {
            version: VERSION,
            id: "x".repeat(100),
            created: String::new(),
            model: "m".repeat(100),
            revision: None,
            engine: engine(),
            requests: vec![RecordedRequest { request: request.clone(), answers }],
            error: None,
        };
        let (empty, full) = (with(Vec::new()).bytes(), with(vec![answer]).bytes());
        assert!(empty >= size_of::<GenerationRecord>() + size_of::<RecordedRequest>() + 312, "{empty}");
        assert!(full - empty >= 6000 + size_of::<RecordedAnswer>(), "{full} and {empty}");
    }
}
