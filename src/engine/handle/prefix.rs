//! Saves cached prefixes to files, and loads saved prefixes into the prefix cache.

use std::path::Path;
use std::sync::mpsc;

use anyhow::Result;

use super::EngineHandle;
use crate::engine::blocks::{BlockManager, prefix_file};
use crate::engine::engine_loop::EngineCommand;
use crate::files;
use crate::runner::Runner;

/// How much larger a prefix file may be than the KV caches, in bytes. The header and the token ids need this room.
/// The value is the limit of the `safetensors` crate for the header alone.
const MAX_PREFIX_HEADER: u64 = 100_000_000;

impl EngineHandle {
    /// Saves the keys and values of the longest cached prefix of `ids` to a file. Returns the number of saved tokens.
    ///
    /// [`load_prefix`](Self::load_prefix) reads the file.
    /// Finds only prefixes that were cached by requests without a cache salt.
    /// In an engine that is not deterministic, does not find prefixes of deterministic requests.
    /// If no such prefix is cached, writes no file and returns 0.
    /// Fails if the keys and values cannot be read, if the file cannot be written, or if the engine stops.
    pub fn save_prefix(&self, ids: &[u32], path: &Path) -> Result<usize> {
        let ids = ids.to_vec();
        let path = path.to_path_buf();
        let fingerprint = self.shared.fingerprint.clone();
        self.with_cache(move |runner, blocks| prefix_file::save(&path, &ids, &fingerprint, runner, blocks))?
    }

    /// Adds a saved prefix to the prefix cache. Returns the number of tokens in the prefix.
    ///
    /// Returns 0 if the cache has too few free blocks.
    /// Also returns 0 if the prefix was saved with other model files, with another build of inferno, or with other
    /// settings that change keys and values, such as the dtype, the quantization or the attention kernel.
    /// For deterministic engines, these settings include the number of devices, the split, and a chunk size below 512.
    /// Fails if the file cannot be read, is not a complete prefix file, or is over 100 MB larger than the KV caches of
    /// all ranks together. Also fails if the engine stops.
    pub fn load_prefix(&self, path: &Path) -> Result<usize> {
        // Read the file on the client's thread, so that the engine thread does not wait for the file.
        let largest = self.info().cache_bytes.saturating_mul(self.info().ranks as u64);
        let bytes = files::read(path, largest.saturating_add(MAX_PREFIX_HEADER))?;
        let (path, fingerprint) = (path.to_path_buf(), self.shared.fingerprint.clone());
        self.with_cache(move |runner, blocks| prefix_file::load(&path, bytes, &fingerprint, runner, blocks))?
    }

    fn with_cache<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Runner, &mut BlockManager) -> T + Send + 'static,
    ) -> Result<T> {
        let (sender, result) = mpsc::sync_channel(1);
        self.send(EngineCommand::CallCache(Box::new(move |runner, blocks| {
            // The send fails only if the caller no longer waits for the result of the call.
            let _ = sender.send(call(runner, blocks));
        })))?;
        self.wait_for(&result)
    }
}
