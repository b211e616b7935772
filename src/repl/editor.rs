//! The line editor of the chat: history, multi-line input, Tab completion, and $EDITOR for longer messages.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
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

use super::{commands, multiline};
use crate::conversation::{journal, state_folder};
use crate::files;
use crate::terminal;
use crate::text::printable;

/// A function that returns the names of the models, which Tab completes after `/model`.
pub type NameList = Box<dyn Fn() -> Vec<String>>;

/// What the user did at the prompt.
pub enum Input {
    Message(String),
    /// Ctrl-C on an empty line.
    Interrupted,
    /// Ctrl-C on a line with text. The text is discarded.
    Cleared,
    /// Ctrl-D on an empty line, or the end of the input.
    End,
}

/// The line editor of the chat, with a history and Tab completion.
pub struct LineEditor {
    editor: Editor<LineHelper, FileHistory>,
    history: Option<PathBuf>,
    /// The text of the line when the user pressed Ctrl-G.
    sent_to_editor: SharedText,
    /// The text of the line when the user pressed Ctrl-Z.
    suspended: SharedText,
    /// The current text of the line.
    draft: SharedText,
}

/// Text that a key handler or the helper passes to the line editor.
type SharedText = Arc<Mutex<Option<String>>>;

/// The maximum size of a message in the history, in bytes. Longer messages would slow down later starts.
const MAX_HISTORY_BYTES: usize = 64 << 10;

impl LineEditor {
    /// Creates the editor, loads the history and binds Ctrl-G and, on Unix, Ctrl-Z.
    pub fn new(model_names: NameList) -> Result<Self> {
        let config = Config::builder()
            .auto_add_history(false)
            .max_history_size(1000)?
            .completion_type(CompletionType::List)
            .bracketed_paste(true)
            .build();
        let mut editor = Editor::with_config(config).context("cannot use this terminal")?;
        let sent_to_editor = SharedText::default();
        let suspended = SharedText::default();
        let draft = SharedText::default();
        editor.set_helper(Some(LineHelper { files: FilenameCompleter::new(), model_names, draft: draft.clone() }));
        let ctrl_g = EventHandler::Conditional(Box::new(EndLine(sent_to_editor.clone())));
        editor.bind_sequence(KeyEvent::ctrl('G'), ctrl_g);
        #[cfg(unix)]
        {
            let ctrl_z = EventHandler::Conditional(Box::new(EndLine(suspended.clone())));
            editor.bind_sequence(KeyEvent::ctrl('Z'), ctrl_z);
        }
        let history = history_path();
        if let Some(path) = &history
            && let Err(error) = editor.load_history(path)
        {
            move_damaged_history_aside(path, &error);
        }
        Ok(Self { editor, history, sent_to_editor, suspended, draft })
    }

    /// Prompts for a message. `initial` is the text that is already on the line.
    pub fn read(&mut self, initial: &str) -> Result<Input> {
        let mut initial = initial.to_string();
        loop {
            put(&self.draft, Some(initial.clone()));
            match self.editor.readline_with_initial(">>> ", (&initial, "")) {
                Ok(line) => return Ok(Input::Message(self.accept(&line))),
                Err(ReadlineError::Interrupted) => {
                    if let Some(text) = take(&self.suspended) {
                        #[cfg(unix)]
                        terminal::modes::stop_process();
                        initial = text;
                    } else if let Some(text) = take(&self.sent_to_editor) {
                        initial = edit(&text).unwrap_or_else(|error| {
                            terminal::print(&crate::text::error_message(&error));
                            text
                        });
                    } else {
                        let had_text = take(&self.draft).is_some_and(|draft| !draft.is_empty());
                        return Ok(if had_text { Input::Cleared } else { Input::Interrupted });
                    }
                }
                Err(ReadlineError::Eof) => return Ok(Input::End),
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    terminal::print("cannot read the input: it is not UTF-8; the line is unchanged");
                    discard_input();
                    initial = take(&self.draft).unwrap_or_default();
                }
                Err(error) => return Err(error).context("cannot read from the terminal"),
            }
        }
    }

    /// Adds a message to the history, unless the message is blank or longer than `MAX_HISTORY_BYTES`.
    /// Returns the message without the `"""` or the `\` at line ends that made it multi-line.
    pub fn accept(&mut self, line: &str) -> String {
        if !line.trim().is_empty() && line.len() <= MAX_HISTORY_BYTES {
            let _ = self.editor.add_history_entry(line);
            if let Some(path) = &self.history {
                // Ignore errors. The chat must continue even if the disk is full.
                let _ = self.editor.append_history(path);
            }
        }
        multiline::message(line)
    }
}

fn put(shared: &SharedText, text: Option<String>) {
    // Ignore lock poisoning: the text is valid even if another thread panicked while it held the lock.
    *shared.lock().unwrap_or_else(PoisonError::into_inner) = text;
}

fn take(shared: &SharedText) -> Option<String> {
    shared.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Returns the path of the history file and creates its folder.
/// Returns `None` if saving is disabled, or if the folder is unknown or cannot be created.
fn history_path() -> Option<PathBuf> {
    let folder = state_folder::path().filter(|_| state_folder::is_enabled())?;
    state_folder::create_folder(&folder).ok()?;
    Some(folder.join("history"))
}

/// Renames a damaged history file, because rustyline cannot append to it. Leaves a missing or unreadable file alone.
fn move_damaged_history_aside(path: &Path, error: &ReadlineError) {
    if let ReadlineError::Io(error) = error
        && error.kind() != ErrorKind::InvalidData
    {
        return;
    }
    let backup = path.with_extension("bad");
    if std::fs::rename(path, &backup).is_ok() {
        let backup = backup.display();
        terminal::print(&format!(
            "cannot read the input history: it is damaged; moved it to {backup} and started a new one"
        ));
    }
}

/// Discards pending input after invalid UTF-8. Otherwise, the rest of a paste would be read as new messages.
fn discard_input() {
    #[cfg(unix)]
    {
        use nix::sys::termios::{FlushArg, tcflush};
        std::thread::sleep(std::time::Duration::from_millis(50));
        let _ = tcflush(std::os::fd::AsFd::as_fd(&std::io::stdin()), FlushArg::TCIFLUSH);
    }
}

/// Opens `text` in $VISUAL, $EDITOR or vi, and returns the edited text.
fn edit(text: &str) -> Result<String> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let editor = variable("VISUAL").or_else(|| variable("EDITOR")).unwrap_or_else(|| "vi".to_string());
    let folder = state_folder::path().context("cannot edit the text: no home directory found; set HOME")?;
    state_folder::create_folder(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(format!("message-{}.md", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let result = edit_file(&editor, &path, text);
    let _ = std::fs::remove_file(&path);
    result
}

fn edit_file(editor: &str, path: &Path, text: &str) -> Result<String> {
    std::io::Write::write_all(&mut files::create_private(path)?, text.as_bytes())?;
    // Like git, allow arguments in $VISUAL and $EDITOR.
    // The trap keeps the shell alive if the user presses Ctrl-C in the editor.
    let script = format!("trap : INT; {editor} \"$@\"");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(script).arg(editor).arg(path);
    let status = terminal::interrupt::ignore_ctrl_c_during(|| shell.status());
    let status = status.with_context(|| format!("cannot run {editor}: cannot start sh"))?;
    anyhow::ensure!(status.success(), "cannot edit the text: {editor} failed ({status}); set VISUAL to another editor");
    let edited = files::read_text(path, files::MAX_TEXT_BYTES)?;
    Ok(edited.trim_end().to_string())
}

/// The handler of Ctrl-G and Ctrl-Z: stores the text of the line, so that [`LineEditor::read`] can act on it.
/// Interrupts the prompt as Ctrl-C does.
struct EndLine(SharedText);

impl ConditionalEventHandler for EndLine {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        put(&self.0, Some(context.line().to_string()));
        Some(Cmd::Interrupt)
    }
}

/// The rustyline helper: completes commands and their arguments on Tab, decides whether Enter ends the message, and
/// stores the draft.
struct LineHelper {
    files: FilenameCompleter,
    model_names: NameList,
    draft: SharedText,
}

impl Completer for LineHelper {
    type Candidate = Pair;

    fn complete(&self, line: &str, cursor: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = &line[..cursor];
        let Some((command, argument)) = typed.split_once(' ') else {
            let names = if typed.starts_with('/') { commands::names() } else { Vec::new() };
            return Ok((0, candidates(typed, names)));
        };
        let argument = argument.trim_start();
        let names = match command {
            "/file" | "/export" => return self.files.complete_path(line, cursor),
            "/model" => (self.model_names)(),
            "/load" => journal::names(),
            _ => commands::arguments(command),
        };
        Ok((cursor - argument.len(), candidates(argument, names)))
    }
}

fn candidates(typed: &str, names: Vec<String>) -> Vec<Pair> {
    let matching = names.into_iter().filter(|name| name.starts_with(typed));
    matching.map(|name| Pair { display: printable(&name), replacement: name }).collect()
}

impl Validator for LineHelper {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        let is_incomplete = multiline::is_incomplete(context.input());
        Ok(if is_incomplete { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Hinter for LineHelper {
    type Hint = String;

    /// Stores the line as the draft and returns no hint. rustyline calls `hint` after each change of the line.
    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        put(&self.draft, Some(line.to_string()));
        None
    }
}

impl Highlighter for LineHelper {}

impl Helper for LineHelper {}
