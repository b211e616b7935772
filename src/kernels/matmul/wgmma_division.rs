//! [`Division`]: how `dense_wgmma` divides a matrix among thread blocks.

use crate::kernels::constants::{DENSE_WGMMA_COLUMNS, DENSE_WGMMA_ROWS};

/// How a matrix is divided among thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    /// The number of terms of the product (split-K). The columns are divided into this many ranges, and different
    /// blocks multiply the ranges of a tile.
    pub terms: usize,
    /// The rows of w per tile, a multiple of 8. In a gated product, half of them are gate rows, and half are up rows.
    pub tile_rows: usize,
}

/// What a kernel allows in a [`Division`].
#[derive(Clone, Copy, Debug)]
pub(super) struct DivisionLimits {
    /// The number of rows per tile must be a multiple of this number.
    pub row_multiple: usize,
    pub max_terms: usize,
}

impl Division {
    /// Chooses the division that minimizes the largest number of weights that any block reads.
    /// Each multiprocessor runs at most one block.
    pub fn of_matrix((rows, columns): (usize, usize), multiprocessors: usize, limits: DivisionLimits) -> Self {
        let (tiles, k_steps) = (rows.div_ceil(DENSE_WGMMA_ROWS), columns.div_ceil(DENSE_WGMMA_COLUMNS));
        let divide = |terms: usize| {
            let blocks = multiprocessors / terms;
            let tiles_per_block = tiles.div_ceil(blocks);
            let tile_rows = rows.div_ceil(blocks * tiles_per_block).next_multiple_of(limits.row_multiple);
            (tiles_per_block * tile_rows * k_steps.div_ceil(terms), Self { terms, tile_rows })
        };
        // With several terms, each block has only one tile.
        let max_terms = limits.max_terms.min(multiprocessors / tiles.max(1)).min(columns / DENSE_WGMMA_COLUMNS).max(1);
        // Of equally good divisions, the one with the most terms has the largest tiles, so x is read least often.
        let better = |best: (usize, Self), next: (usize, Self)| if next.0 <= best.0 { next } else { best };
        (2..=max_terms).map(divide).fold(divide(1), better).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::constants::MAX_PRODUCT_TERMS;

    /// The limits of plain products and of gated products.
    const PLAIN: DivisionLimits = DivisionLimits { row_multiple: 8, max_terms: MAX_PRODUCT_TERMS };
    const GATED: DivisionLimits = DivisionLimits { row_multiple: 16, max_terms: 1 };

    #[test]
    fn divisions_cover_the_matrix_and_balance_the_work() {
        for multiprocessors in [132, 114, 8] {
            for (rows, columns) in [(28_672, 4096), (6144, 4096), (2880, 4096), (5120, 2880), (201_088, 2880), (1, 8)] {
                for limits in [PLAIN, GATED] {
                    let matrix = (rows, columns);
                    let division = Division::of_matrix(matrix, multiprocessors, limits);
                    let Division { terms, tile_rows } = division;
                    let blocks = terms * rows.div_ceil(tile_rows);
                    let is_valid = terms <= limits.max_terms
                        && tile_rows.is_multiple_of(limits.row_multiple)
                        && tile_rows <= DENSE_WGMMA_ROWS
                        && (terms == 1 || blocks <= multiprocessors);
                    assert!(is_valid, "{matrix:?}, {multiprocessors} multiprocessors: {division:?}");
                }
            }
        }
        // The matrices of Llama-3.1-8B: q, k and v in one matrix; o; gate and up in one matrix.
        // Then the matrices of gpt-oss-20b: q, k and v in one matrix; o.
        for (matrix, limits, terms, tile_rows) in [
            ((6144, 4096), PLAIN, 2, 96),
            ((4096, 4096), PLAIN, 4, 128),
            ((28_672, 4096), GATED, 1, 112),
            ((5120, 2880), PLAIN, 3, 120),
            ((2880, 4096), PLAIN, 4, 88),
        ] {
            let division = Division::of_matrix(matrix, 132, limits);
            assert_eq!(division, Division { terms, tile_rows }, "{matrix:?}");
        }
    }
}
