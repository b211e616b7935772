//! Sums over all ranks (`exchange_sum.cu`).

use candle_core::{DType, Result, Tensor, bail};

use super::gpu_exchange::{GpuExchange, RawMailboxes, of_world};
use super::path::ExchangePath;
use crate::kernels::launch::{Arguments, Launch, LaunchList, address, module};
use crate::kernels::scratch;
use crate::world::World;

/// Adds a launch that writes the sum of `x` over all ranks to `out`. Adds nothing if there is only one rank.
///
/// `x` and `out` are f32 and have the same number of elements.
/// If `x` and `out` are different tensors, the launch also fills `x` with zeros.
pub fn add_sum(launches: &mut LaunchList, world: &World, x: &Tensor, out: &Tensor) -> Result<()> {
    if world.size() == 1 {
        return Ok(());
    }
    let launch = of_world(world)?.sum_launch(x, out, x.id() != out.id())?;
    // SAFETY: `sum_launch` checks the tensors. The caller keeps `world` alive, which keeps the mailboxes alive.
    // Overlap: all threads call `pdl_wait` (in `begin`) before they access device memory.
    unsafe { launches.add(launch) }
}

/// Adds a launch that sums the results of the last kernel in `launches` over all ranks, and writes the sum to `out`.
/// Adds nothing if there is only one rank.
///
/// The last kernel must take a [`sender`] as an argument. It either sends its results or writes them to `x`.
/// If it writes them to `x`, and `x` and `out` are different tensors, the added launch also fills `x` with zeros.
/// At least one kernel must come between the previous exchange and the last kernel.
pub fn add_sum_of_sent(launches: &mut LaunchList, world: &World, x: &Tensor, out: &Tensor) -> Result<()> {
    if world.size() == 1 {
        return Ok(());
    }
    let exchange = of_world(world)?;
    if !exchange.has_senders() {
        return add_sum(launches, world, x, out);
    }
    let launch = exchange.sent_sum_launch(out)?;
    // SAFETY: `sent_sum_launch` checks `out`. The caller keeps `world` alive, which keeps the mailboxes alive.
    // Overlap: the added kernel calls `pdl_wait` only if ranks share a GPU (see `pdl.cuh`). It may run while the last
    // kernel still runs, but starts only after all blocks of the last kernel have waited for earlier kernels and read
    // the exchange state. The added kernel overwrites an element of `out` only after the last kernel has sent its
    // result for this element. After that, the last kernel does not read the element.
    unsafe { launches.add(launch) }
}

/// Returns the argument with which a kernel sends its results to all ranks of `world` (`Sender` in `exchange.cuh`).
/// If there is only one rank, or if the ranks do not use senders, the kernel stores its results instead.
pub fn sender(world: &World) -> Result<RawMailboxes> {
    if world.size() == 1 {
        return Ok(RawMailboxes::alone());
    }
    let exchange = of_world(world)?;
    Ok(if exchange.has_senders() { exchange.raw(0, 1) } else { RawMailboxes::alone() })
}

impl GpuExchange {
    /// Returns whether kernels send their results with a [`sender`]: false if the mailboxes are in host memory.
    /// A sender stores one value at a time, and such small stores to host memory would be slow.
    fn has_senders(&self) -> bool {
        self.own().path != ExchangePath::HostMemory
    }

    /// Returns the sum of `x` over all ranks, in the dtype of `x`.
    pub(super) fn queue_sum(&self, x: &Tensor) -> Result<Tensor> {
        self.sum_in_launches(x, self.region(), |x, out| self.sum_launch(x, out, false))
    }

    /// Like [`queue_sum`](Self::queue_sum), but rounds every rank's `x` to bf16 before the addition.
    /// With more than two ranks, also rounds the sum.
    /// Rounds nothing if the number of elements is not a multiple of 8.
    pub(super) fn queue_rounded_sum(&self, x: &Tensor) -> Result<Tensor> {
        if !x.elem_count().is_multiple_of(8) {
            return self.queue_sum(x);
        }
        self.sum_in_launches(x, self.rounded_elements(), |x, out| self.rounded_sum_launch(x, out))
    }

    /// Returns a launch that writes the sum of `x` over all ranks to `out`. `out` may be `x`.
    ///
    /// `x` and `out` are contiguous f32 and have the same number of elements, at most [`region`](Self::region).
    /// If `clears_x` is true, the launch also fills `x` with zeros, and `out` must not be `x`.
    fn sum_launch(&self, x: &Tensor, out: &Tensor, clears_x: bool) -> Result<Launch> {
        let words = x.elem_count();
        if x.dtype() != DType::F32 || out.dtype() != DType::F32 || out.elem_count() != words || words > self.region() {
            bail!(
                "cannot write the sum of x {:?} {:?} to out {:?}: \
                 both must be f32 and have the same size, at most the size of a mailbox region",
                x.dtype(),
                x.dims(),
                out.dims()
            );
        }
        let (x_address, out_address) = (address(x)?, address(out)?);
        let is_aligned = words.is_multiple_of(4) && x_address.is_multiple_of(16) && out_address.is_multiple_of(16);
        let (kernel, items) = if is_aligned { ("exchange_sum_4", words / 4) } else { ("exchange_sum_1", words) };
        let arguments = Arguments::new().tensor(x)?.tensor(out)?.value(self.raw(0, 1), []).int(words).flag(clears_x);
        Ok(Launch::new(module!("exchange_sum"), kernel, self.shape(items), arguments)
            .with_bytes_moved(8 * words as u64))
    }

    /// Returns a launch that receives the values that all ranks send with a [`sender`], and writes their sum to `out`.
    /// `out` is f32 and has at most [`region`](Self::region) elements.
    fn sent_sum_launch(&self, out: &Tensor) -> Result<Launch> {
        let words = out.elem_count();
        if out.dtype() != DType::F32 || words > self.region() {
            bail!(
                "cannot receive a sum in out {:?} {:?}: expected F32 with at most {} elements",
                out.dtype(),
                out.dims(),
                self.region()
            );
        }
        let is_aligned = words.is_multiple_of(4) && address(out)?.is_multiple_of(16);
        let (kernel, items) = if is_aligned { ("exchange_sent_4", words / 4) } else { ("exchange_sent_1", words) };
        let arguments = Arguments::new().tensor(out)?.value(self.raw(0, 1), []).int(words);
        let bytes = 4 * words * (self.mailboxes.len() + 2);
        Ok(Launch::new(module!("exchange_sum"), kernel, self.shape(items), arguments).with_bytes_moved(bytes as u64))
    }

    /// Returns the maximum number of elements for [`rounded_sum_launch`](Self::rounded_sum_launch), a multiple of 8.
    fn rounded_elements(&self) -> usize {
        // A region of n words has room for 2n bf16 values. If each rank adds up only its share, these values are the
        // addends and the sums of a share of n elements. Otherwise, they are the addends of all 2n elements.
        let shares = if self.sums_shares() { self.mailboxes.len() } else { 2 };
        self.region() / 8 * 8 * shares
    }

    /// Returns whether, in a rounded sum, each rank adds up only its share and sends its sums to the other ranks.
    /// With two ranks, dividing the additions would not reduce the amount of data to send.
    fn sums_shares(&self) -> bool {
        self.mailboxes.len() > 2
    }

    /// Returns a launch that rounds every rank's `x` to bf16 and writes the sum, as f32, to `out`. `out` may be `x`.
    /// With more than two ranks, the launch also rounds the sum to bf16.
    ///
    /// `x` and `out` are contiguous f32, aligned to 16 bytes, and have the same number of elements.
    /// This number must be a multiple of 8, and at most [`rounded_elements`](Self::rounded_elements).
    fn rounded_sum_launch(&self, x: &Tensor, out: &Tensor) -> Result<Launch> {
        let (elements, words) = (x.elem_count(), x.elem_count() / 2);
        let (x_address, out_address) = (address(x)?, address(out)?);
        let is_aligned = elements.is_multiple_of(8) && x_address.is_multiple_of(16) && out_address.is_multiple_of(16);
        let is_f32 = x.dtype() == DType::F32 && out.dtype() == DType::F32;
        if !is_aligned || !is_f32 || out.elem_count() != elements || elements > self.rounded_elements() {
            bail!(
                "cannot write the rounded sum of x {:?} {:?} to out {:?}: \
                 unsupported dtype, size or alignment",
                x.dtype(),
                x.dims(),
                out.dims()
            );
        }
        let (kernel, quads) =
            if self.sums_shares() { ("exchange_sum_shares_bf16", words / 4) } else { ("exchange_sum_bf16", 0) };
        let arguments = Arguments::new().tensor(x)?.tensor(out)?.value(self.raw(quads, 1), []).int(words);
        Ok(Launch::new(module!("exchange_sum"), kernel, self.shape(words / 4), arguments)
            .with_bytes_moved(8 * elements as u64))
    }

    /// Returns the sum of `x` over all ranks, in the dtype of `x`. Each launch sums at most `max_elements` elements.
    /// `launch(x, out)` returns the launch for some elements of `x` and the same elements of the result.
    fn sum_in_launches(
        &self,
        x: &Tensor,
        max_elements: usize,
        launch: impl Fn(&Tensor, &Tensor) -> Result<Launch>,
    ) -> Result<Tensor> {
        let from = x.to_dtype(DType::F32)?.contiguous()?;
        // SAFETY: the kernels write every element of `out`.
        let out = unsafe { scratch::empty(x.dims(), DType::F32, x.device())? };
        let from = from.flatten_all()?;
        let sums = out.flatten_all()?;
        let elements = x.elem_count();
        for start in (0..elements).step_by(max_elements) {
            let count = max_elements.min(elements - start);
            let launch = launch(&from.narrow(0, start, count)?, &sums.narrow(0, start, count)?)?;
            // SAFETY: `launch` checks the tensors. The mailboxes live as long as `self`.
            // Overlap: all threads call `pdl_wait` (in `begin`) before they access device memory.
            unsafe { self.enqueue(launch.overlapping())? };
        }
        out.to_dtype(x.dtype())
    }

    /// Loads the sum kernels by launching each one for 0 words. Such a launch does not wait for other ranks.
    pub(super) fn load_sum_kernels(&self) -> Result<()> {
        let received = || Arguments::new().address(0).value(self.raw(0, 1), []).int(0);
        let arguments = || Arguments::new().address(0).address(0).value(self.raw(0, 1), []).int(0);
        for (kernel, arguments) in [
            ("exchange_sum_4", arguments().flag(false)),
            ("exchange_sum_1", arguments().flag(false)),
            ("exchange_sent_4", received()),
            ("exchange_sent_1", received()),
            ("exchange_sum_bf16", arguments()),
            ("exchange_sum_shares_bf16", arguments()),
        ] {
            let launch = Launch::new(module!("exchange_sum"), kernel, self.shape(0), arguments);
            // SAFETY: before the first operation and without words, the kernel accesses only this rank's state.
            unsafe { launch.enqueue(&self.device)? };
        }
        Ok(())
    }
}
