//! [`Partial`]: a partially downloaded file, and the record of its byte ranges on disk.
//!
//! Ranges arrive in any order, so the length of `blobs/<etag>.parts` does not show which bytes are present.
//! The record, `blobs/<etag>.parts.json`, lists the byte ranges that are on disk.
//! The file data is flushed before the record is written, so all listed bytes are on disk even after a power failure.
#![allow(clippy::single_range_in_vec_init, reason = "lists with a single range are intended here")]

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::files;
use crate::hub::cache::disk::{self, create_dir, with_suffix, write_error};

/// The suffixes of unfinished blobs, of their records, and of corrupt blobs.
///
/// Hugging Face's Python tools leave `.incomplete` files, and usually write a file from start to end.
/// inferno therefore assumes that an `.incomplete` file has all bytes up to its length.
/// If a tool wrote the file in another order, as `hf_transfer` does, verification finds the wrong contents,
/// and inferno fetches the file again.
pub(in crate::hub) const SUFFIXES: [&str; 4] = [".parts", ".parts.json", ".incomplete", BAD];

/// The suffix of a corrupt blob that a repair keeps until the replacement has arrived.
pub(in crate::hub) const BAD: &str = ".bad";

/// A partially downloaded file, and the byte ranges that are on disk.
pub(in crate::hub) struct Partial {
    path: PathBuf,
    /// The size of the complete file, in bytes.
    bytes: u64,
    record: PartsRecord,
    /// Whether file data was discarded or could not be flushed.
    /// If true, pending records that share this flag are not saved.
    ///
    /// After a failed flush, the flag stays true even if the file is fetched again from the start,
    /// because the operating system reports a failed flush only once.
    is_lost: Arc<AtomicBool>,
}

/// The contents of `blobs/<etag>.parts.json`.
#[derive(Clone, Default, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PartsRecord {
    /// The byte ranges on disk: sorted, not empty, and disjoint.
    done: Vec<Range<u64>>,
    /// The etag that the server sent. Stored only if the blob's name is not a hash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    etag: Option<String>,
}

impl PartsRecord {
    /// Returns whether the ranges are sorted, not empty, disjoint, and within a file of `bytes` bytes.
    fn is_valid(&self, bytes: u64) -> bool {
        let mut previous_end = 0;
        self.done.iter().all(|range| {
            let is_in_order = previous_end <= range.start && range.start < range.end && range.end <= bytes;
            previous_end = range.end;
            is_in_order
        })
    }
}

impl Partial {
    /// Determines which bytes of `blob` earlier attempts have left on disk. Does not write to disk.
    pub fn find(blob: &Path, bytes: u64) -> Self {
        let path = with_suffix(blob, ".parts");
        let json = files::read(&with_suffix(blob, ".parts.json"), files::MAX_DOWNLOAD_RECORD_BYTES).ok();
        let mut record: PartsRecord = json.and_then(|json| files::parse_json(&json).ok()).unwrap_or_default();
        let length = |path: &Path| fs::metadata(path).ok().filter(|data| data.is_file()).map(|data| data.len());
        let length_on_disk = match (length(&path), length(&with_suffix(blob, ".incomplete"))) {
            (Some(length), _) => length,
            (None, Some(length)) => {
                record = PartsRecord { done: vec![0..length], etag: None };
                length
            }
            (None, None) => 0,
        };
        if record.is_valid(bytes) {
            // Another program may have truncated the file since the record was written.
            record.done.iter_mut().for_each(|range| range.end = range.end.min(length_on_disk));
            record.done.retain(|range| range.start < range.end);
        } else {
            record = PartsRecord::default();
        }
        Self { path, bytes, record, is_lost: Arc::default() }
    }

    /// Creates the partial file, unless an earlier attempt has left one. If the Python tools have left an `.incomplete`
    /// file, renames it instead.
    pub fn create(&self, blob: &Path) -> Result<()> {
        create_dir(blob.parent().unwrap_or(blob))?;
        if !self.path.exists() {
            let incomplete = with_suffix(blob, ".incomplete");
            if incomplete.exists() {
                files::open(&incomplete)
                    .map_err(io::Error::other)
                    .and_then(|data| data.sync_data())
                    .map_err(|error| write_error(error, &incomplete))?;
                self.pending_record().write_record()?;
                fs::rename(&incomplete, &self.path).map_err(|error| write_error(error, &self.path))?;
            } else {
                // Delete a record whose partial file is gone, because the record does not describe the new file.
                delete(&record_path(&self.path))?;
            }
        }
        let file = self.open()?;
        // Truncate a file that is too long, for example because the hub listed a larger size in an earlier download.
        if file.metadata().is_ok_and(|data| data.len() > self.bytes) {
            file.set_len(self.bytes).map_err(|error| write_error(error, &self.path))?;
        }
        Ok(())
    }

    /// Opens or creates the partial file for writing. Each transfer uses its own file handle.
    /// Fails if something other than a regular file is at this path.
    pub fn open(&self) -> Result<File> {
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        #[cfg(unix)]
        {
            use nix::fcntl::OFlag;
            use std::os::unix::fs::OpenOptionsExt;
            // Accept only regular files: a symlink could point to any file, and opening a pipe would block.
            options.custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits());
        }
        let file = options.open(&self.path).map_err(|error| write_error(error, &self.path))?;
        if !file.metadata().is_ok_and(|data| data.is_file()) {
            bail!(
                "cannot write {}: not a regular file\n  delete it and run the same command again",
                self.path.display()
            );
        }
        Ok(file)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn done_bytes(&self) -> u64 {
        self.record.done.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns the byte ranges of the file that are not on disk yet.
    pub fn gaps(&self) -> Vec<Range<u64>> {
        let starts = std::iter::once(0).chain(self.record.done.iter().map(|range| range.end));
        let ends = self.record.done.iter().map(|range| range.start).chain(std::iter::once(self.bytes));
        starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end).collect()
    }

    /// Adds a written byte range to the record in memory.
    pub fn add(&mut self, new: Range<u64>) {
        if new.start >= new.end {
            return;
        }
        let done = &mut self.record.done;
        // Merge the new range with all ranges that overlap or touch it.
        let first = done.partition_point(|range| range.end < new.start);
        let last = done.partition_point(|range| range.start <= new.end);
        let mut merged = new;
        for range in &done[first..last] {
            merged = merged.start.min(range.start)..merged.end.max(range.end);
        }
        done.splice(first..last, [merged]);
    }

    /// Clears the record in memory, and keeps every earlier [`PendingRecord`] from being saved.
    pub fn clear(&mut self) {
        self.record = PartsRecord::default();
        // If a flush has failed, set the new flag too, so that later records are not saved either.
        let was_lost = self.is_lost.swap(true, Ordering::AcqRel);
        self.is_lost = Arc::new(AtomicBool::new(was_lost));
    }

    /// Returns whether `etag` equals the stored etag. If no etag is stored yet, stores `etag` and returns true.
    pub fn has_same_etag(&mut self, etag: &str) -> bool {
        *self.record.etag.get_or_insert_with(|| etag.to_string()) == etag
    }

    /// Returns a copy of the record, which the caller can save after it has unlocked the state of the download.
    pub fn pending_record(&self) -> PendingRecord {
        PendingRecord { path: self.path.clone(), record: self.record.clone(), is_lost: self.is_lost.clone() }
    }

    /// Flushes the data of the partial file, then saves the record.
    pub fn save(&self) -> Result<()> {
        self.pending_record().save()
    }

    /// Deletes the partial file and its record.
    pub fn delete(&self) -> Result<()> {
        for path in [&record_path(&self.path), &self.path] {
            delete(path)?;
        }
        Ok(())
    }

    /// Renames the complete file to `blob` and deletes its record.
    pub fn finish(&self, blob: &Path) -> Result<()> {
        // Flush before renaming. Otherwise, a power failure could leave a blob of the right size that contains zeros.
        self.pending_record().sync()?;
        fs::rename(&self.path, blob).with_context(|| format!("cannot rename {}", self.path.display()))?;
        self.delete()
    }
}

/// A copy of the record of a [`Partial`], to be saved to disk later.
pub(in crate::hub) struct PendingRecord {
    path: PathBuf,
    record: PartsRecord,
    is_lost: Arc<AtomicBool>,
}

impl PendingRecord {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Flushes the data of the partial file, then writes the record.
    /// Does not write the record if the file does not exist, or if data was discarded or lost.
    pub fn save(&self) -> Result<()> {
        if self.is_lost.load(Ordering::Acquire) || !self.sync()? || self.is_lost.load(Ordering::Acquire) {
            return Ok(());
        }
        self.write_record()
    }

    /// Flushes the data of the partial file. Returns false if the file does not exist.
    pub fn sync(&self) -> Result<bool> {
        match File::open(&self.path).and_then(|data| data.sync_data()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => {
                self.is_lost.store(true, Ordering::Release);
                Err(write_error(error, &self.path))
            }
        }
    }

    fn write_record(&self) -> Result<()> {
        let path = record_path(&self.path);
        disk::replace(&path, &serde_json::to_vec(&self.record)?).map_err(|error| write_error(error, &path))
    }
}

fn delete(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot delete {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn record_path(parts: &Path) -> PathBuf {
    with_suffix(parts, ".json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_merged_and_gaps_remain() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("blob");
        let mut partial = Partial::find(&blob, 100);
        assert_eq!(partial.gaps(), [0..100]);
        assert!(Partial::find(&blob, 0).gaps().is_empty());
        for range in [10..20, 40..50, 20..25, 60..60, 0..5] {
            partial.add(range);
        }
        assert_eq!(partial.record.done, [0..5, 10..25, 40..50]);
        assert_eq!(partial.gaps(), [5..10, 25..40, 50..100]);
        partial.add(3..45);
        assert_eq!((partial.record.done.clone(), partial.done_bytes()), (vec![0..50], 50));
        partial.add(50..100);
        assert!(partial.gaps().is_empty());
    }

    #[test]
    fn record_is_found_again_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("blob");
        let mut partial = Partial::find(&blob, 100);
        partial.create(&blob).unwrap();
        fs::write(partial.path(), [1; 90]).unwrap();
        partial.add(0..30);
        partial.add(80..90);
        assert!(partial.has_same_etag("a") && partial.has_same_etag("a") && !partial.has_same_etag("b"));
        partial.save().unwrap();
        assert_eq!(Partial::find(&blob, 100).record, partial.record);
        assert_eq!(Partial::find(&blob, 85).done_bytes(), 0, "the record of a longer file was accepted");
        partial.open().unwrap().set_len(85).unwrap();
        assert_eq!(Partial::find(&blob, 100).record.done, [0..30, 80..85]);
        let unsorted = r#"{"done":[{"start":9,"end":10},{"start":0,"end":3}]}"#;
        for broken in ["{", r#"{"done":[{"start":5,"end":2}]}"#, unsorted] {
            fs::write(with_suffix(&blob, ".parts.json"), broken).unwrap();
            assert_eq!(Partial::find(&blob, 100).done_bytes(), 0, "{broken}");
        }
        partial.delete().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn incomplete_file_of_other_tools_is_resumed() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("blob");
        fs::write(with_suffix(&blob, ".incomplete"), [1; 40]).unwrap();
        let partial = Partial::find(&blob, 100);
        assert_eq!(partial.record.done, [0..40]);
        partial.create(&blob).unwrap();
        assert_eq!(Partial::find(&blob, 100).record.done, [0..40]);
        assert!(!with_suffix(&blob, ".incomplete").exists());
    }
}
