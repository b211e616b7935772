//! The paged KV cache: the keys and values of all sequences, in blocks of [`BLOCK_TOKENS`] positions.
//!
//! The layers are divided into layer groups. All layers of a layer group have the same attention window.
//! A sequence has one block table per layer group.
//! In layer groups with full attention, a sequence keeps all its blocks.
//! In layer groups with a sliding window, a sequence keeps only the blocks that its later tokens attend to.
//!
//! All blocks have room for the same number of layers, so any layer group can use any free block.
//! Layer i of every layer group is stored in the same tensors, but in different blocks.
//! If one window is more common than another, as in Gemma 3, the layers with the more common window form several
//! layer groups.
//! vLLM's hybrid KV cache manager also forms layer groups in this way.

use std::ops::Range;

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

use crate::kernels::attention::CachedLayer;
use crate::kernels::rows::copy_rows;

pub use crate::kernels::attention::BLOCK_TOKENS;

/// The shape of one layer's keys and values, and its attention window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The maximum number of positions that a token attends to, including its own. `None` for full attention.
    pub window: Option<usize>,
}

/// Returns the size in bytes of all keys and values that a token at position `depth` attends to in `layers`.
/// Counts the token's own keys and values, too.
pub fn step_bytes(layers: &[LayerSpec], depth: usize, dtype: DType) -> u64 {
    let elements = |layer: &LayerSpec| {
        let positions = layer.window.map_or(depth + 1, |window| window.min(depth + 1));
        2 * positions * layer.kv_heads * layer.head_dim
    };
    layers.iter().map(|layer| (elements(layer) * dtype.size_in_bytes()) as u64).sum()
}

/// The division of a cache's layers into layer groups. The layers of a layer group share one block table per sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// The attention window of each layer group, or `None` for full attention.
    windows: Vec<Option<usize>>,
    /// The index in the model of the first layer of the cache.
    first_layer: usize,
    /// The place of each layer of the cache, in layer order.
    places: Vec<LayerPlace>,
    /// For each layer group, the number of its layers before `first_layer`.
    earlier_layers: Vec<usize>,
    /// The number of layers for which a block has room. A layer group may have fewer layers in the cache.
    layers_per_group: usize,
    /// The shape that all layers share.
    /// `None` if layers differ or there are no layers: [`KvCache::new`] then fails.
    shape: Option<KvShape>,
    /// The number of elements in the keys of one token in one layer. If layers differ, the maximum over the layers.
    row_elements: usize,
}

/// The place of one layer in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LayerPlace {
    group: usize,
    /// The index of the layer among the layers of `group` that are in the cache.
    index: usize,
}

/// The shape of one token's keys, and of its values, in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KvShape {
    kv_heads: usize,
    head_dim: usize,
}

/// All layers of a model that have the same attention window.
struct WindowClass {
    window: Option<usize>,
    /// The indices of the layers in the model.
    layers: Vec<usize>,
}

impl CacheLayout {
    /// Groups the layers of a model by attention window.
    pub fn new(layers: &[LayerSpec]) -> Self {
        let shape = |layer: &LayerSpec| KvShape { kv_heads: layer.kv_heads, head_dim: layer.head_dim };
        let common_shape = layers.first().map(shape).filter(|first| layers.iter().all(|layer| shape(layer) == *first));
        let row_elements = layers.iter().map(|layer| layer.kv_heads.saturating_mul(layer.head_dim)).max().unwrap_or(0);
        let classes = window_classes(layers);
        let layers_per_group = classes.iter().map(|class| class.layers.len()).min().unwrap_or(0);
        let mut windows = Vec::new();
        let mut places = vec![LayerPlace { group: 0, index: 0 }; layers.len()];
        for class in classes {
            let (first, groups) = (windows.len(), class.layers.len().div_ceil(layers_per_group));
            // Assign the layers to the groups in turn, so that any range of layers is spread evenly over the groups.
            // The blocks of a layout from `of_layers` then need room for as few layers as possible.
            for (nth, layer) in class.layers.into_iter().enumerate() {
                places[layer] = LayerPlace { group: first + nth % groups, index: nth / groups };
            }
            windows.resize(first + groups, class.window);
        }
        let earlier_layers = vec![0; windows.len()];
        Self { windows, first_layer: 0, places, earlier_layers, layers_per_group, shape: common_shape, row_elements }
    }

    /// Returns the layout of a cache that holds only the layers in `range`. `self` must be the layout of all layers.
    /// The layer groups and block tables stay the same, but a block has room only for the layers that are in `range`.
    pub fn of_layers(&self, range: Range<usize>) -> Self {
        // The number of layers of each layer group that are in the cache.
        let mut counts = vec![0; self.groups()];
        let mut places = Vec::with_capacity(range.len());
        for &LayerPlace { group, .. } in &self.places[range.clone()] {
            places.push(LayerPlace { group, index: counts[group] });
            counts[group] += 1;
        }
        let mut earlier_layers = self.earlier_layers.clone();
        for place in &self.places[..range.start] {
            earlier_layers[place.group] += 1;
        }
        let layers_per_group = counts.into_iter().max().unwrap_or(0);
        Self { first_layer: range.start, places, earlier_layers, layers_per_group, ..self.clone() }
    }

    /// Returns the attention window of each layer group, or `None` for full attention.
    pub fn windows(&self) -> &[Option<usize>] {
        &self.windows
    }

    /// Returns the number of layer groups. A sequence has one block table per layer group.
    pub fn groups(&self) -> usize {
        self.windows.len()
    }

    /// Returns the layer group of the layer with index `layer` in the model.
    pub fn group(&self, layer: usize) -> usize {
        self.place(layer).group
    }

    /// Returns the place of the layer with index `layer` in the model.
    fn place(&self, layer: usize) -> LayerPlace {
        self.places[layer - self.first_layer]
    }

    /// Returns the size of one block in bytes: [`BLOCK_TOKENS`] positions in as many layers as a block has room for.
    pub fn block_bytes(&self, dtype: DType) -> u64 {
        // One row of keys and one row of values.
        let row_bytes = (self.row_elements as u64).saturating_mul(2 * dtype.size_in_bytes() as u64);
        row_bytes.saturating_mul((self.layers_per_group * BLOCK_TOKENS) as u64)
    }

    /// Returns the maximum number of blocks that a sequence of `tokens` tokens uses at once, in all layer groups
    /// together. `chunk` is the maximum number of tokens of the sequence that one step computes.
    pub fn peak_blocks(&self, tokens: usize, chunk: usize) -> usize {
        self.windows.iter().map(|&window| peak_blocks(window, tokens, chunk)).sum()
    }
}

/// Returns the window classes of a model's layers, in the order of their first layers.
fn window_classes(layers: &[LayerSpec]) -> Vec<WindowClass> {
    let mut classes: Vec<WindowClass> = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        match classes.iter_mut().find(|class| class.window == layer.window) {
            Some(class) => class.layers.push(index),
            None => classes.push(WindowClass { window: layer.window, layers: vec![index] }),
        }
    }
    classes
}

/// Like [`CacheLayout::peak_blocks`], but for one layer group whose attention window is `window`.
pub fn peak_blocks(window: Option<usize>, tokens: usize, chunk: usize) -> usize {
    let all = tokens.div_ceil(BLOCK_TOKENS);
    // The tokens of a step attend to themselves and to the window before them.
    // If this range starts inside a block, it can overlap one block more.
    window.map_or(all, |window| all.min(window.saturating_add(chunk).div_ceil(BLOCK_TOKENS) + 1))
}

/// The block tables of one sequence, one per layer group.
/// Entry i of a table is the block for positions `i * BLOCK_TOKENS` to `(i + 1) * BLOCK_TOKENS - 1`.
/// With a sliding window, the block may be reused once no later token attends to these positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTables {
    groups: Vec<Vec<u32>>,
}

impl BlockTables {
    /// Creates an empty block table for each layer group.
    pub fn new(groups: usize) -> Self {
        Self { groups: vec![Vec::new(); groups] }
    }

    /// Creates tables for a sequence of up to `context` positions that is the only sequence in the cache.
    /// Block 0 stays unused, as in a cache that the engine manages, where block 0 is the scratch block.
    ///
    /// Layer groups with a sliding window use their blocks as a ring buffer. A step may compute at most `chunk` tokens.
    pub fn for_one_sequence(layout: &CacheLayout, context: usize, chunk: usize) -> Self {
        let mut first = 1;
        let tables = layout.windows.iter().map(|&window| {
            let (blocks, all) = (peak_blocks(window, context, chunk), context.div_ceil(BLOCK_TOKENS));
            let table = (0..all).map(|index| (first + index % blocks) as u32).collect();
            first += blocks;
            table
        });
        Self { groups: tables.collect() }
    }

    /// Returns the tables in the order of the layer groups.
    pub fn iter(&self) -> std::slice::Iter<'_, Vec<u32>> {
        self.groups.iter()
    }

    pub fn table(&self, group: usize) -> &[u32] {
        &self.groups[group]
    }

    pub fn len(&self, group: usize) -> usize {
        self.groups[group].len()
    }

    pub fn get(&self, group: usize, index: usize) -> u32 {
        self.groups[group][index]
    }

    pub fn set(&mut self, group: usize, index: usize, block: u32) {
        self.groups[group][index] = block;
    }

    pub fn push(&mut self, group: usize, block: u32) {
        self.groups[group].push(block);
    }

    /// Returns the number of positions for which every layer group has a block.
    pub fn positions(&self) -> usize {
        self.groups.iter().map(Vec::len).min().unwrap_or(0) * BLOCK_TOKENS
    }
}

/// The keys and values of one layer, and the place of the layer in the model's layer groups.
pub struct GroupedLayer<'c> {
    /// The layer group of the layer.
    pub group: usize,
    /// The index of the layer among all of the model's layers in `group`.
    pub index: usize,
    /// The keys, `[rows, kv_heads, head_dim]`.
    pub k: &'c Tensor,
    /// The values, `[rows, kv_heads, head_dim]`.
    pub v: &'c Tensor,
}

/// The keys and values of one layer of each layer group. These layers use different blocks of the same tensors.
/// Block b consists of `BLOCK_TOKENS` rows, starting at row `b * BLOCK_TOKENS`.
struct LayerTensors {
    /// The keys, `[rows, kv_heads, head_dim]`.
    k: Tensor,
    /// The values, `[rows, kv_heads, head_dim]`.
    v: Tensor,
}

/// The keys and values of all sequences, in the layers of one rank.
pub struct KvCache {
    layout: CacheLayout,
    blocks: usize,
    /// Entry i holds the keys and the values of layer i of each layer group.
    layers: Vec<LayerTensors>,
    device: Device,
}

impl KvCache {
    /// Allocates a cache of `blocks` blocks, filled with zeros.
    /// Fails if the model's layers differ in KV heads or head size, or if the model has no layers.
    pub fn new(layout: CacheLayout, blocks: usize, dtype: DType, device: &Device) -> Result<Self> {
        let Some(KvShape { kv_heads, head_dim }) = layout.shape else {
            bail!("cannot allocate a KV cache: the layers differ in their number of KV heads or in their head size");
        };
        let shape = (blocks * BLOCK_TOKENS, kv_heads, head_dim);
        let zeros = || Tensor::zeros(shape, dtype, device);
        let layer = |_| Ok(LayerTensors { k: zeros()?, v: zeros()? });
        let layers = (0..layout.layers_per_group).map(layer).collect::<Result<_>>()?;
        Ok(Self { layout, blocks, layers, device: device.clone() })
    }

    /// Allocates a cache for one sequence of `context` positions. Returns the cache, and the sequence's block tables.
    /// A step may compute any number of tokens, up to the whole context.
    pub fn for_one_sequence(
        layout: CacheLayout,
        context: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<(Self, BlockTables)> {
        let tables = BlockTables::for_one_sequence(&layout, context, context);
        let blocks = 1 + layout.peak_blocks(context, context);
        Ok((Self::new(layout, blocks, dtype, device)?, tables))
    }

    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Returns the number of blocks, including the scratch block (block 0).
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the keys and values of the layer with index `layer` in the model.
    pub fn layer(&self, layer: usize) -> CachedLayer<'_> {
        let LayerTensors { k, v } = &self.layers[self.layout.place(layer).index];
        CachedLayer { k, v }
    }

    /// Returns all layers in this cache, in layer order.
    pub fn own_layers(&self) -> impl Iterator<Item = GroupedLayer<'_>> {
        self.layout.places.iter().map(|&LayerPlace { group, index }| {
            let LayerTensors { k, v } = &self.layers[index];
            GroupedLayer { group, index: self.layout.earlier_layers[group] + index, k, v }
        })
    }

    /// Returns the number of KV heads per layer in this cache.
    pub fn kv_heads(&self) -> usize {
        self.layout.shape.map_or(0, |shape| shape.kv_heads)
    }

    /// Copies the keys and values in block `from` to block `to`, in all layers of the layer group that uses the blocks.
    pub fn copy_block(&self, from: u32, to: u32) -> Result<()> {
        for tensor in self.layers.iter().flat_map(|layer| [&layer.k, &layer.v]) {
            let rows = tensor.narrow(0, from as usize * BLOCK_TOKENS, BLOCK_TOKENS)?.force_contiguous()?;
            copy_rows(tensor, &rows, to as usize * BLOCK_TOKENS)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(windows: &[Option<usize>]) -> Vec<LayerSpec> {
        windows.iter().map(|&window| LayerSpec { kv_heads: 2, head_dim: 8, window }).collect()
    }

    /// Returns the group and the index of each layer.
    fn places(layout: &CacheLayout) -> Vec<(usize, usize)> {
        layout.places.iter().map(|place| (place.group, place.index)).collect()
    }

    #[test]
    fn alternating_layers_form_two_groups() {
        let layout = CacheLayout::new(&specs(&[Some(128), None, Some(128), None]));
        assert_eq!(layout.windows(), [Some(128), None]);
        assert_eq!(places(&layout), [(0, 0), (1, 0), (0, 1), (1, 1)]);
        assert_eq!(layout.block_bytes(DType::BF16), 2 * 2 * 2 * 8 * 2 * 64);
    }

    #[test]
    fn larger_classes_are_split() {
        let layout = CacheLayout::new(&specs(&[Some(4), Some(4), Some(4), None, Some(4), Some(4), Some(4), None]));
        assert_eq!(layout.windows(), [Some(4), Some(4), Some(4), None]);
        assert_eq!(places(&layout), [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]);
    }

    #[test]
    fn a_part_of_the_layers_needs_a_part_of_the_memory_with_the_same_groups() {
        let windows = [Some(4), Some(4), Some(4), None, Some(4), Some(4), Some(4), None];
        let whole = CacheLayout::new(&specs(&windows));
        for (range, layers) in [(0..4, 1), (4..8, 1), (1..7, 2), (3..4, 1), (0..8, 2)] {
            let part = whole.of_layers(range.clone());
            assert_eq!(part.block_bytes(DType::F32) * 2, whole.block_bytes(DType::F32) * layers, "{range:?}");
            assert_eq!(part.peak_blocks(1000, 64), whole.peak_blocks(1000, 64));
            assert!(range.clone().all(|layer| part.group(layer) == whole.group(layer)));
            // No two layers of a layer group may use the same tensors.
            let mut places = places(&part);
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), range.len(), "{range:?}");
        }
    }

    #[test]
    fn layers_of_different_shapes_are_planned_but_not_allocated() {
        let mut layers = specs(&[None, None]);
        layers[1].head_dim = 16;
        let layout = CacheLayout::new(&layers);
        assert_eq!(layout.block_bytes(DType::F32), 2 * 2 * 2 * 16 * 4 * 64);
        assert!(KvCache::new(layout, 1, DType::F32, &Device::Cpu).is_err());
    }

    #[test]
    fn sliding_groups_need_few_blocks() {
        let layout = CacheLayout::new(&specs(&[Some(128), None]));
        assert_eq!(layout.peak_blocks(64, 32), 2);
        assert_eq!(layout.peak_blocks(64_000, 64), 1000 + 4);
        let tables = BlockTables::for_one_sequence(&layout, 64_000, 64);
        assert_eq!((tables.get(0, 3), tables.get(0, 4), tables.get(1, 0)), (4, 1, 5));
    }

    #[test]
    fn a_copied_block_has_the_same_rows() {
        let layout = CacheLayout::new(&specs(&[None]));
        let cache = KvCache::new(layout, 3, DType::F32, &Device::Cpu).unwrap();
        let rows = Tensor::ones((BLOCK_TOKENS, 2, 8), DType::F32, &Device::Cpu).unwrap();
        copy_rows(cache.layer(0).k, &rows, BLOCK_TOKENS).unwrap();
        cache.copy_block(1, 2).unwrap();
        let sums = cache.layer(0).k.reshape((3, BLOCK_TOKENS * 16)).unwrap().sum(1).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(sums, [0.0, 1024.0, 1024.0]);
    }
}
