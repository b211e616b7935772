//! Connects the GPUs of all ranks, and measures how fast they exchange data.

use std::sync::Arc;
use std::time::Instant;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Device, Result as CandleResult, Tensor};

use super::gpu_exchange::GpuExchange;
use super::mailbox::RankMailbox;
use super::path::ExchangePath;
use super::sizes::{ExchangeTimes, LARGE_ELEMENTS, SMALL_ELEMENTS};
use crate::world::{Exchange, World};

/// Returns `world` with an exchange on the first of `paths` that works. If no path works, returns `world` unchanged.
/// Fails if the world has ended, or ends because a rank does not answer.
pub fn connect(world: World, device: &CudaDevice, paths: &[ExchangePath]) -> CandleResult<World> {
    for &path in paths {
        match connected(&world, device, path)? {
            Ok(exchange) => {
                if world.is_first() {
                    match path {
                        ExchangePath::Direct => tracing::info!(ranks = world.size(), "the GPUs exchange data directly"),
                        ExchangePath::HostMemory => tracing::info!(
                            ranks = world.size(),
                            "the GPUs exchange data through host memory, which is slower than a direct exchange"
                        ),
                    }
                }
                return Ok(world.with_exchange(Arc::new(exchange)));
            }
            Err(reason) => {
                // All ranks get the same reason, so only the first rank logs it.
                if world.is_first() {
                    tracing::warn!(%reason, ?path, "the GPUs cannot exchange data on this path");
                }
            }
        }
    }
    if world.is_first() {
        tracing::warn!("the host copies all data between the GPUs, which is very slow");
    }
    Ok(world)
}

/// Creates and tests the exchange between this rank and all other ranks.
///
/// The inner error is the reason why the GPUs cannot exchange data on `path`. All ranks receive the same inner error.
/// An outer error means that the world has ended.
fn connected(world: &World, device: &CudaDevice, path: ExchangePath) -> CandleResult<Result<GpuExchange, String>> {
    let mailboxes = match agree(world, RankMailbox::new(device, path))? {
        Ok(mailboxes) => mailboxes,
        Err(reason) => return Ok(Err(reason)),
    };
    let exchange = GpuExchange::new(world.rank(), device, mailboxes);
    let opened = exchange.mailboxes.iter().try_for_each(|peer| exchange.own().enable_access_to(peer));
    if let Err(reason) = agree(world, opened.and_then(|()| exchange.load_kernels()))? {
        return Ok(Err(reason));
    }
    // The exchange must be tested, because some drivers report peer access that does not work.
    // If the test fails on this rank, end the exchange, because the other ranks may still wait for this rank.
    let tested = exchange.test().inspect_err(|_| exchange.end());
    Ok(agree(world, tested)?.map(|_| exchange))
}

/// Connects the GPUs of all ranks on `path`, and measures the mean time of a sum over all ranks, for two tensor sizes.
///
/// The inner error is the reason why the GPUs cannot exchange data on `path`, or says that a GPU stopped answering.
/// An outer error means that the world has ended or that a CUDA call failed.
pub fn measure(world: &World, device: &CudaDevice, path: ExchangePath) -> CandleResult<Result<ExchangeTimes, String>> {
    let exchange = match connected(world, device, path)? {
        Ok(exchange) => exchange,
        Err(reason) => return Ok(Err(reason)),
    };
    let time = |elements: usize| -> CandleResult<f64> {
        // Many more operations than this could fill the launch queue of a GPU. On a shared GPU, the other ranks would
        // then be blocked, too.
        const OPERATIONS: usize = 100;
        let x = Tensor::new(vec![1f32; elements], &Device::Cuda(device.clone()))?;
        device.cuda_stream().synchronize().w()?;
        world.barrier()?;
        let started = Instant::now();
        for _ in 0..OPERATIONS {
            exchange.queue_sum(&x)?;
        }
        device.cuda_stream().synchronize().w()?;
        Ok(started.elapsed().as_secs_f64() / OPERATIONS as f64)
    };
    let times = ExchangeTimes { small: time(SMALL_ELEMENTS)?, large: time(LARGE_ELEMENTS)? };
    let missing = exchange.missing_rank().map(|rank| format!("GPU {} does not answer", rank + 1));
    Ok(missing.map_or(Ok(times), Err))
}

/// Returns the results of all ranks, or the error message of the lowest-numbered rank that failed.
/// An outer error means that the world has ended.
///
/// Every rank must call this function, even if its `result` is an error, because the other ranks wait for this call.
fn agree<T: Send + Sync + 'static>(
    world: &World,
    result: CandleResult<T>,
) -> CandleResult<Result<Vec<Arc<T>>, String>> {
    let own = result.map(Arc::new).map_err(|error| error.to_string());
    Ok(world.gather_values(own)?.iter().map(|of_rank| (**of_rank).clone()).collect())
}
