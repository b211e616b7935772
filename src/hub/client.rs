//! Defines [`Hub`]. Other files of `hub` add methods to [`Hub`], such as `find`, `download` and `remove`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::cache::Cache;
use super::cache::disk;
use super::config::HubConfig;
use super::remote::endpoint::{self, TokenStatus};
use super::snapshot::SnapshotSource;
use crate::error::Error;

/// Access to the model caches on this machine and to the hub from which models are downloaded.
pub struct Hub {
    pub(super) config: HubConfig,
    /// Whether `remove` and `prune` delete files even if the filesystem does not support file locking.
    pub(super) force: bool,
}

impl Hub {
    /// Creates a `Hub` from environment variables such as INFERNO_CACHE, HF_HOME, HF_ENDPOINT and HF_TOKEN.
    pub fn from_env() -> Result<Self> {
        Ok(Self::new(HubConfig::from_env()?))
    }

    pub fn new(config: HubConfig) -> Self {
        Self { config, force: false }
    }

    /// Sets whether [`remove`](Self::remove) and [`prune`](Self::prune) may delete files without file locking.
    /// Without `force`, removing and pruning fail on a filesystem that does not support file locking.
    /// Removing the demo does not require file locking.
    pub fn with_force(self, force: bool) -> Self {
        Self { force, ..self }
    }

    pub fn config(&self) -> &HubConfig {
        &self.config
    }

    /// Returns the directory of inferno's own cache, to which models are downloaded. The directory may not exist yet.
    pub fn cache_dir(&self) -> &Path {
        &self.config.cache
    }

    /// Returns a warning if a token is set but is not sent to the hub, because the connection is not encrypted.
    /// Returns `None` if HF_HUB_OFFLINE is set.
    pub fn token_warning(&self) -> Option<String> {
        self.config.token_warning().filter(|_| !self.config.offline)
    }

    /// Asks the hub whether it accepts the token. If no token is sent, only checks that the hub responds.
    /// Fails if HF_HUB_OFFLINE is set, if the request fails or times out, or if the hub responds with a server error.
    pub fn check_endpoint(&self) -> Result<TokenStatus> {
        self.check_online(|| "cannot contact the hub: HF_HUB_OFFLINE is set".into())?;
        endpoint::check_endpoint(&self.config)
    }

    /// Returns the free space on the disk of inferno's own cache, in bytes, or `None` if it is unknown.
    pub fn free_bytes(&self) -> Option<u64> {
        disk::free_bytes(&self.config.cache)
    }

    /// Fails if inferno's own cache is not writable. Creates its directory, then writes and deletes a test file.
    pub fn check_cache_is_writable(&self) -> Result<()> {
        disk::create_dir(&self.config.cache)?;
        let probe = disk::temporary_path(&self.config.cache.join("probe"));
        let written = fs::write(&probe, b"inferno").and_then(|()| fs::remove_file(&probe));
        written.with_context(|| format!("cannot write {}", probe.display()))
    }

    /// Fails if inferno's own cache is also the shared Hugging Face cache, which inferno must not change.
    pub(super) fn check_own_cache(&self) -> Result<()> {
        let HubConfig { cache, shared_cache, .. } = &self.config;
        if cache != shared_cache && disk::resolve(cache) != disk::resolve(shared_cache) {
            return Ok(());
        }
        Err(Error::usage(format!(
            "cannot change {}: it is the shared Hugging Face cache\n  set INFERNO_CACHE to another directory",
            cache.display()
        )))
    }

    /// Fails with [`Error::Offline`] if HF_HUB_OFFLINE is set. `what` returns the first line of the error text.
    pub(super) fn check_online(&self, what: impl FnOnce() -> String) -> Result<()> {
        if self.config.offline { Err(Error::Offline { what: what() }.into()) } else { Ok(()) }
    }

    pub(super) fn own_cache(&self) -> Cache {
        Cache { root: self.config.cache.clone() }
    }

    /// Returns inferno's own cache and the shared cache, in search order.
    pub(super) fn caches(&self) -> [(Cache, SnapshotSource); 2] {
        let shared = Cache { root: self.config.shared_cache.clone() };
        [(self.own_cache(), SnapshotSource::Inferno), (shared, SnapshotSource::HuggingFace)]
    }
}
