//! [`MemoryPlan`]: how much memory a model needs, computed from its config and weight headers.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! The loader makes the plan before it allocates memory for the model. `inferno show` prints the plan.
//!
//! - `plan`: [`MemoryPlan`], its constructors, and the user's options; `token_workspace`: activation memory per token
//! - `sizes`: the sizes of the KV cache and of the workspace
//! - `division`: divides the model among ranks, and plans the memory of one rank
//! - `fit`: which contexts and chunk sizes fit; `choice`: chooses the context length and the chunk size
//! - `out_of_memory`: the error if the model does not fit

mod choice;
mod division;
mod fit;
mod out_of_memory;
mod plan;
mod sizes;
#[cfg(test)]
pub(super) mod test_plan;
mod token_workspace;

pub use plan::{Capacity, DeviceKind, MemoryPlan};
