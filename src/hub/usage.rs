//! Records when a model was last used, in the directory `.used` of inferno's own cache.
//!
//! The access times of model files are not reliable, because most systems do not record every access.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::cache::disk;
use super::client::Hub;
use super::snapshot::{Snapshot, SnapshotSource};
use crate::files;

impl Hub {
    /// Records the current time as the last use of a model. Does nothing if the user passed a path instead of a name.
    /// Ignores write errors.
    pub fn record_use(&self, snapshot: &Snapshot) {
        if snapshot.source == SnapshotSource::Directory {
            return;
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let path = self.usage_path(&snapshot.name);
        let _ = fs::create_dir_all(path.parent().unwrap_or(&path))
            .and_then(|()| disk::replace(&path, now.as_secs().to_string().as_bytes()));
    }

    /// Returns when inferno last used a model, or `None` if there is no valid record.
    pub fn last_used(&self, snapshot: &Snapshot) -> Option<SystemTime> {
        let seconds = files::read_text(&self.usage_path(&snapshot.name), files::MAX_SINGLE_VALUE_BYTES)
            .ok()?
            .trim()
            .parse()
            .ok()?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
    }

    /// Deletes the usage record of a model. For `org/name`, also deletes the records of all `org/name:TAG`.
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

/// Returns the file name of a model's usage record: the model's name, with `--` for each slash or backslash.
fn file_name(name: &str) -> String {
    name.replace(['/', '\\'], "--")
}
