//! The formats of quantized matrices and their sizes in bytes.

use crate::kernels::constants;

/// The number of columns in a group (see [`super`]).
pub const GROUP_COLUMNS: usize = 32;
/// The number of columns in a superblock of the K formats: eight groups with common super-scales.
pub const SUPERBLOCK_COLUMNS: usize = 256;

/// How the values of a matrix are quantized. The `Q` formats are ggml's, in another memory layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum WeightFormat {
    Q4_0 = constants::FORMAT_Q4_0 as i32,
    Q4_1 = constants::FORMAT_Q4_1 as i32,
    Q5_0 = constants::FORMAT_Q5_0 as i32,
    Q5_1 = constants::FORMAT_Q5_1 as i32,
    Q8_0 = constants::FORMAT_Q8_0 as i32,
    Q2K = constants::FORMAT_Q2_K as i32,
    Q3K = constants::FORMAT_Q3_K as i32,
    Q4K = constants::FORMAT_Q4_K as i32,
    Q5K = constants::FORMAT_Q5_K as i32,
    Q6K = constants::FORMAT_Q6_K as i32,
    /// Signed 8-bit integers with one scale per row.
    Int8 = constants::FORMAT_INT8 as i32,
    /// FP8 values (E4M3) with one scale per row.
    Fp8 = constants::FORMAT_FP8 as i32,
}

/// The size in bytes of each plane, per group or superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneBytes {
    /// Bytes per group for the low bits of the values.
    pub low: usize,
    /// Bytes per group for the high bits of the values. 0 in formats without a high plane.
    pub high: usize,
    /// Bytes per group for the scales and mins. 0 if each row has a single f32 scale.
    pub scales: usize,
    /// Bytes per superblock for the super-scales. 0 in formats other than the K formats.
    pub supers: usize,
}

impl WeightFormat {
    pub const ALL: [Self; 12] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Int8,
        Self::Fp8,
    ];

    /// Returns the size in bytes of each plane, per group or superblock.
    pub fn plane_bytes(self) -> PlaneBytes {
        let (low, high, scales, supers) = match self {
            Self::Q4_0 => (16, 0, 2, 0),
            Self::Q4_1 => (16, 0, 4, 0),
            Self::Q5_0 => (16, 4, 2, 0),
            Self::Q5_1 => (16, 4, 4, 0),
            Self::Q8_0 => (32, 0, 2, 0),
            Self::Q2K => (8, 0, 2, 4),
            Self::Q3K => (8, 4, 2, 4),
            Self::Q4K => (16, 0, 2, 4),
            Self::Q5K => (16, 4, 2, 4),
            Self::Q6K => (16, 8, 2, 4),
            Self::Int8 | Self::Fp8 => (32, 0, 0, 0),
        };
        PlaneBytes { low, high, scales, supers }
    }

    /// Returns the number of columns in a unit: a superblock in the K formats, a group in the others.
    /// When several GPUs divide the columns of a matrix, no unit may be split.
    pub fn column_unit(self) -> usize {
        if self.plane_bytes().supers > 0 { SUPERBLOCK_COLUMNS } else { GROUP_COLUMNS }
    }

    /// Returns whether each row has a single scale.
    pub fn has_row_scales(self) -> bool {
        self.plane_bytes().scales == 0
    }

    /// Returns the bytes of one row in each plane: low, high, scales, supers. A partial group counts as a whole group.
    pub fn row_bytes(self, columns: usize) -> [usize; 4] {
        let PlaneBytes { low, high, scales, supers } = self.plane_bytes();
        let groups = columns.div_ceil(GROUP_COLUMNS);
        let scales = if self.has_row_scales() { size_of::<f32>() } else { scales * groups };
        [low * groups, high * groups, scales, supers * (columns / SUPERBLOCK_COLUMNS)]
    }

    /// Returns the total size in bytes of the planes of a matrix.
    pub fn bytes(self, rows: u64, columns: u64) -> u64 {
        (self.row_bytes(columns as usize).iter().sum::<usize>() as u64).saturating_mul(rows)
    }
}
