//! What several tests share: where fixtures lie, which device is tested, closeness.

use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use inferno::device::{self, DeviceChoice};

/// A folder of `tests/golden`. INFERNO_GOLDEN moves it, for a test binary that has been carried to another machine.
pub fn golden(case: &str) -> PathBuf {
    let root = std::env::var_os("INFERNO_GOLDEN").map(PathBuf::from);
    root.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"))).join(case)
}

/// The CPU in f32 always; with the feature `cuda` the first GPU too, in the dtypes that kernels compute in.
pub fn devices() -> Vec<(Device, DType)> {
    let mut devices = vec![(Device::Cpu, DType::F32)];
    if cfg!(feature = "cuda") {
        match device::open(DeviceChoice::FirstCuda) {
            Ok(gpu) => devices.extend([DType::F32, DType::BF16, DType::F16].map(|dtype| (gpu.clone(), dtype))),
            Err(error) => println!("no GPU tested: {error}"),
        }
    }
    devices
}

/// Largest |got - want| over the largest |want|.
pub fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len(), "lengths differ");
    let scale = want.iter().fold(0f32, |scale, value| scale.max(value.abs()));
    let error = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0f32, |a, b| {
        // `max` would drop a NaN.
        if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
    });
    error / scale
}

/// All elements as f32.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The demo's files as they lie in the repository.
pub fn demo_dir() -> PathBuf {
    let moved = std::env::var_os("INFERNO_DEMO").map(PathBuf::from);
    moved.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo")))
}

/// Seeded numbers: SplitMix64 (Steele et al., OOPSLA 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}
