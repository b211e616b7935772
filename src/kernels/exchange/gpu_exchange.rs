//! The exchange of data between the GPUs of all ranks, as one rank uses it. Launches the kernels in `exchange.cu`.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, hint, thread};

use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::mailbox::RankMailbox;
use super::path::ExchangePath;
use super::sizes::MAILBOX_BYTES;
use crate::kernels::constants::{EXCHANGE_BLOCKS, EXCHANGE_MAX_RANKS, EXCHANGE_SLOTS};
use crate::kernels::launch::{Arguments, HostWords, Launch, LaunchList, LaunchShape, address, module};
use crate::kernels::scratch;
use crate::world::{ANSWER_TIMEOUT, Exchange, ResidualUpdate, UpdatedResidual, World, share};

/// The maximum time, in seconds, that a GPU waits for the data of another rank.
const TIMEOUT_SECONDS: i32 = ANSWER_TIMEOUT.as_secs() as i32;
/// The time limit for waiting for the hosts of other ranks when those hosts may be loading kernels.
/// Reading the kernels of cuBLAS from a disk can take seconds.
/// No GPU waits during this time, because no host launches an operation before all hosts are ready.
/// If a rank launches two graphs in a row, no host loads kernels between them, and [`ANSWER_TIMEOUT`] applies instead.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// The value of the control word after the host has ended the exchange.
/// Any other nonzero value of the control word is 1 + the rank that did not answer.
const ENDED: u32 = u32::MAX;
/// The number of times that a waiting thread checks the other ranks before it starts to yield its core.
/// Spinning notices the other ranks sooner, and yielding lets other threads run.
const SPINNING_TURNS: usize = 10_000;
const NOT_CAPTURING: sys::CUstreamCaptureStatus = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;

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
    unsafe { launches.add(launch) }
}

/// Adds a launch that concatenates the columns of all ranks in `out`, f32 `[rows, columns]`.
/// `x` is f32 `[rows, columns of this rank]`.
pub fn add_columns(launches: &mut LaunchList, world: &World, x: &Tensor, out: &Tensor) -> Result<()> {
    let launch = of_world(world)?.columns_launch(x, out)?;
    // SAFETY: `columns_launch` checks the tensors. The caller keeps `world` alive, which keeps the mailboxes alive.
    unsafe { launches.add(launch) }
}

fn of_world(world: &World) -> Result<&GpuExchange> {
    match world.exchange().and_then(|exchange| (&**exchange as &dyn Any).downcast_ref()) {
        Some(exchange) => Ok(exchange),
        None => bail!("internal error: the GPUs have no exchange for CUDA graphs"),
    }
}

/// The Rust counterpart of the struct `Mailboxes` in `exchange.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawMailboxes {
    of: [u64; EXCHANGE_MAX_RANKS],
    state: u64,
    control: u64,
    first_item: [i32; EXCHANGE_MAX_RANKS + 1],
    rank: i32,
    ranks: i32,
    region: i32,
    timeout_seconds: i32,
    shares_gpu: i32,
    in_host_memory: i32,
}

// SAFETY: the struct has C's layout and contains only numbers.
unsafe impl DeviceRepr for RawMailboxes {}

/// The exchange of data between this rank and all other ranks, through mailboxes.
pub(super) struct GpuExchange {
    pub(super) rank: usize,
    pub(super) device: CudaDevice,
    pub mailboxes: Vec<Arc<RankMailbox>>,
    /// True if any two ranks use the same GPU.
    shares_gpu: bool,
    /// True until this rank launches its first graph, and again after it launches or captures a single operation.
    /// While this value is true, the hosts of the other ranks may be loading kernels.
    may_load: AtomicBool,
}

impl fmt::Debug for GpuExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuExchange({} of {})", self.rank, self.mailboxes.len())
    }
}

impl GpuExchange {
    pub fn new(rank: usize, device: &CudaDevice, mailboxes: Vec<Arc<RankMailbox>>) -> Self {
        let gpu = |mailbox: &Arc<RankMailbox>| mailbox.context.cu_device();
        let shares_gpu =
            (1..mailboxes.len()).any(|i| mailboxes[..i].iter().any(|other| gpu(other) == gpu(&mailboxes[i])));
        Self { rank, device: device.clone(), mailboxes, shares_gpu, may_load: AtomicBool::new(true) }
    }

    pub fn own(&self) -> &RankMailbox {
        &self.mailboxes[self.rank]
    }

    fn is_capturing(&self) -> bool {
        self.device.cuda_stream().capture_status().is_ok_and(|status| status != NOT_CAPTURING)
    }

    /// Launches an operation at the same time as the other ranks.
    /// During the capture of a graph, this function only captures the operation, and does not wait for the other ranks.
    ///
    /// # Safety
    /// The same as for [`Launch::enqueue`]. All mailboxes live as long as `self`, and `drop` waits for the last launch.
    pub(super) unsafe fn enqueue(&self, launch: Launch) -> Result<()> {
        let mut launch = Some(launch);
        let mut enqueue = || match launch.take() {
            // SAFETY: the caller guarantees valid arguments.
            Some(launch) => unsafe { launch.enqueue(&self.device) },
            None => Ok(()),
        };
        self.may_load.store(true, Ordering::Relaxed);
        if self.is_capturing() { enqueue() } else { self.launch_within(LOAD_TIMEOUT, &mut enqueue) }
    }

    /// Waits until every rank is ready, calls `launch`, and waits until every rank has launched.
    /// Ends the exchange if waiting for the ranks takes longer than `limit`, before or after the launch.
    fn launch_within(&self, limit: Duration, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.meet(limit, |mailbox| &mailbox.ready);
        let result = launch();
        self.meet(limit, |mailbox| &mailbox.launched);
        result
    }

    /// Adds 1 to this rank's `counter`, and waits until the counters of all ranks have reached its new value.
    /// Stops waiting if the exchange ends. If the wait takes longer than `limit`, ends the exchange.
    fn meet(&self, limit: Duration, counter: impl Fn(&RankMailbox) -> &AtomicU64) {
        let own = counter(self.own()).fetch_add(1, Ordering::Release) + 1;
        let missing = || self.mailboxes.iter().position(|rank| counter(rank).load(Ordering::Acquire) < own);
        let has_ended = || self.control().words()[0].load(Ordering::Relaxed) != 0;
        let (mut turns, mut started) = (0, None);
        while let Some(rank) = missing()
            && !has_ended()
        {
            turns += 1;
            if turns < SPINNING_TURNS {
                hint::spin_loop();
                continue;
            }
            thread::yield_now();
            let started: &Instant = started.get_or_insert_with(Instant::now);
            if started.elapsed() > limit {
                self.report_missing(rank);
            }
        }
    }

    /// Ends the exchange because `rank` does not answer. Does nothing if the exchange has already ended.
    fn report_missing(&self, rank: usize) {
        let _ = self.control().words()[0].compare_exchange(0, 1 + rank as u32, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn control(&self) -> &Arc<HostWords> {
        &self.mailboxes[0].control
    }

    /// Returns the number of words in a region, a multiple of 4.
    pub(super) fn region(&self) -> usize {
        MAILBOX_BYTES / (EXCHANGE_SLOTS * self.mailboxes.len() * 16) * 4
    }

    /// Returns the `Mailboxes` argument of the kernels.
    /// The ranks divide `items` items (see [`share`]). `first_item` holds the position of each rank's first item.
    /// An item takes `unit` positions.
    pub(super) fn raw(&self, items: usize, unit: usize) -> RawMailboxes {
        let ranks = self.mailboxes.len();
        let mut raw = RawMailboxes {
            of: [0; EXCHANGE_MAX_RANKS],
            state: self.own().state,
            control: self.control().address(0),
            first_item: [(items * unit) as i32; EXCHANGE_MAX_RANKS + 1],
            rank: self.rank as i32,
            ranks: ranks as i32,
            region: self.region() as i32,
            timeout_seconds: TIMEOUT_SECONDS,
            shares_gpu: self.shares_gpu.into(),
            in_host_memory: (self.own().path == ExchangePath::HostMemory).into(),
        };
        for (rank, mailbox) in self.mailboxes.iter().enumerate() {
            raw.of[rank] = mailbox.address;
            raw.first_item[rank] = (share(items, 1, rank, ranks).start * unit) as i32;
        }
        raw
    }

    /// Returns the maximum number of thread blocks of an exchange kernel.
    /// If ranks share a GPU, the ranks divide [`EXCHANGE_BLOCKS`], so that the blocks of all ranks can run together.
    pub(super) fn max_blocks(&self) -> usize {
        if self.shares_gpu { EXCHANGE_BLOCKS / self.mailboxes.len() } else { EXCHANGE_BLOCKS }
    }

    /// Returns the launch shape for `items` items. A thread may handle several items.
    pub(super) fn shape(&self, items: usize) -> LaunchShape {
        // For few items, blocks are small, so that the items are spread over more multiprocessors.
        let blocks = self.max_blocks();
        let threads = if items <= blocks * 128 { 128 } else { 512 };
        LaunchShape::linear(items.div_ceil(threads).clamp(1, blocks), threads)
    }

    /// Returns a launch that writes the sum of `x` over all ranks to `out`. `out` may be `x`.
    ///
    /// `x` and `out` are contiguous f32 and have the same number of elements, at most [`region`](Self::region).
    /// If `clears_x` is true, the launch also fills `x` with zeros, and `out` must not be `x`.
    fn sum_launch(&self, x: &Tensor, out: &Tensor, clears_x: bool) -> Result<Launch> {
        let words = x.elem_count();
        if x.dtype() != DType::F32 || out.dtype() != DType::F32 || out.elem_count() != words || words > self.region() {
            bail!(
                "exchange_sum: cannot write the sum of x {:?} {:?} to out {:?}: \
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
        Ok(Launch::new(module!("exchange"), kernel, self.shape(items), arguments)
            .with_bytes_moved(8 * words as u64)
            .overlapping())
    }

    /// Returns the maximum number of elements for [`rounded_sum_launch`](Self::rounded_sum_launch), a multiple of 8.
    fn rounded_elements(&self) -> usize {
        // If each rank adds only its share, a region holds the addends and the sums of one share, two values per word.
        // Otherwise, a region holds all addends, two values per word.
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
    /// `x` and `out` are contiguous f32 and have the same number of elements.
    /// The number of elements must be a multiple of 8, and at most [`rounded_elements`](Self::rounded_elements).
    fn rounded_sum_launch(&self, x: &Tensor, out: &Tensor) -> Result<Launch> {
        let (elements, words) = (x.elem_count(), x.elem_count() / 2);
        let (x_address, out_address) = (address(x)?, address(out)?);
        let is_aligned = elements.is_multiple_of(8) && x_address.is_multiple_of(16) && out_address.is_multiple_of(16);
        let is_f32 = x.dtype() == DType::F32 && out.dtype() == DType::F32;
        if !is_aligned || !is_f32 || out.elem_count() != elements || elements > self.rounded_elements() {
            bail!(
                "exchange_sum: cannot write the rounded sum of x {:?} {:?} to out {:?}: \
                 unsupported dtype, size or alignment",
                x.dtype(),
                x.dims(),
                out.dims()
            );
        }
        let (kernel, groups) =
            if self.sums_shares() { ("exchange_sum_shares_bf16", words / 4) } else { ("exchange_sum_bf16", 0) };
        let arguments = Arguments::new().tensor(x)?.tensor(out)?.value(self.raw(groups, 1), []).int(words);
        Ok(Launch::new(module!("exchange"), kernel, self.shape(words / 4), arguments)
            .with_bytes_moved(8 * elements as u64)
            .overlapping())
    }

    /// Returns the sum of `x` over all ranks, in the dtype of `x`. Each launch sums at most `most` elements.
    /// `launch(x, out)` returns the launch for a part of `x` and the same part of the result.
    fn sum_parts(
        &self,
        x: &Tensor,
        most: usize,
        launch: impl Fn(&Tensor, &Tensor) -> Result<Launch>,
    ) -> Result<Tensor> {
        let from = x.to_dtype(DType::F32)?.contiguous()?;
        // SAFETY: the kernels write every element of `out`.
        let out = unsafe { scratch::empty(x.dims(), DType::F32, x.device())? };
        let (from, sums, elements) = (from.flatten_all()?, out.flatten_all()?, x.elem_count());
        for start in (0..elements).step_by(most) {
            let part = |tensor: &Tensor| tensor.narrow(0, start, most.min(elements - start));
            let launch = launch(&part(&from)?, &part(&sums)?)?;
            // SAFETY: `launch` checks the tensors. The mailboxes live as long as `self`.
            unsafe { self.enqueue(launch)? };
        }
        out.to_dtype(x.dtype())
    }

    /// Returns a launch that concatenates the columns of all ranks in `out`, f32 `[rows, columns]`.
    ///
    /// `x` is f32 `[rows, columns of this rank]`. Every rank's `x` must fit in a region.
    fn columns_launch(&self, x: &Tensor, out: &Tensor) -> Result<Launch> {
        let (rows, columns) = out.dims2()?;
        let ranks = self.mailboxes.len();
        let (own, largest) = (share(columns, 1, self.rank, ranks).len(), rows * share(columns, 1, 0, ranks).len());
        let is_valid = x.dims() == [rows, own] && x.dtype() == DType::F32 && out.dtype() == DType::F32;
        if !is_valid || largest > self.region() {
            bail!(
                "exchange_columns: cannot write x {:?} {:?} to columns of out {:?}: unsupported dtype or size",
                x.dtype(),
                x.dims(),
                out.dims()
            );
        }
        // A tensor without elements has no address.
        let x_address = if own > 0 { address(x)? } else { 0 };
        let is_aligned = x_address.is_multiple_of(16)
            && address(out)?.is_multiple_of(16)
            && (0..ranks).all(|rank| share(columns, 1, rank, ranks).len().is_multiple_of(4));
        let (kernel, items) =
            if is_aligned { ("exchange_columns_4", largest / 4) } else { ("exchange_columns_1", largest) };
        let arguments = Arguments::new();
        let arguments = if own > 0 { arguments.tensor(x)? } else { arguments.address(0) };
        let arguments = arguments.tensor(out)?.value(self.raw(columns, 1), []).int(rows).int(largest);
        Ok(Launch::new(module!("exchange"), kernel, self.shape(items), arguments)
            .with_bytes_moved(4 * (rows * (own + columns)) as u64)
            .overlapping())
    }

    /// Loads all exchange kernels: launches each kernel without values, so that no kernel waits for other ranks.
    pub fn load_kernels(&self) -> Result<()> {
        let arguments = || Arguments::new().address(0).address(0).value(self.raw(0, 1), []).int(0);
        for (kernel, has_flag) in [
            ("exchange_sum_4", true),
            ("exchange_sum_1", true),
            ("exchange_columns_4", true),
            ("exchange_columns_1", true),
            ("exchange_sum_bf16", false),
            ("exchange_sum_shares_bf16", false),
        ] {
            let arguments = if has_flag { arguments().int(0) } else { arguments() };
            let launch = Launch::new(module!("exchange"), kernel, self.shape(0), arguments);
            // SAFETY: without values, the kernel accesses only the state of this rank's mailbox.
            unsafe { launch.enqueue(&self.device)? };
        }
        self.load_residual_kernels()?;
        self.device.cuda_stream().synchronize().w()
    }

    /// Exchanges test values. Fails if a sum is wrong or a rank does not answer.
    pub fn test(&self) -> Result<()> {
        let (device, ranks) = (Device::Cuda(self.device.clone()), self.mailboxes.len());
        // Run more operations than there are slots, so that each slot is emptied and used again.
        for round in 0..2 * EXCHANGE_SLOTS {
            let value = |rank: usize| (round * 100 + rank) as f32;
            let x = Tensor::new(vec![value(self.rank); 1024], &device)?;
            let sums = self.sum(&x)?;
            // Synchronize before the copy to the host.
            // If ranks share a GPU, a copy that waits for the sums could block the launches of the other ranks.
            self.device.cuda_stream().synchronize().w()?;
            let sums = sums.to_vec1::<f32>()?;
            let expected: f32 = (0..ranks).map(value).sum();
            if let Some(rank) = self.missing_rank() {
                bail!("GPU {} did not answer in test operation {round}", rank + 1);
            }
            if let Some(sum) = sums.iter().find(|&&sum| sum != expected) {
                bail!("test operation {round} returned the sum {sum} instead of {expected}");
            }
        }
        Ok(())
    }
}

impl Exchange for GpuExchange {
    fn can_queue(&self) -> bool {
        !self.shares_gpu || self.is_capturing()
    }

    fn launch_together(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let may_load = self.may_load.swap(false, Ordering::Relaxed);
        self.launch_within(if may_load { LOAD_TIMEOUT } else { ANSWER_TIMEOUT }, launch)
    }

    fn sum(&self, x: &Tensor) -> Result<Tensor> {
        self.sum_parts(x, self.region(), |x, out| self.sum_launch(x, out, false))
    }

    fn sum_rounded(&self, x: &Tensor) -> Result<Tensor> {
        if !x.elem_count().is_multiple_of(8) {
            return self.sum(x);
        }
        self.sum_parts(x, self.rounded_elements(), |x, out| self.rounded_sum_launch(x, out))
    }

    fn add_partials(&self, update: &ResidualUpdate, rounds: bool) -> Result<Option<UpdatedResidual>> {
        self.update_residual(update, rounds)
    }

    fn gather_rows(&self, x: &Tensor) -> Result<Tensor> {
        self.gather_own_rows(x)
    }

    fn concat_columns(&self, x: &Tensor, columns: usize, out: Option<&Tensor>) -> Result<Tensor> {
        let (rows, _) = x.dims2()?;
        let from = x.contiguous()?;
        let out = match out {
            Some(out) if out.dims() == [rows, columns] && out.dtype() == DType::F32 => out.clone(),
            Some(out) => {
                bail!("exchange_columns: out is {:?} {:?}, expected F32 [{rows}, {columns}]", out.dtype(), out.dims())
            }
            // SAFETY: the kernels write every element of `out`.
            None => unsafe { scratch::empty((rows, columns), DType::F32, x.device())? },
        };
        let most = self.region() / share(columns, 1, 0, self.mailboxes.len()).len().max(1);
        if most == 0 {
            bail!("exchange_columns: rows of {columns} columns do not fit in a mailbox region");
        }
        for start in (0..rows).step_by(most) {
            let part = |tensor: &Tensor| tensor.narrow(0, start, most.min(rows - start));
            let launch = self.columns_launch(&part(&from)?, &part(&out)?)?;
            // SAFETY: `columns_launch` checks the tensors. The mailboxes live as long as `self`.
            unsafe { self.enqueue(launch)? };
        }
        Ok(out)
    }

    fn missing_rank(&self) -> Option<usize> {
        match self.control().words()[0].load(Ordering::Relaxed) {
            0 | ENDED => None,
            rank => Some(rank as usize - 1),
        }
    }

    fn end(&self) {
        // If a rank did not answer, the control word keeps the number of that rank.
        let _ = self.control().words()[0].compare_exchange(0, ENDED, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Drop for GpuExchange {
    fn drop(&mut self) {
        // Wait for queued kernels, because they write to the mailboxes of all ranks. `drop` cannot return an error.
        let _ = self.device.cuda_stream().synchronize();
    }
}
