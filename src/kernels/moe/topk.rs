//! Expert routing on the device: the N largest router logits of each token and their softmax.

#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Device, Result, Tensor, bail};

use crate::kernels::{elements, to_f32};

/// What the weights of the chosen experts are shares of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Softmax {
    /// Of the chosen ones: they sum to one (gpt-oss, Mixtral, Qwen3 with `norm_topk_prob`).
    OverChosen,
    /// Of all experts: what the others would have got is left out (Qwen3 without it).
    OverAll,
}

/// logits [T, E] → ids [T, N] u32 in falling order of their logits (equal ones: lower expert first), weights [T, N] f32.
pub fn topk_softmax(logits: &Tensor, chosen: usize, softmax: Softmax) -> Result<(Tensor, Tensor)> {
    let (tokens, experts) = logits.dims2()?;
    if chosen == 0 || chosen > experts || chosen > 32 || experts > 1024 {
        bail!("topk_softmax: cannot choose {chosen} of {experts} experts (at most 32 of 1024)");
    }
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
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            // SAFETY: the kernel writes N ids and N weights for each of the T tokens.
            let ids = unsafe { Tensor::empty((tokens, chosen), DType::U32, logits.device())? };
            // SAFETY: as above.
            let weights = unsafe { Tensor::empty((tokens, chosen), DType::F32, logits.device())? };
            let args = [
                Arg::tensor(logits)?,
                Arg::tensor(&ids)?,
                Arg::tensor(&weights)?,
                experts.into(),
                chosen.into(),
                Arg::Int(i32::from(softmax == Softmax::OverAll)),
            ];
            let name = format!("topk_softmax_{}", suffix(logits.dtype())?);
            // SAFETY: shapes and dtypes checked above.
            unsafe { launch(device, &module!("topk"), &name, (tokens, 1, 1), 32, 0, &args)? };
            Ok((ids, weights))
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("topk_softmax", logits),
    }
}

/// The same in plain Rust. A NaN logit sorts last.
pub fn reference(logits: &[f32], experts: usize, chosen: usize, softmax: Softmax) -> (Vec<u32>, Vec<f32>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(experts) {
        let key = |&expert: &usize| if row[expert].is_nan() { f32::NEG_INFINITY } else { row[expert] };
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b)));
        let top = row[order[0]];
        let exp = |&expert: &usize| (key(&expert) - top).exp();
        let all: f32 = order.iter().map(exp).sum();
        order.truncate(chosen);
        let exps: Vec<f32> = order.iter().map(|&expert| (row[expert] - top).exp()).collect();
        let total: f32 = if softmax == Softmax::OverAll { all } else { exps.iter().sum() };
        weights.extend(exps.iter().map(|e| e / total));
        ids.extend(order.iter().map(|&expert| expert as u32));
    }
    (ids, weights)
}
