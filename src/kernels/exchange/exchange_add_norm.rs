//! Updates of the residual stream x with the partial results y of all ranks (`exchange_add_norm.cu`).
//!
//! - In `exchange_add_norm_all`, each rank computes all rows.
//!   This kernel runs if y is not rounded to bf16, or if there are two ranks and few rows.
//!   In both cases, x must be valid in all rows, and y must fit in a region.
//! - In `exchange_add_norm`, each rank computes its own rows and sends the normalized rows to the other ranks.
//!   This kernel runs in all other cases in which y is rounded, even if x is valid only in the rank's own rows.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use super::gpu_exchange::{GpuExchange, RawMailboxes};
use crate::kernels::constants::{EXCHANGE_ROW_BLOCKS, EXCHANGE_ROW_SEGMENTS, EXCHANGE_ROW_THREADS, MAX_PRODUCT_PARTS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, address, dtype_suffix, module};
use crate::kernels::scratch;
use crate::world::{PartialResult, ResidualUpdate, UpdatedResidual, share};

/// With two ranks and at most this many rows, each rank computes all rows, even if partial results are rounded.
/// With few rows, computing the other rank's rows takes less time than waiting for that rank's normalized rows.
const REPLICATED_ROWS: usize = 256;

/// The maximum number of columns of a row. A thread has 8 columns of each segment of a row.
const MAX_COLUMNS: usize = 8 * EXCHANGE_ROW_SEGMENTS * EXCHANGE_ROW_THREADS;

/// Returns the part of a kernel's name that stands for the form of y.
fn y_suffix(y: PartialResult) -> Result<&'static str> {
    match y {
        PartialResult::Rows(y) => dtype_suffix(y.dtype()),
        PartialResult::ProductParts(_) => Ok("parts"),
        PartialResult::Experts { .. } => Ok("experts"),
    }
}

impl GpuExchange {
    /// Divides the rows into ranges, one range per launch. The ranks divide the rows of each range among themselves.
    /// Returns `None` if a region has no room for a row of `columns` columns.
    fn row_ranges(&self, rows: usize, columns: usize) -> Option<impl Iterator<Item = Range<usize>> + use<>> {
        // In a region, an element of a rank's share takes one word: two bf16 values in `exchange_add_norm` (the partial
        // result and the normalized value), or one f32 value in `exchange_columns`.
        let max_rows = self.region() / columns * self.mailboxes.len();
        (max_rows > 0).then(|| (0..rows).step_by(max_rows).map(move |start| start..rows.min(start + max_rows)))
    }

    /// Returns this rank's share of the rows in `range`.
    fn own_rows(&self, range: &Range<usize>) -> Range<usize> {
        let own = share(range.len(), 1, self.rank, self.mailboxes.len());
        range.start + own.start..range.start + own.end
    }

    /// Computes a [`ResidualUpdate`]. If `rounds` is true, rounds y to bf16, and may round the normalized rows.
    /// Returns `None` if no kernel supports the sizes, dtypes or alignment, or if x is divided and `rounds` is false.
    /// Fails if the shapes do not match.
    pub(super) fn update_residual(&self, update: &ResidualUpdate, rounds: bool) -> Result<Option<UpdatedResidual>> {
        let ResidualUpdate { x, is_divided, y, bias, weight, eps: _, dtype } = *update;
        let (rows, columns) = x.dims2()?;
        let y_fits = match y {
            PartialResult::Rows(y) => y.dims() == x.dims(),
            PartialResult::ProductParts(parts) => parts.dims() == [parts.dim(0)?, rows, columns],
            PartialResult::Experts { outputs, weights } => {
                outputs.dims() == [rows, weights.dim(1)?, columns] && weights.dim(0)? == rows
            }
        };
        if !y_fits || weight.dims() != [columns] || bias.is_some_and(|bias| bias.dims() != [columns]) {
            let (x, weight, bias) = (x.dims(), weight.dims(), bias.map(Tensor::dims));
            bail!(
                "cannot update the residual stream: x {x:?}, y {y:?}, weight {weight:?} and bias {bias:?} do not match"
            );
        }
        let in_f32;
        let y = match y {
            PartialResult::Rows(y) if !rounds => {
                in_f32 = y.to_dtype(DType::F32)?;
                PartialResult::Rows(&in_f32)
            }
            y => y,
        };
        let mut is_supported = columns.is_multiple_of(8) && columns <= MAX_COLUMNS;
        is_supported &= matches!(dtype, DType::BF16 | DType::F32);
        is_supported &= match y {
            PartialResult::Rows(y) => address(y)?.is_multiple_of(16) && matches!(y.dtype(), DType::F32 | DType::BF16),
            PartialResult::ProductParts(parts) => {
                let are_valid = parts.dtype() == DType::F32 && (1..=MAX_PRODUCT_PARTS).contains(&parts.dim(0)?);
                are_valid && address(parts)?.is_multiple_of(16)
            }
            PartialResult::Experts { outputs, weights } => {
                let are_valid = outputs.dtype() == DType::BF16 && weights.dtype() == DType::F32;
                are_valid && address(outputs)?.is_multiple_of(16)
            }
        };
        for tensor in [Some(x), bias, Some(weight)].into_iter().flatten() {
            is_supported &= tensor.dtype() == DType::F32 && address(tensor)?.is_multiple_of(16);
        }
        let words = rows * columns / if rounds { 2 } else { 1 };
        // With two ranks, a rank sends the same number of bytes whether it computes all rows or only its own.
        let computes_all = !rounds || self.mailboxes.len() == 2 && rows <= REPLICATED_ROWS;
        Ok(if !is_supported {
            None
        } else if computes_all && !is_divided && words <= self.region() {
            Some(self.update_all_rows(&ResidualUpdate { y, ..*update }, rounds)?)
        } else if rounds {
            self.update_own_rows(update)?
        } else {
            None
        })
    }

    /// Computes a supported [`ResidualUpdate`] whose x is valid in all rows. Every rank computes all rows.
    fn update_all_rows(&self, update: &ResidualUpdate, rounds: bool) -> Result<UpdatedResidual> {
        let ResidualUpdate { x, y, dtype, .. } = *update;
        let (rows, columns) = x.dims2()?;
        // SAFETY: the kernel writes every element of `sum` and `normed`.
        let empty = |dtype| unsafe { scratch::empty((rows, columns), dtype, x.device()) };
        let (sum, normed) = (empty(DType::F32)?, empty(dtype)?);
        let kind = if rounds { "rounded" } else { "exact" };
        let (parts, shape) = self.row_shape(y, rows, columns);
        let kernel = format!("exchange_add_norm_all_{kind}_{}_{}_{parts}", y_suffix(y)?, dtype_suffix(dtype)?);
        let arguments = self.update_arguments(update, &sum, &normed, 0..rows, self.raw(0, 1), Some(rows))?;
        let launch = Launch::new(module!("exchange_add_norm"), kernel, shape, arguments).overlapping();
        // SAFETY: `update_residual` has checked all shapes and dtypes. The mailboxes live as long as `self`.
        unsafe { self.enqueue(launch)? };
        Ok(UpdatedResidual { x: sum, is_divided: false, normed })
    }

    /// Computes a supported [`ResidualUpdate`]. Every rank computes its own rows.
    /// Rounds y and the normalized rows to bf16.
    /// Returns `None` if a region has no room for a row.
    fn update_own_rows(&self, update: &ResidualUpdate) -> Result<Option<UpdatedResidual>> {
        let ResidualUpdate { x, y, dtype, .. } = *update;
        let (rows, columns) = x.dims2()?;
        let Some(ranges) = self.row_ranges(rows, columns) else { return Ok(None) };
        // SAFETY: the kernel writes every element of `normed`, and this rank's rows of `sum`.
        // The result is marked as divided, so callers read only these rows of `sum`.
        let empty = |dtype| unsafe { scratch::empty((rows, columns), dtype, x.device()) };
        let (sum, normed) = (empty(DType::F32)?, empty(dtype)?);
        for range in ranges {
            let (parts, shape) = self.row_shape(y, share(range.len(), 1, 0, self.mailboxes.len()).len(), columns);
            let kernel = format!("exchange_add_norm_{}_{}_{parts}", y_suffix(y)?, dtype_suffix(dtype)?);
            let raw = self.raw(range.len(), 1);
            let arguments = self.update_arguments(update, &sum, &normed, range.clone(), raw, None)?;
            let launch = Launch::new(module!("exchange_add_norm"), kernel, shape, arguments).overlapping();
            // SAFETY: `update_residual` has checked all shapes and dtypes. The mailboxes live as long as `self`.
            unsafe { self.enqueue(launch)? };
        }
        Ok(Some(UpdatedResidual { x: sum, is_divided: true, normed }))
    }

    /// Returns the maximum number of parts of a row, with which the kernel's name ends, and the launch shape.
    /// `rows` is the largest number of rows that a rank computes.
    fn row_shape(&self, y: PartialResult, rows: usize, columns: usize) -> (usize, LaunchShape) {
        let threads = columns.div_ceil(8).next_multiple_of(32);
        let (parts, threads) = match threads {
            ..=EXCHANGE_ROW_THREADS => (1, threads),
            _ => (EXCHANGE_ROW_SEGMENTS, EXCHANGE_ROW_THREADS),
        };
        // On a shared GPU, the blocks of all ranks must fit at the same time. Another rank's y can have a form whose
        // kernel fits fewer blocks, so no rank launches more than `max_blocks`.
        let blocks = match y {
            PartialResult::Rows(_) | PartialResult::Experts { .. } if parts == 1 && !self.shares_gpu => {
                self.max_blocks() * EXCHANGE_ROW_BLOCKS
            }
            _ => self.max_blocks(),
        };
        (parts, LaunchShape::linear(rows.clamp(1, blocks), threads))
    }

    /// Returns the arguments of a kernel for the rows in `range`.
    /// `rows` is `None` for `exchange_add_norm`, which takes no number of rows.
    fn update_arguments(
        &self,
        update: &ResidualUpdate,
        sum: &Tensor,
        normed: &Tensor,
        range: Range<usize>,
        raw: RawMailboxes,
        rows: Option<usize>,
    ) -> Result<Arguments> {
        let ResidualUpdate { x, y, bias, weight, eps, .. } = *update;
        let part = |tensor: &Tensor| tensor.narrow(0, range.start, range.len());
        let arguments = Arguments::new().tensor(&part(x)?)?;
        let arguments = match y {
            PartialResult::Rows(y) => arguments.tensor(&part(y)?)?,
            // These rows are in the first part. The kernel adds multiples of the part size to find them in other parts.
            PartialResult::ProductParts(parts) => arguments.tensor(&part(&parts.get(0)?)?)?,
            PartialResult::Experts { outputs, weights } => {
                arguments.tensor(&part(outputs)?)?.tensor(&part(weights)?)?
            }
        };
        let arguments = arguments.optional(bias)?.tensor(weight)?.tensor(&part(sum)?)?.tensor(&part(normed)?)?;
        let arguments = arguments.value(raw, []);
        let arguments = rows.into_iter().fold(arguments, Arguments::int).int(x.dim(1)?);
        let arguments = match y {
            PartialResult::Rows(_) => arguments,
            PartialResult::ProductParts(parts) => arguments.int(parts.dim(0)?).int(x.elem_count()),
            PartialResult::Experts { weights, .. } => arguments.int(weights.dim(1)?),
        };
        Ok(arguments.float(eps))
    }

    /// Collects the rows of all ranks in a new tensor, f32 `[rows, columns]`. `x` is a divided result of
    /// `update_residual`, which is valid only in this rank's rows.
    pub(super) fn gather_own_rows(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, columns) = x.dims2()?;
        if x.dtype() != DType::F32 || !columns.is_multiple_of(4) || !address(x)?.is_multiple_of(16) {
            let dtype = x.dtype();
            bail!("cannot gather the rows of x {dtype:?} [{rows}, {columns}]: unsupported dtype, size or alignment");
        }
        let Some(ranges) = self.row_ranges(rows, columns) else {
            bail!("cannot gather the rows of all ranks: a row of {columns} columns does not fit in a mailbox region");
        };
        // SAFETY: the kernel writes every element of `out`.
        let out = unsafe { scratch::empty((rows, columns), DType::F32, x.device())? };
        for range in ranges {
            let own = self.own_rows(&range);
            // The kernel concatenates columns. This launch passes the range as a single row, in which a rank's columns
            // are the values of the rank's rows.
            let largest = share(range.len(), 1, 0, self.mailboxes.len()).len() * columns;
            let arguments = match own.len() {
                0 => Arguments::new().address(0),
                own_rows => Arguments::new().tensor(&x.narrow(0, own.start, own_rows)?)?,
            };
            let arguments = arguments
                .tensor(&out.narrow(0, range.start, range.len())?)?
                .value(self.raw(range.len(), columns), [])
                .int(1)
                .int(largest);
            let shape = self.shape(largest / 4);
            let launch = Launch::new(module!("exchange_columns"), "exchange_columns_4", shape, arguments).overlapping();
            // SAFETY: the dtype, the columns and the alignment are checked above, and `out` has room for all rows.
            // `row_ranges` returns ranges of which each rank's share fits in a region.
            unsafe { self.enqueue(launch)? };
        }
        Ok(out)
    }

    /// Loads the `exchange_add_norm` and `exchange_add_norm_all` kernels by launching each one for 0 rows.
    pub(super) fn load_add_norm_kernels(&self) -> Result<()> {
        let shape = LaunchShape::linear(1, EXCHANGE_ROW_THREADS);
        // The form of y, and the numbers of addresses and integers that `exchange_add_norm` takes.
        // `exchange_add_norm_all` also takes the number of rows.
        for (y, addresses, ints) in [("f32", 6, 1), ("bf16", 6, 1), ("parts", 6, 3), ("experts", 7, 2)] {
            for dtype in ["f32", "bf16"] {
                let arguments = |ints| {
                    let addresses = (0..addresses).fold(Arguments::new(), |arguments, _| arguments.address(0));
                    let arguments = addresses.value(self.raw(0, 1), []);
                    (0..ints).fold(arguments, |arguments, _| arguments.int(0)).float(0.0)
                };
                for parts in [1, EXCHANGE_ROW_SEGMENTS] {
                    let own = (format!("exchange_add_norm_{y}_{dtype}_{parts}"), arguments(ints));
                    let rounded = (format!("exchange_add_norm_all_rounded_{y}_{dtype}_{parts}"), arguments(ints + 1));
                    let exact = (format!("exchange_add_norm_all_exact_{y}_{dtype}_{parts}"), arguments(ints + 1));
                    for (kernel, arguments) in [own, rounded, exact] {
                        if kernel.contains("exact_bf16") {
                            continue; // without rounding, `update_residual` passes bf16 rows as f32
                        }
                        // SAFETY: before the first operation and without rows, the kernel accesses only this rank's
                        // state.
                        unsafe {
                            Launch::new(module!("exchange_add_norm"), kernel, shape, arguments).enqueue(&self.device)?
                        };
                    }
                }
            }
        }
        Ok(())
    }
}
