//! The inputs of the operations that the self-test checks.

use candle_core::{DType, Device, Result, Tensor};

/// The device on which a check runs an operation, and the dtype of the operation.
#[derive(Clone, Copy)]
pub(super) struct CheckTarget<'d> {
    pub device: &'d Device,
    pub dtype: DType,
}

impl CheckTarget<'_> {
    pub fn put(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor.to_dtype(self.dtype)?.to_device(self.device)
    }

    pub fn f32(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor.to_device(self.device)
    }

    pub fn ids(&self, ids: &[u32]) -> Result<Tensor> {
        Tensor::new(ids, self.device)
    }
}

/// Reproducible random numbers from the linear congruential generator of Knuth's MMIX.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the upper 31 bits of the next state. The lower bits are less random.
    pub(crate) fn next_bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }
}

/// The source of the random inputs of an operation. Every source returns the same numbers, and
/// [`check`](super::check) gives each run of an operation a new source, so the run on the device and the run on the CPU
/// get the same inputs.
pub(super) struct Noise(Random);

impl Noise {
    pub fn new() -> Self {
        Self(Random::new(1))
    }

    /// Returns `count` numbers less than `below`.
    pub fn numbers(&mut self, count: usize, below: u64) -> impl Iterator<Item = u64> {
        std::iter::repeat_with(move || self.0.next_bits() % below).take(count)
    }

    /// Returns values around zero, as f32 on the CPU. Every 53rd value is an outlier, 20 times as large.
    /// Each value is exactly representable in `dtype`.
    pub fn tensor(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let count: usize = shape.iter().product();
        let unit = |n: u64| n as f32 / 4096.0 - 0.5;
        let halves: Vec<f32> = self.numbers(2 * count, 4096).map(unit).collect();
        let value = |(index, pair): (usize, &[f32])| (pair[0] + pair[1]) * if index % 53 == 7 { 20.0 } else { 1.0 };
        let values: Vec<f32> = halves.chunks_exact(2).enumerate().map(value).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_dtype(DType::F32)
    }

    /// Returns bytes in the range `first..first + below`.
    pub fn bytes(&mut self, shape: &[usize], first: u8, below: u64) -> Result<Tensor> {
        let bytes: Vec<u8> = self.numbers(shape.iter().product(), below).map(|n| first + n as u8).collect();
        Tensor::from_vec(bytes, shape, &Device::Cpu)
    }
}
