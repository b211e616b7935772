//! The exchange of data between a rank's GPU and the GPUs of the other ranks.
//! The files `exchange_*.rs` implement the operations, such as sums over all ranks.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, hint, thread};

use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Device, Result, Tensor, bail};

use super::mailbox::RankMailbox;
use super::path::ExchangePath;
use super::sizes::MAILBOX_BYTES;
use crate::kernels::constants::{EXCHANGE_BLOCKS, EXCHANGE_BUFFERS, EXCHANGE_MAX_RANKS, EXCHANGE_THREADS};
use crate::kernels::launch::{HostWords, Launch, LaunchShape};
use crate::world::{ANSWER_TIMEOUT, Exchange, ResidualUpdate, UpdatedResidual, World, share};

/// How long a kernel waits for the data of other ranks before it gives up, in seconds.
const TIMEOUT_SECONDS: i32 = ANSWER_TIMEOUT.as_secs() as i32;
/// How long a host thread waits for the host threads of other ranks while those threads may be loading kernels.
/// Reading the kernels of cuBLAS from a disk can take seconds.
/// No GPU waits for a rank that is loading kernels, because a rank launches an operation only when all ranks are ready.
/// Between two graphs in a row, no rank loads kernels, so [`ANSWER_TIMEOUT`] applies instead.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// The value of the control word after [`Exchange::end`] has ended the exchange.
/// Any other nonzero value of the control word is 1 + the rank that did not answer.
const ENDED: u32 = u32::MAX;
/// The number of times that a waiting thread checks the other ranks before it starts to yield its core.
/// Spinning notices the other ranks sooner, but yielding lets other threads run.
const SPINNING_TURNS: usize = 10_000;
const NOT_CAPTURING: sys::CUstreamCaptureStatus = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;

/// Returns the exchange of `world`. Fails if the ranks do not exchange data with GPU kernels.
pub(super) fn of_world(world: &World) -> Result<&GpuExchange> {
    match world.exchange().and_then(|exchange| (&**exchange as &dyn Any).downcast_ref()) {
        Some(exchange) => Ok(exchange),
        None => bail!("internal error: the ranks cannot exchange data within a CUDA graph"),
    }
}

/// Mirrors `Mailboxes` in `exchange.cuh`. The `u64` fields are device addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawMailboxes {
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

// The last 4 bytes are padding.
const _: () = assert!(size_of::<RawMailboxes>() == 8 * (EXCHANGE_MAX_RANKS + 2) + 4 * (EXCHANGE_MAX_RANKS + 8));
// SAFETY: the struct has C layout and contains only numbers. The kernels do not read the padding.
unsafe impl DeviceRepr for RawMailboxes {}

impl RawMailboxes {
    /// Returns the argument for kernels that exchange nothing: one rank and no mailboxes.
    pub(super) fn alone() -> Self {
        Self {
            of: [0; EXCHANGE_MAX_RANKS],
            state: 0,
            control: 0,
            first_item: [0; EXCHANGE_MAX_RANKS + 1],
            rank: 0,
            ranks: 1,
            region: 0,
            timeout_seconds: TIMEOUT_SECONDS,
            shares_gpu: 0,
            in_host_memory: 0,
        }
    }
}

/// The exchange of data between this rank and all other ranks, through mailboxes.
pub(super) struct GpuExchange {
    pub(super) rank: usize,
    pub(super) device: CudaDevice,
    pub mailboxes: Vec<Arc<RankMailbox>>,
    /// True if any two ranks use the same GPU.
    pub(super) shares_gpu: bool,
    /// True until this rank launches its first graph, and from each [`enqueue`](Self::enqueue) to the next graph.
    /// While this value is true, the host threads of the other ranks may be loading kernels.
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
    /// The same as for [`Launch::enqueue`], except that the caller need not keep the mailboxes alive.
    /// They live as long as `self`, and `drop` waits for the last launch.
    pub(super) unsafe fn enqueue(&self, launch: Launch) -> Result<()> {
        self.may_load.store(true, Ordering::Relaxed);
        // SAFETY: the caller guarantees valid arguments.
        unsafe { self.enqueue_within(LOAD_TIMEOUT, launch) }
    }

    /// Like [`enqueue`](Self::enqueue), for operations that may follow a graph. After a graph, the time limit for the
    /// other ranks is [`ANSWER_TIMEOUT`], because no rank loads kernels between the graph and the operation.
    ///
    /// # Safety
    /// The same as for [`enqueue`](Self::enqueue).
    pub(super) unsafe fn enqueue_after_graph(&self, launch: Launch) -> Result<()> {
        let limit = if self.may_load.load(Ordering::Relaxed) { LOAD_TIMEOUT } else { ANSWER_TIMEOUT };
        // SAFETY: the caller guarantees valid arguments.
        unsafe { self.enqueue_within(limit, launch) }
    }

    /// Like [`enqueue`](Self::enqueue), with `limit` as the time limit for waiting for the other ranks.
    ///
    /// # Safety
    /// The same as for [`enqueue`](Self::enqueue).
    unsafe fn enqueue_within(&self, limit: Duration, launch: Launch) -> Result<()> {
        let mut launch = Some(launch);
        let mut enqueue = || match launch.take() {
            // SAFETY: the caller guarantees valid arguments.
            Some(launch) => unsafe { launch.enqueue(&self.device) },
            None => Ok(()),
        };
        if self.is_capturing() { enqueue() } else { self.launch_within(limit, &mut enqueue) }
    }

    /// Waits until every rank is ready, calls `launch`, and waits until every rank has launched.
    /// Ends the exchange if one of the two waits takes longer than `limit`.
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

    /// Returns the size of a region in 32-bit words, a multiple of 4.
    /// A region is the part of a mailbox buffer that one sending rank uses.
    pub(super) fn region(&self) -> usize {
        MAILBOX_BYTES / (EXCHANGE_BUFFERS * self.mailboxes.len() * 16) * 4
    }

    /// Returns the `Mailboxes` argument of the kernels. The ranks divide `items` items (see [`share`]).
    /// `first_item` holds the index of each rank's first item and the number of items, all multiplied by `factor`.
    pub(super) fn raw(&self, items: usize, factor: usize) -> RawMailboxes {
        let ranks = self.mailboxes.len();
        let mut raw = RawMailboxes {
            of: [0; EXCHANGE_MAX_RANKS],
            state: self.own().state,
            control: self.control().address(0),
            first_item: [(items * factor) as i32; EXCHANGE_MAX_RANKS + 1],
            rank: self.rank as i32,
            ranks: ranks as i32,
            region: self.region() as i32,
            timeout_seconds: TIMEOUT_SECONDS,
            shares_gpu: self.shares_gpu.into(),
            in_host_memory: (self.own().path == ExchangePath::HostMemory).into(),
        };
        for (rank, mailbox) in self.mailboxes.iter().enumerate() {
            raw.of[rank] = mailbox.address;
            raw.first_item[rank] = (share(items, 1, rank, ranks).start * factor) as i32;
        }
        raw
    }

    /// Returns the maximum number of thread blocks of an exchange kernel.
    /// With one rank per GPU, `row_shape` allows more blocks for some kernels.
    ///
    /// If ranks share a GPU, they divide [`EXCHANGE_BLOCKS`], so that the blocks of all ranks can run at the same time.
    pub(super) fn max_blocks(&self) -> usize {
        if self.shares_gpu { EXCHANGE_BLOCKS / self.mailboxes.len() } else { EXCHANGE_BLOCKS }
    }

    /// Returns the launch shape of a kernel for `items` items, each a word or a `Quad` of 4 words (`exchange.cuh`).
    /// A thread may process several items.
    pub(super) fn shape(&self, items: usize) -> LaunchShape {
        // For few items, blocks are small, so that the items are spread over more multiprocessors.
        let blocks = self.max_blocks();
        let threads = if items <= blocks * 128 { 128 } else { EXCHANGE_THREADS };
        LaunchShape::linear(items.div_ceil(threads).clamp(1, blocks), threads)
    }

    /// Loads all exchange kernels by launching each one for 0 values. Such a launch does not wait for other ranks.
    pub fn load_kernels(&self) -> Result<()> {
        self.load_sum_kernels()?;
        self.load_columns_kernels()?;
        self.load_add_norm_kernels()?;
        self.device.cuda_stream().synchronize().w()
    }

    /// Sums test values over all ranks. Fails if a sum is wrong or a rank does not answer.
    pub fn test(&self) -> Result<()> {
        let (device, ranks) = (Device::Cuda(self.device.clone()), self.mailboxes.len());
        // Run more operations than there are buffers, so that each buffer is emptied and used again.
        for round in 0..2 * EXCHANGE_BUFFERS {
            let value = |rank: usize| (round * 100 + rank) as f32;
            let x = Tensor::new(vec![value(self.rank); 1024], &device)?;
            let sums = self.queue_sum(&x)?;
            // Synchronize before the copy to the host: if ranks share a GPU, a copy that waits for the sums could block
            // the launches of the other ranks.
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

    fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        self.queue_sum(x)
    }

    fn all_reduce_rounded(&self, x: &Tensor) -> Result<Tensor> {
        self.queue_rounded_sum(x)
    }

    fn update_residual(&self, update: &ResidualUpdate, rounds_to_bf16: bool) -> Result<Option<UpdatedResidual>> {
        self.queue_update(update, rounds_to_bf16)
    }

    fn all_gather_rows(&self, x: &Tensor) -> Result<Tensor> {
        self.queue_gather(x)
    }

    fn all_gather_columns(&self, x: &Tensor, columns: usize, out: Option<&Tensor>) -> Result<Tensor> {
        self.queue_columns(x, columns, out)
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
        // Wait for queued kernels, because they write to the mailboxes of all ranks. `drop` cannot return the error.
        let _ = self.device.cuda_stream().synchronize();
    }
}
