//! The flags of `inferno play`.

use std::num::NonZero;
use std::path::PathBuf;
use std::rc::Rc;

use anyhow::Result;

use crate::chat::ReasoningEffort;
use crate::commands::shared::LoadArgs;
use crate::commands::shared::defaults::ParsedCommandLine;
use crate::commands::shared::sampling::SamplingArgs;
use crate::conversation::{ModelId, ModelSource, Overflow, SettingValues};

/// The flags that cannot be combined with `--url`, because they apply only to a model in this process.
const LOCAL_FLAGS: [&str; 13] = [
    "attention",
    "chunk",
    "context",
    "deterministic",
    "device",
    "dtype",
    "eager",
    "gpu_memory",
    "gpus",
    "quantize",
    "raw",
    "revision",
    "split",
];

/// Chat with a model, or get one answer with --prompt
#[derive(clap::Args)]
pub struct Args {
    /// Name, directory or GGUF file of a model; `demo` is built in [default: choose from a list]
    pub model: Option<String>,
    /// URL of a server with OpenAI's API, such as http://127.0.0.1:8000; the chat then uses a model on this server
    #[arg(long, value_name = "URL", conflicts_with_all = LOCAL_FLAGS)]
    pub url: Option<String>,
    /// API key for the server, or @FILE [default: INFERNO_API_KEY]
    #[arg(long, value_name = "KEY", env = "INFERNO_API_KEY", hide_env = true)]
    pub api_key: Option<String>,
    /// PEM file with the certificates to trust, such as the server's own certificate
    #[arg(long, value_name = "FILE", env = "SSL_CERT_FILE", hide_env = true)]
    pub ca_cert: Option<PathBuf>,
    /// Answer this prompt and exit [default: standard input, unless it is a terminal]
    #[arg(long, short, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Append piped standard input to --prompt; not needed for a redirected file (`< notes.txt`)
    #[arg(long, requires = "prompt")]
    pub stdin: bool,
    /// Continue a saved conversation; without a name, the most recent one
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "", conflicts_with = "raw")]
    pub resume: Option<String>,
    /// System prompt; with --resume, it replaces the saved one
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How much the model thinks before it answers: low, medium or high
    #[arg(long, default_value = "medium", value_name = "EFFORT")]
    pub reasoning: ReasoningEffort,
    /// Hide the model's reasoning
    #[arg(long)]
    pub hide_reasoning: bool,
    /// Show answers as the model wrote them, without formatting Markdown
    #[arg(long)]
    pub plain: bool,
    /// End an answer after this many tokens
    #[arg(long, value_name = "TOKENS")]
    pub max_tokens: Option<NonZero<usize>>,
    /// End an answer at this text; can be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Continue the prompt as plain text, without a chat format
    #[arg(long)]
    pub raw: bool,
    /// Keep generating after the model's end-of-text token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Print one JSON object: text, reasoning, tokens, finish_reason, usage, stats, model, revision, seed, and
    /// tool_calls if the model called a tool
    #[arg(long)]
    pub json: bool,
    /// Print one JSON object per line as the answer streams: start, reasoning, answer, tool_call, end or error
    #[arg(long, conflicts_with = "json")]
    pub jsonl: bool,
    /// When the context is full: stop, or drop-oldest to continue without the oldest messages
    #[arg(long, default_value = "stop", value_name = "WHAT")]
    pub overflow: Overflow,
    /// Give the same answer to the same request whether or not part of it is cached; slower
    #[arg(long, hide_short_help = true)]
    pub deterministic: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub load: LoadArgs,
    /// Where the flag values came from. Set after parsing.
    #[arg(skip)]
    pub origin: ValueOrigin,
}

/// Flag values, grouped by source.
#[derive(Default)]
pub struct ValueOrigin {
    /// Whether the user named the model on the command line.
    pub is_model_typed: bool,
    /// Values from the command line, the environment or a resumed conversation.
    pub requested: SettingValues,
    /// Values from the configuration file. Requested values override them.
    pub configured: SettingValues,
    /// Messages about invalid settings in a resumed conversation.
    pub rejected: Vec<String>,
    /// Parses the command line again, once the model is known. `None` in the result of this second parse.
    pub reparse: Option<Box<Reparse>>,
}

/// Parses the command line again, and applies the configuration file's settings for the model with the given name.
pub type Reparse = dyn Fn(&str) -> Result<Args>;

impl ValueOrigin {
    pub fn from_command_line(line: ParsedCommandLine) -> Self {
        let ParsedCommandLine { is_model_typed, requested, configured, rejected, .. } = line;
        Self { is_model_typed, requested, configured, rejected, reparse: None }
    }
}

/// The model for a conversation or a one-shot answer, and its source.
pub struct Selected {
    pub model: ModelId,
    /// The revision, if the user typed `NAME@REVISION`. Always `None` for a path and for a model of a server.
    pub typed_revision: Option<String>,
    /// Creates the source that loads this model, and any other model to which the user switches later.
    pub source: Box<dyn FnOnce(Box<Reparse>) -> Rc<dyn ModelSource>>,
}
