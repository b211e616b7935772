//! Tests of `world`, with ranks on threads that exchange CPU tensors.

use std::time::Instant;

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
    // The result depends on the order of additions: in f32, 1e8 + 1 - 1e8 is 0, but 1e8 - 1e8 + 1 is 1.
    let values = [1e8f32, 1.0, -1e8];
    for _ in 0..100 {
        let sums = on_threads(3, |world| {
            let x = Tensor::new(&[values[world.rank()], world.rank() as f32], &Device::Cpu).unwrap();
            world.all_reduce(&x).unwrap().to_vec1::<f32>().unwrap()
        });
        assert_eq!(sums, [[0.0, 3.0], [0.0, 3.0], [0.0, 3.0]]);
    }
}

#[test]
fn ranks_exchange_many_times_without_mixing_data() {
    let sums = on_threads(4, |world| {
        (0..1000).all(|round| {
            let x = Tensor::new(&[(round * world.rank()) as f32], &Device::Cpu).unwrap();
            world.all_reduce(&x).unwrap().to_vec1::<f32>().unwrap() == [(6 * round) as f32]
        })
    });
    assert_eq!(sums, [true; 4]);
}

#[test]
fn uneven_and_empty_columns_are_placed_side_by_side() {
    for (columns, expected) in [(4, vec![0.0, 0.0, 1.0, 2.0]), (2, vec![0.0, 1.0])] {
        let rows = on_threads(3, |world| {
            let own = world.share(columns, 1).len();
            let x = Tensor::full(world.rank() as f32, (2, own), &Device::Cpu).unwrap();
            world.all_gather_columns(&x, columns).unwrap().to_vec2::<f32>().unwrap()
        });
        assert!(rows.iter().all(|rows| rows[0] == expected && rows[1] == expected), "{rows:?}");
    }
}

#[test]
fn every_rank_gets_the_values_of_all() {
    let values = on_threads(3, |world| {
        let of_ranks = world.gather_values(world.rank() * 10).unwrap();
        (of_ranks.iter().map(|value| **value).collect::<Vec<_>>(), world.check().is_ok())
    });
    assert_eq!(values, vec![(vec![0, 10, 20], true); 3]);
}

#[test]
fn the_end_of_a_world_frees_the_ranks_that_wait() {
    let errors = on_threads(3, |world| match world.rank() {
        2 => {
            world.end("rank 2 failed");
            String::new()
        }
        _ => world.all_reduce(&Tensor::new(&[1f32], &Device::Cpu).unwrap()).unwrap_err().to_string(),
    });
    assert!(errors[..2].iter().all(|error| error.contains("rank 2 failed")), "{errors:?}");
}

#[test]
fn a_rank_that_does_not_answer_ends_the_world_with_its_name() {
    let limit = Duration::from_millis(500);
    let value = || Arc::new(());
    let ends = on_threads(3, |world| {
        let meeting = world.meeting.clone().unwrap();
        if world.rank() == 1 {
            // This rank takes twice as long as `limit`, but the others keep waiting, because it makes progress.
            for _ in 0..20 {
                std::thread::sleep(limit / 10);
                world.record_progress();
            }
            meeting.gather(1, value(), limit).unwrap();
            // Now this rank makes no progress until the others end the world.
            let has_ended = |_| {
                std::thread::sleep(limit / 10);
                world.end_reason().is_some()
            };
            assert!((0..100).any(has_ended), "the world has not ended");
            let error = meeting.gather(1, value(), limit).unwrap_err().to_string();
            return (error, Duration::ZERO);
        }
        meeting.gather(world.rank(), value(), limit).unwrap();
        let started = Instant::now();
        let error = meeting.gather(world.rank(), value(), limit).unwrap_err().to_string();
        (error, started.elapsed())
    });
    let expected = "GPU 2 of 3 does not answer; the other GPUs were stopped";
    // Compare only the first line: if RUST_BACKTRACE is set, candle errors also contain a backtrace.
    assert!(ends.iter().all(|(error, _)| error.lines().next() == Some(expected)), "{ends:?}");
    // One rank ends the world after waiting for the limit. The other rank may have waited for less than the limit.
    assert!(ends.iter().any(|(_, waited)| *waited >= limit), "{ends:?}");
}

#[test]
fn failures_are_reported_once_and_closing_is_not_a_failure() {
    let failures = |act: &dyn Fn(&[World])| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let worlds = World::threads(2);
        worlds[0].on_failure(move |reason| sender.send(reason.to_string()).unwrap());
        act(&worlds);
        drop(worlds);
        receiver.into_iter().collect::<Vec<_>>()
    };
    let fail_twice = |worlds: &[World]| {
        worlds[1].end("first");
        worlds[0].end("second");
    };
    assert_eq!(failures(&fail_twice), ["first"]);
    assert!(failures(&|worlds| worlds[0].close()).is_empty());
}
