//! The recent speed of the engine.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The shortest time over which the speed is measured.
const MIN_PERIOD: Duration = Duration::from_secs(1);

/// Measures generated tokens per second between two calls.
pub struct Throughput(Mutex<Period>);

struct Period {
    started: Instant,
    tokens: u64,
    tok_per_s: f64,
}

impl Default for Throughput {
    fn default() -> Self {
        Self(Mutex::new(Period { started: Instant::now(), tokens: 0, tok_per_s: 0.0 }))
    }
}

impl Throughput {
    /// Returns the speed since the last call that was at least a second ago. `tokens` counts all tokens so far.
    pub fn measure(&self, tokens: u64) -> f64 {
        let mut period = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = period.started.elapsed();
        if elapsed >= MIN_PERIOD {
            let tok_per_s = tokens.saturating_sub(period.tokens) as f64 / elapsed.as_secs_f64();
            *period = Period { started: Instant::now(), tokens, tok_per_s };
        }
        period.tok_per_s
    }
}
