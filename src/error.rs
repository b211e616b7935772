//! The failures that a caller can act on. Each has an exit code and names the next command to type.
//!
//! Every other failure is an `anyhow::Error` with context that names the file, tensor or layer.

use std::path::PathBuf;

/// A failure that a caller can act on. `downcast_ref` finds it in an `anyhow::Error`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use an NVIDIA GPU: {reason}\n  {hint}")]
    NoGpu { reason: String, hint: String },

    #[error("model '{model}' is not on this machine\n  {hint}")]
    ModelNotFound { model: String, hint: String },

    #[error(
        "there is no repository '{repo}' at {endpoint}, or it is private\n  check the name; for a private repository set HF_TOKEN"
    )]
    RepositoryNotFound { repo: String, endpoint: String },

    #[error("repository '{repo}' has no revision '{revision}'")]
    RevisionNotFound { repo: String, revision: String },

    #[error(
        "access to '{repo}' is restricted\n  accept its license at {endpoint}/{repo}, then set HF_TOKEN to a token that may read it"
    )]
    Gated { repo: String, endpoint: String },

    #[error("offline: {what}\n  unset HF_HUB_OFFLINE to allow network access")]
    Offline { what: String },

    #[error("cannot fetch from {endpoint}: {cause}\n  check the network, or set HF_ENDPOINT to a mirror")]
    Network {
        endpoint: String,
        cause: String,
        /// True if the same request may succeed later.
        is_temporary: bool,
    },

    #[error(
        "not enough disk space at {path}: {:.1} MB needed, {:.1} MB free\n  free some space, or set INFERNO_CACHE to another disk",
        *needed_bytes as f64 / 1e6,
        *free_bytes as f64 / 1e6
    )]
    DiskFull { path: PathBuf, needed_bytes: u64, free_bytes: u64 },

    /// A download or a file is not what the hub says it is.
    #[error("{what}\n  {hint}")]
    Verification { what: String, hint: String },

    #[error("architecture '{found}' is not supported\n  supported: {supported}")]
    UnsupportedArchitecture { found: String, supported: String },

    #[error(
        "{what} is not supported\n  choose a repository that is not quantized, a GGUF file, or 8-bit compressed-tensors weights"
    )]
    UnsupportedQuantization { what: String },

    #[error(
        "{what} needs {:.1} GB of memory on {device}, and {:.1} GB are free\n  {}",
        *needed_bytes as f64 / 1e9,
        *free_bytes as f64 / 1e9,
        match fitting_context {
            Some(context) => format!("try --context {context}, or free memory on the device"),
            None => "no context fits: free memory on the device, or choose a smaller model".to_string(),
        }
    )]
    OutOfMemory {
        what: String,
        device: String,
        needed_bytes: u64,
        free_bytes: u64,
        /// The longest context that would fit, in tokens.
        fitting_context: Option<usize>,
    },

    /// The model is on this machine, but not where inferno may change it.
    #[error("{0}")]
    NotOurs(String),

    /// Arguments that cannot work on any machine.
    #[error("{0}")]
    Usage(String),

    #[error(
        "the prompt has {prompt_tokens} tokens, and the context holds {context_tokens}\n  {}",
        if context_tokens < limit_tokens {
            format!("shorten it, or raise --context (this model allows {limit_tokens})")
        } else {
            "shorten it: this model allows no more".to_string()
        }
    )]
    ContextFull { prompt_tokens: usize, context_tokens: usize, limit_tokens: usize },
}

impl Error {
    /// Returns [`Error::Usage`] as an `anyhow::Error`.
    pub fn usage(problem: impl Into<String>) -> anyhow::Error {
        Self::Usage(problem.into()).into()
    }

    /// Returns [`Error::NoGpu`] with a hint: `next`, and how to run the demo model without a GPU.
    pub fn no_gpu(reason: impl Into<String>, next: &str) -> Self {
        let hint = format!("{next}\n  or run the demo model without a GPU: inferno play demo --device cpu");
        Self::NoGpu { reason: reason.into(), hint }
    }

    /// Returns the exit code of the process. Other failures exit with 1, clap's usage errors with 2, Ctrl-C with 130.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::ModelNotFound { .. } | Error::RepositoryNotFound { .. } | Error::RevisionNotFound { .. } => 3,
            Error::NotOurs(_) => 3,
            Error::Gated { .. } => 4,
            Error::Offline { .. } | Error::Network { .. } => 5,
            Error::Verification { .. } => 6,
            Error::NoGpu { .. } => 7,
            Error::OutOfMemory { .. } => 8,
            Error::UnsupportedArchitecture { .. } | Error::UnsupportedQuantization { .. } => 9,
            Error::ContextFull { .. } => 10,
            Error::DiskFull { .. } => 11,
        }
    }
}
