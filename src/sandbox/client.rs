//! The client side of a sandbox process: starts the process, sends requests, and reports why the process ended.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::limits::Budget;
use super::protocol::{self, Frame, Loaded, LoadedChat, SandboxRequest, SandboxResponse};
use crate::chat::{ChatFormat, Message, Render, RenderOptions, Rendered};
use crate::error::Error;
use crate::language::Language;
use crate::tokenizer::{ControlTokens, Encode, TokenTable, Tokenizer};

/// A handle to the sandbox process that runs the tokenizer and the chat template of one model.
pub struct Sandbox {
    dir: PathBuf,
    /// The sandbox process, or `None` after a request has ended it. The next request then starts a new process.
    process: Mutex<Option<Process>>,
}

impl Sandbox {
    /// Starts a sandbox process for the model at `dir`.
    /// The returned [`Language`] encodes text and renders conversations in the sandbox process.
    pub fn load(dir: &Path) -> Result<Language> {
        let dir = std::path::absolute(dir)?;
        let Started { process, loaded, tokens } = Process::start(&dir)?;
        let Loaded { table, chat, generation_config, stop_ids } = loaded;
        let process = Arc::new(Self { dir, process: Mutex::new(Some(process)) });
        let table = TokenTable::from_parts(table, &tokens)?;
        let tokenizer = Tokenizer::from_table(table, Box::new(Sandboxed(process.clone())));
        let chat =
            chat.map(|LoadedChat { name, reads_tools }| ChatFormat::rendered_elsewhere(&tokenizer, name, reads_tools));
        let language = Language::new(tokenizer, chat, generation_config, stop_ids);
        Ok(language.with_renderer(Box::new(Sandboxed(process))))
    }

    /// Sends a request to the sandbox process. Returns the response, or an error if the request failed.
    /// If an earlier request ended the sandbox process, starts a new process first.
    fn call(&self, request: &SandboxRequest, body: &[u8]) -> Result<Frame<SandboxResponse>> {
        let mut slot = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let mut process = match slot.take() {
            Some(process) => process,
            None => Process::start(&self.dir)?.process,
        };
        let response = process.call(&self.dir, request, body)?;
        *slot = Some(process);
        drop(slot);
        match response.header {
            SandboxResponse::Failed(message) => bail!(message),
            SandboxResponse::Invalid(message) => Err(Error::invalid_request(message)),
            _ => Ok(response),
        }
    }
}

/// Encodes text and renders conversations in a sandbox process.
struct Sandboxed(Arc<Sandbox>);

impl Encode for Sandboxed {
    fn encode(&self, text: &str, controls: ControlTokens) -> Result<Vec<u32>> {
        let response = self.0.call(&SandboxRequest::Encode(controls), text.as_bytes())?;
        Ok(protocol::ids_from_bytes(&response.body))
    }
}

impl Render for Sandboxed {
    fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        let response = self.0.call(&SandboxRequest::Render(messages.to_vec(), options.clone()), &[])?;
        let SandboxResponse::Rendered(text) = response.header else {
            bail!("internal error: the sandbox process sent the wrong response")
        };
        Ok(Rendered { ids: protocol::ids_from_bytes(&response.body), text })
    }
}

/// A sandbox process and the pipes to it.
struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    stderr: ChildStderr,
}

/// A sandbox process, and what it has loaded.
struct Started {
    process: Process,
    loaded: Loaded,
    /// The tokens of the vocabulary, for [`TokenTable::from_parts`].
    tokens: Vec<u8>,
}

impl Process {
    /// Starts a sandbox process, and waits until it has loaded `dir`, which is a snapshot or a GGUF file.
    fn start(dir: &Path) -> Result<Started> {
        // The path /proc/self/exe works even if the executable was replaced on disk.
        let mut command = Command::new("/proc/self/exe");
        command.arg(protocol::ARGUMENT).env_clear().env("RAYON_NUM_THREADS", "2");
        // A build with CUDA may need `LD_LIBRARY_PATH` to find its libraries.
        // The sandbox process inherits no other variable.
        command.envs(std::env::var_os("LD_LIBRARY_PATH").map(|path| ("LD_LIBRARY_PATH", path)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C sends SIGINT to all processes of inferno's process group.
        // To survive Ctrl-C, the sandbox process runs in its own group.
        command.process_group(0);
        let mut child = command.spawn().context("cannot start the process for the tokenizer and the chat template")?;
        let (Some(stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            bail!("cannot start the process for the tokenizer and the chat template: its pipes are missing");
        };
        let mut process = Self { child, stdin, stdout, stderr };
        let response = process.call(dir, &SandboxRequest::Load, dir.as_os_str().as_bytes())?;
        match response.header {
            SandboxResponse::Loaded(loaded) => Ok(Started { process, loaded: *loaded, tokens: response.body }),
            SandboxResponse::Failed(message) => bail!(message),
            _ => bail!("internal error: the sandbox process sent the wrong response"),
        }
    }

    /// Sends a request and waits for the response.
    /// Fails if the request cannot be sent, or if the sandbox process ends or takes too long.
    fn call(&mut self, dir: &Path, request: &SandboxRequest, body: &[u8]) -> Result<Frame<SandboxResponse>> {
        let budget = Budget::of(request, body);
        // If the sandbox process has ended, this write fails with a broken pipe. Do not return this error here:
        // the read below also fails, and `failure` then reports why the process ended.
        let written = protocol::write(&mut self.stdin, request, body);
        if let Err(error) = &written
            && error.downcast_ref().is_none_or(|error: &io::Error| error.kind() != io::ErrorKind::BrokenPipe)
        {
            return Err(anyhow!(
                "cannot send the request to the process of the tokenizer and the chat template: {error}"
            ));
        }
        let deadline = Instant::now() + budget.wait();
        let mut input = WithDeadline { stdout: &mut self.stdout, deadline };
        match protocol::read(&mut input) {
            Ok(Some(response)) => written.map(|()| response),
            Ok(None) | Err(_) => Err(self.failure(dir, request, budget, Instant::now() >= deadline)),
        }
    }

    /// Kills the sandbox process and returns why the request failed.
    /// `is_late` is true if the deadline for the response has passed.
    fn failure(&mut self, dir: &Path, request: &SandboxRequest, budget: Budget, is_late: bool) -> anyhow::Error {
        let is_ended = |child: &mut Child| matches!(child.try_wait(), Ok(Some(_)));
        // When a process ends, its pipes close shortly before its exit status is available, so wait for the status.
        let deadline = Instant::now() + Duration::from_secs(1);
        while !is_ended(&mut self.child) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child.kill();
        let status = self.child.wait();
        let mut last_words = String::new();
        let _ = self.stderr.by_ref().take(4096).read_to_string(&mut last_words);

        let (action, what) = match request {
            SandboxRequest::Load => ("load the tokenizer of", "it"),
            SandboxRequest::Encode(_) => ("encode the text with", "the tokenizer"),
            SandboxRequest::Render(..) => ("render the conversation with", "the chat template"),
        };
        let signal = status.as_ref().ok().and_then(|status| Signal::try_from(status.signal()?).ok());
        let reason = if signal == Some(Signal::SIGXCPU) {
            format!("{what} took more than {} s of CPU time", budget.cpu_s)
        } else if is_late {
            format!("{what} took more than {} s", budget.wait().as_secs())
        } else if last_words.contains("memory allocation of") || last_words.contains("out of memory") {
            format!("{what} needed more than {} MiB of memory", budget.memory_bytes >> 20)
        } else if last_words.contains("overflowed its stack") || signal == Some(Signal::SIGSEGV) {
            format!("{what} recursed too deeply")
        } else {
            let status = status.map_or_else(|e| e.to_string(), |s| s.to_string());
            format!("the process of the tokenizer and the chat template ended unexpectedly ({status})")
        };
        anyhow!("cannot {action} {}: {reason}", dir.display())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ignore errors, because the sandbox process may have already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The standard output of a sandbox process. Reads fail if no data arrives before the deadline.
struct WithDeadline<'p> {
    stdout: &'p mut ChildStdout,
    deadline: Instant,
}

impl Read for WithDeadline<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now()).as_millis();
        let timeout = PollTimeout::try_from(left.min(i32::MAX as u128) as i32).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.stdout.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => self.stdout.read(buffer),
            Err(nix::errno::Errno::EINTR) => Err(io::ErrorKind::Interrupted.into()),
            Err(error) => Err(error.into()),
        }
    }
}
