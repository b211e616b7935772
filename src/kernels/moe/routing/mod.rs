//! Routing: chooses the experts of each token, and sorts the (token, expert) pairs by expert.

#[cfg(feature = "cuda")]
mod choose_experts;
pub mod expert_usage;
#[cfg(feature = "cuda")]
pub mod route;
#[cfg(feature = "cuda")]
pub(super) mod sort_by_expert;
pub mod topk;

use candle_core::{Result, bail};

use crate::kernels::constants::MAX_CHOSEN_EXPERTS;

pub use crate::kernels::constants::MAX_EXPERTS;

/// Fails if the kernels cannot route each token to `chosen` of `experts` experts.
pub fn check_routing(chosen: usize, experts: usize) -> Result<()> {
    if chosen == 0 || chosen > experts || chosen > MAX_CHOSEN_EXPERTS || experts > MAX_EXPERTS {
        bail!(
            "cannot route each token to {chosen} of {experts} experts: the limits are 1 to {MAX_CHOSEN_EXPERTS} \
             experts per token, and {MAX_EXPERTS} experts"
        );
    }
    Ok(())
}
