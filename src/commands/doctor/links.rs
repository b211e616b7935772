//! Checks how the GPUs can exchange data. Without direct exchange, a model on several GPUs is slower.

use std::panic::resume_unwind;
use std::thread;

use anyhow::Result;
use candle_core::Device;

use super::finding::Finding;
use crate::device::{self, DeviceChoice};
use crate::kernels::exchange::{self, ExchangePath, ExchangeTimes, LARGE_ELEMENTS, SMALL_ELEMENTS};
use crate::text::one_line;
use crate::world::World;

/// Checks the links between the first [`device::MAX_RANKS`] GPUs. Returns `None` if there are fewer than two GPUs.
pub fn check() -> Option<Finding> {
    let count = device::gpu_count().min(device::MAX_RANKS);
    (count > 1).then(|| {
        let direct = measure(count, ExchangePath::Direct);
        let through_host = matches!(direct, Ok(Err(_))).then(|| measure(count, ExchangePath::HostMemory));
        finding(count, direct, through_host)
    })
}

/// The measured times of a data exchange on one path. The inner error says why the GPUs cannot exchange data on this
/// path, or that a GPU does not answer. The outer error is any other failure, such as a GPU that cannot be opened.
type Measured = Result<Result<ExchangeTimes, String>>;

/// Measures the exchange between the first `count` GPUs on `path`.
fn measure(count: usize, path: ExchangePath) -> Measured {
    thread::scope(|scope| {
        let measure = |world: World| {
            let measured = measure_rank(&world, path);
            // If this rank fails, call `World::end`, so that the other ranks do not wait for this rank.
            measured.inspect_err(|error| world.end(&one_line(error)))
        };
        let threads: Vec<_> =
            World::threads(count).into_iter().map(|world| scope.spawn(move || measure(world))).collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        let results = results.collect::<Result<Vec<_>>>()?;
        // For each size, report the time of the slowest rank. If the exchange fails on any rank, report the failure.
        Ok(results.into_iter().reduce(|a, b| Ok(slower(a?, b?))).unwrap_or_else(|| Err("there is no GPU".into())))
    })
}

fn slower(a: ExchangeTimes, b: ExchangeTimes) -> ExchangeTimes {
    ExchangeTimes { small: a.small.max(b.small), large: a.large.max(b.large) }
}

fn measure_rank(world: &World, path: ExchangePath) -> Measured {
    match device::open(DeviceChoice::Cuda(world.rank()))? {
        Device::Cuda(device) => Ok(exchange::measure(world, &device, path)?),
        _ => Ok(Err("there is no GPU".into())),
    }
}

/// Returns the finding about the links. `through_host` is `None` if this path was not measured.
fn finding(count: usize, direct: Measured, through_host: Option<Measured>) -> Finding {
    const NEXT: &str = "nvidia-smi topo -p2p r";
    match (direct, through_host) {
        (Ok(Ok(times)), _) => {
            Finding::pass("links", format!("{count} GPUs exchange data directly: {}", described(times)))
        }
        (Ok(Err(reason)), Some(Ok(Ok(times)))) => {
            let times = described(times);
            let what = format!(
                "{count} GPUs exchange data through host memory: {times}. A direct exchange is faster, but {reason}"
            );
            Finding::warn("links", what, NEXT)
        }
        (Ok(Err(reason)), Some(Ok(Err(through_host)))) => {
            let what = format!(
                "{count} GPUs cannot exchange data without copies by the host, so --gpus is very slow. \
                 Direct exchange: {reason}. Exchange through host memory: {through_host}"
            );
            Finding::warn("links", what, NEXT)
        }
        (Ok(Err(reason)), None) => Finding::warn("links", reason, NEXT),
        (Err(error), _) | (_, Some(Err(error))) => Finding::fail("links", one_line(&error), NEXT),
    }
}

fn described(times: ExchangeTimes) -> String {
    let kilobytes = |elements: usize| (elements * size_of::<f32>()) as f64 / 1e3;
    let (small_kb, large_kb) = (kilobytes(SMALL_ELEMENTS), kilobytes(LARGE_ELEMENTS));
    let (small, large) = (times.small * 1e6, times.large * 1e6);
    format!("summing {small_kb:.1} KB takes {small:.1} µs, and {large_kb:.0} KB takes {large:.0} µs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::finding::FindingStatus;

    #[test]
    fn links_are_reported_with_their_times() {
        let times = || Ok(Ok(ExchangeTimes { small: 3.25e-6, large: 41e-6 }));
        let no_access = || Ok(Err("no peer access".into()));
        let found = finding(2, times(), None);
        assert_eq!(found.status, FindingStatus::Pass);
        assert!(found.what.ends_with("summing 11.5 KB takes 3.2 µs, and 4194 KB takes 41 µs"), "{}", found.what);
        let found = finding(2, no_access(), Some(times()));
        assert!(
            found.status == FindingStatus::Warn && found.what.contains("host memory: summing 11.5 KB"),
            "{}",
            found.what
        );
        let found = finding(2, no_access(), Some(Ok(Err("no pinned memory".into()))));
        assert!(found.status == FindingStatus::Warn && found.what.contains("no peer access"), "{}", found.what);
        assert!(found.what.ends_with("through host memory: no pinned memory"), "{}", found.what);
        assert_eq!(finding(2, no_access(), Some(Err(anyhow::anyhow!("the GPU is lost")))).status, FindingStatus::Fail);
        assert_eq!(finding(2, Err(anyhow::anyhow!("no GPU")), None).status, FindingStatus::Fail);
        let slow = ExchangeTimes { small: 2.0, large: 1.0 };
        assert_eq!(slower(slow, ExchangeTimes { small: 1.0, large: 3.0 }), ExchangeTimes { small: 2.0, large: 3.0 });
    }
}
