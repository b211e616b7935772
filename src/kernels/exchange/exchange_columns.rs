//! Concatenation of the columns of all ranks (`exchange_columns.cu`).

use candle_core::{DType, Result, Tensor, bail};

use super::gpu_exchange::{GpuExchange, of_world};
use crate::kernels::launch::{Arguments, Launch, LaunchList, address, module};
use crate::kernels::scratch;
use crate::world::{World, share};

/// Adds a launch that writes the columns of all ranks, in rank order, to `out`, f32 or u32 `[rows, columns]`.
/// `x` is `[rows, columns of this rank]`, in the dtype of `out`.
pub fn add_columns(launches: &mut LaunchList, world: &World, x: &Tensor, out: &Tensor) -> Result<()> {
    let launch = of_world(world)?.columns_launch(x, out)?;
    // SAFETY: `columns_launch` checks the tensors. The caller keeps `world` alive, which keeps the mailboxes alive.
    // Overlap: all threads call `pdl_wait` (in `begin`) before they access device memory.
    unsafe { launches.add(launch) }
}

impl GpuExchange {
    /// Returns the columns of all ranks: f32 `[rows, columns]`. `x` is f32 `[rows, columns of this rank]`.
    /// If `out` is given, writes the columns to `out` and returns it.
    pub(super) fn queue_columns(&self, x: &Tensor, columns: usize, out: Option<&Tensor>) -> Result<Tensor> {
        let (rows, _) = x.dims2()?;
        let from = x.contiguous()?;
        let out = match out {
            Some(out) if out.dims() == [rows, columns] && out.dtype() == DType::F32 => out.clone(),
            Some(out) => {
                bail!(
                    "cannot concatenate columns: out is {:?} {:?}, expected F32 [{rows}, {columns}]",
                    out.dtype(),
                    out.dims()
                )
            }
            // SAFETY: the kernels write every element of `out`.
            None => unsafe { scratch::empty((rows, columns), DType::F32, x.device())? },
        };
        let max_rows = self.region() / share(columns, 1, 0, self.mailboxes.len()).len().max(1);
        if max_rows == 0 {
            bail!("cannot concatenate columns: a rank's share of {columns} columns does not fit in a mailbox region");
        }
        for start in (0..rows).step_by(max_rows) {
            let rows = max_rows.min(rows - start);
            let launch = self.columns_launch(&from.narrow(0, start, rows)?, &out.narrow(0, start, rows)?)?;
            // In a step on a batch graph, the ranks exchange all logits with this operation after the graph.
            // If the step needs only the best logits, the graph itself contains the operation.
            // SAFETY: `columns_launch` checks the tensors. The mailboxes live as long as `self`.
            // Overlap: all threads call `pdl_wait` (in `begin`) before they access device memory.
            unsafe { self.enqueue_after_graph(launch.overlapping())? };
        }
        Ok(out)
    }

    /// Returns a launch that writes the columns of all ranks, in rank order, to `out`, f32 or u32 `[rows, columns]`.
    ///
    /// `x` is `[rows, columns of this rank]`, in the dtype of `out`. Every rank's `x` must fit in a region.
    /// The word `0xffffffff`, which marks an empty word of a mailbox, arrives as `0x7fffffff`.
    fn columns_launch(&self, x: &Tensor, out: &Tensor) -> Result<Launch> {
        let (rows, columns) = out.dims2()?;
        let ranks = self.mailboxes.len();
        let (own, largest) = (share(columns, 1, self.rank, ranks).len(), rows * share(columns, 1, 0, ranks).len());
        let is_valid =
            x.dims() == [rows, own] && x.dtype() == out.dtype() && matches!(x.dtype(), DType::F32 | DType::U32);
        if !is_valid || largest > self.region() {
            bail!(
                "cannot write x {:?} {:?} to columns of out {:?}: unsupported dtype or size",
                x.dtype(),
                x.dims(),
                out.dims()
            );
        }
        // A tensor without elements may have no valid address.
        let x_address = if own > 0 { address(x)? } else { 0 };
        let is_aligned = x_address.is_multiple_of(16)
            && address(out)?.is_multiple_of(16)
            && (0..ranks).all(|rank| share(columns, 1, rank, ranks).len().is_multiple_of(4));
        let (kernel, items) =
            if is_aligned { ("exchange_columns_4", largest / 4) } else { ("exchange_columns_1", largest) };
        let arguments = Arguments::new();
        let arguments = if own > 0 { arguments.tensor(x)? } else { arguments.address(0) };
        let arguments = arguments.tensor(out)?.value(self.raw(columns, 1), []).int(rows).int(largest);
        Ok(Launch::new(module!("exchange_columns"), kernel, self.shape(items), arguments)
            .with_bytes_moved(4 * (rows * (own + columns)) as u64))
    }

    /// Loads the column kernels by launching each one for 0 rows. Such a launch does not wait for other ranks.
    pub(super) fn load_columns_kernels(&self) -> Result<()> {
        for kernel in ["exchange_columns_4", "exchange_columns_1"] {
            let arguments = Arguments::new().address(0).address(0).value(self.raw(0, 1), []).int(0).int(0);
            let launch = Launch::new(module!("exchange_columns"), kernel, self.shape(0), arguments);
            // SAFETY: before the first operation and without rows, the kernel accesses only this rank's state.
            unsafe { launch.enqueue(&self.device)? };
        }
        Ok(())
    }
}
