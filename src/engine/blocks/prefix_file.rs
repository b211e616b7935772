//! Saves the keys and values of a prefix to a file, and reads them back into the prefix cache.
//!
//! The file is a safetensors file with these tensors, for a prefix of n tokens:
//!
//! - `tokens`: u32 `[n]`
//! - `group.G.layer.L.k` and `.v`: `[rows, kv_heads, head_dim]` for layer L of group G.
//!   The rows come from all blocks that a token after the prefix attends to.
//!
//! Keys and values are valid only for the model, dtype and build that computed them.
//! The metadata value `fingerprint` identifies the model, dtype and build.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::safetensors::Load;
use candle_core::{Device, Tensor};
use safetensors::SafeTensors;

use super::BlockManager;
use crate::files;
use crate::kernels::rows::copy_rows;
use crate::nn::kv_cache::{BLOCK_TOKENS, BlockTables, KvCache};

/// The metadata key of the fingerprint.
const FINGERPRINT: &str = "fingerprint";

/// Saves the longest prefix of `ids` whose blocks are all cached. Returns the number of saved tokens.
/// If nothing is cached, returns 0 and writes no file.
pub fn save(path: &Path, ids: &[u32], fingerprint: &str, cache: &KvCache, blocks: &mut BlockManager) -> Result<usize> {
    // A cached prefix never includes the last token, so append a token to find all of `ids`.
    let tokens = [ids, &[0]].concat();
    let sequence = blocks.start(&tokens, tokens.len(), Default::default());
    let computed = sequence.computed();
    let tensors = read_blocks(computed, sequence.tables(), cache, blocks);
    blocks.abandon(sequence);
    if computed == 0 {
        return Ok(0);
    }
    let mut tensors = tensors?;
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

/// Reads a file that [`save`] wrote, and adds its prefix to the prefix cache. `bytes` is the content of the file.
/// Returns the number of tokens in the prefix.
///
/// Returns 0 if the fingerprint differs, or if the cache has too few free blocks. Fails if the content is damaged.
pub fn load(path: &Path, bytes: &[u8], fingerprint: &str, cache: &KvCache, blocks: &mut BlockManager) -> Result<usize> {
    let damaged = || format!("{} is damaged", path.display());
    let (_, metadata) = SafeTensors::read_metadata(bytes).with_context(damaged)?;
    if metadata.metadata().as_ref().and_then(|metadata| metadata.get(FINGERPRINT)).is_none_or(|f| f != fingerprint) {
        return Ok(0);
    }
    let file = SafeTensors::deserialize(bytes).with_context(damaged)?;
    add(&file, cache, blocks).with_context(damaged)
}

fn add(file: &SafeTensors, cache: &KvCache, blocks: &mut BlockManager) -> Result<usize> {
    let tensor = |name: &str| -> Result<Tensor> { Ok(file.tensor(name)?.load(&Device::Cpu)?) };
    let tokens: Vec<u32> = tensor("tokens")?.to_vec1()?;
    ensure!(!tokens.is_empty() && tokens.len().is_multiple_of(BLOCK_TOKENS), "it has {} tokens", tokens.len());
    let Some(mut sequence) = blocks.adopt(&tokens) else { return Ok(0) };
    let written = write_blocks(&tensor, tokens.len(), sequence.tables(), cache, blocks);
    if written.is_ok() {
        blocks.commit(&mut sequence, &tokens);
    }
    blocks.release(sequence);
    written.map(|()| tokens.len())
}

fn read_blocks(
    computed: usize,
    tables: &BlockTables,
    cache: &KvCache,
    blocks: &BlockManager,
) -> Result<Vec<(String, Tensor)>> {
    let mut tensors = Vec::new();
    for group in 0..cache.layout().groups() {
        let visible = blocks.visible_blocks(group, computed);
        for (layer, pair) in cache.tensors().enumerate() {
            for (kind, tensor) in ["k", "v"].into_iter().zip(pair) {
                let rows = visible.clone().map(|index| -> Result<Tensor> {
                    let first = tables.get(group, index) as usize * BLOCK_TOKENS;
                    Ok(tensor.narrow(0, first, BLOCK_TOKENS)?.force_contiguous()?.to_device(&Device::Cpu)?)
                });
                let rows = rows.collect::<Result<Vec<_>>>()?;
                if !rows.is_empty() {
                    tensors.push((format!("group.{group}.layer.{layer}.{kind}"), Tensor::cat(&rows, 0)?));
                }
            }
        }
    }
    Ok(tensors)
}

fn write_blocks(
    tensor: &dyn Fn(&str) -> Result<Tensor>,
    computed: usize,
    tables: &BlockTables,
    cache: &KvCache,
    blocks: &BlockManager,
) -> Result<()> {
    for group in 0..cache.layout().groups() {
        let visible = blocks.visible_blocks(group, computed);
        for (layer, pair) in cache.tensors().enumerate() {
            for (kind, to) in ["k", "v"].into_iter().zip(pair) {
                let name = format!("group.{group}.layer.{layer}.{kind}");
                if visible.is_empty() {
                    continue;
                }
                let rows = tensor(&name)?;
                let mut shape = to.dims().to_vec();
                shape[0] = visible.len() * BLOCK_TOKENS;
                if rows.dims() != shape || rows.dtype() != to.dtype() {
                    bail!(
                        "{name} has dtype {:?} and shape {:?}, expected {:?} and {shape:?}",
                        rows.dtype(),
                        rows.dims(),
                        to.dtype()
                    );
                }
                for (part, index) in visible.clone().enumerate() {
                    let block = rows.narrow(0, part * BLOCK_TOKENS, BLOCK_TOKENS)?.force_contiguous()?;
                    copy_rows(to, &block.to_device(to.device())?, tables.get(group, index) as usize * BLOCK_TOKENS)?;
                }
            }
        }
    }
    Ok(())
}
