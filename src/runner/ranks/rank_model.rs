//! [`RankModel`]: what one rank holds of a model.

use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;

/// The part of a model that one rank holds, and the rank's KV cache.
pub struct RankModel {
    pub decoder: Decoder,
    pub cache: KvCache,
}
