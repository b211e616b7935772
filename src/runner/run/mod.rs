//! The methods of [`Runner`](crate::runner::Runner) that run and queue steps.
//!
//! - `step`: `Runner::step`, which waits for the tokens of the step
//! - `step_on_graph`: the methods behind `Runner::step` that run or start CUDA graphs
//! - `queue`: `Runner::queue` and `Runner::take`, for steps that can be queued while the previous step runs
//! - `queue_on_cpu`: the method behind `Runner::queue` that runs a step at once on a CPU, for tests
//! - `solo`: `Runner::logits` and other methods for one sequence that has the KV cache to itself
//! - `bench`: prefills, decodes and measures this sequence, for the command `bench` and for tests

mod bench;
mod queue;
mod queue_on_cpu;
mod solo;
mod step;
mod step_on_graph;
