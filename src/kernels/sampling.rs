//! What the sampling kernels of `decode` take over from the sampler on the host.

/// The parameters of the sampling kernel (the struct of the same name in `sampling.cuh`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingKernelParams {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub seed: u64,
    /// The number of random draws that the host sampler made before the first step of the kernel.
    /// Each random number depends only on the seed and the number of earlier draws.
    pub sampled_before: u32,
}

impl SamplingKernelParams {
    /// Returns parameters for greedy sampling without penalties.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            sampled_before: 0,
        }
    }
}

/// The parameters and token counts that the sampling kernel takes over from the sampler on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSampling {
    pub params: SamplingKernelParams,
    /// The tokens that have appeared, each with 1 + the number of times it was generated. Empty without penalties.
    pub seen: Vec<(u32, u32)>,
}
