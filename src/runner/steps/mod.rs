//! The methods of [`Runner`](super::Runner) that run steps.
//!
//! - `run`: `Runner::step`, which waits for the tokens of the step
//! - `run_on_gpu`: the parts of `Runner::step` that run only on a GPU: CUDA graphs, and sampling on the device
//! - `queue`: `Runner::queue` and `Runner::take`, which let the host plan a step while the device runs the previous step
//! - `queue_on_gpu`: `Runner::queue` on a GPU

mod queue;
#[cfg(feature = "cuda")]
mod queue_on_gpu;
mod run;
#[cfg(feature = "cuda")]
mod run_on_gpu;
