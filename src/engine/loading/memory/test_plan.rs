//! A memory plan and a device for tests.

use candle_core::DType;

use super::plan::MemoryPlan;
use super::token_workspace::MIN_WORKSPACE_BYTES_PER_TOKEN;
use crate::device::DeviceInfo;
use crate::nn::kv_cache::{CacheLayout, LayerSpec};
use crate::weights::inventory::ModelBytes;
use crate::weights::inventory::RankShare;

pub fn plan() -> MemoryPlan {
    const FULL: LayerSpec = LayerSpec { kv_heads: 8, head_dim: 64, window: None };
    const SLIDING: LayerSpec = LayerSpec { kv_heads: 8, head_dim: 64, window: Some(128) };
    MemoryPlan {
        ranks: 1,
        weight_bytes: 10 << 30,
        rank_shares: {
            let share = |ranks: u64| RankShare {
                weight_bytes: (1 << 30) + (9 << 30) / ranks,
                kv_heads: vec![8 / ranks as usize; 2],
            };
            (1..=8).map(|ranks| vec![share(ranks); ranks as usize]).collect()
        },
        model_bytes: ModelBytes { layers: vec![4 << 30; 2], head: 1 << 30, other: 1 << 30 },
        loading_bytes: 0,
        unpacked_bytes: 0,
        workspace_bytes_per_token: MIN_WORKSPACE_BYTES_PER_TOKEN,
        layout: CacheLayout::new(&[FULL, SLIDING]),
        layers: vec![FULL, SLIDING],
        sequences: 1,
        limit_bytes: None,
        logits_row_bytes: 0,
        chunks: vec![2048, 512],
        dtype: DType::BF16,
        max_context: 131_072,
        default_context: 131_072,
    }
}

pub fn device(free_bytes: u64) -> DeviceInfo {
    DeviceInfo { name: "a GPU".into(), compute_capability: None, free_bytes, total_bytes: 80 << 30 }
}
