//! A file that is being fetched: the bytes that are there, and a note of which they are.
//!
//! Parts arrive in any order, so the length of `blobs/<etag>.parts` says nothing. `<etag>.parts.json` lists what has come
//! and is on the disk for good: it is written after the data, so that neither a kill nor a power cut can make it lie.
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges are what this is about, some of length one")]

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::cache::{create_aside, create_dir};
use super::disk::write_error;

/// The endings of what is unfinished, of files that grew from their beginning, as in Python, and of what was found bad.
pub(super) const ENDINGS: [&str; 4] = [".parts", ".parts.json", ".incomplete", BAD];

/// A blob with other contents than its name says, until another one is there.
pub(super) const BAD: &str = ".bad";

/// What is there of one file.
pub(super) struct Partial {
    path: PathBuf,
    /// Of the whole file.
    bytes: u64,
    note: Note,
    /// Nothing is noted any more of what notes up to now are about: data could not be put on the disk, which a system
    /// tells once and then forgets; or all of it is void.
    lost: Arc<AtomicBool>,
}

#[derive(Clone, Default, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// Bytes that are there: in order, apart from each other, none empty.
    done: Vec<Range<u64>>,
    /// What the server called the contents, where the blob's own name is no hash of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    etag: Option<String>,
}

impl Partial {
    /// What earlier attempts have left of the file that will be `blob`. Writes nothing.
    pub fn find(blob: &Path, bytes: u64) -> Self {
        let path = with_ending(blob, ".parts");
        let note = fs::read(with_ending(blob, ".parts.json")).ok();
        let mut note: Note = note.and_then(|note| serde_json::from_slice(&note).ok()).unwrap_or_default();
        let length = |path: &Path| fs::metadata(path).ok().filter(|data| data.is_file()).map(|data| data.len());
        let there = match (length(&path), length(&with_ending(blob, ".incomplete"))) {
            (Some(length), _) => length,
            (None, Some(length)) => {
                note = Note { done: vec![0..length], etag: None };
                length
            }
            (None, None) => 0,
        };
        // A note that cannot be true is none; a file that was cut short has less.
        let mut last = 0;
        let sound = note.done.iter().all(|range| {
            let in_order = last <= range.start && range.start < range.end && range.end <= bytes;
            last = range.end;
            in_order
        });
        if sound {
            note.done.iter_mut().for_each(|range| range.end = range.end.min(there));
            note.done.retain(|range| range.start < range.end);
        } else {
            note = Note::default();
        }
        Self { path, bytes, note, lost: Arc::default() }
    }

    /// Makes the file, from what [`find`](Self::find) found.
    pub fn create(&self, blob: &Path) -> Result<()> {
        create_dir(blob.parent().unwrap_or(blob))?;
        if !self.path.exists() {
            let grown = with_ending(blob, ".incomplete");
            if grown.exists() {
                File::open(&grown).and_then(|data| data.sync_data()).map_err(|error| write_error(error, &grown, 0))?;
                self.note().write()?;
                fs::rename(&grown, &self.path).map_err(|error| write_error(error, &self.path, 0))?;
            } else {
                // A note without its file would be taken for one about the new file.
                delete(&json(&self.path))?;
            }
        }
        let file = self.open()?;
        // Left by something else under this name.
        if file.metadata().is_ok_and(|data| data.len() > self.bytes) {
            file.set_len(self.bytes).map_err(|error| write_error(error, &self.path, 0))?;
        }
        Ok(())
    }

    /// One more handle to write with.
    pub fn open(&self) -> Result<File> {
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        #[cfg(unix)]
        {
            use nix::fcntl::OFlag;
            use std::os::unix::fs::OpenOptionsExt;
            // Nothing but a file of our own: a link could lead anywhere, and a pipe would wait for a reader.
            options.custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits());
        }
        let file = options.open(&self.path).map_err(|error| write_error(error, &self.path, 0))?;
        if !file.metadata().is_ok_and(|data| data.is_file()) {
            bail!("{} is no file; delete it", self.path.display());
        }
        Ok(file)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn done_bytes(&self) -> u64 {
        self.note.done.iter().map(|range| range.end - range.start).sum()
    }

    /// What is not there yet.
    pub fn gaps(&self) -> Vec<Range<u64>> {
        let starts = std::iter::once(0).chain(self.note.done.iter().map(|range| range.end));
        let ends = self.note.done.iter().map(|range| range.start).chain(std::iter::once(self.bytes));
        starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end).collect()
    }

    /// Bytes have been written.
    pub fn add(&mut self, new: Range<u64>) {
        if new.start >= new.end {
            return;
        }
        let done = &mut self.note.done;
        // Those that it touches become one with it.
        let first = done.partition_point(|range| range.end < new.start);
        let last = done.partition_point(|range| range.start <= new.end);
        let mut merged = new;
        for range in &done[first..last] {
            merged = merged.start.min(range.start)..merged.end.max(range.end);
        }
        done.splice(first..last, [merged]);
    }

    /// Forgets all that is there. A note that somebody is about to write is not written.
    pub fn clear(&mut self) {
        self.note = Note::default();
        // Of a disk that loses data nothing is noted, whatever comes.
        let was_lost = self.lost.swap(true, Ordering::AcqRel);
        self.lost = Arc::new(AtomicBool::new(was_lost));
    }

    /// Whether an answer is about the same contents as those before it.
    pub fn is_same(&mut self, etag: &str) -> bool {
        *self.note.etag.get_or_insert_with(|| etag.to_string()) == etag
    }

    /// A note to be kept once the data up to now is on the disk.
    pub fn note(&self) -> SaveNote {
        SaveNote { path: self.path.clone(), note: self.note.clone(), lost: self.lost.clone() }
    }

    /// Puts data and note on the disk.
    pub fn save(&self) -> Result<()> {
        self.note().save()
    }

    /// Deletes all of it.
    pub fn delete(&self) -> Result<()> {
        let note = json(&self.path);
        for path in [&note, &self.path] {
            delete(path)?;
        }
        Ok(())
    }

    /// Gives the whole file its name.
    pub fn finish(&self, blob: &Path) -> Result<()> {
        // On disk before it has its name: a power cut must not leave a whole-looking file of zeros.
        self.note().sync()?;
        fs::rename(&self.path, blob).with_context(|| format!("cannot rename {}", self.path.display()))?;
        self.delete()
    }
}

/// See [`Partial::note`].
pub(super) struct SaveNote {
    path: PathBuf,
    note: Note,
    lost: Arc<AtomicBool>,
}

impl SaveNote {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the data on the disk, and then the note. Nothing where the data is gone, or where some of it once could not be
    /// put there.
    pub fn save(&self) -> Result<()> {
        if self.lost.load(Ordering::Acquire) || !self.sync()? || self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        self.write()
    }

    /// Puts the data on the disk; false if there is none.
    pub fn sync(&self) -> Result<bool> {
        match File::open(&self.path).and_then(|data| data.sync_data()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => {
                self.lost.store(true, Ordering::Release);
                Err(write_error(error, &self.path, 0))
            }
        }
    }

    fn write(&self) -> Result<()> {
        let path = json(&self.path);
        let error = |error| write_error(error, &path, 0);
        let (temporary, mut file) = create_aside(&path).map_err(error)?;
        let mut write = || -> std::io::Result<()> {
            file.write_all(serde_json::to_string(&self.note)?.as_bytes())?;
            file.sync_data()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|cause| {
            let _ = fs::remove_file(&temporary);
            error(cause)
        })
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

fn json(parts: &Path) -> PathBuf {
    with_ending(parts, ".json")
}

pub(super) fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut path = path.as_os_str().to_os_string();
    path.push(ending);
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_and_what_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("blob");
        let mut partial = Partial::find(&blob, 100);
        assert_eq!(partial.gaps(), [0..100]);
        assert!(Partial::find(&blob, 0).gaps().is_empty());
        for range in [10..20, 40..50, 20..25, 60..60, 0..5] {
            partial.add(range);
        }
        assert_eq!(partial.note.done, [0..5, 10..25, 40..50]);
        assert_eq!(partial.gaps(), [5..10, 25..40, 50..100]);
        partial.add(3..45);
        assert_eq!((partial.note.done.clone(), partial.done_bytes()), (vec![0..50], 50));
        partial.add(50..100);
        assert!(partial.gaps().is_empty());
    }

    #[test]
    fn notes_are_found_again_and_not_believed_blindly() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("blob");
        let mut partial = Partial::find(&blob, 100);
        partial.create(&blob).unwrap();
        fs::write(partial.path(), [1; 90]).unwrap();
        partial.add(0..30);
        partial.add(80..90);
        assert!(partial.is_same("a") && partial.is_same("a") && !partial.is_same("b"));
        partial.save().unwrap();
        assert_eq!(Partial::find(&blob, 100).note, partial.note);
        assert_eq!(Partial::find(&blob, 85).done_bytes(), 0, "the note is about a longer file");
        partial.open().unwrap().set_len(85).unwrap();
        assert_eq!(Partial::find(&blob, 100).note.done, [0..30, 80..85]);
        for lie in ["{", r#"{"done":[{"start":5,"end":2}]}"#, r#"{"done":[{"start":9,"end":10},{"start":0,"end":3}]}"#]
        {
            fs::write(with_ending(&blob, ".parts.json"), lie).unwrap();
            assert_eq!(Partial::find(&blob, 100).done_bytes(), 0, "{lie}");
        }
        partial.delete().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // What has grown from its beginning.
        fs::write(with_ending(&blob, ".incomplete"), [1; 40]).unwrap();
        let grown = Partial::find(&blob, 100);
        assert_eq!(grown.note.done, [0..40]);
        grown.create(&blob).unwrap();
        assert_eq!(Partial::find(&blob, 100).note.done, [0..40]);
        assert!(!with_ending(&blob, ".incomplete").exists());
    }
}
