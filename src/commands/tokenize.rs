//! `inferno tokenize`: prints the tokens of a text or a conversation.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;

use crate::chat::{Message, ReasoningEffort, RenderOptions, today};
use crate::files;
use crate::hub::Hub;
use crate::sandbox;
use crate::text::{escaped_json, library_error};
use crate::tokenizer::ControlTokens;

/// Show the tokens of a text or a conversation
#[derive(clap::Args)]
pub struct Args {
    /// Name, directory or GGUF file of a model; its safetensors weights are not needed
    model: String,
    /// Text to tokenize [default: standard input]
    text: Option<String>,
    /// Read the text from a file
    #[arg(long, value_name = "PATH", conflicts_with = "text")]
    file: Option<PathBuf>,
    /// Read a conversation: a JSON array of OpenAI-style messages, or an object with `messages` and optional `tools`
    #[arg(long, value_name = "PATH", conflicts_with_all = ["text", "file"])]
    chat: Option<PathBuf>,
    /// Leave out the generation prompt, which starts the assistant's turn
    #[arg(long, requires = "chat")]
    no_generation_prompt: bool,
    /// Reasoning effort in the prompt: low, medium or high
    #[arg(long, default_value = "medium", requires = "chat", value_name = "EFFORT")]
    reasoning: ReasoningEffort,
    /// Current date in the prompt, YYYY-MM-DD [default: today]
    #[arg(long, requires = "chat", value_name = "DATE")]
    date: Option<String>,
    /// Branch, tag or commit of the model
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Print JSON with the token ids, the token pieces and the rendered text
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let snapshot = Hub::from_env()?.find_tokenizer(&args.model, args.revision.as_deref())?;
    let language = sandbox::load_language(&snapshot.path)?;
    let (ids, rendered) = match &args.chat {
        Some(path) => {
            let (messages, tools) = read_conversation(path)?;
            let options = RenderOptions {
                tools,
                reasoning_effort: args.reasoning,
                date: args.date.clone().unwrap_or_else(today),
                add_generation_prompt: !args.no_generation_prompt,
                template_variables: serde_json::Map::new(),
            };
            let rendered = language.render(&messages, &options)?;
            (rendered.ids, rendered.text)
        }
        None => {
            let text = read_text(&args)?;
            (language.tokenizer.encode(&text, ControlTokens::Default)?, text)
        }
    };
    let pieces: Vec<String> =
        ids.iter().map(|&id| language.tokenizer.token(id).unwrap_or_default().to_string()).collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        let json = serde_json::json!({ "ids": ids, "pieces": pieces, "rendered": rendered });
        writeln!(out, "{}", escaped_json(&json.to_string()))?;
    } else {
        for (id, piece) in ids.iter().zip(&pieces) {
            writeln!(out, "{id:>8}  {}", crate::text::printable(piece))?;
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn read_text(args: &Args) -> Result<String> {
    if let Some(text) = &args.text {
        return Ok(text.clone());
    }
    if let Some(path) = &args.file {
        return files::read_input_text(path, files::MAX_TEXT_BYTES);
    }
    files::read_stdin(files::MAX_TEXT_BYTES)
}

fn read_conversation(path: &Path) -> Result<(Vec<Message>, Vec<serde_json::Value>)> {
    let text = files::read_input(path, files::MAX_CONVERSATION_BYTES)?;
    let json: serde_json::Value =
        files::parse_json(&text).with_context(|| format!("cannot read {}", path.display()))?;
    let (messages, tools) = match json {
        serde_json::Value::Object(mut fields) => (fields.remove("messages"), fields.remove("tools")),
        list => (Some(list), None),
    };
    let Some(messages) = messages else { bail!("cannot read {}: it has no 'messages'", path.display()) };
    let messages = parse_part(path, "messages", messages)?;
    let tools = match tools {
        None | Some(serde_json::Value::Null) => Vec::new(),
        Some(tools) => parse_part(path, "tools", tools)?,
    };
    Ok((messages, tools))
}

fn parse_part<T: DeserializeOwned>(path: &Path, name: &str, json: serde_json::Value) -> Result<T> {
    let parsed = serde_json::from_value(json).map_err(|error| anyhow!("{}", library_error(&error)));
    parsed.with_context(|| format!("cannot read '{name}' in {}", path.display()))
}
