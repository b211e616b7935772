//! Counters of the distinct experts that small batches use.

use candle_core::{DType, Device, Result, Tensor};

/// Two counters of one MoE layer, on the device: the number of batches, and the number of distinct experts per batch,
/// summed over the batches.
///
/// Only `RoutedPairs::route` increments the counters, and only if it routes the batch in one launch.
#[derive(Debug)]
pub struct ExpertUsage(Tensor);

/// The values of the counters of an [`ExpertUsage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageCounts {
    pub batches: u64,
    /// The number of distinct experts per batch, summed over the batches.
    pub experts: u64,
}

impl ExpertUsage {
    /// Creates both counters with the value zero.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self(Tensor::zeros(2, DType::U32, device)?))
    }

    /// Returns the two counters, u32 `[2]`.
    #[cfg(feature = "cuda")]
    pub(super) fn counters(&self) -> &Tensor {
        &self.0
    }

    /// Returns the values of the two counters, and resets them to zero. Waits for the device.
    pub fn take(&self) -> Result<UsageCounts> {
        let counts: Vec<u32> = self.0.to_vec1()?;
        self.0.zero_set()?;
        Ok(UsageCounts { batches: counts[0].into(), experts: counts[1].into() })
    }
}
