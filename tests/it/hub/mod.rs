//! Tests of `hub` with a fake hub on 127.0.0.1. The tests use neither the network nor the user's caches.
//!
//! - `download`, `errors`: downloads
//! - `hostile`, `answers`, `schedules`: downloads with faults of the hub or the network
//! - `find`, `maintenance`, `demo`: models on this machine
//! - `process`: `inferno download` and other cache commands as processes

mod answers;
mod demo;
mod download;
mod errors;
mod find;
mod hostile;
mod maintenance;
mod process;
mod schedules;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use inferno::Error;
use inferno::hub::{FileFilter, Hub, HubConfig, Limits, Progress, Snapshot};
use tempfile::TempDir;

use crate::support::fake_hub::REPO;

/// Returns limits for tests: few retries, short waits before retries, and no minimum time between saves of progress.
fn fast_limits() -> Limits {
    let ms = Duration::from_millis;
    Limits { first_wait: ms(1), max_wait: ms(2_500), save_interval: ms(0), max_failures: 4, ..Limits::default() }
}

fn include_only(pattern: &str) -> FileFilter {
    FileFilter { include: vec![pattern.to_string()], ..FileFilter::default() }
}

/// A simulated machine with two empty caches: inferno's own cache and the shared Hugging Face cache.
struct Machine {
    dir: TempDir,
    endpoint: String,
}

impl Machine {
    fn new(endpoint: String) -> Self {
        Self { dir: TempDir::new().unwrap(), endpoint }
    }

    fn config(&self) -> HubConfig {
        HubConfig {
            cache: self.dir.path().join("own"),
            shared_cache: self.dir.path().join("shared"),
            endpoint: self.endpoint.clone(),
            token: None,
            offline: false,
            limits: fast_limits(),
        }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.config())
    }

    /// Downloads all files of [`REPO`] that inferno needs, without reporting progress.
    fn download(&self) -> anyhow::Result<Snapshot> {
        self.hub().download(REPO, None, &FileFilter::default(), &())
    }

    fn with_token(&self) -> Hub {
        Hub::new(HubConfig { token: Some("hf_secret".to_string()), ..self.config() })
    }

    fn offline(&self) -> Hub {
        Hub::new(HubConfig { offline: true, ..self.config() })
    }

    fn repo(&self) -> PathBuf {
        self.dir.path().join("own/models--org--tiny-model")
    }

    /// Writes a snapshot and the ref `main` into a cache. The snapshot has regular files instead of links to blobs.
    fn write_snapshot(&self, cache: &str, repo: &str, commit: &str, files: &[(&str, &[u8])]) -> PathBuf {
        let repo = self.dir.path().join(cache).join(format!("models--{}", repo.replace('/', "--")));
        let snapshot = repo.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repo.join("refs")).unwrap();
        for (name, bytes) in files {
            fs::write(snapshot.join(name), bytes).unwrap();
        }
        fs::write(repo.join("refs/main"), commit).unwrap();
        snapshot
    }
}

const COMPLETE: [(&str, &[u8]); 3] =
    [("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", b"weights")];

/// Records progress events as lines of text, except `asking_for_sizes`.
#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl Progress for Recorder {
    fn already_present(&self, snapshot: &Snapshot) {
        self.0.lock().unwrap().push(format!("already present: {:?}", snapshot.source));
    }
    fn start(&self, files: &[(String, u64)]) {
        self.0.lock().unwrap().push(format!(
            "start {} files, {} bytes",
            files.len(),
            files.iter().map(|f| f.1).sum::<u64>()
        ));
    }
    fn file(&self, name: &str, done_bytes: u64) {
        self.0.lock().unwrap().push(format!("{name} {done_bytes}"));
    }
    fn verifying(&self, name: &str) {
        self.0.lock().unwrap().push(format!("verifying {name}"));
    }
    fn retrying(&self, name: &str, cause: &str, wait: Duration) {
        self.0.lock().unwrap().push(format!("retrying {name} after {} ms: {cause}", wait.as_millis()));
    }
    fn waiting(&self, repo: &str) {
        self.0.lock().unwrap().push(format!("waiting for {repo}"));
    }
}

impl Recorder {
    fn all(self) -> Vec<String> {
        self.0.into_inner().unwrap()
    }
}

fn message_and_code(result: anyhow::Result<Snapshot>) -> (String, u8) {
    let error = result.unwrap_err();
    let code = error.downcast_ref::<Error>().map_or(1, Error::exit_code);
    (format!("{error:#}"), code)
}

fn file_names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
