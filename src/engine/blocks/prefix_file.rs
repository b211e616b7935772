//! Saves the keys and values of a prefix to a file, and reads them back into the prefix cache.
//!
//! The file is a safetensors file with these tensors, for a prefix of n tokens:
//!
//! - `tokens`: u32 `[n]`
//! - `group.G.layer.L.k` and `group.G.layer.L.v`: `[rows, kv_heads, head_dim]` for layer L of layer group G.
//!   L is the index of the layer within its layer group, across all ranks.
//!   The rows come from the blocks that the token after the prefix attends to, in order of position.
//!
//! The file holds all layers and all KV heads of the model, even if each rank holds only some of them.
//! An engine with another number of ranks can therefore load the file, unless the engines are deterministic.
//!
//! Keys and values are valid only for the model, build and settings that computed them.
//! The metadata value `fingerprint` identifies the model files, the build, and settings such as the dtype.
//! For a deterministic engine, it also identifies the number of ranks and how the ranks divide the model.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;

use super::BlockManager;
use crate::files;
use crate::kernels::rows::copy_rows;
use crate::nn::kv_cache::{BLOCK_TOKENS, BlockTables, GroupedLayer, KvCache};
use crate::runner::Runner;

/// The metadata key for the fingerprint of the model files, the build and the settings.
const FINGERPRINT: &str = "fingerprint";

/// The blocks of the KV cache that hold a prefix.
struct PrefixBlocks {
    tables: BlockTables,
    /// For each layer group, the table indices of the blocks that the token after the prefix attends to.
    visible: Vec<Range<usize>>,
}

impl PrefixBlocks {
    fn new(computed: usize, tables: &BlockTables, blocks: &BlockManager, groups: usize) -> Self {
        let visible = (0..groups).map(|group| blocks.visible_blocks(group, computed)).collect();
        Self { tables: tables.clone(), visible }
    }

    /// Returns the first cache row of each visible block of a layer group.
    fn rows(&self, group: usize) -> impl Iterator<Item = usize> + '_ {
        self.visible[group].clone().map(move |index| self.tables.get(group, index) as usize * BLOCK_TOKENS)
    }
}

/// Saves the longest cached prefix of `ids`. Returns the number of saved tokens.
/// If no prefix is cached, returns 0 and writes no file.
/// Does not find blocks that were cached by requests with a cache salt or with prompt segments of their own.
/// Fails if a rank cannot read its cache, or if the file cannot be written.
pub fn save(path: &Path, ids: &[u32], fingerprint: &str, runner: &Runner, blocks: &BlockManager) -> Result<usize> {
    // `find_prefix` never includes the last token, so append a token to find all full blocks of `ids`.
    let tokens = [ids, &[0]].concat();
    let prefix = blocks.find_prefix(&tokens, tokens.len(), Default::default(), usize::MAX);
    let computed = prefix.tokens();
    let prefix = PrefixBlocks::new(computed, prefix.tables(), blocks, runner.cache().layout().groups());
    if computed == 0 {
        return Ok(0);
    }
    // `save` runs on the engine thread, so no step can overwrite the blocks before `save` returns.
    let parts = runner.with_caches(move |rank| read_blocks(&prefix, rank.cache))?;
    let mut tensors = all_heads(parts)?;
    tensors.push(("tokens".into(), Tensor::new(&ids[..computed], &Device::Cpu)?));
    let metadata = HashMap::from([(FINGERPRINT.to_string(), fingerprint.to_string())]);
    let bytes = safetensors::serialize(tensors, Some(metadata))?;
    let part = path.with_extension("kv.part");
    let write = || -> Result<()> {
        let _ = fs::remove_file(&part);
        files::create_private(&part)?.write_all(&bytes)?;
        Ok(fs::rename(&part, path)?)
    };
    write().with_context(|| format!("cannot write {}", path.display())).inspect_err(|_| _ = fs::remove_file(&part))?;
    Ok(computed)
}

/// Adds a saved prefix to the prefix cache. `bytes` is the content of a file that [`save`] wrote.
/// Returns the number of tokens in the prefix.
///
/// Returns 0 if the file has another fingerprint, or if the cache has too few free blocks.
/// Fails if `bytes` is not a safetensors file, if a tensor is missing or has the wrong shape or dtype,
/// or if a rank cannot write to its cache.
/// The error says that the file is damaged, unless the cause is a rank that cannot write to its cache.
/// The file has no checksum, so damaged keys and values of the right shape and dtype are not detected.
pub fn load(
    path: &Path,
    bytes: Vec<u8>,
    fingerprint: &str,
    runner: &Runner,
    blocks: &mut BlockManager,
) -> Result<usize> {
    let (_, metadata) = SafeTensors::read_metadata(&bytes).with_context(|| damaged(path))?;
    if metadata.metadata().as_ref().and_then(|metadata| metadata.get(FINGERPRINT)).is_none_or(|f| f != fingerprint) {
        return Ok(0);
    }
    add(path, bytes.into(), runner, blocks)
}

/// Returns the error message for a file with invalid content.
fn damaged(path: &Path) -> String {
    format!("cannot load the prefix: {} is damaged", path.display())
}

fn add(path: &Path, bytes: Arc<[u8]>, runner: &Runner, blocks: &mut BlockManager) -> Result<usize> {
    let tokens = read_tokens(&bytes).with_context(|| damaged(path))?;
    let Some(mut sequence) = blocks.adopt(&tokens) else { return Ok(0) };
    let prefix = PrefixBlocks::new(tokens.len(), sequence.tables(), blocks, runner.cache().layout().groups());
    let written = write_all_ranks(path, bytes, prefix, runner);
    if written.is_ok() {
        blocks.commit(&mut sequence, &tokens);
    }
    blocks.release(sequence);
    written.map(|()| tokens.len())
}

/// Returns the tokens of the prefix in a file.
/// Fails if the file is invalid, or if the number of tokens is not a positive multiple of the block size.
fn read_tokens(bytes: &[u8]) -> Result<Vec<u32>> {
    let tokens: Vec<u32> = SafeTensors::deserialize(bytes)?.tensor("tokens")?.load(&Device::Cpu)?.to_vec1()?;
    ensure!(
        !tokens.is_empty() && tokens.len().is_multiple_of(BLOCK_TOKENS),
        "expected a positive multiple of {BLOCK_TOKENS} tokens, found {}",
        tokens.len()
    );
    Ok(tokens)
}

/// Reads the visible blocks from the KV cache of one rank. This cache has only the layers and KV heads of the rank.
/// Returns the keys and the values of each layer as separate tensors, with their names in the file.
/// Leaves out empty tensors.
fn read_blocks(prefix: &PrefixBlocks, cache: &KvCache) -> Result<Vec<(String, Tensor)>> {
    let mut tensors = Vec::new();
    for GroupedLayer { group, index, k, v } in cache.own_layers() {
        for (kind, tensor) in [("k", k), ("v", v)] {
            if tensor.elem_count() == 0 {
                continue;
            }
            let rows = prefix.rows(group).map(|first| -> Result<Tensor> {
                Ok(tensor.narrow(0, first, BLOCK_TOKENS)?.force_contiguous()?.to_device(&Device::Cpu)?)
            });
            let rows = rows.collect::<Result<Vec<_>>>()?;
            if !rows.is_empty() {
                tensors.push((tensor_name(group, index, kind), Tensor::cat(&rows, 0)?));
            }
        }
    }
    Ok(tensors)
}

/// Concatenates the KV heads of all ranks. `parts` holds the tensors of each rank, in rank order.
fn all_heads(parts: Vec<Vec<(String, Tensor)>>) -> Result<Vec<(String, Tensor)>> {
    let mut by_name: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    for (name, tensor) in parts.into_iter().flatten() {
        by_name.entry(name).or_default().push(tensor);
    }
    by_name.into_iter().map(|(name, heads)| Ok((name, Tensor::cat(&heads, 1)?))).collect()
}

/// Writes the tensors of a file to the blocks of `prefix`, on every rank.
fn write_all_ranks(path: &Path, bytes: Arc<[u8]>, prefix: PrefixBlocks, runner: &Runner) -> Result<()> {
    let path = path.to_path_buf();
    let heads = runner.with_caches(|rank| Ok(rank.cache.kv_heads()))?;
    let shares_heads = runner.world().stages().is_none();
    runner.with_caches(move |rank| {
        let (first, total) =
            if shares_heads { (heads[..rank.rank].iter().sum(), heads.iter().sum()) } else { (0, heads[rank.rank]) };
        let file = SafeTensors::deserialize(&bytes).with_context(|| damaged(&path))?;
        write_blocks(&path, &file, &prefix, rank.cache, first, total)
    })?;
    Ok(())
}

/// Writes a prefix to the layers in the cache of one rank.
///
/// The rank's KV heads start at head `first_head` of the `all_heads` heads in the file.
fn write_blocks(
    path: &Path,
    file: &SafeTensors,
    prefix: &PrefixBlocks,
    cache: &KvCache,
    first_head: usize,
    all_heads: usize,
) -> Result<()> {
    for GroupedLayer { group, index, k, v } in cache.own_layers() {
        for (kind, to) in [("k", k), ("v", v)] {
            let (name, blocks) = (tensor_name(group, index, kind), prefix.visible[group].len());
            let (_, own_heads, head_dim) = to.dims3()?;
            if blocks == 0 || own_heads == 0 {
                continue;
            }
            let shape = [blocks * BLOCK_TOKENS, all_heads, head_dim];
            let rows = read_rows(file, &name, to.dtype(), shape).with_context(|| damaged(path))?;
            let own = rows.narrow(1, first_head, own_heads)?;
            for (part, first_row) in prefix.rows(group).enumerate() {
                let block = own.narrow(0, part * BLOCK_TOKENS, BLOCK_TOKENS)?.force_contiguous()?;
                copy_rows(to, &block.to_device(to.device())?, first_row)?;
            }
        }
    }
    Ok(())
}

/// Reads a tensor from a file. Fails if the tensor is missing or has another dtype or shape.
fn read_rows(file: &SafeTensors, name: &str, dtype: DType, shape: [usize; 3]) -> Result<Tensor> {
    let rows: Tensor = file.tensor(name)?.load(&Device::Cpu)?;
    if rows.dims() != shape || rows.dtype() != dtype {
        bail!("{name} has dtype {:?} and shape {:?}, expected {dtype:?} and {shape:?}", rows.dtype(), rows.dims());
    }
    Ok(rows)
}

fn tensor_name(group: usize, layer: usize, kind: &str) -> String {
    format!("group.{group}.layer.{layer}.{kind}")
}
