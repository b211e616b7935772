//! Chooses the experts with the largest router logits for each token, and computes their routing weights (a softmax).

#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Device, Result, Tensor};

use super::check_routing;
use crate::kernels::{elements, to_f32};

/// The experts over which the softmax of the routing weights runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Softmax {
    /// The chosen experts: a token's routing weights sum to one (gpt-oss, Mixtral, Qwen3-MoE with `norm_topk_prob`).
    OverChosen,
    /// All experts: a token's routing weights sum to at most one (Qwen3-MoE without `norm_topk_prob`).
    OverAll,
}

/// Returns the ids of the `chosen` experts with the largest logits, and their routing weights.
///
/// `logits` is `[tokens, experts]`. The ids are u32 `[tokens, chosen]`, and the weights are f32 `[tokens, chosen]`.
/// A token's ids are in descending order of their logits. Ties go to the lower expert id. A NaN logit counts as -inf.
pub fn topk_softmax(logits: &Tensor, chosen: usize, softmax: Softmax) -> Result<(Tensor, Tensor)> {
    let (tokens, experts) = logits.dims2()?;
    check_routing(chosen, experts)?;
    match logits.device() {
        Device::Cpu => {
            let values = to_f32(logits)?;
            let (values, layout) = values.storage_and_layout();
            let (ids, weights) = reference(elements(&values, layout)?, experts, chosen, softmax);
            let shape = (tokens, chosen);
            Ok((Tensor::from_vec(ids, shape, &Device::Cpu)?, Tensor::from_vec(weights, shape, &Device::Cpu)?))
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
            // SAFETY: the kernel writes every element of `ids`.
            let ids = unsafe { crate::kernels::scratch::empty((tokens, chosen), DType::U32, logits.device())? };
            // SAFETY: the kernel writes every element of `weights`.
            let weights = unsafe { crate::kernels::scratch::empty((tokens, chosen), DType::F32, logits.device())? };
            let arguments = Arguments::new()
                .tensor(logits)?
                .tensor(&ids)?
                .tensor(&weights)?
                .int(experts)
                .int(chosen)
                .flag(softmax == Softmax::OverAll);
            let kernel = format!("topk_softmax_{}", dtype_suffix(logits.dtype())?);
            let launch = Launch::new(module!("topk"), kernel, LaunchShape::linear(tokens, 32), arguments);
            // SAFETY: shapes and dtypes are checked above.
            unsafe { launch.enqueue(device)? };
            Ok((ids, weights))
        }
        _ => crate::kernels::unsupported("topk_softmax", logits),
    }
}

/// Computes [`topk_softmax`] in plain Rust.
pub fn reference(logits: &[f32], experts: usize, chosen: usize, softmax: Softmax) -> (Vec<u32>, Vec<f32>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(experts) {
        let key = |&expert: &usize| if row[expert].is_nan() { f32::NEG_INFINITY } else { row[expert] };
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b)));
        let max = key(&order[0]);
        let exp = |&expert: &usize| (key(&expert) - max).exp();
        let all: f32 = order.iter().map(exp).sum();
        order.truncate(chosen);
        let exps: Vec<f32> = order.iter().map(exp).collect();
        let total: f32 = if softmax == Softmax::OverAll { all } else { exps.iter().sum() };
        weights.extend(exps.iter().map(|e| e / total));
        ids.extend(order.iter().map(|&expert| expert as u32));
    }
    (ids, weights)
}
