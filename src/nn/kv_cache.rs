//! Keys and values of one sequence, allocated once. Full layers keep every position; sliding layers keep a ring of the
//! last positions.
//!
//! Between turns a prompt often changes behind some point (gpt-oss drops past reasoning from its history), so the cache
//! can go back. A full layer goes back anywhere; a ring has overwritten its past, so it goes back a little, or to the
//! checkpoint taken when the prompt had been read.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

use crate::kernels::rows::copy_rows;

/// What one layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Positions in sight of a sliding layer.
    pub window: Option<usize>,
}

impl LayerSpec {
    /// Rows for `context` positions when at most `chunk` are written at once: a chunk's first query must still find
    /// its whole window after the chunk's last key has been written.
    fn rows(&self, context: usize, chunk: usize) -> usize {
        self.window.map_or(context, |window| context.min(window + chunk - 1))
    }
}

/// Bytes that a cache of these layers takes.
pub fn bytes(layers: &[LayerSpec], context: usize, chunk: usize, dtype: DType) -> u64 {
    let elements = |layer: &LayerSpec| {
        let row = 2 * layer.kv_heads as u64 * layer.head_dim as u64;
        row.saturating_mul(layer.rows(context, chunk) as u64)
    };
    let bytes = |layer| elements(layer).saturating_mul(dtype.size_in_bytes() as u64);
    layers.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Bytes of keys and values that a token sees behind `depth` others, its own included.
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
    /// Positions written.
    len: usize,
    checkpoint: Option<Checkpoint>,
}

/// One layer's keys and values, [S, K, D]; position p lies in row p mod S.
pub struct LayerCache {
    k: Tensor,
    v: Tensor,
    window: Option<usize>,
    /// The first position that is still held: rows are reused, and going back does not bring them back.
    oldest: usize,
}

/// The rows of the sliding layers that position `len` and later ones can see.
struct Checkpoint {
    len: usize,
    rows: Vec<Option<(Tensor, Tensor)>>,
}

impl KvCache {
    /// Room for `context` positions, at most `chunk` of them written in one pass.
    pub fn new(layers: &[LayerSpec], context: usize, chunk: usize, dtype: DType, device: &Device) -> Result<Self> {
        let layer = |spec: &LayerSpec| {
            let shape = (spec.rows(context, chunk), spec.kv_heads, spec.head_dim);
            let (k, v) = (Tensor::zeros(shape, dtype, device)?, Tensor::zeros(shape, dtype, device)?);
            Ok(LayerCache { k, v, window: spec.window, oldest: 0 })
        };
        let layers = layers.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, context, chunk, len: 0, checkpoint: None })
    }

    /// Positions written.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions there is room for.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Most tokens in one pass.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Whether `tokens` more fit.
    pub fn check_room(&self, tokens: usize) -> Result<()> {
        if tokens > self.chunk || self.len + tokens > self.context {
            bail!(
                "{tokens} tokens do not fit: {} of {} positions are taken, {} fit in one pass",
                self.len,
                self.context,
                self.chunk
            );
        }
        Ok(())
    }

    /// Writes k, v [T, K, D] of a layer at the positions after `len` and returns the layer. `advance` comes after the
    /// last layer.
    pub fn write(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<&LayerCache> {
        let layer = &mut self.layers[layer];
        layer.write(self.len, k, v)?;
        Ok(layer)
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.len = 0;
        self.checkpoint = None;
        self.layers.iter_mut().for_each(|layer| layer.oldest = 0);
    }

    /// Counts `tokens` written positions.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Counts `tokens` positions that were written without `write`; `beyond` more have been written after them and do not
    /// count, but took their place in the rings.
    pub fn advance_written(&mut self, tokens: usize, beyond: usize) {
        self.len += tokens;
        for layer in &mut self.layers {
            layer.oldest = layer.oldest.max((self.len + beyond).saturating_sub(layer.rows()));
        }
    }

    /// One layer's keys and values.
    pub fn layer(&self, layer: usize) -> &LayerCache {
        &self.layers[layer]
    }

    /// Remembers this point, so that `go_back` can return to it however much is written after it.
    pub fn set_checkpoint(&mut self) -> Result<()> {
        let rows = self.layers.iter().map(|layer| layer.save(self.len)).collect::<Result<_>>()?;
        self.checkpoint = Some(Checkpoint { len: self.len, rows });
        Ok(())
    }

    /// Forgets what comes after the first `len` positions, or after an earlier point if the rings no longer hold what
    /// follows `len`. Returns how many positions are left.
    pub fn go_back(&mut self, len: usize) -> Result<usize> {
        let len = len.min(self.len);
        if self.layers.iter().all(|layer| layer.holds_what_is_seen_at(len)) {
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

    fn rows(&self) -> usize {
        self.k.dims()[0]
    }

    fn write(&mut self, position: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let (tokens, rows) = (k.dim(0)?, self.rows());
        let mut done = 0;
        while done < tokens {
            let row = (position + done) % rows;
            let count = (tokens - done).min(rows - row);
            copy_rows(&self.k, &k.narrow(0, done, count)?, row)?;
            copy_rows(&self.v, &v.narrow(0, done, count)?, row)?;
            done += count;
        }
        self.oldest = self.oldest.max((position + tokens).saturating_sub(rows));
        Ok(())
    }

    /// How many positions before a query its window holds.
    fn past(&self) -> Option<usize> {
        self.window.map(|window| window - 1)
    }

    /// Whether the layer still holds all that position `len` sees.
    fn holds_what_is_seen_at(&self, len: usize) -> bool {
        self.oldest <= self.past().map_or(0, |past| len.saturating_sub(past))
    }

    /// A copy of the rows that position `len` sees; `None` for a full layer, which keeps them anyway.
    fn save(&self, len: usize) -> Result<Option<(Tensor, Tensor)>> {
        let Some(past) = self.past() else { return Ok(None) };
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
            // `cat` of one tensor would share its memory with the ring, and `copy` would take all of the ring along.
            Ok(if parts.len() == 1 { parts[0].force_contiguous()? } else { Tensor::cat(&parts, 0)? })
        };
        Ok(Some((copy(&self.k)?, copy(&self.v)?)))
    }
}
