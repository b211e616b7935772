//! Errors that the user can act on. Each error has an exit code, and most messages suggest what to do next.
//!
//! All other errors are plain `anyhow::Error`s.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

use crate::text::{counted, escaped, quote};

/// An error that the user can act on. Callers extract it from an `anyhow::Error` with `downcast_ref`.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use an NVIDIA GPU: {reason}\n  {hint}")]
    NoGpu { reason: String, hint: String },

    /// One of several GPUs that run a model together has failed or does not answer. The message names the failed GPU.
    #[error("{0}")]
    GpuFailed(String),

    /// `hint` says why the model was not found, and what to do.
    #[error("cannot find model '{}': {hint}", escaped(model))]
    ModelNotFound { model: String, hint: String },

    #[error(
        "cannot find repository '{}' at {endpoint}: it does not exist or is private\n  check the name; for a private repository, set HF_TOKEN",
        escaped(repo)
    )]
    RepositoryNotFound { repo: String, endpoint: String },

    #[error(
        "cannot find revision '{}': repository '{}' has no such branch, tag or commit\n  check the name of the revision",
        escaped(revision),
        escaped(repo)
    )]
    RevisionNotFound { repo: String, revision: String },

    /// The user named a revision of the demo or of local files, which have no revisions.
    #[error("cannot find revision '{}' of {}: {why}\n  omit the revision", escaped(revision), escaped(model))]
    NoRevisions { model: String, revision: String, why: &'static str },

    #[error(
        "cannot fetch '{repo}': access is restricted\n  accept its license at {endpoint}/{repo}, then set HF_TOKEN to a token that has access"
    )]
    Gated { repo: String, endpoint: String },

    #[error("{what}\n  unset HF_HUB_OFFLINE to allow network access")]
    Offline { what: String },

    #[error("cannot fetch from {endpoint}: {cause}\n  check the network, or set HF_ENDPOINT to a mirror")]
    Network {
        endpoint: String,
        cause: String,
        /// Whether a retry of the request may succeed.
        is_temporary: bool,
    },

    #[error("cannot write to {path}: {reason}\n  free some space, or set INFERNO_CACHE to a directory on another disk")]
    DiskFull { path: PathBuf, reason: String },

    /// Verification failed: a file or a commit has the wrong hash, a receipt is invalid or belongs to another record,
    /// a file is missing, or a file keeps changing on the server.
    /// Also the error if a model to repair is in the shared Hugging Face cache, which inferno does not change.
    #[error("{what}\n  {hint}")]
    Verification { what: String, hint: String },

    #[error("cannot load the model: architecture {} is not supported\n  supported: {supported}", quote(found))]
    UnsupportedArchitecture { found: String, supported: String },

    #[error(
        "cannot load the model: {what} is not supported\n  use unquantized weights, a GGUF file, or 8-bit compressed-tensors weights"
    )]
    UnsupportedQuantization { what: String },

    #[error(
        "cannot load {what}: it needs {:.1} GB of memory on {device}, but {}\n  {}",
        *needed_bytes as f64 / 1e9,
        match limit_bytes {
            Some(limit) => format!(
                "--gpu-memory allows only {:.1} GB of the {:.1} GB that is free",
                *limit as f64 / 1e9,
                *free_bytes as f64 / 1e9
            ),
            None => format!("only {:.1} GB is free", *free_bytes as f64 / 1e9),
        },
        out_of_memory_hint(*needed_bytes, *free_bytes, *limit_bytes, *fitting_context, *fitting_gpus)
    )]
    OutOfMemory {
        what: String,
        device: String,
        needed_bytes: u64,
        free_bytes: u64,
        /// The limit that `--gpu-memory` sets, in bytes, if it is less than both `needed_bytes` and `free_bytes`.
        limit_bytes: Option<u64>,
        /// A shorter context, in tokens, that fits according to the memory plan. `None` if there is none.
        /// If the plan fits, but the device ran out of memory anyway, this is half of the planned context.
        fitting_context: Option<usize>,
        /// The smallest number of equal GPUs (2, 4 or 8) that together can hold the model and its context.
        /// `None` on a CPU, on several GPUs, or if no such number is enough.
        fitting_gpus: Option<usize>,
    },

    /// The command changes only inferno's own cache, but the model is in the shared Hugging Face cache.
    #[error("{0}")]
    NotInOwnCache(String),

    /// The command line, an environment variable or the configuration file is invalid, or requests something that
    /// cannot be done.
    #[error("{0}")]
    Usage(String),

    /// The prompt or an option of a request is invalid, or the model cannot use the prompt.
    /// For example, the chat template rejects the conversation.
    #[error("{0}")]
    InvalidRequest(String),

    /// The prompt leaves no room for an answer: it has at least as many tokens as the context holds.
    #[error(
        "cannot use the prompt: it has {}, but the context holds only {context_tokens} for the prompt and the answer\n  {}",
        counted(*prompt_tokens, "token"),
        if context_tokens < limit_tokens {
            format!("shorten the prompt, or raise --context (this model allows up to {limit_tokens})")
        } else {
            "shorten the prompt: this model does not allow a longer context".to_string()
        }
    )]
    ContextFull { prompt_tokens: usize, context_tokens: usize, limit_tokens: usize },

    /// The engine is draining: it finishes the requests that it has accepted, and rejects new ones.
    /// Also the error of an answer that is unfinished when the drain timeout of a server ends.
    #[error("cannot accept a request: the engine is draining\n  load the model again")]
    Draining,

    /// The request did not start within its [`max_wait`](crate::GenerateOptions::max_wait).
    #[error("cannot answer: the request waited longer than its limit\n  try again later, or raise the limit")]
    WaitedTooLong,

    /// The output constraint of a request is invalid, not supported or too expensive.
    /// `name` is the part of the request at fault.
    #[error("cannot constrain the answer: {name}: {reason}")]
    InvalidConstraint { name: String, reason: String },

    /// The request asks for a deterministic answer, but the engine's chunk size or attention kernel does not allow one.
    #[error(
        "cannot answer deterministically: {reason}\n  load the model with --chunk and --context of 64 or more; if it uses the attention kernel 'flash', add --attention portable"
    )]
    NotDeterministic { reason: String },

    /// The grammars of a request were not compiled in time, because the machine is busy with other work.
    /// On systems other than Linux, an expensive grammar can also be the cause.
    #[error("cannot compile the grammars of the request within {wait_s} s: the machine is busy\n  try again")]
    CompilerBusy { wait_s: f64 },

    /// The text of the prompt is far too long for the context. The engine did not tokenize the text.
    #[error(
        "cannot use the prompt: it has {:.1} MB of text, but the context holds only {}\n  shorten the prompt",
        *prompt_bytes as f64 / 1e6,
        counted(*context_tokens, "token")
    )]
    PromptTooLong { prompt_bytes: usize, context_tokens: usize },

    /// A request of `play --url` or `replay` got no response from the server.
    #[error("cannot reach a server at {url}: {cause}\n  check the URL, and check that the server is running")]
    ServerUnreachable { url: String, cause: String },

    /// The response to a request of `play --url` or `replay` broke off, took too long, or was too large.
    #[error("cannot read the response of the server at {url}: {cause}")]
    ResponseBroken { url: String, cause: String },

    /// The server responded to `play --url` or `replay` with something other than JSON.
    #[error(
        "cannot use the server at {url}: it responded with {} instead of JSON\n  check the URL; the API of most servers ends in /v1",
        if body.trim().is_empty() { "an empty body".to_string() } else { quote(body.trim()) }
    )]
    ServerNotJson { url: String, body: String },

    #[error("cannot use the server at {url}: {message}\n  set INFERNO_API_KEY or --api-key to a valid API key")]
    ServerAccess { url: String, message: String },

    #[error("cannot use the server at {url}: {message}\n  check the URL; the API of most servers ends in /v1")]
    ServerRoute { url: String, message: String },

    #[error("cannot use model '{}': the server at {url} does not serve it\n  {hint}", escaped(model))]
    ModelNotServed { model: String, url: String, hint: String },

    /// The server refused a conversation that does not fit in the model's context.
    #[error("cannot answer: {message}\n  shorten the prompt")]
    ServerContextFull { message: String },
}

impl Error {
    /// Returns [`Error::Usage`] as an `anyhow::Error`.
    pub fn usage(problem: impl Into<String>) -> anyhow::Error {
        Self::Usage(problem.into()).into()
    }

    /// Returns [`Error::InvalidRequest`] as an `anyhow::Error`.
    pub fn invalid_request(problem: impl Into<String>) -> anyhow::Error {
        Self::InvalidRequest(problem.into()).into()
    }

    /// Returns [`Error::NoGpu`]. Its hint is `next`, followed by the command that runs the demo without a GPU.
    pub fn no_gpu(reason: impl Into<String>, next: &str) -> Self {
        let hint = format!("{next}\n  or run the demo model without a GPU: inferno play demo --device cpu");
        Self::NoGpu { reason: reason.into(), hint }
    }

    /// Returns the exit code of a process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::InvalidRequest(_) | Error::Draining | Error::WaitedTooLong | Error::CompilerBusy { .. } => 1,
            Error::Usage(_) | Error::InvalidConstraint { .. } | Error::NotDeterministic { .. } => 2,
            Error::ModelNotFound { .. } | Error::RepositoryNotFound { .. } | Error::RevisionNotFound { .. } => 3,
            Error::NotInOwnCache(_) | Error::NoRevisions { .. } => 3,
            Error::ServerRoute { .. } | Error::ModelNotServed { .. } => 3,
            Error::Gated { .. } | Error::ServerAccess { .. } => 4,
            Error::Offline { .. } | Error::Network { .. } => 5,
            Error::ServerUnreachable { .. } | Error::ResponseBroken { .. } | Error::ServerNotJson { .. } => 5,
            Error::Verification { .. } => 6,
            Error::NoGpu { .. } | Error::GpuFailed(_) => 7,
            Error::OutOfMemory { .. } => 8,
            Error::UnsupportedArchitecture { .. } | Error::UnsupportedQuantization { .. } => 9,
            Error::ContextFull { .. } | Error::PromptTooLong { .. } | Error::ServerContextFull { .. } => 10,
            Error::DiskFull { .. } => DISK_FULL,
        }
    }
}

/// Returns the hint of [`Error::OutOfMemory`].
fn out_of_memory_hint(
    needed_bytes: u64,
    free_bytes: u64,
    limit_bytes: Option<u64>,
    fitting_context: Option<usize>,
    fitting_gpus: Option<usize>,
) -> String {
    let more_memory = match limit_bytes {
        Some(_) if needed_bytes <= free_bytes => "raise --gpu-memory",
        Some(_) => "free memory on the device and raise --gpu-memory",
        None => "free memory on the device",
    };
    let more_gpus = fitting_gpus.map(|gpus| format!("--gpus {gpus} if you have {gpus} such GPUs"));
    match (fitting_context, more_gpus) {
        (Some(context), None) => format!("try --context {context}, or {more_memory}"),
        (Some(context), Some(gpus)) if limit_bytes.is_some() => {
            format!("try --context {context}, or {more_memory}, or use {gpus}")
        }
        (Some(context), Some(gpus)) => format!("try --context {context}, or {gpus}"),
        (None, Some(gpus)) if limit_bytes.is_some() => {
            format!("no context fits: {more_memory}, or try {gpus}")
        }
        (None, Some(gpus)) => format!("no context fits: try {gpus}"),
        (None, None) => format!("no context fits: {more_memory}, or choose a smaller model"),
    }
}

/// The exit code if a write failed because of a full disk, a quota or a file size limit,
/// or if a download needs more space than is free.
const DISK_FULL: u8 = 11;

/// Returns the exit code of a process that ends with `error`: the code of its [`Error`] if it contains one,
/// `DISK_FULL` if one of its causes is a full disk (see [`is_disk_full`]), otherwise 1.
///
/// Other exit codes are set elsewhere: for example, clap exits with 2 if it cannot parse the arguments,
/// and an interrupted command exits with 130.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<Error>() {
        return error.exit_code();
    }
    let is_disk_full = error.chain().filter_map(|cause| cause.downcast_ref()).any(is_disk_full);
    if is_disk_full { DISK_FULL } else { 1 }
}

/// Returns whether a write failed because of a full disk, a quota or a file size limit (`ulimit -f`).
pub fn is_disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}
