//! Selects the kernels that compute attention.

use candle_core::DType;

use crate::kernels::constants::FLASH_HEAD_DIMS;

/// The kernels that compute attention, or `Auto` to select them automatically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionBackend {
    /// Selects the first backend below that supports the device, the dtype, the head size and the soft cap.
    #[default]
    Auto,
    /// inferno's tensor-core kernels in `flash_attention.cu`, for bf16 and f16 and the head sizes [`FLASH_HEAD_DIMS`].
    Own,
    /// The tensor-core kernels of the `candle-flash-attn` crate, in builds with the feature `flash-attn`.
    /// inferno uses them for bf16 and f16 and for head sizes up to 256 that are multiples of 8, without a soft cap.
    CandleFlashAttn,
    /// The kernels in `portable_attention.cu`, or plain Rust on a CPU.
    /// They use no tensor cores. They are slow, but support every compute dtype and head sizes up to 256.
    Portable,
}

impl AttentionBackend {
    /// Returns `self`, or the backend that `Auto` selects for this device, dtype, head size and soft cap.
    ///
    /// `Auto` and `Portable` always succeed, and `Auto` selects `Portable` on a CPU.
    /// `Own` and `CandleFlashAttn` fail on a CPU, in a build without them, and if they do not support the dtype, the
    /// head size or the soft cap. The error is the reason.
    pub fn choose(self, is_on_gpu: bool, dtype: DType, head_dim: usize, softcap: Option<f32>) -> Result<Self, String> {
        let has_tensor_cores = is_on_gpu && matches!(dtype, DType::BF16 | DType::F16);
        let has_own = has_tensor_cores && FLASH_HEAD_DIMS.contains(&head_dim);
        // `candle_flash_attn.rs` does not pass a soft cap to the crate.
        let has_candle =
            has_tensor_cores && cfg!(feature = "flash-attn") && softcap.is_none() && head_dim.is_multiple_of(8);
        match self {
            Self::Auto if has_own => Ok(Self::Own),
            Self::Auto if has_candle => Ok(Self::CandleFlashAttn),
            Self::Auto | Self::Portable => Ok(Self::Portable),
            Self::Own if has_own => Ok(Self::Own),
            Self::CandleFlashAttn if has_candle => Ok(Self::CandleFlashAttn),
            _ if !is_on_gpu => Err("this kernel needs a GPU; use auto".into()),
            Self::CandleFlashAttn if !cfg!(feature = "flash-attn") => {
                Err("this build does not include the kernel; use auto, or build inferno with --features flash-attn"
                    .into())
            }
            Self::CandleFlashAttn if softcap.is_some() => {
                Err("this kernel does not support a soft cap; use auto".into())
            }
            _ => Err(format!("this kernel does not support head size {head_dim} in {dtype:?}; use auto")),
        }
    }

    /// Returns the name of the backend in the records of requests and in receipts.
    /// These names must not change, because new records are compared with old ones.
    pub fn record_name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Own => "own",
            Self::CandleFlashAttn => "flash",
            Self::Portable => "eager",
        }
    }
}

impl std::fmt::Display for AttentionBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Own => "own",
            Self::CandleFlashAttn => "flash",
            Self::Portable => "portable",
        })
    }
}
