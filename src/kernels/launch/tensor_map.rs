//! Tensor maps, which describe tensors for `copy_tensor` in `headers/bulk_copy.cuh`.

use std::ffi::c_void;
use std::iter;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, sys};
use candle_core::{Device, Result, Tensor, bail};

use super::arguments::address;
use crate::kernels::constants::TENSOR_MAP_ELEMENT_BYTES;

/// How the bytes of a copied box are ordered in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoxOrder {
    /// Row by row.
    Plain,
    /// Rows of 128 bytes, swizzled as `wgmma_descriptor` in `headers/wgmma.cuh` expects.
    Swizzled,
}

/// Describes the bytes of a contiguous tensor in three or four dimensions. With a tensor map, a kernel copies a box of
/// the tensor to shared memory with a single instruction. Tensor maps require compute capability 9.0 or later.
///
/// A kernel takes a tensor map as a parameter of type `const __grid_constant__ TensorMap`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

// SAFETY: `CUtensorMap` has C layout and contains only integers.
// `TensorMap` in `headers/bulk_copy.cuh` has the same size.
unsafe impl DeviceRepr for TensorMap {}

/// The innermost dimension of a tensor map: the bytes of a row. Both sizes are multiples of 16.
#[derive(Clone, Copy)]
struct RowBytes {
    size: usize,
    /// The size of a box in this dimension.
    in_box: usize,
}

/// An outer dimension of a tensor map.
#[derive(Clone, Copy)]
struct Dimension {
    size: usize,
    /// The distance between adjacent indices, in bytes.
    stride: usize,
    /// The size of a box in this dimension.
    in_box: usize,
}

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
        let rows = [Dimension { size: height, stride: width, in_box: box_height }];
        let matrices = [Dimension { size: depth, stride: width * height, in_box: 1 }];
        Self::of_rows(tensor, RowBytes { size: width, in_box: box_width }, &[rows, matrices].concat(), order)
    }

    /// Describes a matrix `[rows, width]` that consists of gate rows, followed by one up row for each gate row.
    /// A box has `box_rows / 2` adjacent gate rows and the up rows for them: 8 gate rows, their 8 up rows, the next
    /// 8 gate rows and so on.
    ///
    /// The dimensions, innermost first, are the bytes of a row, the rows of a group of 8, gate or up, and the groups.
    /// The stride of the groups is usually smaller than the stride from gate to up, which the driver accepts.
    /// The number of gate rows and `box_rows / 2` must be multiples of 8.
    /// `width` and `box_width` are as in [`new`](Self::new).
    pub fn of_gate_up(
        tensor: &Tensor,
        [rows, width]: [usize; 2],
        [box_rows, box_width]: [usize; 2],
        order: BoxOrder,
    ) -> Result<Self> {
        if !rows.is_multiple_of(16) || !box_rows.is_multiple_of(16) {
            bail!("cannot create a tensor map: the numbers of rows {rows} and {box_rows} must be multiples of 16");
        }
        let row = Dimension { size: 8, stride: width, in_box: 8 };
        let gate_or_up = Dimension { size: 2, stride: rows / 2 * width, in_box: 2 };
        let group = Dimension { size: rows / 16, stride: 8 * width, in_box: box_rows / 16 };
        Self::of_rows(tensor, RowBytes { size: width, in_box: box_width }, &[row, gate_or_up, group], order)
    }

    /// Describes a tensor that consists of rows. `dimensions` are its other dimensions, innermost first.
    fn of_rows(tensor: &Tensor, row: RowBytes, dimensions: &[Dimension], order: BoxOrder) -> Result<Self> {
        let sizes = dimensions.iter().map(|dimension| dimension.size);
        if row.size * sizes.clone().product::<usize>() != tensor.elem_count() * tensor.dtype().size_in_bytes() {
            let sizes: Vec<usize> = sizes.collect();
            bail!("cannot create a tensor map: {sizes:?} rows of {} bytes do not match {:?}", row.size, tensor.shape());
        }
        if !row.size.is_multiple_of(16) || !row.in_box.is_multiple_of(16) {
            let (width, box_width) = (row.size, row.in_box);
            bail!("cannot create a tensor map: the widths {width} and {box_width} must be multiples of 16 bytes");
        }
        let Device::Cuda(device) = tensor.device() else {
            bail!("cannot create a tensor map: the tensor is not on a GPU")
        };
        // The driver function requires a context that is bound to this thread.
        device.cuda_stream().context().bind_to_thread().w()?;
        let elements = |bytes: usize| (bytes / TENSOR_MAP_ELEMENT_BYTES) as u64;
        let dims: Vec<u64> = iter::once(elements(row.size)).chain(sizes.map(|size| size as u64)).collect();
        let strides: Vec<u64> = dimensions.iter().map(|dimension| dimension.stride as u64).collect();
        let in_box = dimensions.iter().map(|dimension| dimension.in_box as u32);
        let box_dims: Vec<u32> = iter::once(elements(row.in_box) as u32).chain(in_box).collect();
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: all pointers are valid, and each array has the length that the function expects for the dimensions.
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
                vec![1; dims.len()].as_ptr(),
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
