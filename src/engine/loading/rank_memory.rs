//! [`RankMemory`]: the memory plans of all ranks, which must use the same context, chunk size and number of blocks.

use std::ops::Range;

use anyhow::Result;

use super::memory::{Capacity, MemoryPlan};
use super::memory_limit::MemoryLimit;
use crate::device::{DeviceInfo, Devices, Split};
use crate::error::Error;

/// The memory plans of all ranks, and the device of each plan.
pub(super) struct RankMemory {
    ranks: Vec<(MemoryPlan, DeviceInfo)>,
    /// The layers of each rank. `None` if there is only one rank, or if every rank holds a part of each layer.
    pub stages: Option<Vec<Range<usize>>>,
}

impl RankMemory {
    /// Divides the model of `plan` among ranks. `infos` describes the device of each rank.
    ///
    /// If `limit` is set, the ranks on a device together use at most this amount of the device's memory.
    /// Fails if `limit` is set but the total memory of a device is unknown.
    /// With [`Split::Layers`], fails if there are more ranks than layers.
    pub fn new(
        plan: &MemoryPlan,
        devices: &Devices,
        infos: &[DeviceInfo],
        split: Split,
        limit: Option<MemoryLimit>,
    ) -> Result<Self> {
        let mut infos = infos.to_vec();
        // Several ranks can run on one device and share its memory.
        let ranks = devices.max_ranks_per_device() as u64;
        // `free_bytes` becomes each rank's share of the free memory, regardless of the limit.
        // `usable_bytes` is this share, or the rank's share of the limit if that is less.
        // Both are needed: `MemoryPlan::choose` checks both, and error messages name the free memory.
        let mut usable_bytes = Vec::with_capacity(infos.len());
        for device in &mut infos {
            device.free_bytes /= ranks;
            let mut usable = device.free_bytes;
            if let Some(limit) = limit {
                if device.total_bytes == 0 {
                    let message = format!(
                        "cannot use --gpu-memory: the memory size of {} is unknown; omit --gpu-memory",
                        device.name
                    );
                    return Err(Error::Usage(message).into());
                }
                // The limit can exceed the free memory, because other processes use memory too.
                usable = usable.min(limit.bytes(device.total_bytes) / ranks);
            }
            usable_bytes.push(usable);
        }
        let stages = match split {
            Split::Layers if infos.len() > 1 => Some(plan.stages(&usable_bytes)?),
            _ => None,
        };
        let count = infos.len();
        let rank = |(rank, device): (usize, DeviceInfo)| {
            let rank_plan = match &stages {
                Some(stages) => plan.clone().with_stage(stages[rank].clone(), count),
                None => plan.clone().with_share(rank, count),
            };
            let rank_plan = if limit.is_some() { rank_plan.with_limit(usable_bytes[rank]) } else { rank_plan };
            (rank_plan, device)
        };
        Ok(Self { ranks: infos.into_iter().enumerate().map(rank).collect(), stages })
    }

    /// Returns the smallest context and the smallest chunk size that [`MemoryPlan::choose`] chooses for any rank.
    /// If memory is short, the error suggests a context that fits on all ranks, unless there is none.
    pub fn choose(&self, context: Option<usize>) -> Result<Capacity> {
        let capacities = self.ranks.iter().map(|(plan, device)| plan.choose(context, device));
        let capacities = capacities.collect::<Result<Vec<_>>>().map_err(|mut error| {
            if let Some(Error::OutOfMemory { fitting_context, .. }) = error.downcast_mut() {
                let largest = self.ranks.iter().map(|(plan, device)| plan.largest_context(device));
                // `None` is less than any context, so the minimum is `None` if no context fits on at least one rank.
                *fitting_context = largest.chain([*fitting_context]).min().flatten();
            }
            error
        })?;
        let context = capacities.iter().map(|capacity| capacity.context).min().unwrap_or(0);
        let chunk = capacities.iter().map(|capacity| capacity.chunk).min().unwrap_or(0);
        Ok(Capacity { context, chunk })
    }

    /// Returns the number of blocks in each rank's KV cache: the smallest number that any rank's plan allows.
    pub fn cache_blocks(&self, capacity: Capacity) -> usize {
        self.ranks.iter().map(|(plan, _)| plan.cache_blocks(capacity)).min().unwrap_or(0)
    }

    /// Returns the number of sequences of `capacity.context` tokens that the KV cache can hold.
    pub fn cache_sequences(&self, capacity: Capacity) -> usize {
        (self.cache_blocks(capacity) - 1) / self.first().sequence_blocks(capacity.context).max(1)
    }

    /// Returns the size of the largest KV cache of any rank, in bytes.
    pub fn cache_bytes(&self, capacity: Capacity) -> u64 {
        let blocks = self.cache_blocks(capacity);
        self.ranks.iter().map(|(plan, _)| plan.block_bytes(blocks)).max().unwrap_or(0)
    }

    /// Returns the estimated size of the weights on the rank with the most weights, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        self.ranks.iter().map(|(plan, _)| plan.weight_bytes()).max().unwrap_or(0)
    }

    /// Returns the plan of the first rank.
    pub fn first(&self) -> &MemoryPlan {
        &self.ranks[0].0
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::test_plan::{device, plan};
    use super::*;

    #[test]
    fn the_suggested_context_fits_on_all_ranks() {
        let devices: Devices = "cuda:0,1".parse().unwrap();
        let bytes = |context| plan().with_share(0, 2).bytes(Capacity { context, chunk: 512 });
        let error = |free: [u64; 2]| {
            let memory = RankMemory::new(&plan(), &devices, &free.map(device), Split::Tensor, None).unwrap();
            memory.choose(Some(16_384)).unwrap_err().to_string()
        };
        for free in [[bytes(4096), bytes(2048)], [bytes(2048), bytes(4096)], [bytes(4096), bytes(2048) + 1]] {
            let error = error(free);
            assert!(error.contains("--context 2048"), "{free:?}: {error}");
        }
        let error = error([bytes(4096), 1 << 30]);
        assert!(error.contains("no context fits"), "{error}");
    }
}
