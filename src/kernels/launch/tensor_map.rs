//! Tensor maps, which describe tensors for `copy_tensor` in `headers/bulk_copy.cuh`.

use std::ffi::c_void;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, sys};
use candle_core::{Device, Result, Tensor, bail};

use super::arguments::address;
use crate::kernels::constants::TENSOR_MAP_ELEMENT_BYTES;

/// The order of the bytes of a copied box in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoxOrder {
    /// Row by row.
    Plain,
    /// Rows of 128 bytes, swizzled as `wgmma_descriptor` in `headers/wgmma.cuh` expects.
    Swizzled,
}

/// Describes the bytes of a contiguous tensor in three dimensions, for GPUs of compute capability 9.0 and later.
/// With a tensor map, a single instruction of a kernel copies a box of the tensor to shared memory.
///
/// A kernel takes a tensor map as a parameter of type `const __grid_constant__ TensorMap`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

// SAFETY: `CUtensorMap` has C layout and contains only integers.
// `TensorMap` in `headers/bulk_copy.cuh` has the same size.
unsafe impl DeviceRepr for TensorMap {}

impl TensorMap {
    /// Describes the bytes of a tensor as `[depth, height, width]`, and boxes of `[1, box_height, box_width]`.
    /// Both widths are in bytes and must be multiples of 16.
    /// `box_height` is at most 256, and `box_width` is at most 256 · `TENSOR_MAP_ELEMENT_BYTES`.
    /// If `order` is `Swizzled`, `box_width` is 128.
    pub fn new(
        tensor: &Tensor,
        [depth, height, width]: [usize; 3],
        [box_height, box_width]: [usize; 2],
        order: BoxOrder,
    ) -> Result<Self> {
        if depth * height * width != tensor.elem_count() * tensor.dtype().size_in_bytes() {
            bail!("cannot create a tensor map: {depth} x {height} x {width} bytes do not match {:?}", tensor.shape());
        }
        if !width.is_multiple_of(16) || !box_width.is_multiple_of(16) {
            bail!("cannot create a tensor map: the widths {width} and {box_width} are not multiples of 16 bytes");
        }
        let Device::Cuda(device) = tensor.device() else {
            bail!("cannot create a tensor map: the tensor is not on a GPU")
        };
        // The driver function requires a context.
        device.cuda_stream().context().bind_to_thread().w()?;
        let elements = |bytes: usize| (bytes / TENSOR_MAP_ELEMENT_BYTES) as u64;
        let dims = [elements(width), height as u64, depth as u64];
        let strides = [width as u64, (width * height) as u64];
        let box_dims = [elements(box_width) as u32, box_height as u32, 1];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: all pointers are valid, and each array has the length that the function expects for three dimensions.
        // The function checks the sizes, and does not access the tensor.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
                dims.len() as u32,
                address(tensor)? as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                box_dims.as_ptr(),
                [1; 3].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                match order {
                    BoxOrder::Plain => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
                    BoxOrder::Swizzled => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                },
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        status.result().w()?;
        Ok(Self(map))
    }
}
