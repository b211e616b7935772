//! The ranks that run one model together, and the operations in which they exchange data.
//!
//! Tensor parallelism, as in [Megatron-LM](https://arxiv.org/abs/1909.08053): every rank holds a part of each large
//! matrix. All ranks run the same passes, and the partial results of the attention and of the MLP are summed.
//! Sums are added in the order of the ranks, so all ranks get the same bits and choose the same tokens.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor, bail};

/// The place of a rank among all ranks of a model. A model on a single device is a world of one rank.
#[derive(Clone, Debug, Default)]
pub struct World {
    rank: usize,
    /// Where the ranks exchange data. `None` in a world of one rank.
    meeting: Option<Arc<Meeting>>,
}

impl World {
    /// Returns a world of one rank.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Returns the worlds of `size` ranks, which run on one thread each.
    pub fn threads(size: usize) -> Vec<Self> {
        let meeting = (size > 1).then(|| Arc::new(Meeting::new(size)));
        (0..size).map(|rank| Self { rank, meeting: meeting.clone() }).collect()
    }

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

    /// Returns the sum of the tensors x of all ranks, which have the same shape and dtype.
    /// Waits until all ranks have called it.
    pub fn sum(&self, x: &Tensor) -> Result<Tensor> {
        let Some(meeting) = &self.meeting else { return Ok(x.clone()) };
        let parts = self.parts(meeting, x)?;
        parts[1..].iter().try_fold(parts[0].clone(), |sum, part| sum + part)
    }

    /// Returns the columns of all ranks side by side, in the order of the ranks. x is `[rows, columns]`, where only the
    /// number of rows is the same on every rank. Waits until all ranks have called it.
    pub fn concat_columns(&self, x: &Tensor) -> Result<Tensor> {
        let Some(meeting) = &self.meeting else { return Ok(x.clone()) };
        let parts = self.parts(meeting, x)?;
        let parts: Vec<&Tensor> = parts.iter().filter(|part| part.elem_count() > 0).collect();
        Tensor::cat(&parts, 1)
    }

    /// Returns the tensors of all ranks on the device of x. Copies between GPUs do not pass through host memory if the
    /// driver can avoid it.
    fn parts(&self, meeting: &Meeting, x: &Tensor) -> Result<Vec<Tensor>> {
        let device = x.device();
        // Each GPU has a stream of its own, so a rank must not read a part before the other GPU has written it, and must
        // not free its own part before all others have read it.
        device.synchronize()?;
        let parts = meeting.exchange(self.rank, x.clone())?;
        let parts = parts.iter().map(|part| part.to_device(device)).collect::<Result<Vec<_>>>()?;
        if device.is_cuda() {
            device.synchronize()?;
            meeting.exchange(self.rank, x.clone())?;
        }
        Ok(parts)
    }

    /// Returns why the world has ended, or `None` if it has not.
    pub fn end_reason(&self) -> Option<String> {
        self.meeting.as_ref()?.lock().end_reason.clone()
    }

    /// Ends the world. All ranks that wait for an exchange, now or later, get an error with this reason. Only the first
    /// reason counts.
    pub fn end(&self, reason: &str) {
        if let Some(meeting) = &self.meeting {
            let mut state = meeting.lock();
            state.end_reason.get_or_insert_with(|| reason.to_string());
            meeting.changed.notify_all();
        }
    }
}

/// Returns the part of `total` items that a rank holds.
///
/// Items are divided in units: a unit of a quantized matrix is a block, for example. Only the last unit may be
/// incomplete. The first ranks hold one unit more than the others if the units cannot be divided evenly. With more ranks
/// than units, the last ranks hold nothing.
pub fn share(total: usize, unit: usize, rank: usize, size: usize) -> Range<usize> {
    let units = total.div_ceil(unit);
    let start = |rank: usize| ((units / size * rank + rank.min(units % size)) * unit).min(total);
    start(rank)..start(rank + 1)
}

/// A place where the threads of all ranks exchange tensors.
#[derive(Debug)]
struct Meeting {
    size: usize,
    state: Mutex<MeetingState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MeetingState {
    /// What the ranks brought to the current exchange.
    brought: Vec<Option<Tensor>>,
    /// The number of exchanges that have ended.
    exchanges: u64,
    /// The tensors of the last exchange. They stay until every rank has come to the next exchange, so no rank misses
    /// them.
    last: Arc<Vec<Tensor>>,
    end_reason: Option<String>,
}

impl Meeting {
    fn new(size: usize) -> Self {
        let state = MeetingState { brought: vec![None; size], ..MeetingState::default() };
        Self { size, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every rank has brought a tensor. Returns the tensors of all ranks.
    fn exchange(&self, rank: usize, tensor: Tensor) -> Result<Arc<Vec<Tensor>>> {
        let mut state = self.lock();
        state.brought[rank] = Some(tensor);
        if state.end_reason.is_none() && state.brought.iter().all(Option::is_some) {
            state.last = Arc::new(state.brought.iter_mut().filter_map(Option::take).collect());
            state.exchanges += 1;
            self.changed.notify_all();
            return Ok(state.last.clone());
        }
        let before = state.exchanges;
        let is_waiting = |state: &mut MeetingState| state.exchanges == before && state.end_reason.is_none();
        let state = self.changed.wait_while(state, is_waiting).unwrap_or_else(PoisonError::into_inner);
        match &state.end_reason {
            Some(reason) if state.exchanges == before => bail!("{reason}"),
            _ => Ok(state.last.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn shares_cover_everything_once_and_differ_by_one_unit() {
        for (total, unit) in [(90, 1), (2880, 32), (113, 1), (96, 32), (100, 32), (8, 1), (3, 2), (0, 4)] {
            for size in 1..=9 {
                let shares: Vec<_> = (0..size).map(|rank| share(total, unit, rank, size)).collect();
                assert_eq!((shares[0].start, shares[size - 1].end), (0, total));
                assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(shares.iter().all(|share| share.start % unit == 0 || share.is_empty()));
                let units: Vec<usize> = shares.iter().map(|share| share.len().div_ceil(unit)).collect();
                assert!(units.is_sorted_by(|a, b| a >= b) && units[0] - units[size - 1] <= 1, "{units:?}");
            }
        }
        let blocks = |size| (0..size).map(|rank| share(90, 1, rank, size).len()).collect::<Vec<_>>();
        assert_eq!(blocks(4), [23, 23, 22, 22]);
        assert_eq!(blocks(8), [12, 12, 11, 11, 11, 11, 11, 11]);
    }

    /// Runs `work` on one thread per rank. Returns the results in the order of the ranks.
    fn on_threads<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = World::threads(size).into_iter().map(|world| scope.spawn(|| work(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn sums_are_added_in_the_order_of_the_ranks() {
        // In f32, 1e8 + 1 - 1e8 is 0, but 1e8 - 1e8 + 1 is 1.
        let values = [1e8f32, 1.0, -1e8];
        for _ in 0..100 {
            let sums = on_threads(3, |world| {
                let x = Tensor::new(&[values[world.rank()], world.rank() as f32], &Device::Cpu).unwrap();
                world.sum(&x).unwrap().to_vec1::<f32>().unwrap()
            });
            assert_eq!(sums, [[0.0, 3.0], [0.0, 3.0], [0.0, 3.0]]);
        }
    }

    #[test]
    fn ranks_exchange_many_times_without_mixing_data() {
        let sums = on_threads(4, |world| {
            (0..1000).all(|round| {
                let x = Tensor::new(&[(round * world.rank()) as f32], &Device::Cpu).unwrap();
                world.sum(&x).unwrap().to_vec1::<f32>().unwrap() == [(6 * round) as f32]
            })
        });
        assert_eq!(sums, [true; 4]);
    }

    #[test]
    fn uneven_and_empty_columns_are_placed_side_by_side() {
        let rows = on_threads(3, |world| {
            let columns = [2, 1, 0][world.rank()];
            let x = Tensor::full(world.rank() as f32, (2, columns), &Device::Cpu).unwrap();
            world.concat_columns(&x).unwrap().to_vec2::<f32>().unwrap()
        });
        assert!(rows.iter().all(|rows| rows == &[[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), "{rows:?}");
    }

    #[test]
    fn the_end_of_a_world_frees_the_ranks_that_wait() {
        let errors = on_threads(3, |world| match world.rank() {
            2 => {
                world.end("rank 2 failed");
                String::new()
            }
            _ => world.sum(&Tensor::new(&[1f32], &Device::Cpu).unwrap()).unwrap_err().to_string(),
        });
        assert!(errors[..2].iter().all(|error| error.contains("rank 2 failed")), "{errors:?}");
    }
}
