//! Keeps records of the most recent requests, so that their answers can be reproduced.
//!
//! Records contain prompts and answers, so a tenant can read only its own records.
//! The most recent records stay in memory. If the options name a folder, records are also written to it,
//! except while `MAX_WAITING` records already wait for the disk.

use std::collections::VecDeque;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};

use super::options::RecordOptions;
use crate::engine::GenerationRecord;
use crate::files;
use crate::server::ids;
use crate::server::tenant::Tenant;

/// The maximum number of records that wait to be written to the folder. Records beyond this number are not written.
const MAX_WAITING: usize = 256;

/// Keeps the most recent records in memory. If a folder is set, also writes records to the folder.
pub struct Recorder {
    /// The maximum memory for records, in bytes.
    limit: usize,
    ring: Mutex<Ring>,
    /// Writes records to the folder. `None` without a folder, and after [`finish`](Self::finish).
    writer: Mutex<Option<RecordWriter>>,
}

/// The most recent records, oldest first.
#[derive(Default)]
struct Ring {
    entries: VecDeque<RingEntry>,
    bytes: usize,
}

struct RingEntry {
    tenant: Tenant,
    record: Arc<GenerationRecord>,
    bytes: usize,
}

struct RecordWriter {
    records: SyncSender<Arc<GenerationRecord>>,
    thread: JoinHandle<()>,
}

impl Recorder {
    /// Creates a recorder. If the options name a folder that does not exist, creates the folder.
    pub fn new(options: &RecordOptions) -> Result<Self> {
        let writer = options.folder.as_ref().map(|folder| RecordWriter::start(folder.clone())).transpose()?;
        Ok(Self { limit: options.memory_bytes, ring: Mutex::default(), writer: Mutex::new(writer) })
    }

    /// Returns whether requests are recorded, in memory or in a folder.
    pub fn is_on(&self) -> bool {
        self.limit > 0 || lock(&self.writer).is_some()
    }

    /// Adds a record. Drops the oldest records from memory while the records in memory exceed the limit.
    /// A record that alone exceeds the limit is not kept in memory.
    pub fn add(&self, tenant: Tenant, record: GenerationRecord) {
        let record = Arc::new(record);
        if let Some(writer) = &*lock(&self.writer)
            && let Err(TrySendError::Full(record)) = writer.records.try_send(record.clone())
        {
            tracing::warn!(id = record.id, "cannot write the record of a request: the disk is too slow");
        }
        let bytes = size_of::<RingEntry>() + record.bytes();
        if bytes > self.limit {
            return;
        }
        let mut ring = lock(&self.ring);
        ring.bytes += bytes;
        ring.entries.push_back(RingEntry { tenant, record, bytes });
        while ring.bytes > self.limit {
            let Some(oldest) = ring.entries.pop_front() else { return };
            ring.bytes -= oldest.bytes;
        }
    }

    /// Returns a tenant's newest record with this request id, if the record is still in memory.
    pub fn get(&self, tenant: Tenant, id: &str) -> Option<Arc<GenerationRecord>> {
        let ring = lock(&self.ring);
        let entry = ring.entries.iter().rev().find(|entry| entry.tenant == tenant && entry.record.id == id);
        entry.map(|entry| entry.record.clone())
    }

    /// Waits until all waiting records are written to the folder. Records added after this call are not written.
    pub fn finish(&self) {
        let writer = lock(&self.writer).take();
        if let Some(RecordWriter { records, thread }) = writer {
            drop(records);
            // If the writer thread panicked, the panic message is already printed.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RecordWriter {
    fn start(folder: PathBuf) -> Result<Self> {
        let what = || format!("cannot record requests in {}", folder.display());
        std::fs::create_dir_all(&folder).with_context(what)?;
        let (records, receiver) = mpsc::sync_channel::<Arc<GenerationRecord>>(MAX_WAITING);
        let write = move || {
            for record in receiver {
                if let Err(error) = write(&folder, &record) {
                    tracing::warn!(id = record.id, "cannot write the record of a request: {error:#}");
                }
            }
        };
        let thread = thread::Builder::new().name("inferno-record".into()).spawn(write);
        Ok(Self { records, thread: thread.context("cannot start the thread that writes records")? })
    }
}

/// Writes a record to a new file, which on Unix only its owner can read.
fn write(folder: &Path, record: &GenerationRecord) -> Result<()> {
    let json = serde_json::to_vec(record)?;
    let name = file_name(&record.id);
    let mut path = folder.join(format!("{name}.json"));
    let mut file = match files::create_private(&path) {
        // A client may use the same request id twice, so the file may already exist.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            path = folder.join(format!("{}.json", ids::new(&format!("{name}-"))));
            files::create_private(&path)
        }
        file => file,
    }?;
    // Remove an incomplete record, which can result from a full disk.
    Ok(file.write_all(&json).inspect_err(|_| drop(std::fs::remove_file(&path)))?)
}

/// Converts a request id to a safe file name. Replaces all characters except ASCII letters, digits, `-`, `_` and `.`
/// with `_`. Adds `_` before a leading `.`.
fn file_name(id: &str) -> String {
    let is_safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = id.chars().map(|c| if is_safe(c) { c } else { '_' }).collect();
    if name.starts_with('.') { format!("_{name}") } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_stay_in_the_folder() {
        for (id, name) in [("req-1", "req-1"), ("../x", "_.._x"), ("a/b\\c:d", "a_b_c_d"), (".", "_.")] {
            assert_eq!(file_name(id), name);
        }
    }
}
