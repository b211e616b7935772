//! Records when each model was last used. The records are files in inferno's cache.
//!
//! File access times are not reliable, because most systems do not record every access.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::client::Hub;
use super::disk;
use super::snapshot::{Snapshot, Source};
use crate::files;

impl Hub {
    /// Records that a model is in use now, unless the user named it by its path. Ignores write errors.
    pub fn record_use(&self, snapshot: &Snapshot) {
        if snapshot.source == Source::Directory {
            return;
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let path = self.usage_path(&snapshot.name);
        let _ = fs::create_dir_all(path.parent().unwrap_or(&path))
            .and_then(|()| disk::replace(&path, now.as_secs().to_string().as_bytes()));
    }

    /// Returns the time when inferno last used a model. Returns `None` if there is no record.
    pub fn last_used(&self, snapshot: &Snapshot) -> Option<SystemTime> {
        let seconds =
            files::read_text(&self.usage_path(&snapshot.name), files::SINGLE_VALUE).ok()?.trim().parse().ok()?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
    }

    /// Deletes the record of a removed model. For `org/name`, also deletes the records of every `org/name:TAG`.
    pub(super) fn forget_use(&self, name: &str) {
        let name = file_name(name);
        for entry in disk::entries(&self.config.cache.join(".used")) {
            let found = entry.file_name();
            let rest = found.to_str().and_then(|found| found.strip_prefix(&name));
            if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':')) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn usage_path(&self, name: &str) -> PathBuf {
        self.config.cache.join(".used").join(file_name(name))
    }
}

/// Converts a model's name to a file name. Replaces each slash or backslash with `--`.
fn file_name(name: &str) -> String {
    name.replace(['/', '\\'], "--")
}
