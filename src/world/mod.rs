//! The ranks that run one model together, and the operations that exchange data between the ranks.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! By default, inferno uses tensor parallelism, as in [Megatron-LM](https://arxiv.org/abs/1909.08053).
//! Every rank holds the whole embedding, but only a part of each large matrix in the layers and of the output head.
//! All ranks run the same forward passes.
//! The ranks sum their partial results after attention and after the MLP.
//! Partial results are added in rank order, so all ranks compute bit-identical sums and choose the same tokens.
//!
//! With [`World::with_stages`], each rank holds whole layers instead. The ranks run their layers one after another.
//! After the last layer of each rank, all ranks get the result. Only the output head is divided as above.

mod exchange;
mod meeting;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use candle_core::{Result, Tensor, bail};

use meeting::{FailureCall, Meeting, no_answer};

pub use exchange::{Exchange, PartialResult, ResidualUpdate, UpdatedResidual};
pub use meeting::ProgressWatch;

/// How long a rank waits for another rank that does not answer.
/// This limit applies to exchanges of tensors between CPUs, to exchanges with kernels between GPUs (except while a rank
/// may load kernels), and to the pings with which an idle engine checks the ranks.
/// Between CPUs and for pings, the time starts again whenever the other rank calls [`World::record_progress`]. The
/// limit must therefore be longer than the work between two of these calls.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The time limit that replaces [`ANSWER_TIMEOUT`] if GPUs exchange tensors by memory copies instead of kernels.
/// This limit also applies to [`World::gather_values`], for example while the ranks connect or load weights.
/// Opening a GPU and loading kernels from a disk can take seconds.
const HOST_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// This rank's communicator: its index among the ranks that run a model, and its connection to the other ranks.
/// A model that is not divided has one rank.
#[derive(Clone, Debug, Default)]
pub struct World {
    rank: usize,
    /// Exchanges tensors between the devices. `None` if the ranks exchange tensors only through `meeting`.
    exchange: Option<Arc<dyn Exchange>>,
    /// The meeting point where the threads of all ranks gather their values. `None` in a world of one rank.
    meeting: Option<Arc<Meeting>>,
    /// The layers of each rank. `None` if every rank holds a part of each layer.
    stages: Option<Arc<[Range<usize>]>>,
    /// Only partial results with at least this many elements may be rounded to bf16. If `None`, no result is rounded.
    min_rounded: Option<usize>,
}

impl World {
    /// Returns a world of one rank.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Returns one world for each of `size` ranks. The caller moves each world to a thread of its own.
    pub fn threads(size: usize) -> Vec<Self> {
        let meeting = (size > 1).then(|| Arc::new(Meeting::new(size)));
        (0..size).map(|rank| Self { rank, meeting: meeting.clone(), ..Self::default() }).collect()
    }

    /// Sets the exchange that this rank uses. If one rank uses an exchange, all ranks must use one.
    pub fn with_exchange(self, exchange: Arc<dyn Exchange>) -> Self {
        Self { exchange: Some(exchange), ..self }
    }

    /// Divides the layers of the model among the ranks, instead of dividing each layer.
    /// `stages` holds the layers of each rank, in rank order. Together, the ranges cover all layers without gaps.
    pub fn with_stages(self, stages: &[Range<usize>]) -> Self {
        Self { stages: Some(stages.into()), ..self }
    }

    /// Allows the ranks to round partial results of at least `min_elements` elements, and their sums, to bf16.
    pub fn with_rounded_partials(self, min_elements: usize) -> Self {
        Self { min_rounded: Some(min_elements), ..self }
    }

    /// Returns the layers of each rank, or `None` if every rank holds a part of each layer.
    pub fn stages(&self) -> Option<&[Range<usize>]> {
        self.stages.as_deref()
    }

    /// Returns the [`Exchange`] that this rank uses, if any.
    pub fn exchange(&self) -> Option<&Arc<dyn Exchange>> {
        self.exchange.as_ref()
    }

    /// Returns the index of this rank: 0 to [`size`](Self::size) - 1.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.meeting.as_ref().map_or(1, |meeting| meeting.size)
    }

    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Returns the part of `total` items, such as heads or columns, that this rank holds. See [`share`].
    pub fn share(&self, total: usize, unit: usize) -> Range<usize> {
        share(total, unit, self.rank, self.size())
    }

    /// Returns the sum of x over all ranks. x must have the same shape and dtype on all ranks.
    /// Waits until all ranks have called this function, except during the capture of a CUDA graph.
    ///
    /// If a rank does not answer in time, a sum that an [`Exchange`] has queued is wrong, and [`check`](Self::check)
    /// reports the rank. If no [`Exchange`] can queue the sum, this function ends the world and fails.
    pub fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        match (&self.meeting, &self.exchange) {
            (None, _) => Ok(x.clone()),
            (_, Some(exchange)) if exchange.can_queue() => exchange.all_reduce(x),
            (Some(meeting), _) => {
                let addends = self.gather_tensors(meeting, x)?;
                addends[1..].iter().try_fold(addends[0].clone(), |sum, addend| sum + addend)
            }
        }
    }

    /// Like [`all_reduce`](Self::all_reduce), for an f32 x that is a partial result of attention or of an MLP.
    /// With [`with_rounded_partials`](Self::with_rounded_partials), an [`Exchange`] may round a large x and the sum to
    /// bf16. The additions are still in f32, and all ranks still get the same bits.
    pub fn all_reduce_partials(&self, x: &Tensor) -> Result<Tensor> {
        match &self.exchange {
            Some(exchange) if self.can_round(x.elem_count()) => exchange.all_reduce_rounded(x),
            _ => self.all_reduce(x),
        }
    }

    /// Returns whether the ranks may round partial results with `elements` elements to bf16 when they add them up.
    pub fn can_round(&self, elements: usize) -> bool {
        self.min_rounded_now().is_some_and(|min_rounded| elements >= min_rounded)
    }

    /// Returns whether layers should pass [`PartialResult::ProductTerms`] to
    /// [`update_residual`](Self::update_residual): only if an [`Exchange`] can queue operations and may round partial
    /// results.
    pub fn can_add_product_terms(&self) -> bool {
        self.min_rounded_now().is_some()
    }

    /// Returns the number of elements from which on partial results may be rounded.
    /// Returns `None` if no result may be rounded, or if no [`Exchange`] can queue operations now.
    fn min_rounded_now(&self) -> Option<usize> {
        self.min_rounded.filter(|_| self.exchange.as_ref().is_some_and(|exchange| exchange.can_queue()))
    }

    /// Computes a [`ResidualUpdate`]. With [`with_rounded_partials`](Self::with_rounded_partials), may round large
    /// partial results and the normalized x' to bf16.
    ///
    /// Returns `None` unless there is an [`Exchange`] that can queue the update and supports it.
    /// If the partial result is [`PartialResult::Rows`] in f32 or bf16, all ranks then get `None`.
    /// Rows must not have another dtype, because some ranks could then wait for ranks that get `None`.
    /// If the partial result has another form, the other ranks may be waiting in the update, so a rank that gets `None`
    /// must add up its partial result and call again with the rows.
    pub fn update_residual(&self, update: &ResidualUpdate) -> Result<Option<UpdatedResidual>> {
        match &self.exchange {
            Some(exchange) if exchange.can_queue() => {
                exchange.update_residual(update, self.can_round(update.x.elem_count()))
            }
            _ => Ok(None),
        }
    }

    /// Collects each row of x from the rank that computed it. x is a divided x' from
    /// [`update_residual`](Self::update_residual).
    pub fn all_gather_rows(&self, x: &Tensor) -> Result<Tensor> {
        match &self.exchange {
            Some(exchange) => exchange.all_gather_rows(x),
            None => Ok(x.clone()),
        }
    }

    /// Returns the columns of all ranks side by side, in rank order: f32 `[rows, columns]`.
    /// x, f32 `[rows, columns of this rank]`, holds this rank's [`share`] of all columns.
    /// Waits for the other ranks like [`all_reduce`](Self::all_reduce), with the same consequences if a rank does not
    /// answer.
    pub fn all_gather_columns(&self, x: &Tensor, columns: usize) -> Result<Tensor> {
        self.all_gather_columns_into(x, columns, None)
    }

    /// Like [`all_gather_columns`](Self::all_gather_columns), but may write the result to `out`, f32 `[rows, columns]`,
    /// and return `out`.
    pub fn all_gather_columns_into(&self, x: &Tensor, columns: usize, out: Option<&Tensor>) -> Result<Tensor> {
        match (&self.meeting, &self.exchange) {
            (None, _) => Ok(x.clone()),
            (_, Some(exchange)) if exchange.can_queue() => exchange.all_gather_columns(x, columns, out),
            (Some(meeting), _) => {
                let columns = self.gather_tensors(meeting, x)?;
                let columns: Vec<&Tensor> = columns.iter().filter(|columns| columns.elem_count() > 0).collect();
                Tensor::cat(&columns, 1)
            }
        }
    }

    /// Returns the x of every rank, in rank order, copied to this rank's device.
    /// If possible, the driver copies directly from GPU to GPU, without using host memory.
    fn gather_tensors(&self, meeting: &Meeting, x: &Tensor) -> Result<Vec<Tensor>> {
        let device = x.device();
        // The streams of different GPUs run independently, so finish x before another rank reads it.
        device.synchronize()?;
        let limit = if device.is_cuda() { HOST_ANSWER_TIMEOUT } else { ANSWER_TIMEOUT };
        let tensors = meeting.gather(self.rank, Arc::new(x.clone()), limit)?;
        let tensors = tensors.iter().map(|tensor| tensor.to_device(device)).collect::<Result<Vec<_>>>()?;
        if device.is_cuda() {
            // Wait until all ranks have read x, because the caller may free x afterward.
            device.synchronize()?;
            meeting.gather(self.rank, Arc::new(()), limit)?;
        }
        Ok(tensors)
    }

    /// Waits until all ranks have called this function, with the same time limit as
    /// [`gather_values`](Self::gather_values).
    pub fn barrier(&self) -> Result<()> {
        self.gather_values(()).map(drop)
    }

    /// Returns the values of all ranks, in rank order. Waits until all ranks have called this function.
    /// The ranks pass values between their threads on the host. For tensors, see
    /// [`all_gather_columns`](Self::all_gather_columns).
    /// If a rank makes no progress for 60 s, ends the world and fails.
    pub fn gather_values<T: Any + Send + Sync>(&self, value: T) -> Result<Vec<Arc<T>>> {
        match &self.meeting {
            None => Ok(vec![Arc::new(value)]),
            Some(meeting) => meeting.gather(self.rank, Arc::new(value), HOST_ANSWER_TIMEOUT),
        }
    }

    /// Calls `launch`, which launches a CUDA graph, at the same time as the other ranks (see
    /// [`Exchange::launch_together`]). Without an [`Exchange`], calls `launch` at once.
    pub fn launch_together(&self, mut launch: impl FnMut() -> Result<()>) -> Result<()> {
        match &self.exchange {
            Some(exchange) => exchange.launch_together(&mut launch),
            None => launch(),
        }
    }

    /// Fails if the world has ended. If an [`Exchange`] reports a missing rank, ends the world and fails.
    pub fn check(&self) -> Result<()> {
        if let Some(missing) = self.exchange.as_ref().and_then(|exchange| exchange.missing_rank()) {
            self.end(&no_answer(missing, self.size()));
        }
        match self.end_reason() {
            Some(reason) => bail!("{reason}"),
            None => Ok(()),
        }
    }

    /// Returns the reason why the world has ended, or `None` if the world has not ended.
    pub fn end_reason(&self) -> Option<String> {
        self.meeting.as_ref()?.lock().end_reason.clone()
    }

    /// Ends the world because of a failure, and calls the function of [`on_failure`](Self::on_failure).
    /// If the world has already ended, keeps the first reason. Does nothing in a world of one rank.
    ///
    /// Calls that pass values between the threads, such as [`gather_values`](Self::gather_values), then fail
    /// with `reason`. Operations of an [`Exchange`] do not fail, but stop waiting, so their results can be wrong.
    /// [`check`](Self::check) reports the failure.
    pub fn end(&self, reason: &str) {
        if let Some(meeting) = &self.meeting {
            meeting.end(&mut meeting.lock(), reason);
        }
        if let Some(exchange) = &self.exchange {
            exchange.end();
        }
    }

    /// Ends the world because a rank did not answer in time.
    pub fn end_without_answer(&self, rank: usize) {
        self.end(&no_answer(rank, self.size()));
    }

    /// Sets a function to call when a world of several ranks ends because of a failure. The function gets the reason.
    /// The next call of `on_failure` replaces the function. If the world has already ended, calls the function at once.
    pub fn on_failure(&self, call: impl FnOnce(&str) + Send + 'static) {
        let Some(meeting) = &self.meeting else { return };
        let mut state = meeting.lock();
        match &state.end_reason {
            Some(reason) => call(reason),
            None => state.on_failure = Some(FailureCall(Box::new(call))),
        }
    }

    /// Ends the world because the model is dropped. Does not call the function of [`on_failure`](Self::on_failure).
    pub fn close(&self) {
        if let Some(meeting) = &self.meeting {
            meeting.lock().on_failure = None;
        }
        self.end("the engine has stopped");
    }

    /// Records that this rank makes progress.
    /// During long work, such as running many layers, a rank must call `record_progress` at least once per
    /// [`ANSWER_TIMEOUT`]. Otherwise, a rank that waits for this rank can end the world.
    pub fn record_progress(&self) {
        if let Some(meeting) = &self.meeting {
            meeting.progress[self.rank].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of times that `rank` has called [`record_progress`](Self::record_progress). Always 0 in a
    /// world of one rank.
    pub fn progress(&self, rank: usize) -> u64 {
        self.meeting.as_ref().map_or(0, |meeting| meeting.progress[rank].load(Ordering::Relaxed))
    }
}

/// Returns the range of items that a rank holds if `size` ranks divide `total` items.
///
/// Items are divided into units of `unit` items, such as blocks of a quantized matrix. The last unit may be smaller.
/// If the units cannot be divided evenly, the first ranks hold one unit more than the other ranks.
/// With more ranks than units, the last ranks hold nothing.
pub fn share(total: usize, unit: usize, rank: usize, size: usize) -> Range<usize> {
    let units = total.div_ceil(unit);
    let start = |rank: usize| ((units / size * rank + rank.min(units % size)) * unit).min(total);
    start(rank)..start(rank + 1)
}
