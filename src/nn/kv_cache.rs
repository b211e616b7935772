//! The KV cache of one sequence. Its memory is allocated once, for the whole context.
//!
//! A full-attention layer keeps every position. A sliding-window layer keeps a ring buffer of the last positions.
//!
//! The next turn of a chat often changes the end of the prompt. For example, gpt-oss drops past reasoning.
//! The cache can therefore be truncated.
//! A full-attention layer can be truncated to any length.
//! Once a ring buffer has overwritten its oldest positions, truncation can remove at most `chunk` positions from it.
//! A longer truncation restores the savepoint, a copy of the sliding windows at the end of the prefill.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

use crate::kernels::rows::copy_rows;

/// The shape of one layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The size of the sliding window in positions, or `None` for a full-attention layer.
    pub window: Option<usize>,
}

impl LayerSpec {
    /// Returns the number of rows to allocate for `context` positions if one pass writes at most `chunk` positions.
    /// After a chunk is written, the whole window of its first query must still be in the cache.
    fn rows(&self, context: usize, chunk: usize) -> usize {
        self.window.map_or(context, |window| context.min(window + chunk - 1))
    }
}

/// Returns the size of a cache with these layers, in bytes.
pub fn bytes(layers: &[LayerSpec], context: usize, chunk: usize, dtype: DType) -> u64 {
    let elements = |layer: &LayerSpec| {
        let row = 2 * layer.kv_heads as u64 * layer.head_dim as u64;
        row.saturating_mul(layer.rows(context, chunk) as u64)
    };
    let bytes = |layer| elements(layer).saturating_mul(dtype.size_in_bytes() as u64);
    layers.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Returns the size in bytes of the keys and values that a token at position `depth` reads, including its own.
pub fn step_bytes(layers: &[LayerSpec], depth: usize, dtype: DType) -> u64 {
    let elements = |layer: &LayerSpec| {
        let positions = layer.window.map_or(depth + 1, |window| window.min(depth + 1));
        2 * positions * layer.kv_heads * layer.head_dim
    };
    layers.iter().map(|layer| (elements(layer) * dtype.size_in_bytes()) as u64).sum()
}

/// The KV cache of one sequence.
pub struct KvCache {
    layers: Vec<LayerCache>,
    context: usize,
    chunk: usize,
    /// The number of cached positions.
    len: usize,
    savepoint: Option<Savepoint>,
}

/// The keys and values of one layer, both `[cache_rows, kv_heads, head_dim]`. Position p is in row p mod `cache_rows`.
pub struct LayerCache {
    k: Tensor,
    v: Tensor,
    window: Option<usize>,
    /// The oldest position that has not been overwritten. Only the savepoint can restore older positions.
    oldest: usize,
}

/// A copy of the rows of each sliding-window layer that position `len` and later positions attend to.
struct Savepoint {
    len: usize,
    rows: Vec<Option<(Tensor, Tensor)>>,
}

impl KvCache {
    /// Allocates a cache for `context` positions. One pass may write at most `chunk` positions.
    pub fn new(layers: &[LayerSpec], context: usize, chunk: usize, dtype: DType, device: &Device) -> Result<Self> {
        let layer = |spec: &LayerSpec| {
            let shape = (spec.rows(context, chunk), spec.kv_heads, spec.head_dim);
            let (k, v) = (Tensor::zeros(shape, dtype, device)?, Tensor::zeros(shape, dtype, device)?);
            Ok(LayerCache { k, v, window: spec.window, oldest: 0 })
        };
        let layers = layers.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, context, chunk, len: 0, savepoint: None })
    }

    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the maximum number of positions in the cache.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the maximum number of tokens that one pass may write.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Fails if the cache has no room for `tokens` more positions, or if one pass may not write that many.
    pub fn check_capacity(&self, tokens: usize) -> Result<()> {
        if tokens > self.chunk || self.len + tokens > self.context {
            bail!(
                "cannot cache {tokens} tokens: {} of {} positions are used, and a pass takes at most {} tokens",
                self.len,
                self.context,
                self.chunk
            );
        }
        Ok(())
    }

    /// Writes `k` and `v`, both `[tokens, kv_heads, head_dim]`, after the cached positions of one layer.
    /// Returns the cache of this layer. Call `advance` after writing the last layer.
    ///
    /// Fails without writing anything if [`check_capacity`](Self::check_capacity) fails, because the tokens would
    /// overwrite rows that are still needed.
    pub fn write(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<&LayerCache> {
        if k.dims() != v.dims() {
            bail!("cannot cache keys {:?} with values {:?}: their shapes differ", k.dims(), v.dims());
        }
        self.check_capacity(k.dim(0)?)?;
        let layer = &mut self.layers[layer];
        layer.write(self.len, k, v)?;
        Ok(layer)
    }

    /// Removes all positions and the savepoint.
    pub fn reset(&mut self) {
        self.len = 0;
        self.savepoint = None;
        self.layers.iter_mut().for_each(|layer| layer.oldest = 0);
    }

    /// Advances the length by `tokens` positions, which `write` must have written to all layers.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Advances the length by `tokens` positions that the decode graph has written.
    /// The graph has also written `beyond` positions after the new length, which have overwritten ring buffer rows.
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

    /// Copies the rows of sliding-window layers that later positions attend to.
    /// `truncate` can then restore this length, no matter how many positions are written after it.
    pub fn set_savepoint(&mut self) -> Result<()> {
        let rows = self.layers.iter().map(|layer| layer.save_window(self.len)).collect::<Result<_>>()?;
        self.savepoint = Some(Savepoint { len: self.len, rows });
        Ok(())
    }

    /// Truncates the cache to at most `len` positions and returns the number of positions left.
    /// Fewer than `len` are left if a ring buffer has overwritten part of the window of position `len`.
    pub fn truncate(&mut self, len: usize) -> Result<usize> {
        let len = len.min(self.len);
        if self.layers.iter().all(|layer| layer.has_window_of(len)) {
            self.len = len;
        } else if let Some(savepoint) = self.savepoint.take_if(|savepoint| savepoint.len <= len) {
            for (layer, rows) in self.layers.iter_mut().zip(&savepoint.rows) {
                if let Some((k, v)) = rows {
                    layer.oldest = savepoint.len - k.dim(0)?;
                    layer.write(layer.oldest, k, v)?;
                }
            }
            self.len = savepoint.len;
            self.savepoint = Some(savepoint);
        } else {
            self.reset();
        }
        self.savepoint.take_if(|savepoint| savepoint.len > self.len);
        Ok(self.len)
    }
}

impl LayerCache {
    /// `[cache_rows, kv_heads, head_dim]`
    pub fn k(&self) -> &Tensor {
        &self.k
    }

    /// `[cache_rows, kv_heads, head_dim]`
    pub fn v(&self) -> &Tensor {
        &self.v
    }

    /// Returns the number of positions that fit in the cache of this layer.
    fn rows(&self) -> usize {
        self.k.dims()[0]
    }

    /// Writes `k` and `v` starting at `position`. The caller guarantees that the rows may be overwritten.
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

    /// Returns the number of previous positions that a token attends to, or `None` for a full-attention layer.
    fn past_window(&self) -> Option<usize> {
        self.window.map(|window| window - 1)
    }

    /// Returns true if the layer still has every position that position `len` attends to.
    fn has_window_of(&self, len: usize) -> bool {
        self.oldest <= self.past_window().map_or(0, |past| len.saturating_sub(past))
    }

    /// Copies the rows before position `len` that position `len` attends to.
    /// Returns `None` if there are no such rows, or for a full-attention layer, which never overwrites rows.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the keys of `tokens` positions from `first` on, f32 `[tokens, 1, 1]`. The key of position p is p.
    fn keys(first: usize, tokens: usize) -> Tensor {
        let positions = (first..first + tokens).map(|position| position as f32);
        Tensor::from_iter(positions, &Device::Cpu).unwrap().reshape((tokens, 1, 1)).unwrap()
    }

    fn cached(cache: &KvCache) -> [Vec<f32>; 2] {
        [0, 1].map(|layer| cache.layer(layer).k().flatten_all().unwrap().to_vec1().unwrap())
    }

    #[test]
    fn write_fails_without_room() {
        let layers = [None, Some(3)].map(|window| LayerSpec { kv_heads: 1, head_dim: 1, window });
        let mut cache = KvCache::new(&layers, 10, 4, DType::F32, &Device::Cpu).unwrap();
        let mut append = |first: usize, tokens: usize| {
            let k = keys(first, tokens);
            for layer in 0..layers.len() {
                cache.write(layer, &k, &k).map(|_| ())?;
            }
            cache.advance(tokens);
            anyhow::Ok(cached(&cache))
        };
        assert!(append(0, 5).is_err(), "5 tokens should exceed the chunk of 4");
        append(0, 4).unwrap();
        append(4, 4).unwrap();
        assert!(append(8, 3).is_err(), "3 tokens after 8 should exceed the context of 10");
        // The failed writes have changed nothing. Position p of the second layer is in row p mod 6.
        let [full, sliding] = append(8, 2).unwrap();
        assert_eq!(full, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        assert_eq!(sliding, [6.0, 7.0, 8.0, 9.0, 4.0, 5.0]);
        assert!(append(10, 1).is_err());
    }

    #[test]
    fn write_fails_if_keys_and_values_differ_in_shape() {
        let layers = [LayerSpec { kv_heads: 1, head_dim: 1, window: None }];
        let mut cache = KvCache::new(&layers, 10, 4, DType::F32, &Device::Cpu).unwrap();
        assert!(cache.write(0, &keys(0, 2), &keys(0, 3)).is_err());
        assert!(cache.write(0, &keys(0, 3), &keys(0, 2)).is_err());
    }
}
