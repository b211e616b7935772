//! What a model takes of a device, known from headers and config alone: loading asks before it allocates, `inferno show`
//! before a model is even here.

use anyhow::Result;
use candle_core::DType;

use crate::device::DeviceInfo;
use crate::error::Error;
use crate::models::Architecture;
use crate::nn::kv_cache::{self, LayerSpec};
use crate::weights::Inventory;

const DEFAULT_CONTEXT: usize = 32_768;
/// A context that is chosen for want of memory is no smaller than this.
const SMALLEST_CONTEXT: usize = 2048;

/// Bytes for activations: in any case, and for each token of a chunk.
const WORKSPACE: (u64, u64) = (192 << 20, 448 << 10);

/// Where a model is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Gpu,
    Cpu,
}

impl DeviceKind {
    /// Tokens in one pass of prefill: more is faster until the matrix units are full, and takes more memory.
    fn chunk_sizes(self) -> &'static [usize] {
        match self {
            DeviceKind::Gpu => &[8192, 2048, 512],
            DeviceKind::Cpu => &[256],
        }
    }
}

/// What a model takes.
pub struct MemoryPlan {
    weight_bytes: u64,
    /// What loading takes beside the weights, before cache and activations do: a layer's experts, laid out anew.
    loading_bytes: u64,
    /// What a pass takes beside activations: quantized experts as floats.
    unpacked_bytes: u64,
    layers: Vec<LayerSpec>,
    /// Tokens in one pass of prefill that may be chosen, the best first.
    chunks: Vec<usize>,
    dtype: DType,
    max_context: usize,
    /// Chosen up to this if nobody asks for more.
    default_context: usize,
}

/// What is made capacity for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Positions.
    pub context: usize,
    /// Tokens in one pass of prefill.
    pub chunk: usize,
}

impl MemoryPlan {
    /// Of a model with these tensors, computed in `dtype`.
    pub fn new(inventory: &Inventory, architecture: &dyn Architecture, dtype: DType, device_kind: DeviceKind) -> Self {
        let (layers, max_context) = (architecture.cache_layers(), architecture.max_position_embeddings());
        let default_context = architecture.default_context();
        Self { default_context, ..Self::from_layers(inventory, layers, max_context, dtype, device_kind) }
    }

    /// The same for a model whose family is not known: what its layers keep is taken on trust.
    pub fn from_layers(
        inventory: &Inventory,
        layers: Vec<LayerSpec>,
        max_context: usize,
        dtype: DType,
        device_kind: DeviceKind,
    ) -> Self {
        Self {
            weight_bytes: inventory.loaded_bytes(dtype),
            loading_bytes: if device_kind == DeviceKind::Gpu { inventory.largest_expert_layer(dtype) } else { 0 },
            unpacked_bytes: if device_kind == DeviceKind::Gpu { inventory.unpacked_expert_layer(dtype) } else { 0 },
            layers,
            chunks: device_kind.chunk_sizes().to_vec(),
            dtype,
            max_context,
            default_context: max_context,
        }
    }

    /// With no choice of how many tokens of a prompt are read at once.
    pub fn with_chunk(self, chunk: Option<usize>) -> Result<Self> {
        match chunk {
            Some(0) => Err(Error::Usage("--chunk 0 reads nothing".into()).into()),
            Some(chunk) => Ok(Self { chunks: vec![chunk], ..self }),
            None => Ok(self),
        }
    }

    /// What each layer keeps.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    /// Of the weights once they are loaded.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// What loading takes beside the weights, before there is a cache.
    pub fn loading_bytes(&self) -> u64 {
        self.loading_bytes
    }

    pub fn cache_bytes(&self, capacity: Capacity) -> u64 {
        kv_cache::bytes(&self.layers, capacity.context, capacity.chunk, self.dtype)
    }

    /// Of the activations of one chunk.
    pub fn workspace_bytes(&self, capacity: Capacity) -> u64 {
        (WORKSPACE.0 + capacity.chunk as u64 * WORKSPACE.1).saturating_add(self.unpacked_bytes)
    }

    /// What 1,000 positions more add to the cache, and what sliding layers keep however long the context is.
    pub fn cache_growth(&self, chunk: usize) -> (u64, u64) {
        let (sliding, full): (Vec<LayerSpec>, Vec<LayerSpec>) =
            self.layers.iter().partition(|layer| layer.window.is_some());
        let bytes = |layers: &[LayerSpec], context| kv_cache::bytes(layers, context, chunk, self.dtype);
        (bytes(&full, 1000), bytes(&sliding, self.max_context))
    }

    /// Everything, with the activations of one chunk.
    pub fn bytes(&self, capacity: Capacity) -> u64 {
        let running = self.cache_bytes(capacity).saturating_add(self.workspace_bytes(capacity) - WORKSPACE.0);
        self.weight_bytes.saturating_add(WORKSPACE.0).saturating_add(running.max(self.loading_bytes))
    }

    /// This context read in the smallest chunks: what takes least.
    pub fn smallest(&self, context: usize) -> Capacity {
        Capacity { context, chunk: self.chunks.last().copied().unwrap_or(context).min(context) }
    }

    /// The context that is chosen where memory is ample and nobody asks for another.
    pub fn default_context(&self) -> usize {
        self.max_context.min(self.default_context).min(DEFAULT_CONTEXT)
    }

    /// The longest context that fits, if prompts are read in the smallest chunks.
    pub fn largest_context(&self, device: &DeviceInfo) -> Option<usize> {
        let fits = |context| self.fits(self.smallest(context), device);
        if self.max_context == 0 || !fits(1) {
            return None;
        }
        // `fit` does, `beyond` does not.
        let (mut fit, mut beyond) = (1, self.max_context + 1);
        while beyond - fit > 1 {
            let middle = fit + (beyond - fit) / 2;
            if fits(middle) { fit = middle } else { beyond = middle }
        }
        Some(fit)
    }

    fn fits(&self, capacity: Capacity, device: &DeviceInfo) -> bool {
        device.total_bytes == 0 || self.bytes(capacity) <= device.free_bytes
    }

    /// This context with the largest chunk that fits.
    fn fit(&self, context: usize, device: &DeviceInfo) -> Option<Capacity> {
        let mut capacities = self.chunks.iter().map(|&chunk| Capacity { context, chunk: chunk.min(context) });
        capacities.find(|capacity| self.fits(*capacity, device))
    }

    /// The context asked for, or the largest up to the default that fits. Where memory is short, prompts are read in
    /// smaller chunks before the context shrinks.
    pub fn choose(&self, asked: Option<usize>, device: &DeviceInfo) -> Result<Capacity> {
        let Some(context) = self.checked(asked)? else {
            let most = self.default_context();
            return self.halvings(most).find_map(|context| self.fit(context, device)).ok_or_else(|| {
                let smallest = self.halvings(most).last().unwrap_or(most);
                self.out_of_memory(smallest, device).into()
            });
        };
        self.fit(context, device).ok_or_else(|| self.out_of_memory(context, device).into())
    }

    /// A context that was asked for, if it is one that this model can have.
    pub fn checked(&self, asked: Option<usize>) -> Result<Option<usize>> {
        match asked {
            Some(0) => Err(Error::Usage("--context 0 has no capacity for anything".into()).into()),
            Some(asked) if asked > self.max_context => {
                let limit = self.max_context;
                let problem = format!("--context {asked} is more than the {limit} that this model was made for");
                Err(Error::Usage(problem).into())
            }
            asked => Ok(asked),
        }
    }

    /// `most`, half of it, and so on, down to the smallest context that is chosen for want of memory.
    fn halvings(&self, most: usize) -> impl Iterator<Item = usize> {
        let smallest = SMALLEST_CONTEXT.min(most);
        let next = move |&context: &usize| (context > smallest).then(|| (context / 2).max(smallest));
        std::iter::successors(Some(most), next)
    }

    pub fn out_of_memory(&self, context: usize, device: &DeviceInfo) -> Error {
        let what = format!("this model with a context of {context} tokens");
        let (needed_bytes, free_bytes) = (self.bytes(self.smallest(context)), device.free_bytes);
        let smaller = self.halvings(context).skip(1);
        let fitting_context = smaller.into_iter().find(|&context| self.fit(context, device).is_some());
        Error::OutOfMemory { what, device: device.name.clone(), needed_bytes, free_bytes, fitting_context }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> MemoryPlan {
        const FULL: LayerSpec = LayerSpec { kv_heads: 8, head_dim: 64, window: None };
        const SLIDING: LayerSpec = LayerSpec { kv_heads: 8, head_dim: 64, window: Some(128) };
        MemoryPlan {
            weight_bytes: 10 << 30,
            loading_bytes: 0,
            unpacked_bytes: 0,
            layers: vec![FULL, SLIDING],
            chunks: vec![2048, 512],
            dtype: DType::BF16,
            max_context: 131_072,
            default_context: 131_072,
        }
    }

    fn device(free_bytes: u64) -> DeviceInfo {
        DeviceInfo { name: "a GPU".into(), compute_capability: None, free_bytes, total_bytes: 80 << 30 }
    }

    #[test]
    fn room_shrinks_by_chunk_first_and_by_context_then() {
        let plan = plan();
        let all = Capacity { context: DEFAULT_CONTEXT, chunk: 2048 };
        assert_eq!(plan.choose(None, &device(80 << 30)).unwrap(), all);
        assert_eq!(plan.choose(None, &device(plan.bytes(all))).unwrap(), all);
        let small = Capacity { chunk: 512, ..all };
        assert_eq!(plan.choose(None, &device(plan.bytes(all) - 1)).unwrap(), small);
        assert_eq!(plan.choose(None, &device(plan.bytes(small))).unwrap(), small);
        let half = plan.choose(None, &device(plan.bytes(small) - 1)).unwrap();
        assert_eq!(half, Capacity { context: DEFAULT_CONTEXT / 2, chunk: 512 });
        assert_eq!(plan.choose(Some(100), &device(80 << 30)).unwrap(), Capacity { context: 100, chunk: 100 });
    }

    #[test]
    fn loading_may_take_more_than_running() {
        let capacity = Capacity { context: 100, chunk: 100 };
        let running = plan().bytes(capacity);
        let plan = MemoryPlan { loading_bytes: 5 << 30, ..plan() };
        assert_eq!(plan.bytes(capacity), (10 << 30) + WORKSPACE.0 + (5 << 30));
        assert!(running < plan.bytes(capacity));
    }

    #[test]
    fn what_does_not_fit_says_what_would() {
        let plan = plan();
        let fits = plan.bytes(Capacity { context: 4096, chunk: 512 });
        let error = plan.choose(Some(16_384), &device(fits)).unwrap_err();
        assert!(error.to_string().contains("--context 4096"), "{error}");
        let error = plan.choose(None, &device(1 << 30)).unwrap_err();
        let Some(Error::OutOfMemory { fitting_context, .. }) = error.downcast_ref() else { panic!("{error}") };
        assert_eq!(*fitting_context, None);
    }

    #[test]
    fn the_largest_context_is_the_last_that_fits() {
        let plan = plan();
        assert_eq!(plan.largest_context(&device(80 << 30)), Some(131_072));
        assert_eq!(plan.largest_context(&device(1 << 30)), None);
        for context in [1, 511, 5000, 131_071] {
            let bytes = plan.bytes(plan.smallest(context));
            assert_eq!(plan.largest_context(&device(bytes)), Some(context));
        }
    }

    #[test]
    fn the_cache_grows_with_full_layers_alone() {
        let plan = plan();
        let (per_1000, fixed) = plan.cache_growth(512);
        assert_eq!(per_1000, 1000 * 2 * 8 * 64 * 2);
        assert_eq!(fixed, (128 + 512 - 1) * 2 * 8 * 64 * 2);
        assert_eq!(plan.cache_bytes(Capacity { context: 3000, chunk: 512 }), 3 * per_1000 + fixed);
    }
}
