//! The server side of a sandbox process: reads requests from standard input and writes responses to standard output.

use std::ffi::OsString;
use std::io::{BufReader, BufWriter, stdin, stdout};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::thread;

use anyhow::{Context, Result, bail};

use super::limits::{self, Budget};
use super::protocol::{self, Frame, Loaded, LoadedChat, SandboxRequest, SandboxResponse};
use crate::error::Error;
use crate::language::Language;
use crate::text::error_message;

/// Serves requests until standard input ends. Returns the exit code.
pub fn run() -> i32 {
    // Templates and regular expressions can recurse deeply, and `ulimit -s` may limit the main thread's stack.
    // Serve requests on another thread, whose large stack has a fixed size.
    let server = thread::Builder::new().name("language-sandbox".into()).stack_size(limits::STACK_BYTES).spawn(serve);
    match server.map(thread::JoinHandle::join) {
        Ok(Ok(Ok(()))) => 0,
        _ => 1,
    }
}

fn serve() -> Result<()> {
    close_inherited_files();
    limits::disable_core_dumps()?;
    let mut input = BufReader::new(stdin().lock());
    let mut output = BufWriter::new(stdout().lock());
    let mut language = None;
    while let Some(request) = protocol::read::<SandboxRequest>(&mut input)? {
        Budget::of(&request.header, &request.body).enforce()?;
        let failed = |error| Frame { header: failure(&error), body: Vec::new() };
        let response = answer(request, &mut language).unwrap_or_else(failed);
        protocol::write(&mut output, &response.header, &response.body)?;
    }
    Ok(())
}

/// Answers one request. `language` is the loaded tokenizer and chat format, or `None` before [`SandboxRequest::Load`].
fn answer(request: Frame<SandboxRequest>, language: &mut Option<Language>) -> Result<Frame<SandboxResponse>> {
    let Frame { header: request, body } = request;
    if let SandboxRequest::Load = request {
        let loaded = language.insert(Language::load(&path(body))?);
        let (table, tokens) = loaded.tokenizer.table().to_parts()?;
        let response = Loaded {
            table,
            chat: loaded
                .chat
                .as_ref()
                .map(|chat| LoadedChat { name: chat.name().to_string(), reads_tools: chat.reads_tools() }),
            generation_config: loaded.generation_config.clone(),
            stop_ids: loaded.stop_ids().to_vec(),
        };
        return Ok(Frame { header: SandboxResponse::Loaded(Box::new(response)), body: tokens });
    }
    let language = language.as_ref().context("internal error: the sandbox process has not loaded a model")?;
    match request {
        SandboxRequest::Load => bail!("internal error: unhandled load request"),
        SandboxRequest::Encode(controls) => {
            let ids = language.tokenizer.encode(&String::from_utf8(body)?, controls)?;
            Ok(Frame { header: SandboxResponse::Encoded, body: protocol::ids_to_bytes(&ids) })
        }
        SandboxRequest::Render(messages, options) => {
            let rendered = language.render(&messages, &options)?;
            let body = protocol::ids_to_bytes(&rendered.ids);
            Ok(Frame { header: SandboxResponse::Rendered(rendered.text), body })
        }
    }
}

fn failure(error: &anyhow::Error) -> SandboxResponse {
    match error.downcast_ref() {
        Some(Error::InvalidRequest(_)) => SandboxResponse::Invalid(error_message(error)),
        _ => SandboxResponse::Failed(error_message(error)),
    }
}

fn path(bytes: Vec<u8>) -> PathBuf {
    OsString::from_vec(bytes).into()
}

/// Closes all inherited file descriptors except the standard streams.
/// Otherwise, an inherited file descriptor of NVIDIA's driver could keep GPU memory allocated.
fn close_inherited_files() {
    let Ok(files) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers: Vec<i32> = files.flatten().filter_map(|file| file.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|&number| number > 2) {
        // The list also contains the descriptor of /proc/self/fd itself, which is already closed. Ignore its error.
        let _ = nix::unistd::close(number);
    }
}
