//! [`RankParts`]: the decoder and the KV cache of a rank.

use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;

/// The part of a model that one rank holds, and its KV cache.
pub struct RankParts {
    pub decoder: Decoder,
    pub cache: KvCache,
}
