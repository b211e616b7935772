//! Conversations on disk. After a crash, `inferno play --resume` continues from the last complete turn.
//!
//! Each conversation is a file with one JSON object per line. Each change appends a line and syncs it to disk.
//! A crash can truncate only the last line, and a truncated line is ignored.
//! If a write fails, the partial line is removed, and the next write saves the whole conversation.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::settings::SettingValues;
use super::state_folder;
use crate::chat::{Message, Role};
use crate::error::Error;
use crate::files;
use crate::text::library_error;

/// The version of the file format. Journals with a higher version cannot be read.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
enum JournalRecord {
    /// The first line of a journal: the model and the settings of the conversation.
    Start {
        version: u32,
        model: String,
        settings: SettingValues,
    },
    /// The model and the settings from this line on, for example after a switch to another model.
    Model {
        model: String,
        settings: SettingValues,
    },
    Settings {
        settings: SettingValues,
    },
    /// A question and its answer.
    Turn {
        messages: Vec<Message>,
    },
    /// All messages. Replaces the messages of earlier lines, for example after `/undo` or `/regen`.
    Messages {
        messages: Vec<Message>,
    },
}

/// Whether and where a conversation is recorded.
pub enum Recording {
    Off,
    /// Recording starts with the first answer, which creates the journal.
    FromFirstAnswer,
    Journal(Journal),
}

/// A conversation that was read from its journal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedConversation {
    pub model: String,
    pub settings: SettingValues,
    pub messages: Vec<Message>,
    /// A message about the first damaged line, if any. The conversation excludes that line and all later lines.
    pub damage: Option<String>,
}

impl SavedConversation {
    fn has_question(&self) -> bool {
        self.messages.iter().any(|message| message.role == Role::User)
    }
}

/// The open file of a conversation, locked on Unix.
pub struct Journal {
    name: String,
    path: PathBuf,
    file: LockedFile,
    /// The total length of all complete lines, in bytes.
    length: u64,
    /// Whether the last write failed. If so, part of the conversation is missing from the file.
    is_incomplete: bool,
}

/// The kind of change that [`Journal::write_change`] records.
#[derive(Clone, Copy, Debug)]
pub enum ConversationChange {
    Model,
    Settings,
    /// A question and its answer were appended.
    Turn,
    Messages,
}

/// The parts of a conversation that the journal stores.
pub struct ConversationState<'a> {
    pub model: &'a str,
    pub settings: &'a SettingValues,
    pub messages: &'a [Message],
}

#[cfg(unix)]
type LockedFile = nix::fcntl::Flock<File>;
#[cfg(not(unix))]
type LockedFile = File;

impl Journal {
    /// Creates the journal of a new conversation, named after the current time.
    /// Returns `None` if saving is disabled, or if [`state_folder::path`] returns `None`.
    /// Fails if the file or its folder cannot be created or written.
    pub fn create(model: &str, settings: &SettingValues) -> Result<Option<Journal>> {
        let time = jiff::Zoned::now().strftime("%Y-%m-%d-%H%M%S").to_string();
        let Some(folder) = folder().filter(|_| state_folder::is_enabled()) else { return Ok(None) };
        state_folder::create_folder(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        for number in 1.. {
            let name = if number == 1 { time.clone() } else { format!("{time}-{number}") };
            let path = journal_path(&folder, &name);
            match files::create_private(&path) {
                Ok(file) => {
                    let mut journal = Journal { name, file: lock(file, &path)?, path, length: 0, is_incomplete: false };
                    let (model, settings) = (model.to_string(), settings.clone());
                    if let Err(error) = journal.write(&[JournalRecord::Start { version: VERSION, model, settings }]) {
                        let _ = fs::remove_file(&journal.path);
                        return Err(error);
                    }
                    // Also sync the folder, so that the new directory entry survives a system crash.
                    let _ = File::open(&folder).and_then(|folder| folder.sync_all());
                    return Ok(Some(journal));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| format!("cannot create {}", path.display())),
            }
        }
        Ok(None)
    }

    /// Opens a conversation to continue it. Without a name, opens the most recent resumable conversation.
    ///
    /// If a line is damaged, makes a backup copy of the file, then removes that line and all later lines.
    /// Fails if the conversation is not found or cannot be read. On Unix, also fails if an inferno process has it open.
    pub fn open(name: Option<&str>) -> Result<(Journal, SavedConversation)> {
        let (name, path) = find(name)?;
        let file = OpenOptions::new().read(true).append(true).open(&path);
        let file = lock(file.with_context(|| format!("cannot open {}", path.display()))?, &path)?;
        let (mut saved, length) = read(&path)?;
        tracing::info!(path = %path.display(), messages = saved.messages.len(), "conversation");
        if let Some(damage) = &mut saved.damage {
            // Keep a copy, because the user may still be able to recover messages from the removed lines.
            let copy = copy_damaged(&path).with_context(|| format!("{damage}; cannot make a backup copy"))?;
            damage.push_str(&format!("; removed this line and all later lines; the backup is {}", copy.display()));
        }
        // Remove the first incomplete or damaged line and all later lines, so that new lines follow valid lines.
        file.set_len(length).with_context(|| format!("cannot write {}", path.display()))?;
        Ok((Journal { name, path, file, length, is_incomplete: false }, saved))
    }

    /// Returns the name of the conversation, which is its file name without the extension.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path at which the conversation's KV cache is saved, next to the journal.
    pub fn prefix_path(&self) -> PathBuf {
        self.path.with_extension("kv")
    }

    /// Writes a change, or the whole conversation if the previous write failed. Returns once the data is on disk.
    pub fn write_change(&mut self, change: ConversationChange, state: &ConversationState) -> Result<()> {
        let model = || JournalRecord::Model { model: state.model.to_string(), settings: state.settings.clone() };
        let messages = || JournalRecord::Messages { messages: state.messages.to_vec() };
        if self.is_incomplete {
            return self.write(&[model(), messages()]);
        }
        self.write(&[match change {
            ConversationChange::Model => model(),
            ConversationChange::Settings => JournalRecord::Settings { settings: state.settings.clone() },
            ConversationChange::Turn => {
                let turn = &state.messages[state.messages.len().saturating_sub(2)..];
                JournalRecord::Turn { messages: turn.to_vec() }
            }
            ConversationChange::Messages => messages(),
        }])
    }

    /// Renames the conversation and its saved KV cache. Fails if the name is invalid or taken.
    pub fn rename(&mut self, name: &str) -> Result<()> {
        let name = validate_name(name)?;
        if name == self.name {
            return Ok(());
        }
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let path = journal_path(folder, name);
        // `fs::rename` would overwrite another conversation with this name. `fs::hard_link` fails instead.
        fs::hard_link(&self.path, &path).with_context(|| {
            if path.exists() {
                format!("cannot name the conversation {name}: that name is taken; choose another name")
            } else {
                format!("cannot write {}", path.display())
            }
        })?;
        let _ = fs::remove_file(&self.path);
        let _ = fs::rename(self.prefix_path(), path.with_extension("kv"));
        (self.name, self.path) = (name.to_string(), path);
        Ok(())
    }

    fn write(&mut self, records: &[JournalRecord]) -> Result<()> {
        let mut lines = Vec::new();
        for record in records {
            serde_json::to_writer(&mut lines, record)?;
            lines.push(b'\n');
        }
        let result = self.append(&lines);
        self.is_incomplete = result.is_err();
        result.with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        // Remove the partial line that a failed write may have left in the journal.
        if self.is_incomplete {
            self.file.set_len(self.length)?;
        }
        if let Err(error) = self.file.write_all(lines).and_then(|()| self.file.sync_data()) {
            let _ = self.file.set_len(self.length);
            return Err(error);
        }
        self.length += lines.len() as u64;
        Ok(())
    }
}

/// Reads a conversation without locking it. Without a name, reads the most recent resumable conversation.
pub fn read_saved(name: Option<&str>) -> Result<SavedConversation> {
    Ok(read(&find(name)?.1)?.0)
}

/// Returns the names of all saved conversations, most recently written first.
pub fn names() -> Vec<String> {
    let entries = folder().and_then(|folder| fs::read_dir(folder).ok());
    let mut found: Vec<_> = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?.strip_suffix(".jsonl")?.to_string();
            // Skip empty files: a crash while a journal is created can leave one.
            let metadata = path.metadata().ok().filter(|metadata| metadata.len() > 0)?;
            Some((metadata.modified().ok()?, name))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, name)| name).collect()
}

fn folder() -> Option<PathBuf> {
    Some(state_folder::path()?.join("conversations"))
}

fn journal_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.jsonl"))
}

/// Returns the name and path of a conversation. Without a name, finds the most recent resumable conversation.
/// Fails if the name is invalid, or if there is no such conversation.
fn find(name: Option<&str>) -> Result<(String, PathBuf)> {
    let folder =
        folder().ok_or_else(|| Error::usage("cannot find conversations: no home directory found; set HOME"))?;
    let names = names();
    let name = match name.filter(|name| !name.is_empty()) {
        Some(name) => validate_name(name)?,
        None => names
            .iter()
            .find(|name| is_resumable(&journal_path(&folder, name)))
            .ok_or_else(|| Error::usage("cannot find a conversation to resume; start one: inferno play MODEL"))?,
    };
    let path = journal_path(&folder, name);
    if !path.exists() {
        let known: Vec<&str> = names.iter().take(10).map(String::as_str).collect();
        let hint = if known.is_empty() {
            "no conversations have been saved yet".to_string()
        } else {
            format!("try {}", known.join(", "))
        };
        return Err(Error::usage(format!("cannot open the conversation '{name}': not found\n  {hint}")));
    }
    Ok((name.to_string(), path))
}

/// Returns whether `--resume` without a name may choose the conversation at `path`.
///
/// Returns false if the conversation is open, or if it has no question.
/// A damaged or unreadable journal may be chosen even without a question, so that the user learns of the damage.
fn is_resumable(path: &Path) -> bool {
    !is_open(path) && read(path).map_or(true, |(saved, _)| saved.has_question() || saved.damage.is_some())
}

/// Returns `name`, or an error if `name` is not allowed for a conversation.
fn validate_name(name: &str) -> Result<&str> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 100 || name.starts_with(['.', '-']) || !name.chars().all(is_allowed) {
        return Err(Error::usage(format!(
            "cannot use the name '{name}': use 1 to 100 characters from A-Z, a-z, 0-9, '-', '_' and '.', \
             and do not start with '-' or '.'"
        )));
    }
    Ok(name)
}

/// Copies a damaged journal without replacing an earlier copy. Returns the path of the copy.
fn copy_damaged(path: &Path) -> io::Result<PathBuf> {
    for number in 1.. {
        let extension = if number == 1 { "damaged".to_string() } else { format!("damaged-{number}") };
        let copy = path.with_extension(extension);
        if !copy.exists() {
            return fs::copy(path, &copy).map(|_| copy);
        }
    }
    unreachable!("cannot find a free name for the copy")
}

/// Returns whether an inferno process has the conversation open, and therefore holds the lock on its journal.
/// On non-Unix systems, always returns false, because journals are not locked there.
fn is_open(path: &Path) -> bool {
    files::open(path).is_ok_and(|file| lock(file, path).is_err())
}

#[cfg(unix)]
fn lock(file: File, path: &Path) -> Result<LockedFile> {
    use nix::fcntl::{Flock, FlockArg};
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(file) => Ok(file),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            bail!("cannot open the conversation {name}: it is open in another inferno process")
        }
        Err((_, error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

#[cfg(not(unix))]
fn lock(file: File, _: &Path) -> Result<LockedFile> {
    Ok(file)
}

/// Reads a journal up to its first incomplete or damaged line. Also returns the length in bytes of the lines it read.
/// Fails if the file cannot be read, if its first line is incomplete or damaged, or if a newer inferno wrote it.
fn read(path: &Path) -> Result<(SavedConversation, u64)> {
    let bytes = files::read(path, files::MAX_JOURNAL_BYTES)?;
    let mut saved = SavedConversation::default();
    let mut length = 0;
    for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        if !line.ends_with(b"\n") {
            break;
        }
        let record = match serde_json::from_slice(line) {
            Ok(record) => record,
            Err(error) => {
                let error = library_error(&error);
                saved.damage = Some(format!("{} is damaged at line {} ({error})", path.display(), index + 1));
                break;
            }
        };
        match record {
            JournalRecord::Start { version, .. } if version > VERSION => {
                bail!("cannot read {}: it was written by a newer version of inferno", path.display())
            }
            JournalRecord::Start { model, settings, .. } | JournalRecord::Model { model, settings } => {
                (saved.model, saved.settings) = (model, settings)
            }
            JournalRecord::Settings { settings } => saved.settings = settings,
            JournalRecord::Turn { messages } => saved.messages.extend(messages),
            JournalRecord::Messages { messages } => saved.messages = messages,
        }
        length += line.len() as u64;
    }
    if saved.model.is_empty() {
        let cause = saved.damage.unwrap_or_else(|| format!("the first line of {} is incomplete", path.display()));
        bail!("cannot read the conversation's model: {cause}");
    }
    Ok((saved, length))
}
