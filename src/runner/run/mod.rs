//! The methods of [`Runner`] that run and queue steps.
//!
//! - `step`: `Runner::step`, which waits for the tokens of the step
//! - `step_on_gpu`: the methods behind `Runner::step` that run or start CUDA graphs
//! - `queue`: `Runner::queue` and `Runner::take`, for steps that can be queued while the previous step runs
//! - `queue_on_gpu`, `queue_on_cpu`: the methods behind `Runner::queue` for each kind of device

mod queue;
mod queue_on_cpu;
mod queue_on_gpu;
mod step;
mod step_on_gpu;

use crate::runner::Runner;
use crate::runner::step::RunnerFacts;

impl Runner {
    /// Returns the properties of this runner that decide how its steps run.
    pub(super) fn facts(&self) -> RunnerFacts {
        let launcher = self.launcher.as_ref();
        RunnerFacts {
            has_decode_graph: self.decode_graph.is_ok(),
            has_batch_graphs: launcher.is_some_and(|launcher| launcher.can_run_model(&self.decoder)),
            can_queue: match launcher {
                Some(_) => self.options.queue_steps.unwrap_or(true) && self.ranks.can_queue(),
                None => self.options.queue_steps.unwrap_or(false) && self.device.is_cpu(),
            },
            has_several_ranks: self.has_several_ranks(),
            is_deterministic: self.options.prompt_parts.is_some(),
        }
    }
}
