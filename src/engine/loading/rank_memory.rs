//! The memory plans of all ranks of a model.

use std::ops::Range;

use anyhow::Result;

use super::memory::{Capacity, MemoryPlan};
use super::memory_limit::MemoryLimit;
use crate::device::{DeviceInfo, Devices, Split};
use crate::error::Error;

/// The memory plan and the device of each rank.
pub(super) struct RankMemory {
    ranks: Vec<(MemoryPlan, DeviceInfo)>,
    /// The layers of each rank. `None` if every rank holds a part of each layer.
    pub stages: Option<Vec<Range<usize>>>,
}

impl RankMemory {
    /// Divides a model among devices. `plan` is the plan of the whole model, and `infos` are the devices in rank order.
    /// If `limit` is set, each rank uses at most `limit` of the memory of its device.
    pub fn new(
        plan: &MemoryPlan,
        devices: &Devices,
        infos: &[DeviceInfo],
        split: Split,
        limit: Option<MemoryLimit>,
    ) -> Result<Self> {
        let mut usable = infos.to_vec();
        for device in &mut usable {
            // Ranks on the same device share the memory of the device.
            device.free_bytes /= devices.most_ranks_per_device() as u64;
            if let Some(limit) = limit {
                if device.total_bytes == 0 {
                    let message = "cannot limit the memory: the memory of this device is unknown";
                    return Err(Error::Usage(message.into()).into());
                }
                // Other processes may already use part of the memory that the limit allows.
                device.free_bytes = device.free_bytes.min(limit.bytes(device.total_bytes));
            }
        }
        let stages = match split {
            Split::Layers if usable.len() > 1 => {
                Some(plan.stages(&usable.iter().map(|device| device.free_bytes).collect::<Vec<_>>())?)
            }
            _ => None,
        };
        let count = usable.len();
        let rank = |(rank, device): (usize, DeviceInfo)| {
            let part = match &stages {
                Some(stages) => plan.clone().with_stage(stages[rank].clone(), count),
                None => plan.clone().with_rank(rank, count),
            };
            let part = if limit.is_some() { part.with_limit(device.free_bytes) } else { part };
            (part, device)
        };
        Ok(Self { ranks: usable.into_iter().enumerate().map(rank).collect(), stages })
    }

    /// Chooses a capacity that fits on every device. See [`MemoryPlan::choose`].
    pub fn choose(&self, context: Option<usize>) -> Result<Capacity> {
        let capacities = self.ranks.iter().map(|(plan, device)| plan.choose(context, device));
        let capacities = capacities.collect::<Result<Vec<_>>>()?;
        let context = capacities.iter().map(|capacity| capacity.context).min().unwrap_or(0);
        let chunk = capacities.iter().map(|capacity| capacity.chunk).min().unwrap_or(0);
        Ok(Capacity { context, chunk })
    }

    /// Returns the number of blocks in the KV cache of each rank, which is the same for all ranks.
    pub fn cache_blocks(&self, capacity: Capacity) -> usize {
        self.ranks.iter().map(|(plan, _)| plan.cache_blocks(capacity)).min().unwrap_or(0)
    }

    /// Returns the number of full-context sequences that the KV cache can hold.
    pub fn cache_sequences(&self, capacity: Capacity) -> usize {
        (self.cache_blocks(capacity) - 1) / self.first().sequence_blocks(capacity.context).max(1)
    }

    /// Returns the size of the KV cache of the rank with the largest cache, in bytes.
    pub fn cache_bytes(&self, capacity: Capacity) -> u64 {
        let blocks = self.cache_blocks(capacity);
        self.ranks.iter().map(|(plan, _)| plan.block_bytes(blocks)).max().unwrap_or(0)
    }

    /// Returns the size of the weights of the rank with the largest part, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        self.ranks.iter().map(|(plan, _)| plan.weight_bytes()).max().unwrap_or(0)
    }

    /// Returns the plan of the first rank.
    pub fn first(&self) -> &MemoryPlan {
        &self.ranks[0].0
    }
}
