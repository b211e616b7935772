//! Checks whether the GPUs can exchange data directly. A model on several GPUs is slow without direct exchange.

use std::panic::resume_unwind;
use std::thread;

use anyhow::Result;
use candle_core::Device;

use super::finding::Finding;
use crate::device::{self, DeviceChoice, World};
use crate::kernels::exchange::{self, ExchangeTimes, LARGE_ELEMENTS, SMALL_ELEMENTS};
use crate::text::one_line;

/// Checks the links between GPUs. Returns `None` if there are fewer than two GPUs.
pub fn check() -> Option<Finding> {
    let count = device::gpu_count().min(device::MAX_RANKS);
    (count > 1).then(|| finding(count, measure(count)))
}

/// Measures the exchange between the first `count` GPUs. The inner error says why direct exchange is not possible.
fn measure(count: usize) -> Result<Result<ExchangeTimes, String>> {
    thread::scope(|scope| {
        let measure = |world: World| {
            let measured = measure_rank(&world);
            // If this rank fails, end the exchange, because the other ranks would otherwise wait for this rank.
            measured.inspect_err(|error| world.end(&one_line(error)))
        };
        let threads: Vec<_> =
            World::threads(count).into_iter().map(|world| scope.spawn(move || measure(world))).collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        let results = results.collect::<Result<Vec<_>>>()?;
        // Report the times of the slowest rank. If the exchange fails on any rank, report the failure.
        Ok(results.into_iter().reduce(|a, b| Ok(slower(a?, b?))).unwrap_or_else(|| Err("there is no GPU".into())))
    })
}

fn slower(a: ExchangeTimes, b: ExchangeTimes) -> ExchangeTimes {
    ExchangeTimes { small: a.small.max(b.small), large: a.large.max(b.large) }
}

fn measure_rank(world: &World) -> Result<Result<ExchangeTimes, String>> {
    match device::open(DeviceChoice::Cuda(world.rank()))? {
        Device::Cuda(device) => Ok(exchange::measure(world, &device)?),
        _ => Ok(Err("there is no GPU".into())),
    }
}

fn finding(count: usize, measured: Result<Result<ExchangeTimes, String>>) -> Finding {
    const NEXT: &str = "nvidia-smi topo -p2p r";
    match measured {
        Ok(Ok(ExchangeTimes { small, large })) => {
            let kilobytes = |elements: usize| (elements * size_of::<f32>()) as f64 / 1e3;
            let (small_kb, large_kb) = (kilobytes(SMALL_ELEMENTS), kilobytes(LARGE_ELEMENTS));
            let (small, large) = (small * 1e6, large * 1e6);
            let what = format!(
                "{count} GPUs exchange data directly: summing {small_kb:.1} KB takes {small:.1} µs, {large_kb:.0} KB \
                 {large:.0} µs"
            );
            Finding::pass("links", what)
        }
        Ok(Err(reason)) => {
            let what = format!("{count} GPUs cannot exchange data directly, so --gpus is slow: {reason}");
            Finding::warn("links", what, NEXT)
        }
        Err(error) => Finding::fail("links", one_line(&error), NEXT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::finding::Status;

    #[test]
    fn links_are_reported_with_their_times() {
        let found = finding(2, Ok(Ok(ExchangeTimes { small: 3.25e-6, large: 41e-6 })));
        assert_eq!(found.status, Status::Pass);
        assert!(found.what.ends_with("summing 11.5 KB takes 3.2 µs, 4194 KB 41 µs"), "{}", found.what);
        let found = finding(2, Ok(Err("no peer access".into())));
        assert!(found.status == Status::Warn && found.what.ends_with("slow: no peer access"), "{}", found.what);
        assert_eq!(finding(2, Err(anyhow::anyhow!("no GPU"))).status, Status::Fail);
        let slow = ExchangeTimes { small: 2.0, large: 1.0 };
        assert_eq!(slower(slow, ExchangeTimes { small: 1.0, large: 3.0 }), ExchangeTimes { small: 2.0, large: 3.0 });
    }
}
