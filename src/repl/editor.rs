//! The line that a person types: history, several lines, Tab, and $EDITOR for what is too long for a line.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{
    Cmd, CompletionType, ConditionalEventHandler, Config, Context, Editor, Event, EventContext, EventHandler, Helper,
    KeyEvent, RepeatCount,
};

use super::{commands, state};

/// Names that complete what is typed after a command.
pub type Names = Box<dyn Fn() -> Vec<String>>;

/// What came of asking for a message.
pub enum Line {
    Message(String),
    /// Ctrl-C on an empty line.
    Interrupted,
    /// Ctrl-C on what was typed, which is dropped.
    Cleared,
    End,
}

pub struct LineEditor {
    editor: Editor<Completion, FileHistory>,
    history: Option<PathBuf>,
    /// What was typed when Ctrl-G was pressed.
    handed_over: Shared,
    /// The same of Ctrl-Z.
    stopped: Shared,
    /// What is on the line.
    draft: Shared,
}

type Shared = Arc<Mutex<Option<String>>>;

impl LineEditor {
    /// `models` are the names after `/model`.
    pub fn new(models: Names) -> Result<Self> {
        let config = Config::builder()
            .auto_add_history(false)
            .max_history_size(1000)?
            .completion_type(CompletionType::List)
            .bracketed_paste(true)
            .build();
        let mut editor = Editor::with_config(config).context("cannot use this terminal")?;
        let (handed_over, stopped, draft) = (Shared::default(), Shared::default(), Shared::default());
        editor.set_helper(Some(Completion { files: FilenameCompleter::new(), models, draft: draft.clone() }));
        let open_editor = Box::new(HandOver(handed_over.clone()));
        editor.bind_sequence(KeyEvent::ctrl('G'), EventHandler::Conditional(open_editor));
        #[cfg(unix)]
        editor.bind_sequence(KeyEvent::ctrl('Z'), EventHandler::Conditional(Box::new(HandOver(stopped.clone()))));
        let folder = state::folder().filter(|_| state::is_kept());
        let history = folder.filter(|folder| state::make_folder(folder).is_ok()).map(|folder| folder.join("history"));
        if let Some(path) = &history
            && let Err(error) = editor.load_history(path)
        {
            set_aside(path, &error);
        }
        Ok(Self { editor, history, handed_over, stopped, draft })
    }

    /// Asks for a message; `typed` stands there already.
    pub fn read(&mut self, typed: &str) -> Result<Line> {
        let mut typed = typed.to_string();
        loop {
            put(&self.draft, Some(typed.clone()));
            match self.editor.readline_with_initial(">>> ", (&typed, "")) {
                Ok(line) => return Ok(Line::Message(self.take(&line))),
                Err(ReadlineError::Interrupted) => match (take(&self.handed_over), take(&self.stopped)) {
                    (_, Some(text)) => {
                        #[cfg(unix)]
                        super::terminal::stop();
                        typed = text;
                    }
                    (Some(text), None) => {
                        typed = edited(&text).unwrap_or_else(|error| {
                            eprintln!("{}", super::text::printable(&super::text::error_message(&error)));
                            text
                        });
                    }
                    _ if take(&self.draft).is_some_and(|draft| !draft.is_empty()) => return Ok(Line::Cleared),
                    _ => return Ok(Line::Interrupted),
                },
                Err(ReadlineError::Eof) => return Ok(Line::End),
                Err(ReadlineError::Io(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                    eprintln!("that was not UTF-8; the line is as it was before");
                    drop_input();
                    typed = take(&self.draft).unwrap_or_default();
                }
                Err(error) => return Err(error).context("cannot read from the terminal"),
            }
        }
    }

    /// The message in a line, which is remembered.
    pub fn take(&mut self, line: &str) -> String {
        if !line.trim().is_empty() && line.len() <= LONGEST_REMEMBERED {
            let _ = self.editor.add_history_entry(line);
            if let Some(path) = &self.history {
                // A full disk is no reason not to chat.
                let _ = self.editor.append_history(path);
            }
        }
        joined(line)
    }
}

/// Whole documents are no use in a history of lines, and would be read at each start.
const LONGEST_REMEMBERED: usize = 64 << 10;

fn put(shared: &Shared, text: Option<String>) {
    // A poisoned lock still has its text.
    *shared.lock().unwrap_or_else(PoisonError::into_inner) = text;
}

fn take(shared: &Shared) -> Option<String> {
    shared.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// A history that cannot be read would never be written again. A missing one is the first.
fn set_aside(path: &Path, error: &ReadlineError) {
    use std::io::ErrorKind;
    if matches!(error, ReadlineError::Io(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied))
    {
        return;
    }
    let aside = path.with_extension("bad");
    if std::fs::rename(path, &aside).is_ok() {
        eprintln!("the history of what was typed is damaged: it is {} now, and begins anew", aside.display());
    }
}

/// What came together with something unreadable is not to be taken for lines.
fn drop_input() {
    #[cfg(unix)]
    {
        use nix::sys::termios::{FlushArg, tcflush};
        std::thread::sleep(std::time::Duration::from_millis(50));
        let _ = tcflush(std::os::fd::AsFd::as_fd(&std::io::stdin()), FlushArg::TCIFLUSH);
    }
}

/// A message without what only held its lines together.
fn joined(line: &str) -> String {
    match line.trim().strip_prefix(QUOTES) {
        Some(text) => text.strip_suffix(QUOTES).unwrap_or(text).trim().to_string(),
        None => line.replace("\\\n", "\n"),
    }
}

const QUOTES: &str = "\"\"\"";

/// Whether more lines are to come.
pub fn goes_on(line: &str) -> bool {
    match line.trim().strip_prefix(QUOTES) {
        Some(text) => !text.ends_with(QUOTES),
        None => line.ends_with('\\'),
    }
}

/// Has $VISUAL or $EDITOR change a text.
fn edited(text: &str) -> Result<String> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let editor = variable("VISUAL").or_else(|| variable("EDITOR")).unwrap_or_else(|| "vi".to_string());
    let folder = state::folder().context("there is no home for the text to be edited: set HOME")?;
    state::make_folder(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = folder.join(format!("message-{}.md", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let result = edit_file(&editor, &path, text);
    let _ = std::fs::remove_file(&path);
    result
}

fn edit_file(editor: &str, path: &Path, text: &str) -> Result<String> {
    std::io::Write::write_all(&mut state::make_file(path)?, text.as_bytes())?;
    // As git does it: the variable may hold arguments too. The shell around it is not ended by a Ctrl-C that is for the editor.
    super::ELSEWHERE.store(true, Ordering::Relaxed);
    let status =
        Command::new("sh").arg("-c").arg(format!("trap : INT; {editor} \"$@\"")).arg(editor).arg(path).status();
    super::ELSEWHERE.store(false, Ordering::Relaxed);
    let status = status.with_context(|| format!("cannot run {editor}"))?;
    anyhow::ensure!(status.success(), "{editor} failed ({status}); set EDITOR to another one");
    let edited = std::fs::read_to_string(path).context("what was edited is no text")?;
    Ok(edited.trim_end().to_string())
}

/// Ends the line on Ctrl-G or Ctrl-Z, keeping what was typed.
struct HandOver(Shared);

impl ConditionalEventHandler for HandOver {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        put(&self.0, Some(context.line().to_string()));
        Some(Cmd::Interrupt)
    }
}

/// Tab, and when Enter ends a message.
struct Completion {
    files: FilenameCompleter,
    models: Names,
    draft: Shared,
}

impl Completer for Completion {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = &line[..at];
        let Some((command, rest)) = typed.split_once(' ') else {
            let names = if typed.starts_with('/') { commands::names() } else { Vec::new() };
            return Ok((0, starting_with(typed, names)));
        };
        let start = at - rest.trim_start().len();
        let names = match command {
            "/file" | "/export" => return self.files.complete_path(line, at),
            "/model" => (self.models)(),
            "/load" => super::journal::names(),
            _ => commands::arguments(command),
        };
        Ok((start, starting_with(rest.trim_start(), names)))
    }
}

fn starting_with(typed: &str, names: Vec<String>) -> Vec<Pair> {
    let fitting = names.into_iter().filter(|name| name.starts_with(typed));
    fitting.map(|name| Pair { display: super::text::printable(&name), replacement: name }).collect()
}

impl Validator for Completion {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        Ok(if goes_on(context.input()) { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Hinter for Completion {
    type Hint = String;

    /// There are no hints, but this sees each change of the line.
    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        put(&self.draft, Some(line.to_string()));
        None
    }
}

impl Highlighter for Completion {}

impl Helper for Completion {}
