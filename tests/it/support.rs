//! Helpers that several tests share: paths of fixtures, devices, the distance of values, random numbers.

use std::ops::Range;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use inferno::device::{self, DeviceChoice};

use crate::harness::is_gpu_expected;

/// A folder of `tests/golden`.
/// `INFERNO_GOLDEN` names another root, for a test binary that was copied to another machine.
pub fn golden(case: &str) -> PathBuf {
    let root = std::env::var_os("INFERNO_GOLDEN").map(PathBuf::from);
    root.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"))).join(case)
}

/// The folder of real tokenizers, configs and chat templates, for tests marked `#[test(fixtures)]`.
pub fn fixtures() -> PathBuf {
    fixtures_if_set().expect("INFERNO_FIXTURES names the folder of fixtures")
}

/// The same folder, for tests that have something to check without it.
pub fn fixtures_if_set() -> Option<PathBuf> {
    std::env::var_os("INFERNO_FIXTURES").map(PathBuf::from)
}

/// The first GPU, for tests marked `#[test(gpu)]`.
pub fn gpu() -> Device {
    device::open(DeviceChoice::FirstCuda).unwrap_or_else(|error| panic!("{error}"))
}

/// The first GPU, for tests that check the CPU first. `None` if there is no GPU and `INFERNO_REQUIRE_GPU` is not set.
pub fn gpu_if_expected() -> Option<Device> {
    is_gpu_expected().then(gpu)
}

/// The first GPU with each dtype that kernels compute in, for tests marked `#[test(gpu)]`.
pub fn gpu_with_dtypes() -> Vec<(Device, DType)> {
    let gpu = gpu();
    [DType::F32, DType::BF16, DType::F16].map(|dtype| (gpu.clone(), dtype)).into()
}

/// The CPU in f32, then the first GPU, if there is one, with each dtype that kernels compute in.
pub fn devices() -> Vec<(Device, DType)> {
    let mut devices = vec![(Device::Cpu, DType::F32)];
    if is_gpu_expected() {
        devices.extend(gpu_with_dtypes());
    }
    devices
}

/// The largest |got - want|, divided by the largest |want|. NaN if any value is NaN.
pub fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len(), "lengths differ");
    let scale = want.iter().fold(0f32, |scale, value| scale.max(value.abs()));
    let error = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0f32, |a, b| {
        // `f32::max` would drop a NaN.
        if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
    });
    error / scale
}

/// All elements of a tensor as f32.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The files of the demo model.
/// `INFERNO_DEMO` names another folder, for a test binary that was copied to another machine.
pub fn demo_dir() -> PathBuf {
    let folder = std::env::var_os("INFERNO_DEMO").map(PathBuf::from);
    folder.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo")))
}

/// Random numbers that are the same in every run: the linear congruential generator of Knuth's MMIX.
pub struct Random(pub u64);

impl Random {
    /// The upper 31 bits; the lower ones are less random.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// A number below `limit`; 0 if `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// A number in [0, 1), with 24 bits.
    #[cfg(feature = "cuda")]
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 7) as f32 / (1u64 << 24) as f32
    }

    /// A number from an approximate normal distribution. One in fifty is an outlier.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.next() as f32 / (1u64 << 31) as f32 - 0.5).sum();
        if self.next().is_multiple_of(50) { sum * 40.0 } else { sum }
    }

    /// Normal numbers in f32 that `dtype` holds exactly, so that only the arithmetic of two kernels differs.
    pub fn tensor(&mut self, shape: &[usize], dtype: DType) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap()
    }

    /// Bytes in a range.
    pub fn bytes(&mut self, shape: &[usize], range: Range<u64>) -> Tensor {
        let values: Vec<u8> = (0..shape.iter().product())
            .map(|_| (range.start + self.next() % (range.end - range.start)) as u8)
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }
}
