//! MXFP4 weights in tiles for tensor cores. `tiles.cuh` describes the memory layout of the tiles.

use candle_core::{DType, Device, Result, Tensor};

use crate::kernels::constants::{MXFP4_TILE_BYTES, MXFP4_TILE_COLUMNS, MXFP4_TILE_ROWS, MXFP4_TILE_SCALE_BYTES};
use crate::kernels::launch::{Arguments, BoxOrder, Launch, LaunchShape, TensorMap, module};
use crate::kernels::moe::mxfp4::mxfp4_dims;
use crate::kernels::{bytes, unsupported};

/// The MXFP4 matrices of a layer's experts, in tiles of 16 rows × 64 columns for tensor cores.
#[derive(Clone, Debug)]
pub struct Mxfp4Tiles {
    /// The E2M1 values: u8 `[experts, ceil(rows / 16), ceil(columns / 64), 512]`.
    blocks: Tensor,
    /// The scales: u8 `[experts, ceil(rows / 16), ceil(columns / 64), 32]`.
    scales: Tensor,
    rows: usize,
    columns: usize,
}

/// The order of the 16 rows in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// For gate_up: rows 2g and 2g + 1 of a tile, a gate row and its up row, are stored at positions g and g + 8.
    Paired,
    /// For down: rows 4t to 4t + 3 of a tile are stored at positions 2t, 2t + 1, 2t + 8 and 2t + 9.
    Grouped,
}

impl Mxfp4Tiles {
    /// Repacks MXFP4 blocks and scales into tiles on the GPU, and waits until the tiles are complete.
    ///
    /// The blocks are u8 `[experts, rows, columns / 32, 16]`, and the scales are u8 `[experts, rows, columns / 32]`.
    ///
    /// Returns `None` if a scale exceeds 2 or is NaN, because the kernels for tiles do not support such scales.
    pub fn repack(blocks: &Tensor, scales: &Tensor, order: RowOrder) -> Result<Option<Self>> {
        let (experts, rows, columns) = mxfp4_dims(blocks, scales)?;
        let Device::Cuda(device) = blocks.device() else { return unsupported("Mxfp4Tiles::repack", blocks) };
        let (row_tiles, column_tiles) = (rows.div_ceil(MXFP4_TILE_ROWS), columns.div_ceil(MXFP4_TILE_COLUMNS));
        // SAFETY: the kernel writes every byte of every tile.
        let empty =
            |bytes| unsafe { Tensor::empty((experts, row_tiles, column_tiles, bytes), DType::U8, blocks.device()) };
        let tiles = Self { blocks: empty(MXFP4_TILE_BYTES)?, scales: empty(MXFP4_TILE_SCALE_BYTES)?, rows, columns };
        let has_large_scale = Tensor::zeros(1, DType::U32, blocks.device())?;
        let arguments = Arguments::new()
            .tensor(blocks)?
            .tensor(scales)?
            .tensor(&tiles.blocks)?
            .tensor(&tiles.scales)?
            .tensor(&has_large_scale)?
            .int(experts)
            .int(rows)
            .int(columns)
            .flag(order == RowOrder::Paired);
        let shape = LaunchShape::one_warp_each(experts * row_tiles * column_tiles);
        // SAFETY: `mxfp4_dims` checked blocks and scales; the tiles have the sizes that the kernel expects.
        unsafe { Launch::new(module!("tiles"), "repack_mxfp4", shape, arguments).enqueue(device)? };
        Ok((has_large_scale.to_vec1::<u32>()?[0] == 0).then_some(tiles))
    }

    /// Returns the dimensions of the weights, `(experts, rows, columns)`.
    pub fn dims(&self) -> (usize, usize, usize) {
        (self.blocks.dims()[0], self.rows, self.columns)
    }

    pub fn blocks(&self) -> &Tensor {
        &self.blocks
    }

    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// Returns tensor maps of the blocks and of the scales.
    /// A map has the dimensions `[experts, rows of tiles, bytes of a row of tiles]`.
    /// A box contains `row_tiles` × `column_tiles` adjacent tiles of one expert.
    pub fn tensor_maps(&self, row_tiles: usize, column_tiles: usize) -> Result<[TensorMap; 2]> {
        let map = |tensor: &Tensor| {
            let (experts, height, width, bytes) = tensor.dims4()?;
            TensorMap::new(tensor, [experts, height, width * bytes], [row_tiles, column_tiles * bytes], BoxOrder::Plain)
        };
        Ok([map(&self.blocks)?, map(&self.scales)?])
    }

    pub fn bytes(&self) -> u64 {
        bytes(&self.blocks) + bytes(&self.scales)
    }
}
