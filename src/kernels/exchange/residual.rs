//! Updates of the residual stream that the ranks divide by rows. Launches `exchange_add_norm` in `exchange.cu`.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use super::gpu_exchange::GpuExchange;
use crate::device::{ResidualUpdate, share};
use crate::kernels::constants::{EXCHANGE_ROW_COLUMNS, EXCHANGE_ROW_THREADS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, address, dtype_suffix, module};
use crate::kernels::scratch;

impl GpuExchange {
    /// Divides the rows into ranges, one range per launch. The ranks share the rows of each range.
    /// Returns `None` if a region has no room for a row of `columns` columns.
    fn row_ranges(&self, rows: usize, columns: usize) -> Option<impl Iterator<Item = Range<usize>> + use<>> {
        // For `exchange_add_norm`, a region holds a rank's share twice: as bf16 partial results, and as bf16 norms.
        // For `exchange_columns`, a region holds a rank's share once, as f32 values.
        let most = self.region() / columns * self.mailboxes.len();
        (most > 0).then(|| (0..rows).step_by(most).map(move |start| start..rows.min(start + most)))
    }

    /// Returns this rank's share of the rows in `range`.
    fn own_rows(&self, range: &Range<usize>) -> Range<usize> {
        let own = share(range.len(), 1, self.rank, self.mailboxes.len());
        range.start + own.start..range.start + own.end
    }

    /// Computes a [`ResidualUpdate`]. Returns `None` if the kernel does not support its sizes, dtypes or alignment.
    pub(super) fn add_partials_by_rows(&self, update: &ResidualUpdate) -> Result<Option<(Tensor, Tensor)>> {
        let ResidualUpdate { x, y, bias, weight, eps, dtype } = *update;
        let (rows, columns) = x.dims2()?;
        let tensors = [Some(x), Some(y), bias, Some(weight)].into_iter().flatten();
        let shapes_match = y.dims() == x.dims() && weight.dims() == [columns];
        if !shapes_match || bias.is_some_and(|bias| bias.dims() != [columns]) {
            bail!(
                "exchange_add_norm: x {:?}, y {:?}, weight {:?} and bias do not match",
                x.dims(),
                y.dims(),
                weight.dims()
            );
        }
        let mut is_supported = columns.is_multiple_of(8) && columns <= EXCHANGE_ROW_COLUMNS;
        is_supported &= matches!(dtype, DType::BF16 | DType::F32);
        for tensor in tensors {
            let dtype_fits = tensor.dtype() == DType::F32 || tensor.id() == y.id() && y.dtype() == DType::BF16;
            is_supported &= dtype_fits && address(tensor)?.is_multiple_of(16);
        }
        let Some(ranges) = self.row_ranges(rows, columns).filter(|_| is_supported) else { return Ok(None) };
        // SAFETY: the kernel writes every element of `normed`, and this rank's rows of `sum`. Only these rows are read.
        let empty = |dtype| unsafe { scratch::empty((rows, columns), dtype, x.device()) };
        let (sum, normed) = (empty(DType::F32)?, empty(dtype)?);
        let kernel = format!("exchange_add_norm_{}_{}", dtype_suffix(y.dtype())?, dtype_suffix(dtype)?);
        for range in ranges {
            let part = |tensor: &Tensor| tensor.narrow(0, range.start, range.len());
            let arguments = Arguments::new()
                .tensor(&part(x)?)?
                .tensor(&part(y)?)?
                .optional(bias)?
                .tensor(weight)?
                .tensor(&part(&sum)?)?
                .tensor(&part(&normed)?)?
                .value(self.raw(range.len(), 1), [])
                .int(columns)
                .float(eps);
            let blocks = share(range.len(), 1, 0, self.mailboxes.len()).len().clamp(1, self.max_blocks());
            let shape = LaunchShape::linear(blocks, EXCHANGE_ROW_THREADS);
            let launch = Launch::new(module!("exchange"), kernel.as_str(), shape, arguments).overlapping();
            // SAFETY: all shapes and dtypes are checked above. The mailboxes live as long as `self`.
            unsafe { self.enqueue(launch)? };
        }
        Ok(Some((sum, normed)))
    }

    /// Returns x, f32 `[rows, columns]`, with the rows of all ranks.
    /// x is the first result of `add_partials_by_rows`, in which only this rank's rows are valid.
    pub(super) fn gather_own_rows(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, columns) = x.dims2()?;
        let Some(ranges) = self.row_ranges(rows, columns) else {
            bail!("exchange_columns: rows of {columns} columns are too large");
        };
        // SAFETY: the kernel writes every element of `out`.
        let out = unsafe { scratch::empty((rows, columns), DType::F32, x.device())? };
        for range in ranges {
            let own = self.own_rows(&range);
            // The rows of all ranks, one after the other, are the columns of one long row.
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
            let launch = Launch::new(module!("exchange"), "exchange_columns_4", shape, arguments).overlapping();
            // SAFETY: `row_ranges` returns ranges that fit in a region. The mailboxes live as long as `self`.
            unsafe { self.enqueue(launch)? };
        }
        Ok(out)
    }

    /// Loads the `exchange_add_norm` kernels: launches each kernel without rows.
    pub(super) fn load_residual_kernels(&self) -> Result<()> {
        for dtypes in ["f32_f32", "f32_bf16", "bf16_f32", "bf16_bf16"] {
            let kernel = format!("exchange_add_norm_{dtypes}");
            let arguments = (0..6).fold(Arguments::new(), |arguments, _| arguments.address(0));
            let arguments = arguments.value(self.raw(0, 1), []).int(0).float(0.0);
            let shape = LaunchShape::linear(1, EXCHANGE_ROW_THREADS);
            // SAFETY: without rows, the kernel accesses only the state of this rank's mailbox.
            unsafe { Launch::new(module!("exchange"), kernel, shape, arguments).enqueue(&self.device)? };
        }
        Ok(())
    }
}
