//! Routes tokens to experts on a GPU: chooses the experts and sorts the (token, expert) pairs by expert (`route.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::check_routing;
use super::choose_experts::{self, choose_experts};
use super::expert_usage::ExpertUsage;
use super::sort_by_expert::{SortedPairs, sort_by_expert};
use super::topk::{Softmax, topk_softmax};
use crate::kernels::SumOrder;
use crate::kernels::constants::{ROUTE_CLUSTER, ROUTE_EXPERTS, ROUTE_THREADS, ROUTE_TOKENS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, module, runs_hopper_code};
use crate::kernels::matmul::matmul_f32;
use crate::kernels::rows::add_bias;
use crate::kernels::scratch;
use crate::kernels::unsupported;

/// The (token, expert) pairs of a batch, sorted by expert, and their routing weights.
pub struct RoutedPairs {
    /// u32 `[pairs]`: the indices of the pairs, sorted by expert.
    /// Pair t · chosen + n is token t with its chosen expert n.
    /// If [`route`](Self::route) took one launch, each expert's pairs are in ascending order.
    pub sorted: Tensor,
    /// u32 `[experts + 1]`: `sorted[offsets[e] .. offsets[e + 1]]` are the pairs of expert e.
    pub offsets: Tensor,
    /// f32 `[tokens, chosen]`: the routing weight of each pair.
    pub weights: Tensor,
    /// u32 `[pairs]`: the row of each pair in a tiled tensor (`mxfp4_tiles/tiles.cuh`).
    pub rows: Tensor,
}

impl RoutedPairs {
    /// Sorts the (token, expert) pairs by expert. `ids` are the chosen experts, u32 `[tokens, chosen]`.
    /// `weights` are the routing weights of the pairs, f32 `[tokens, chosen]`.
    /// An id that is not less than `experts` counts as the last expert.
    pub fn new(ids: &Tensor, weights: Tensor, experts: usize) -> Result<Self> {
        let Device::Cuda(device) = ids.device() else { return unsupported("RoutedPairs::new", ids) };
        check_routing(ids.dims2()?.1, experts)?;
        if ids.dims() != weights.dims() || ids.dtype() != DType::U32 || weights.dtype() != DType::F32 {
            let (ids_dtype, weights_dtype) = (ids.dtype(), weights.dtype());
            let (ids, weights) = (ids.dims(), weights.dims());
            bail!(
                "cannot sort pairs: ids {ids_dtype:?} {ids:?} and routing weights {weights_dtype:?} {weights:?} \
                 must be U32 and F32, and have the same shape"
            );
        }
        let SortedPairs { sorted, offsets, rows } = sort_by_expert(device, ids, experts)?;
        Ok(Self { sorted, offsets, weights, rows })
    }

    /// Chooses, for each token, the `chosen` experts with the largest router logits x·weightᵀ + bias.
    /// Then sorts the (token, expert) pairs by expert.
    /// The routing weights are the softmax over a token's chosen experts.
    ///
    /// - x: f32 `[tokens, hidden]`
    /// - weight: f32 `[experts, hidden]`
    /// - bias: f32 `[experts]`
    /// - usage: counters of batches and of their distinct experts; not changed if routing takes several launches
    ///
    /// Routing takes one launch if there are at most `ROUTE_TOKENS` tokens and `ROUTE_EXPERTS` experts, if the hidden
    /// size is a multiple of 4, and if the GPU can run kernels with clusters (`runs_hopper_code`).
    /// Otherwise, it takes two launches (`choose_experts.cu`, `sort_by_expert.cu`).
    /// It takes more launches if `choose_experts` would be slower or does not support the router.
    pub fn route(
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        chosen: usize,
        sum_order: SumOrder,
        usage: Option<&ExpertUsage>,
    ) -> Result<Self> {
        let ((tokens, columns), (experts, weight_columns)) = (x.dims2()?, weight.dims2()?);
        let all_f32 = [Some(x), Some(weight), bias].into_iter().flatten().all(|tensor| tensor.dtype() == DType::F32);
        if !all_f32 || columns != weight_columns || bias.is_some_and(|bias| bias.dims() != [experts]) {
            let x = x.dims();
            let weight = weight.dims();
            let bias = bias.map(Tensor::dims);
            bail!(
                "cannot route tokens: x {x:?}, weight {weight:?} and bias {bias:?} must be F32 and have matching shapes"
            );
        }
        check_routing(chosen, experts)?;
        let Device::Cuda(device) = x.device() else { return unsupported("RoutedPairs::route", x) };
        let is_supported = experts <= ROUTE_EXPERTS && columns > 0 && columns.is_multiple_of(4);
        if (1..=ROUTE_TOKENS).contains(&tokens) && is_supported && runs_hopper_code(device)? {
            return Self::route_few_tokens(device, x, weight, bias, chosen, usage);
        }
        if choose_experts::is_fastest(device, x, weight)? {
            let (ids, weights) = choose_experts(device, x, weight, bias, chosen)?;
            return Self::new(&ids, weights, experts);
        }
        let logits = matmul_f32(x, weight, sum_order)?;
        let logits = match bias {
            Some(bias) => add_bias(&logits, bias)?,
            None => logits,
        };
        let (ids, weights) = topk_softmax(&logits, chosen, Softmax::OverChosen)?;
        Self::new(&ids, weights, experts)
    }

    /// Routes up to `ROUTE_TOKENS` tokens in one launch. `route` has already checked the shapes, dtypes and device.
    fn route_few_tokens(
        device: &CudaDevice,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        chosen: usize,
        usage: Option<&ExpertUsage>,
    ) -> Result<Self> {
        let ((tokens, columns), (experts, _)) = (x.dims2()?, weight.dims2()?);
        // SAFETY: the kernel writes every element before a later kernel reads it.
        let empty = |shape: &[usize], dtype| unsafe { scratch::empty(shape, dtype, x.device()) };
        let routed = Self {
            sorted: empty(&[tokens * chosen], DType::U32)?,
            offsets: empty(&[experts + 1], DType::U32)?,
            weights: empty(&[tokens, chosen], DType::F32)?,
            rows: empty(&[tokens * chosen], DType::U32)?,
        };
        let arguments = Arguments::new()
            .tensor(x)?
            .tensor(weight)?
            .optional(bias)?
            .tensor(&routed.weights)?
            .tensor(&routed.sorted)?
            .tensor(&routed.offsets)?
            .tensor(&routed.rows)?
            .optional(usage.map(ExpertUsage::counters))?
            .int(tokens)
            .int(columns)
            .int(experts)
            .int(chosen);
        let shape = LaunchShape::new((ROUTE_CLUSTER, tokens.div_ceil(ROUTE_CLUSTER), 1), ROUTE_THREADS);
        // SAFETY: `route` has checked all shapes and dtypes, and the grid covers all tokens.
        // Overlap: all threads call `pdl_wait`. Before, they read only the router's weight and bias, which no kernel
        // writes after loading.
        unsafe { Launch::new(module!("route"), "route_f32", shape, arguments).overlapping().enqueue(device)? };
        Ok(routed)
    }
}
