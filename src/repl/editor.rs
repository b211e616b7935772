//! The line that a person types: history, several lines, Tab, and $EDITOR for what is too long for a line.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

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
    Interrupted,
    End,
}

pub struct LineEditor {
    editor: Editor<Completion, FileHistory>,
    history: Option<PathBuf>,
    /// What was typed when Ctrl-G was pressed.
    handed_over: Arc<Mutex<Option<String>>>,
}

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
        editor.set_helper(Some(Completion { files: FilenameCompleter::new(), models }));
        let handed_over = Arc::new(Mutex::new(None));
        let open_editor = Box::new(HandOver(handed_over.clone()));
        editor.bind_sequence(KeyEvent::ctrl('G'), EventHandler::Conditional(open_editor));
        let folder = state::folder().filter(|_| state::is_kept());
        let history = folder.filter(|folder| state::make_folder(folder).is_ok()).map(|folder| folder.join("history"));
        if let Some(path) = &history {
            // A missing or broken history is no reason not to chat.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history, handed_over })
    }

    /// Asks for a message; `typed` stands there already.
    pub fn read(&mut self, typed: &str) -> Result<Line> {
        let mut typed = typed.to_string();
        loop {
            match self.editor.readline_with_initial(">>> ", (&typed, "")) {
                Ok(line) => {
                    if !line.trim().is_empty() {
                        let _ = self.editor.add_history_entry(line.as_str());
                        if let Some(path) = &self.history {
                            let _ = self.editor.append_history(path);
                        }
                    }
                    return Ok(Line::Message(joined(&line)));
                }
                Err(ReadlineError::Interrupted) => match self.take_handed_over() {
                    Some(text) => {
                        typed = edited(&text).unwrap_or_else(|error| {
                            eprintln!("{}", super::style::printable(&format!("{error:#}")));
                            text
                        });
                    }
                    None => return Ok(Line::Interrupted),
                },
                Err(ReadlineError::Eof) => return Ok(Line::End),
                Err(error) => return Err(error).context("cannot read from the terminal"),
            }
        }
    }

    fn take_handed_over(&self) -> Option<String> {
        // A poisoned lock still has its text.
        self.handed_over.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
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
fn goes_on(line: &str) -> bool {
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
    // As git does it: the variable may hold arguments too.
    let status = Command::new("sh").arg("-c").arg(format!("{editor} \"$@\"")).arg(editor).arg(path).status();
    let status = status.with_context(|| format!("cannot run {editor}"))?;
    anyhow::ensure!(status.success(), "{editor} failed ({status}); set EDITOR to another one");
    let edited = std::fs::read_to_string(path).context("what was edited is no text")?;
    Ok(edited.trim_end().to_string())
}

/// Ends the line on Ctrl-G, keeping what was typed.
struct HandOver(Arc<Mutex<Option<String>>>);

impl ConditionalEventHandler for HandOver {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(context.line().to_string());
        Some(Cmd::Interrupt)
    }
}

/// Tab, and when Enter ends a message.
struct Completion {
    files: FilenameCompleter,
    models: Names,
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
    fitting.map(|name| Pair { display: super::style::printable(&name), replacement: name }).collect()
}

impl Validator for Completion {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        Ok(if goes_on(context.input()) { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Hinter for Completion {
    type Hint = String;
}

impl Highlighter for Completion {}

impl Helper for Completion {}
