//! The keys and values of one sequence, allocated once. A full layer keeps every position. A sliding-window layer keeps
//! a ring buffer of the last positions.
//!
//! The next turn of a chat often changes the end of the prompt: gpt-oss drops past reasoning from its history. So the
//! cache can be truncated. A full layer can be cut at any position. A ring buffer has overwritten its oldest positions,
//! so it can be cut a little, or restored from the checkpoint taken at the end of the prefill.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

use crate::kernels::rows::copy_rows;

/// The shape of one layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The number of positions that a sliding-window layer attends to.
    pub window: Option<usize>,
}

impl LayerSpec {
    /// Returns the rows to allocate for `context` positions if one pass writes at most `chunk` of them. The first query
    /// of a chunk must still find its whole window after the last key of the chunk is written.
    fn rows(&self, context: usize, chunk: usize) -> usize {
        self.window.map_or(context, |window| context.min(window + chunk - 1))
    }
}

/// Returns the bytes that a cache of these layers allocates.
pub fn bytes(layers: &[LayerSpec], context: usize, chunk: usize, dtype: DType) -> u64 {
    let elements = |layer: &LayerSpec| {
        let row = 2 * layer.kv_heads as u64 * layer.head_dim as u64;
        row.saturating_mul(layer.rows(context, chunk) as u64)
    };
    let bytes = |layer| elements(layer).saturating_mul(dtype.size_in_bytes() as u64);
    layers.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Returns the bytes of keys and values that one token reads after `depth` cached ones, including its own.
pub fn step_bytes(layers: &[LayerSpec], depth: usize, dtype: DType) -> u64 {
    let elements = |layer: &LayerSpec| {
        let positions = layer.window.map_or(depth + 1, |window| window.min(depth + 1));
        2 * positions * layer.kv_heads * layer.head_dim
    };
    layers.iter().map(|layer| (elements(layer) * dtype.size_in_bytes()) as u64).sum()
}

/// The cache of one sequence.
pub struct KvCache {
    layers: Vec<LayerCache>,
    context: usize,
    chunk: usize,
    /// The number of cached positions.
    len: usize,
    checkpoint: Option<Checkpoint>,
}

/// The keys and values of one layer, both \[S, K, D\]. Position p is in row p mod S.
pub struct LayerCache {
    k: Tensor,
    v: Tensor,
    window: Option<usize>,
    /// The oldest position that no later one has overwritten. Truncating does not restore overwritten rows.
    oldest: usize,
}

/// A copy of the rows of sliding-window layers that positions from `len` on attend to.
struct Checkpoint {
    len: usize,
    rows: Vec<Option<(Tensor, Tensor)>>,
}

impl KvCache {
    /// Allocates `context` positions. One pass may write at most `chunk` of them.
    pub fn new(layers: &[LayerSpec], context: usize, chunk: usize, dtype: DType, device: &Device) -> Result<Self> {
        let layer = |spec: &LayerSpec| {
            let shape = (spec.rows(context, chunk), spec.kv_heads, spec.head_dim);
            let (k, v) = (Tensor::zeros(shape, dtype, device)?, Tensor::zeros(shape, dtype, device)?);
            Ok(LayerCache { k, v, window: spec.window, oldest: 0 })
        };
        let layers = layers.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, context, chunk, len: 0, checkpoint: None })
    }

    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of positions allocated.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the most tokens that one pass may write.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Fails unless `tokens` more fit.
    pub fn check_capacity(&self, tokens: usize) -> Result<()> {
        if tokens > self.chunk || self.len + tokens > self.context {
            bail!(
                "cannot cache {tokens} tokens: {} of {} positions are used, and a pass takes at most {}",
                self.len,
                self.context,
                self.chunk
            );
        }
        Ok(())
    }

    /// Writes k and v \[T, K, D\] of one layer after the cached positions. Returns the layer. Call `advance` after the
    /// last layer.
    pub fn write(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<&LayerCache> {
        let layer = &mut self.layers[layer];
        layer.write(self.len, k, v)?;
        Ok(layer)
    }

    /// Removes all positions and the checkpoint.
    pub fn reset(&mut self) {
        self.len = 0;
        self.checkpoint = None;
        self.layers.iter_mut().for_each(|layer| layer.oldest = 0);
    }

    /// Counts `tokens` positions that `write` has written to all layers.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Counts `tokens` positions that the decode graph has written. It has also written `beyond` positions after them.
    /// Those do not count, but they have overwritten rows of the ring buffers.
    pub fn advance_written(&mut self, tokens: usize, beyond: usize) {
        self.len += tokens;
        for layer in &mut self.layers {
            layer.oldest = layer.oldest.max((self.len + beyond).saturating_sub(layer.rows()));
        }
    }

    /// Returns the keys and values of one layer.
    pub fn layer(&self, layer: usize) -> &LayerCache {
        &self.layers[layer]
    }

    /// Copies what later positions attend to, so that `truncate` can return here however much is written after.
    pub fn set_checkpoint(&mut self) -> Result<()> {
        let rows = self.layers.iter().map(|layer| layer.save_window(self.len)).collect::<Result<_>>()?;
        self.checkpoint = Some(Checkpoint { len: self.len, rows });
        Ok(())
    }

    /// Keeps the first `len` positions, or fewer if a ring buffer has lost some of the window of position `len`. Returns
    /// how many positions are left.
    pub fn truncate(&mut self, len: usize) -> Result<usize> {
        let len = len.min(self.len);
        if self.layers.iter().all(|layer| layer.has_window_of(len)) {
            self.len = len;
        } else if let Some(checkpoint) = self.checkpoint.take_if(|checkpoint| checkpoint.len <= len) {
            for (layer, rows) in self.layers.iter_mut().zip(&checkpoint.rows) {
                if let Some((k, v)) = rows {
                    layer.oldest = checkpoint.len - k.dim(0)?;
                    layer.write(layer.oldest, k, v)?;
                }
            }
            self.len = checkpoint.len;
            self.checkpoint = Some(checkpoint);
        } else {
            self.reset();
        }
        self.checkpoint.take_if(|checkpoint| checkpoint.len > self.len);
        Ok(self.len)
    }
}

impl LayerCache {
    /// [S, K, D]
    pub fn k(&self) -> &Tensor {
        &self.k
    }

    /// [S, K, D]
    pub fn v(&self) -> &Tensor {
        &self.v
    }

    /// Returns S.
    fn rows(&self) -> usize {
        self.k.dims()[0]
    }

    fn write(&mut self, position: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let (tokens, rows) = (k.dim(0)?, self.rows());
        let mut written = 0;
        while written < tokens {
            let row = (position + written) % rows;
            let count = (tokens - written).min(rows - row);
            copy_rows(&self.k, &k.narrow(0, written, count)?, row)?;
            copy_rows(&self.v, &v.narrow(0, written, count)?, row)?;
            written += count;
        }
        self.oldest = self.oldest.max((position + tokens).saturating_sub(rows));
        Ok(())
    }

    /// Returns how many positions before its own a token of a sliding-window layer attends to.
    fn past_window(&self) -> Option<usize> {
        self.window.map(|window| window - 1)
    }

    /// Returns whether the layer still has every position that position `len` attends to.
    fn has_window_of(&self, len: usize) -> bool {
        self.oldest <= self.past_window().map_or(0, |past| len.saturating_sub(past))
    }

    /// Copies the rows that position `len` attends to. Returns `None` for a full layer, which never loses them.
    fn save_window(&self, len: usize) -> Result<Option<(Tensor, Tensor)>> {
        let Some(past) = self.past_window() else { return Ok(None) };
        let (count, rows) = (past.min(len), self.rows());
        if count == 0 {
            return Ok(None);
        }
        let first = (len - count) % rows;
        let copy = |tensor: &Tensor| -> Result<Tensor> {
            let head = count.min(rows - first);
            let mut parts = vec![tensor.narrow(0, first, head)?];
            if head < count {
                parts.push(tensor.narrow(0, 0, count - head)?);
            }
            // `cat` of one tensor would share memory with the ring buffer, and `copy` would copy the whole buffer.
            Ok(if parts.len() == 1 { parts[0].force_contiguous()? } else { Tensor::cat(&parts, 0)? })
        };
        Ok(Some((copy(&self.k)?, copy(&self.v)?)))
    }
}
