//! Conversations on disk, turn by turn: after a crash or a kill, `inferno play --resume` goes on where it ended.
//!
//! One file a conversation, one JSON object a line, only ever appended to and synced to the disk before the next message
//! is asked for. A line that a crash cut off is the last one, and dropped. Where a write fails, what it left is taken back,
//! and the next one that can be done writes everything.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::state;
use crate::chat::{Message, Role};
use crate::error::Error;

/// Settings by the names of their flags, such as `temperature`; a flag that may be given again has several values.
pub type Settings = BTreeMap<String, Vec<String>>;

/// What `Record::Start` says of the format. Only a later inferno raises it.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
enum Record {
    /// Which model answers, and how.
    Start {
        version: u32,
        model: String,
        settings: Settings,
    },
    /// Another one from here on.
    Model {
        model: String,
        settings: Settings,
    },
    Settings {
        settings: Settings,
    },
    /// A question and its answer.
    Turn {
        messages: Vec<Message>,
    },
    /// The conversation as it is now: after `/undo`, `/clear`, `/system`, `/regen`.
    Messages {
        messages: Vec<Message>,
    },
}

/// A conversation as it was left.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Saved {
    pub model: String,
    pub settings: Settings,
    pub messages: Vec<Message>,
    /// What could not be read, and so is missing at the end.
    pub damage: Option<String>,
}

impl Saved {
    fn has_a_question(&self) -> bool {
        self.messages.iter().any(|message| message.role == Role::User)
    }
}

/// The file of the conversation that goes on.
pub struct Journal {
    name: String,
    path: PathBuf,
    file: Lock,
    /// How many bytes are whole lines.
    length: u64,
    /// A write failed: the file is behind the conversation.
    behind: bool,
}

/// What of a conversation has changed.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    Model,
    Settings,
    /// A question and its answer came to it.
    Turn,
    Messages,
}

/// A conversation as it is.
pub struct Now<'a> {
    pub model: &'a str,
    pub settings: &'a Settings,
    pub messages: &'a [Message],
}

#[cfg(unix)]
type Lock = nix::fcntl::Flock<File>;
#[cfg(not(unix))]
type Lock = File;

impl Journal {
    /// A new conversation, named by the time. None where nothing is to be kept.
    pub fn create(model: &str, settings: &Settings) -> Result<Option<Journal>> {
        let now = jiff::Zoned::now().strftime("%Y-%m-%d-%H%M%S").to_string();
        let Some(folder) = folder().filter(|_| state::is_kept()) else { return Ok(None) };
        state::make_folder(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        for number in 1.. {
            let name = if number == 1 { now.clone() } else { format!("{now}-{number}") };
            let path = file_of(&folder, &name);
            match state::make_file(&path) {
                Ok(file) => {
                    let mut journal = Journal { name, file: lock(file, &path)?, path, length: 0, behind: false };
                    let (model, settings) = (model.to_string(), settings.clone());
                    if let Err(error) = journal.write(&[Record::Start { version: VERSION, model, settings }]) {
                        let _ = fs::remove_file(&journal.path);
                        return Err(error);
                    }
                    // The entry in the folder has to last as well.
                    let _ = File::open(&folder).and_then(|folder| folder.sync_all());
                    return Ok(Some(journal));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| format!("cannot make {}", path.display())),
            }
        }
        Ok(None)
    }

    /// Goes on with a conversation; without a name the one that was last written to.
    pub fn open(name: Option<&str>) -> Result<(Journal, Saved)> {
        let (name, path) = find(name)?;
        let file = OpenOptions::new().read(true).append(true).open(&path);
        let file = lock(file.with_context(|| format!("cannot open {}", path.display()))?, &path)?;
        let (mut saved, length) = read(&path)?;
        tracing::info!(path = %path.display(), messages = saved.messages.len(), "conversation");
        if let Some(damage) = &mut saved.damage {
            // Somebody may still find something in it.
            let aside = copy_aside(&path).with_context(|| format!("{damage}; cannot keep a copy of it"))?;
            damage.push_str(&format!(": what follows is lost here, but {} has all of it", aside.display()));
        }
        // What a crash cut off goes, or the next line would be part of it.
        file.set_len(length).with_context(|| format!("cannot write {}", path.display()))?;
        Ok((Journal { name, path, file, length, behind: false }, saved))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Writes what has changed; all that there is where an earlier write failed. On the disk when this returns.
    pub fn write_change(&mut self, change: Change, now: &Now) -> Result<()> {
        let model = || Record::Model { model: now.model.to_string(), settings: now.settings.clone() };
        let messages = || Record::Messages { messages: now.messages.to_vec() };
        if self.behind {
            return self.write(&[model(), messages()]);
        }
        self.write(&[match change {
            Change::Model => model(),
            Change::Settings => Record::Settings { settings: now.settings.clone() },
            Change::Turn => Record::Turn { messages: now.messages[now.messages.len().saturating_sub(2)..].to_vec() },
            Change::Messages => messages(),
        }])
    }

    /// Gives the conversation a name of its own.
    pub fn rename(&mut self, name: &str) -> Result<()> {
        let name = checked(name)?;
        if name == self.name {
            return Ok(());
        }
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let path = file_of(folder, name);
        // As a link first: unlike renaming, that never replaces another conversation.
        fs::hard_link(&self.path, &path).with_context(|| match path.exists() {
            true => format!("there is a conversation {name}; choose another name"),
            false => format!("cannot write {}", path.display()),
        })?;
        let _ = fs::remove_file(&self.path);
        (self.name, self.path) = (name.to_string(), path);
        Ok(())
    }

    fn write(&mut self, records: &[Record]) -> Result<()> {
        let mut lines = Vec::new();
        for record in records {
            serde_json::to_writer(&mut lines, record)?;
            lines.push(b'\n');
        }
        let result = self.append(&lines);
        self.behind = result.is_err();
        result.with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        // Of a write that failed, a part may be there: the next one must not be glued to it.
        if self.behind {
            self.file.set_len(self.length)?;
        }
        // One write: a reader sees the whole line, or a part that it knows to drop.
        if let Err(error) = self.file.write_all(lines).and_then(|()| self.file.sync_data()) {
            let _ = self.file.set_len(self.length);
            return Err(error);
        }
        self.length += lines.len() as u64;
        Ok(())
    }
}

/// What was left of a conversation, without going on with it.
pub fn peek(name: Option<&str>) -> Result<Saved> {
    Ok(read(&find(name)?.1)?.0)
}

/// Names of all conversations, the last written to first.
pub fn names() -> Vec<String> {
    let entries = folder().and_then(|folder| fs::read_dir(folder).ok());
    let mut found: Vec<_> = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?.strip_suffix(".jsonl")?.to_string();
            // One that a crash left empty is none.
            let metadata = path.metadata().ok().filter(|metadata| metadata.len() > 0)?;
            Some((metadata.modified().ok()?, name))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, name)| name).collect()
}

fn folder() -> Option<PathBuf> {
    Some(state::folder()?.join("conversations"))
}

fn file_of(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.jsonl"))
}

fn find(name: Option<&str>) -> Result<(String, PathBuf)> {
    let missing = |what: String| Error::Usage(what);
    let folder = folder().ok_or_else(|| missing("there is no home for conversations: set HOME".into()))?;
    let names = names();
    let name = match name.filter(|name| !name.is_empty()) {
        Some(name) => checked(name)?,
        // One from which all was taken back is nothing to go on with, and one that is open goes on elsewhere.
        None => names
            .iter()
            .find(|name| {
                let path = file_of(&folder, name);
                let something = |(saved, _): (Saved, u64)| saved.has_a_question() || saved.damage.is_some();
                !is_open(&path) && read(&path).map_or(true, something)
            })
            .ok_or_else(|| missing("there is no conversation to resume".into()))?,
    };
    let path = file_of(&folder, name);
    if !path.exists() {
        let some: Vec<&str> = names.iter().take(10).map(String::as_str).collect();
        let there = if some.is_empty() { "there are none yet".to_string() } else { format!("try {}", some.join(", ")) };
        return Err(missing(format!("there is no conversation '{name}'\n  {there}")).into());
    }
    Ok((name.to_string(), path))
}

/// A name that is a file name and nothing else.
fn checked(name: &str) -> Result<&str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 100 || name.starts_with(['.', '-']) || !name.chars().all(fits) {
        let problem = format!("'{name}' cannot name a conversation: letters, digits, - _ and . can");
        return Err(Error::Usage(problem).into());
    }
    Ok(name)
}

/// A copy of a damaged journal, in place of none that was made before. Returns where it is.
fn copy_aside(path: &Path) -> io::Result<PathBuf> {
    for number in 1.. {
        let ending = if number == 1 { "damaged".to_string() } else { format!("damaged-{number}") };
        let aside = path.with_extension(ending);
        if !aside.exists() {
            return fs::copy(path, &aside).map(|_| aside);
        }
    }
    unreachable!("there are fewer files than numbers")
}

/// Whether another inferno goes on with it.
fn is_open(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| lock(file, path).is_err())
}

#[cfg(unix)]
fn lock(file: File, path: &Path) -> Result<Lock> {
    use nix::fcntl::{Flock, FlockArg};
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(file) => Ok(file),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            bail!("the conversation {name} is open in another inferno")
        }
        Err((_, error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

#[cfg(not(unix))]
fn lock(file: File, _: &Path) -> Result<Lock> {
    Ok(file)
}

/// Replays a journal, as far as it is whole. Also returns how many bytes that is.
fn read(path: &Path) -> Result<(Saved, u64)> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut saved = Saved::default();
    let mut length = 0;
    for (number, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        if !line.ends_with(b"\n") {
            break;
        }
        let record = match serde_json::from_slice(line) {
            Ok(record) => record,
            Err(error) => {
                saved.damage = Some(format!("{} is damaged in line {} ({error})", path.display(), number + 1));
                break;
            }
        };
        match record {
            Record::Start { version, .. } if version > VERSION => {
                bail!("{} was written by a later inferno", path.display())
            }
            Record::Start { model, settings, .. } | Record::Model { model, settings } => {
                (saved.model, saved.settings) = (model, settings)
            }
            Record::Settings { settings } => saved.settings = settings,
            Record::Turn { messages } => saved.messages.extend(messages),
            Record::Messages { messages } => saved.messages = messages,
        }
        length += line.len() as u64;
    }
    if saved.model.is_empty() {
        let why = saved.damage.unwrap_or_else(|| format!("{} is cut off at its start", path.display()));
        bail!("{why}: it does not say which model it was");
    }
    Ok((saved, length))
}
