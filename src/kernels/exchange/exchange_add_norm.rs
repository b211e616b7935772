//! Updates of the residual stream x with the partial results of all ranks (`exchange_add_norm.cu`).
//!
//! - In `exchange_add_norm_all`, each rank computes all rows.
//!   This kernel runs if partial results are not rounded to bf16, or if there are two ranks and few rows.
//!   In both cases, x must be valid in all rows, and a partial result must fit in a region.
//! - In `exchange_add_norm`, each rank computes its own rows and sends the normalized rows to the other ranks.
//!   This kernel runs in all other cases in which partial results are rounded, even if x is valid only in the rank's
//!   own rows.

use std::ops::Range;

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::gpu_exchange::GpuExchange;
use crate::kernels::constants::{EXCHANGE_ROW_BLOCKS, EXCHANGE_ROW_SEGMENTS, EXCHANGE_ROW_THREADS, MAX_PRODUCT_TERMS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, address, dtype_suffix, kernel_size, module};
use crate::kernels::scratch;
use crate::world::{PartialResult, ResidualUpdate, UpdatedResidual, share};

/// With two ranks and at most this many rows, each rank computes all rows, even if partial results are rounded.
/// With few rows, computing the other rank's rows takes less time than waiting for that rank's normalized rows.
const REPLICATED_ROWS: usize = 256;

/// The maximum number of columns of a row in one segment. A thread has 8 columns of each segment.
const SEGMENT_COLUMNS: usize = 8 * EXCHANGE_ROW_THREADS;
/// The maximum number of columns of a row.
const MAX_COLUMNS: usize = EXCHANGE_ROW_SEGMENTS * SEGMENT_COLUMNS;

/// Mirrors `PartialRows` in `exchange_add_norm.cu`. `values` is a device address, as are the `u64` fields below.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawPartialRows {
    values: u64,
    columns: i32,
}

/// Mirrors `ProductTerms` in `exchange_add_norm.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawProductTerms {
    product: u64,
    columns: i32,
    terms: i32,
    term_size: i32,
}

/// Mirrors `ExpertRows` in `exchange_add_norm.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawExpertRows {
    outputs: u64,
    weights: u64,
    columns: i32,
    chosen: i32,
}

const _: () = assert!(size_of::<RawPartialRows>() == 16);
const _: () = assert!(size_of::<RawProductTerms>() == 24 && size_of::<RawExpertRows>() == 24);
// SAFETY: the structs have C layout and contain only integers. The kernels do not read the padding at their ends.
unsafe impl DeviceRepr for RawPartialRows {}
// SAFETY: as above.
unsafe impl DeviceRepr for RawProductTerms {}
// SAFETY: as above.
unsafe impl DeviceRepr for RawExpertRows {}

/// A family of kernels of `exchange_add_norm.cu`. The kernels of a family differ in the form of the partial result, in
/// the dtype of the normalized rows, and in the maximum number of segments of a row.
#[derive(Clone, Copy, Debug)]
enum UpdateKernel {
    /// `exchange_add_norm`: each rank computes its own rows. Rounds partial results to bf16.
    OwnRows,
    /// `exchange_add_norm_all`: each rank computes all rows. Rounds partial results to bf16.
    AllRowsRounded,
    /// `exchange_add_norm_all` without rounding.
    AllRowsExact,
}

impl UpdateKernel {
    const ALL: [Self; 3] = [Self::OwnRows, Self::AllRowsRounded, Self::AllRowsExact];

    /// Returns whether there is a kernel for the form of `partial`. If bf16 rows must not be rounded, `queue_update`
    /// converts them to f32.
    fn supports(self, partial: PartialResult) -> bool {
        let is_bf16 = matches!(partial, PartialResult::Rows(rows) if rows.dtype() == DType::BF16);
        !(is_bf16 && matches!(self, Self::AllRowsExact))
    }

    /// Returns the kernel's name for the form of `partial`, normalized rows of `dtype`, and rows of up to `segments`
    /// segments.
    fn name(self, partial: PartialResult, dtype: DType, segments: usize) -> Result<String> {
        let start = match self {
            Self::OwnRows => "exchange_add_norm",
            Self::AllRowsRounded => "exchange_add_norm_all_rounded",
            Self::AllRowsExact => "exchange_add_norm_all_exact",
        };
        let form = match partial {
            PartialResult::Rows(rows) => dtype_suffix(rows.dtype())?,
            PartialResult::ProductTerms(_) => "terms",
            PartialResult::Experts { .. } => "experts",
        };
        Ok(format!("{start}_{form}_{}_{segments}", dtype_suffix(dtype)?))
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

    /// Computes a [`ResidualUpdate`]. If `rounds_to_bf16` is true, rounds partial results to bf16, and may round the
    /// normalized rows.
    /// Returns `None` if no kernel supports the sizes, dtypes or alignment, or if x is divided and `rounds_to_bf16` is
    /// false.
    /// Fails if the shapes do not match.
    pub(super) fn queue_update(
        &self,
        update: &ResidualUpdate,
        rounds_to_bf16: bool,
    ) -> Result<Option<UpdatedResidual>> {
        let ResidualUpdate { x, is_divided, partial, bias, weight, eps: _, dtype } = *update;
        let (rows, columns) = x.dims2()?;
        let partial_fits = match partial {
            PartialResult::Rows(rows) => rows.dims() == x.dims(),
            PartialResult::ProductTerms(terms) => terms.dims() == [terms.dim(0)?, rows, columns],
            PartialResult::Experts { outputs, weights } => {
                outputs.dims() == [rows, weights.dim(1)?, columns] && weights.dim(0)? == rows
            }
        };
        if !partial_fits || weight.dims() != [columns] || bias.is_some_and(|bias| bias.dims() != [columns]) {
            let x = x.dims();
            let weight = weight.dims();
            let bias = bias.map(Tensor::dims);
            bail!(
                "cannot update the residual stream: x {x:?}, the partial result {partial:?}, weight {weight:?} and \
                 bias {bias:?} do not match"
            );
        }
        let in_f32;
        let partial = match partial {
            PartialResult::Rows(rows) if !rounds_to_bf16 => {
                in_f32 = rows.to_dtype(DType::F32)?;
                PartialResult::Rows(&in_f32)
            }
            partial => partial,
        };
        let mut is_supported = columns.is_multiple_of(8) && columns <= MAX_COLUMNS;
        is_supported &= matches!(dtype, DType::BF16 | DType::F32);
        is_supported &= match partial {
            PartialResult::Rows(rows) => {
                address(rows)?.is_multiple_of(16) && matches!(rows.dtype(), DType::F32 | DType::BF16)
            }
            PartialResult::ProductTerms(terms) => {
                let are_valid = terms.dtype() == DType::F32 && (1..=MAX_PRODUCT_TERMS).contains(&terms.dim(0)?);
                are_valid && address(terms)?.is_multiple_of(16)
            }
            PartialResult::Experts { outputs, weights } => {
                let are_valid = outputs.dtype() == DType::BF16 && weights.dtype() == DType::F32;
                are_valid && address(outputs)?.is_multiple_of(16)
            }
        };
        for tensor in [Some(x), bias, Some(weight)].into_iter().flatten() {
            is_supported &= tensor.dtype() == DType::F32 && address(tensor)?.is_multiple_of(16);
        }
        let words = rows * columns / if rounds_to_bf16 { 2 } else { 1 };
        // With two ranks, a rank sends the same number of bytes whether it computes all rows or only its own.
        let computes_all = !rounds_to_bf16 || self.mailboxes.len() == 2 && rows <= REPLICATED_ROWS;
        Ok(if !is_supported {
            None
        } else if computes_all && !is_divided && words <= self.region() {
            Some(self.update_all_rows(&ResidualUpdate { partial, ..*update }, rounds_to_bf16)?)
        } else if rounds_to_bf16 {
            self.update_own_rows(update)?
        } else {
            None
        })
    }

    /// Computes a supported [`ResidualUpdate`] whose x is valid in all rows. Every rank computes all rows.
    fn update_all_rows(&self, update: &ResidualUpdate, rounds_to_bf16: bool) -> Result<UpdatedResidual> {
        let (rows, columns) = update.x.dims2()?;
        // SAFETY: the kernel writes every element of `sum` and `normed`.
        let empty = |dtype| unsafe { scratch::empty((rows, columns), dtype, update.x.device()) };
        let sum = empty(DType::F32)?;
        let normed = empty(update.dtype)?;
        let kernel = if rounds_to_bf16 { UpdateKernel::AllRowsRounded } else { UpdateKernel::AllRowsExact };
        let launch = self.update_launch(kernel, update, &sum, &normed, 0..rows)?;
        // SAFETY: `queue_update` has checked all shapes and dtypes. The mailboxes live as long as `self`.
        // Overlap: all threads call `pdl_wait` (in `begin`) before they access device memory.
        unsafe { self.enqueue(launch.overlapping())? };
        Ok(UpdatedResidual { x: sum, is_divided: false, normed })
    }

    /// Computes a supported [`ResidualUpdate`]. Every rank computes its own rows.
    /// Rounds partial results and the normalized rows to bf16.
    /// Returns `None` if a region has no room for a row.
    fn update_own_rows(&self, update: &ResidualUpdate) -> Result<Option<UpdatedResidual>> {
        let (rows, columns) = update.x.dims2()?;
        let Some(ranges) = self.row_ranges(rows, columns) else { return Ok(None) };
        // SAFETY: the kernel writes every element of `normed`, and this rank's rows of `sum`.
        // The result is marked as divided, so callers read only these rows of `sum`.
        let empty = |dtype| unsafe { scratch::empty((rows, columns), dtype, update.x.device()) };
        let sum = empty(DType::F32)?;
        let normed = empty(update.dtype)?;
        for range in ranges {
            let launch = self.update_launch(UpdateKernel::OwnRows, update, &sum, &normed, range)?;
            // SAFETY: `queue_update` has checked all shapes and dtypes. The mailboxes live as long as `self`.
            // Overlap: all threads call `pdl_wait` (in `begin`) before they access device memory.
            unsafe { self.enqueue(launch.overlapping())? };
        }
        Ok(Some(UpdatedResidual { x: sum, is_divided: true, normed }))
    }

    /// Returns a launch of `kernel` that computes the rows in `range` of a supported update.
    /// Writes them to `sum`, f32, and to `normed`, in the dtype of the update. Both are `[rows, columns]`.
    fn update_launch(
        &self,
        kernel: UpdateKernel,
        update: &ResidualUpdate,
        sum: &Tensor,
        normed: &Tensor,
        range: Range<usize>,
    ) -> Result<Launch> {
        let ResidualUpdate { x, partial, bias, weight, eps, dtype, .. } = *update;
        let columns = x.dim(1)?;
        let raw_columns = kernel_size(columns)?;
        let in_range = |tensor: &Tensor| tensor.narrow(0, range.start, range.len());
        let arguments = Arguments::new().tensor(&in_range(x)?)?;
        let arguments = match partial {
            PartialResult::Rows(rows) => {
                let rows = in_range(rows)?;
                arguments.value(RawPartialRows { values: address(&rows)?, columns: raw_columns }, [&rows])
            }
            PartialResult::ProductTerms(terms) => {
                // The rows of the first term. The kernel adds multiples of the term size to find them in other terms.
                let rows = in_range(&terms.get(0)?)?;
                let raw = RawProductTerms {
                    product: address(&rows)?,
                    columns: raw_columns,
                    terms: kernel_size(terms.dim(0)?)?,
                    term_size: kernel_size(x.elem_count())?,
                };
                arguments.value(raw, [&rows])
            }
            PartialResult::Experts { outputs, weights } => {
                let (outputs, weights) = (in_range(outputs)?, in_range(weights)?);
                let raw = RawExpertRows {
                    outputs: address(&outputs)?,
                    weights: address(&weights)?,
                    columns: raw_columns,
                    chosen: kernel_size(weights.dim(1)?)?,
                };
                arguments.value(raw, [&outputs, &weights])
            }
        };
        let arguments =
            arguments.optional(bias)?.tensor(weight)?.tensor(&in_range(sum)?)?.tensor(&in_range(normed)?)?;
        let arguments = arguments.value(self.raw(range.len(), 1), []);
        let (arguments, most_rows) = match kernel {
            UpdateKernel::OwnRows => (arguments, share(range.len(), 1, 0, self.mailboxes.len()).len()),
            UpdateKernel::AllRowsRounded | UpdateKernel::AllRowsExact => (arguments.int(range.len()), range.len()),
        };
        let (segments, shape) = self.row_shape(partial, most_rows, columns);
        let name = kernel.name(partial, dtype, segments)?;
        Ok(Launch::new(module!("exchange_add_norm"), name, shape, arguments.float(eps)))
    }

    /// Returns the maximum number of segments of a row, with which the kernel's name ends, and the launch shape.
    /// `most_rows` is the largest number of rows that a rank computes.
    fn row_shape(&self, partial: PartialResult, most_rows: usize, columns: usize) -> (usize, LaunchShape) {
        let (segments, threads) = match columns {
            ..=SEGMENT_COLUMNS => (1, columns.div_ceil(8).next_multiple_of(32)),
            _ => (EXCHANGE_ROW_SEGMENTS, EXCHANGE_ROW_THREADS),
        };
        // On a shared GPU, the blocks of all ranks must fit at the same time. Another rank's partial result can have a
        // form whose kernel fits fewer blocks, so no rank launches more than `max_blocks`.
        let blocks = match partial {
            PartialResult::Rows(_) | PartialResult::Experts { .. } if segments == 1 && !self.shares_gpu => {
                self.max_blocks() * EXCHANGE_ROW_BLOCKS
            }
            _ => self.max_blocks(),
        };
        (segments, LaunchShape::linear(most_rows.clamp(1, blocks), threads))
    }

    /// Collects the rows of all ranks in a new tensor, f32 `[rows, columns]`. `x` is a divided result of
    /// `queue_update`, which is valid only in this rank's rows.
    pub(super) fn queue_gather(&self, x: &Tensor) -> Result<Tensor> {
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
            let launch = Launch::new(module!("exchange_columns"), "exchange_columns_4", shape, arguments);
            // SAFETY: the dtype, the columns and the alignment are checked above, and `out` has room for all rows.
            // `row_ranges` returns ranges of which each rank's share fits in a region.
            // Overlap: all threads call `pdl_wait` (in `begin`) before they access device memory.
            unsafe { self.enqueue(launch.overlapping())? };
        }
        Ok(out)
    }

    /// Loads the `exchange_add_norm` and `exchange_add_norm_all` kernels by launching each one for 0 rows.
    pub(super) fn load_add_norm_kernels(&self) -> Result<()> {
        let device = Device::Cuda(self.device.clone());
        // Rows of `SEGMENT_COLUMNS` columns have one segment. Rows with 8 more columns have several.
        for columns in [SEGMENT_COLUMNS, SEGMENT_COLUMNS + 8] {
            let row = Tensor::zeros((1, columns), DType::F32, &device)?;
            let row_in_bf16 = Tensor::zeros((1, columns), DType::BF16, &device)?;
            let (terms, outputs) = (row.unsqueeze(0)?, row_in_bf16.unsqueeze(0)?);
            let weights = Tensor::zeros((1, 1), DType::F32, &device)?;
            let weight = &row.get(0)?;
            let eps = 0.0;
            for partial in [
                PartialResult::Rows(&row),
                PartialResult::Rows(&row_in_bf16),
                PartialResult::ProductTerms(&terms),
                PartialResult::Experts { outputs: &outputs, weights: &weights },
            ] {
                for normed in [&row, &row_in_bf16] {
                    let dtype = normed.dtype();
                    let update = ResidualUpdate { x: &row, is_divided: false, partial, bias: None, weight, eps, dtype };
                    for kernel in UpdateKernel::ALL.into_iter().filter(|kernel| kernel.supports(partial)) {
                        let launch = self.update_launch(kernel, &update, &row, normed, 0..0)?;
                        // SAFETY: the arguments are those of a supported update. Before the first operation and
                        // without rows, the kernel accesses only this rank's state.
                        unsafe { launch.enqueue(&self.device)? };
                    }
                }
            }
        }
        Ok(())
    }
}
