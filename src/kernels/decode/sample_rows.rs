//! Samples one token from each row of logits (`sample_rows.cu`).

use candle_core::{DType, Device, Result, Tensor, bail};

use super::sample::{DeviceSampling, SamplingKernelParams};
use crate::kernels::constants::{SAMPLE_PARAM_WORDS, SAMPLE_THREADS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, module};

/// The kernel's result for a row in which every logit is NaN or -inf.
const NO_TOKEN: u32 = u32::MAX;

/// Samples a token from each row of `logits`, f32 `[rows, vocab]`. Applies penalties to `logits` in place.
///
/// `rows` has the sampling parameters of each row, or `None` for greedy sampling without penalties.
/// The result of a row is `None` if every logit is NaN or -inf.
pub fn sample_rows(logits: &Tensor, rows: &[Option<DeviceSampling>]) -> Result<Vec<Option<u32>>> {
    let (count, vocab) = logits.dims2()?;
    let Device::Cuda(device) = logits.device() else { return crate::kernels::unsupported("sample_rows", logits) };
    if logits.dtype() != DType::F32 || rows.len() != count || count == 0 {
        bail!("sample_rows: {} rows of parameters do not match logits {:?}", rows.len(), logits.shape());
    }
    let mut words = Vec::with_capacity(count * SAMPLE_PARAM_WORDS);
    let mut seen = Vec::new();
    for (row, sampling) in rows.iter().enumerate() {
        let params = sampling.as_ref().map_or_else(SamplingKernelParams::greedy, |sampling| sampling.params);
        words.extend(params.words());
        for &(token, times) in
            sampling.iter().flat_map(|sampling| &sampling.seen).filter(|seen| (seen.0 as usize) < vocab)
        {
            seen.extend([row as u32, token, times]);
        }
    }
    let params = Tensor::from_vec(words, (count, SAMPLE_PARAM_WORDS), logits.device())?;
    if !seen.is_empty() {
        let entries = seen.len() / 3;
        let seen = Tensor::from_vec(seen, (entries, 3), logits.device())?;
        let arguments = Arguments::new().tensor(logits)?.tensor(&params)?.tensor(&seen)?.int(entries).int(vocab);
        let shape = LaunchShape::one_thread_each(entries);
        // SAFETY: shapes and dtypes are checked above. Every entry has a row and a token of `logits`.
        unsafe { Launch::new(module!("sample_rows"), "apply_penalties", shape, arguments).enqueue(device)? };
    }
    // SAFETY: the kernel writes every element.
    let tokens = unsafe { Tensor::empty(count, DType::U32, logits.device())? };
    let arguments = Arguments::new().tensor(logits)?.tensor(&params)?.tensor(&tokens)?.int(vocab);
    let shape = LaunchShape::linear(count, SAMPLE_THREADS);
    // SAFETY: shapes and dtypes are checked above.
    unsafe { Launch::new(module!("sample_rows"), "sample_rows", shape, arguments).enqueue(device)? };
    let tokens: Vec<u32> = tokens.to_vec1()?;
    Ok(tokens.into_iter().map(|token| (token != NO_TOKEN).then_some(token)).collect())
}
