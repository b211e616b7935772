//! How the threads of all ranks gather their values, and how they learn that the world has ended.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{Result, bail};

/// How often a waiting rank checks the progress of the other ranks.
const PROGRESS_POLL: Duration = Duration::from_millis(100);

/// A value that a rank contributes to a gather.
type Item = Arc<dyn Any + Send + Sync>;

/// The meeting point where the threads of all ranks gather their values.
#[derive(Debug)]
pub(super) struct Meeting {
    pub(super) size: usize,
    state: Mutex<MeetingState>,
    changed: Condvar,
    /// For each rank, the number of times that the rank has called
    /// [`World::record_progress`](super::World::record_progress).
    pub(super) progress: Vec<AtomicU64>,
}

#[derive(Debug, Default)]
pub(super) struct MeetingState {
    /// The values that the ranks have contributed to the current gather.
    contributed: Vec<Option<Item>>,
    /// The number of completed gathers.
    completed: u64,
    /// The values of the last completed gather.
    /// The values are kept until every rank has joined the next gather, so no rank misses them.
    last: Arc<Vec<Item>>,
    pub(super) end_reason: Option<String>,
    pub(super) on_failure: Option<FailureCall>,
}

/// The function that [`World::on_failure`](super::World::on_failure) sets.
pub(super) struct FailureCall(pub(super) Box<dyn FnOnce(&str) + Send>);

impl fmt::Debug for FailureCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FailureCall")
    }
}

impl Meeting {
    pub(super) fn new(size: usize) -> Self {
        let state = MeetingState { contributed: vec![None; size], ..MeetingState::default() };
        let progress = (0..size).map(|_| AtomicU64::new(0)).collect();
        Self { size, state: Mutex::new(state), changed: Condvar::new(), progress }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the world because of `reason`, and calls the function of [`World::on_failure`](super::World::on_failure).
    /// If the world has already ended, keeps the first reason and does not call the function.
    pub(super) fn end(&self, state: &mut MeetingState, reason: &str) {
        if state.end_reason.is_none() {
            state.end_reason = Some(reason.to_string());
            if let Some(FailureCall(call)) = state.on_failure.take() {
                call(reason);
            }
        }
        self.changed.notify_all();
    }

    /// Waits until every rank has contributed a value. Returns the values of all ranks.
    /// Ends the world and fails if a rank that has not yet contributed makes no progress for `limit`.
    /// Also fails if the world has already ended or ends during the wait, or if the types of the values differ.
    pub(super) fn gather<T: Any + Send + Sync>(
        &self,
        rank: usize,
        value: Arc<T>,
        limit: Duration,
    ) -> Result<Vec<Arc<T>>> {
        let items = self.gather_items(rank, value, limit)?;
        let typed = items.iter().map(|item| item.clone().downcast::<T>());
        match typed.collect() {
            Ok(values) => Ok(values),
            Err(_) => bail!("internal error: the ranks gather values of different types"),
        }
    }

    fn gather_items(&self, rank: usize, item: Item, limit: Duration) -> Result<Arc<Vec<Item>>> {
        let mut state = self.lock();
        state.contributed[rank] = Some(item);
        if state.end_reason.is_none() && state.contributed.iter().all(Option::is_some) {
            state.last = Arc::new(state.contributed.iter_mut().filter_map(Option::take).collect());
            state.completed += 1;
            self.changed.notify_all();
            return Ok(state.last.clone());
        }
        let before = state.completed;
        let progress = |rank: usize| self.progress[rank].load(Ordering::Relaxed);
        let mut watches: Vec<_> = (0..self.size).map(|rank| ProgressWatch::new(progress(rank))).collect();
        while state.completed == before && state.end_reason.is_none() {
            state = self.changed.wait_timeout(state, PROGRESS_POLL).unwrap_or_else(PoisonError::into_inner).0;
            if state.completed != before {
                break;
            }
            for missing in (0..self.size).filter(|&rank| state.contributed[rank].is_none()).collect::<Vec<_>>() {
                if watches[missing].has_stalled(progress(missing), limit) {
                    self.end(&mut state, &no_answer(missing, self.size));
                }
            }
        }
        match &state.end_reason {
            Some(reason) if state.completed == before => bail!("{reason}"),
            _ => Ok(state.last.clone()),
        }
    }
}

/// Notices when a rank makes no progress. The watching rank passes the rank's
/// [`World::progress`](super::World::progress) at each check.
pub struct ProgressWatch {
    /// The progress at the last check.
    progress: u64,
    /// The time of the first check that saw this progress.
    since: Instant,
}

impl ProgressWatch {
    pub fn new(progress: u64) -> Self {
        Self { progress, since: Instant::now() }
    }

    /// Returns whether the rank, whose progress is now `progress`, has made no progress for longer than `limit`.
    pub fn has_stalled(&mut self, progress: u64, limit: Duration) -> bool {
        if self.progress != progress {
            *self = Self::new(progress);
        }
        self.since.elapsed() > limit
    }
}

/// Returns the error message for a rank that does not answer in time.
pub(super) fn no_answer(rank: usize, size: usize) -> String {
    format!("GPU {} of {size} does not answer; the other GPUs were stopped", rank + 1)
}
