//! Divides a model among ranks, and plans the memory of one rank.

use std::ops::Range;

use anyhow::Result;

use super::plan::MemoryPlan;
use super::sizes::WORKSPACE_BYTES;
use crate::device::Split;
use crate::error::Error;
use crate::nn::kv_cache::CacheLayout;
use crate::text::counted;
use crate::weights::inventory::ModelBytes;
use crate::weights::inventory::RankShare;

/// The maximum default chunk size, in tokens, if each rank holds whole layers.
///
/// While one rank runs its layers, the other ranks wait, and can give up after 5 s (`ANSWER_TIMEOUT`).
/// With 2,048 tokens, a rank takes much less: for example, 0.5 s for 100 GB of bf16 layers at 400 TFLOPS.
const MAX_STAGE_CHUNK: usize = 2048;

impl MemoryPlan {
    /// Divides the layers among ranks. Returns the layers of each rank.
    ///
    /// `free_bytes` has the free memory that each rank may use. A rank's room is this memory minus `WORKSPACE_BYTES`
    /// and minus the rank's weights that belong to no layer. The ranks get layers in proportion to their room,
    /// but at least one layer each. Fails if there are more ranks than layers.
    pub fn stages(&self, free_bytes: &[u64]) -> Result<Vec<Range<usize>>> {
        let (ranks, layers) = (free_bytes.len(), self.model_bytes.layers.len());
        if ranks > layers {
            let message = format!(
                "cannot divide {} among {ranks} devices: use at most {}",
                counted(layers, "layer"),
                counted(layers, "device")
            );
            return Err(Error::Usage(message).into());
        }
        let fixed_bytes = WORKSPACE_BYTES + self.model_bytes.other + self.model_bytes.head / ranks as u64;
        let room = |free: &u64| u128::from(free.saturating_sub(fixed_bytes).max(1));
        let total_room: u128 = free_bytes.iter().map(room).sum();
        let total: u128 = self.model_bytes.layers.iter().map(|&bytes| u128::from(bytes)).sum();
        let mut stages = Vec::with_capacity(ranks);
        let mut start = 0;
        // `bytes` is the size of all layers before `end`. `room_so_far` is the total room of ranks 0 to `rank`.
        let mut bytes = 0;
        let mut room_so_far = 0;
        for (rank, free) in free_bytes.iter().enumerate() {
            room_so_far += room(free);
            // Leave at least one layer for each later rank.
            let last = layers - (ranks - 1 - rank);
            let mut end = start;
            while end < last {
                let with_layer = bytes + u128::from(self.model_bytes.layers[end]);
                // Add the layer if at least half of it lies within the total share of ranks 0 to `rank`.
                let is_within = (bytes + with_layer) * total_room <= 2 * total * room_so_far;
                if end > start && !is_within && rank + 1 < ranks {
                    break;
                }
                (end, bytes) = (end + 1, with_layer);
            }
            stages.push(start..end);
            start = end;
        }
        Ok(stages)
    }

    /// Divides the layers among `ranks` devices with equal memory. See [`stages`](Self::stages).
    fn stages_of_equal_devices(&self, ranks: usize) -> Result<Vec<Range<usize>>> {
        // The amount of free memory does not matter: equal devices get equal shares of the layers.
        self.stages(&vec![0; ranks])
    }

    /// Plans the memory of one of `ranks` ranks. The rank holds the layers `layers` whole, its share of the output
    /// head, and all weights outside the layers and the head.
    pub fn with_stage(mut self, layers: Range<usize>, ranks: usize) -> Self {
        self.ranks = ranks;
        let ModelBytes { layers: layer_bytes, head, other } = &self.model_bytes;
        self.weight_bytes = layer_bytes[layers.clone()].iter().sum::<u64>() + head.div_ceil(ranks as u64) + other;
        self.layout = self.layout.of_layers(layers.clone());
        self.layers = self.layers[layers].to_vec();
        // Keep a chunk size that the user requested, even if it exceeds `MAX_STAGE_CHUNK`.
        if self.chunks.iter().any(|&chunk| chunk <= MAX_STAGE_CHUNK) {
            self.chunks.retain(|&chunk| chunk <= MAX_STAGE_CHUNK);
        }
        self
    }

    /// Divides every layer among `ranks` ranks, and plans the memory of the rank with the largest part.
    pub fn with_largest_share(self, ranks: usize) -> Self {
        // If a tensor cannot be divided equally, no other rank has a larger part than the first.
        self.with_share(0, ranks)
    }

    /// Divides every layer among `ranks` ranks, and plans the memory of rank `rank`.
    pub fn with_share(mut self, rank: usize, ranks: usize) -> Self {
        if ranks > 1 {
            self.ranks = ranks;
            let RankShare { weight_bytes, kv_heads } = &self.rank_shares[ranks - 1][rank];
            for (layer, kv_heads) in self.layers.iter_mut().zip(kv_heads) {
                layer.kv_heads = *kv_heads;
            }
            self.weight_bytes = *weight_bytes;
            self.layout = CacheLayout::new(&self.layers);
        }
        self
    }

    /// Divides the model among devices with equal memory, and plans the memory of the rank with the most weights.
    /// With [`Split::Layers`], fails if there are more ranks than layers.
    pub fn with_split(self, split: Split, ranks: usize) -> Result<Self> {
        if split == Split::Tensor || ranks == 1 {
            return Ok(self.with_largest_share(ranks));
        }
        let stages = self.stages_of_equal_devices(ranks)?;
        let plans = stages.into_iter().map(|stage| self.clone().with_stage(stage, ranks));
        Ok(plans.max_by_key(|plan| plan.weight_bytes).unwrap_or(self))
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Capacity;
    use super::super::test_plan::plan;
    use super::*;
    use crate::kernels::exchange::MAILBOX_BYTES;
    use crate::nn::kv_cache::LayerSpec;

    #[test]
    fn several_ranks_divide_weights_and_cache() {
        let (one, two) = (plan(), plan().with_largest_share(2));
        assert_eq!(two.weight_bytes(), (1 << 30) + (9 << 30) / 2);
        let capacity = Capacity { context: 4096, chunk: 512 };
        assert_eq!(two.cache_blocks(capacity), one.cache_blocks(capacity));
        assert_eq!(two.cache_bytes(capacity), one.cache_bytes(capacity) / 2);
        assert_eq!(two.workspace_bytes(capacity), one.workspace_bytes(capacity) + MAILBOX_BYTES as u64);
    }

    #[test]
    fn layers_are_divided_in_proportion_to_free_memory() {
        let model_bytes = ModelBytes { layers: vec![1 << 30; 10], head: 2 << 30, other: 1 << 30 };
        let plan = MemoryPlan { model_bytes, ..plan() };
        let stages = |gib: &[u64]| plan.stages(&gib.iter().map(|gib| gib << 30).collect::<Vec<_>>()).unwrap();
        assert_eq!(stages(&[20, 20]), [0..5, 5..10]);
        assert_eq!(stages(&[20, 20, 20]), [0..3, 3..7, 7..10]);
        assert_eq!(stages(&[10, 26]), [0..2, 2..10], "rooms of 7.8 and 23.8 GiB are worth 2.5 and 7.5 layers");
        assert_eq!(stages(&[0, 20]), [0..1, 1..10], "a rank without free memory gets one layer");
        assert_eq!(stages(&[20, 0, 0]), [0..8, 8..9, 9..10]);
        // If the memory of a CPU is unknown, its free memory is 0.
        assert_eq!(stages(&[0, 0]), [0..5, 5..10]);
        assert!(plan.stages(&[1 << 30; 11]).unwrap_err().to_string().contains("at most 10 devices"));
    }

    #[test]
    fn a_split_plans_the_rank_with_the_largest_part() {
        let model_bytes = ModelBytes { layers: vec![1 << 30, 1 << 30, 1 << 30], head: 2 << 30, other: 1 << 30 };
        let layers = vec![LayerSpec { kv_heads: 8, head_dim: 64, window: None }; 3];
        let plan = MemoryPlan { model_bytes, layout: CacheLayout::new(&layers), layers, ..plan() };
        let split = |split, ranks| plan.clone().with_split(split, ranks).map(|plan| plan.weight_bytes() >> 20);
        assert_eq!(split(Split::Layers, 2).unwrap(), 4 << 10, "2 layers, half of the head, all other weights");
        assert_eq!(split(Split::Tensor, 2).unwrap(), plan.clone().with_largest_share(2).weight_bytes() >> 20);
        assert_eq!(split(Split::Layers, 1).unwrap(), plan.weight_bytes() >> 20);
        assert!(split(Split::Layers, 4).is_err());
    }

    #[test]
    fn a_rank_with_whole_layers_holds_their_weights_and_cache() {
        let (one, second) = (plan(), plan().with_stage(1..2, 2));
        assert_eq!(second.weight_bytes(), (4 << 30) + (1 << 29) + (1 << 30));
        let capacity = Capacity { context: 4096, chunk: 512 };
        assert_eq!(second.cache_blocks(capacity), one.cache_blocks(capacity));
        // The two layers are in different layer groups, so a block holds one layer in both plans.
        assert_eq!(second.cache_bytes(capacity), one.cache_bytes(capacity));
        assert_eq!(second.layers().len(), 1);
        assert_eq!(plan().with_chunk(Some(8192)).unwrap().with_stage(0..1, 2).chunks, [8192]);
        let plan = MemoryPlan { chunks: vec![8192, 2048, 512], ..plan() };
        assert_eq!(plan.with_stage(0..1, 2).chunks, [2048, 512]);
    }
}
