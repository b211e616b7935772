//! When a model was last used, kept in inferno's cache for all that was found by name. Access times would not tell:
//! most file systems do not keep them.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::{Hub, Snapshot, Source, cache};

impl Hub {
    /// Notes that a model is used now. Where that cannot be written, nothing is said.
    pub fn note_use(&self, snapshot: &Snapshot) {
        if snapshot.source == Source::Directory {
            return;
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let path = self.use_path(&snapshot.name);
        let aside = cache::aside(&path);
        let _ = fs::create_dir_all(path.parent().unwrap_or(&path))
            .and_then(|()| fs::write(&aside, now.as_secs().to_string()))
            .and_then(|()| fs::rename(&aside, &path));
    }

    /// When a model was last used by inferno, as far as is known.
    pub fn last_used(&self, snapshot: &Snapshot) -> Option<SystemTime> {
        let seconds = fs::read_to_string(self.use_path(&snapshot.name)).ok()?.trim().parse().ok()?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
    }

    /// Forgets it, for a model that is removed: `org/name` with all its `org/name:TAG`, or one of them.
    pub(super) fn forget_use(&self, name: &str) {
        let name = file_name(name);
        for entry in cache::entries(&self.settings.cache.join(".used")) {
            let found = entry.file_name();
            let rest = found.to_str().and_then(|found| found.strip_prefix(&name));
            if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':')) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn use_path(&self, name: &str) -> PathBuf {
        self.settings.cache.join(".used").join(file_name(name))
    }
}

/// A name as one file name: `--` stands for the slash, as in the cache.
fn file_name(name: &str) -> String {
    name.replace(['/', '\\'], "--")
}
