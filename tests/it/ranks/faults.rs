//! Tests that an error, a panic or a hang of one rank ends the engine with an error that names the rank.

use std::process::Output;
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use inferno::device::Split;
use inferno::engine::{Engine, Fault, FaultTime, PlannedFault, RankFault};
use inferno::error::exit_code;
use inferno::world::ANSWER_TIMEOUT;
use inferno::{Error, GenerateOptions};
use tempfile::TempDir;

use crate::harness::TestCase;
use crate::runner::queued_steps;
use crate::support::engine::{Answer, greedy};
use crate::support::program::{inferno, text};

/// The number of ranks in the rank fault tests.
/// With tensor parallelism, the third rank has no KV heads of the demo model, so the tests cover a rank without heads.
const RANKS: usize = 3;

/// The time limit for noticing a failure, for dropping the engine, and for a run of the program.
/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(45);

/// What the engine is doing when a rank fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    Idle,
    Prefill,
    Decode,
    QueuedDecode,
}

fn load(work: Work, split: Split) -> Engine {
    let devices = ["cpu"; RANKS].join(",").parse().unwrap();
    let builder = queued_steps::demo().devices(devices).split(split).chunk(16);
    builder.queue_steps(work == Work::QueuedDecode).load().unwrap()
}

/// Returns the error message that clients must receive after the fault.
fn expected(rank: usize, fault: RankFault) -> String {
    let what = match fault {
        RankFault::Error => "failed: injected fault of a rank",
        RankFault::Panic => "failed: its thread panicked",
        RankFault::Hang => "does not answer",
    };
    format!("GPU {} of {RANKS} {what}; the other GPUs were stopped", rank + 1)
}

/// Returns the number of the step before which the fault is injected. With 0, the fault does not wait for a step.
/// Unless the engine is idle, the requests of `check` take more steps than this, so the fault always strikes.
fn step(work: Work) -> u64 {
    match work {
        Work::Idle => 0,
        Work::Prefill => 3,
        Work::Decode | Work::QueuedDecode => 20,
    }
}

/// Each engine has three rank threads. With too many engines, a rank might get no core for `ANSWER_TIMEOUT` (5 s).
const ENGINES_AT_ONCE: usize = 8;

/// The number of engines that `check` may still start.
static FREE_ENGINES: Mutex<usize> = Mutex::new(ENGINES_AT_ONCE);

/// Notified when an engine has ended.
static ENGINE_ENDED: Condvar = Condvar::new();

/// The permission to start an engine. Dropping it lets another test start an engine.
struct EnginePermit;

impl EnginePermit {
    /// Waits until fewer than [`ENGINES_AT_ONCE`] engines are running.
    fn wait() -> Self {
        *ENGINE_ENDED.wait_while(FREE_ENGINES.lock().unwrap(), |free| *free == 0).unwrap() -= 1;
        Self
    }
}

impl Drop for EnginePermit {
    fn drop(&mut self) {
        *FREE_ENGINES.lock().unwrap() += 1;
        ENGINE_ENDED.notify_one();
    }
}

fn check(rank: usize, fault: RankFault, work: Work, split: Split) {
    let _permit = EnginePermit::wait();
    let name = format!("{fault:?} of rank {rank} in {work:?} with {split:?}");
    let engine = load(work, split);
    let options = GenerateOptions { ignore_eos: true, max_tokens: Some(200), ..greedy() };
    let time = FaultTime::Step(step(work));
    let started = Instant::now();
    engine.inject_fault(Fault::Rank(PlannedFault { rank, fault, time })).unwrap();
    let prompt = engine.random_tokens(1, if work == Work::Prefill { 300 } else { 10 });
    let options = if work == Work::Prefill { GenerateOptions { max_tokens: Some(1), ..options } } else { options };
    let mut streams: Vec<_> = match work {
        Work::Idle => Vec::new(),
        // Submit two requests, because the fault must end all requests of the engine.
        _ => (0..2).map(|_| engine.complete_ids(&prompt, options.clone()).unwrap()).collect(),
    };
    if matches!(work, Work::Decode | Work::QueuedDecode) {
        for stream in &mut streams {
            assert!((0..3).all(|_| stream.next_blocking().unwrap().unwrap().token().is_some()), "{name}");
        }
    }
    for stream in &mut streams {
        let error =
            stream.into_iter().find_map(Result::err).unwrap_or_else(|| panic!("{name}: the request did not fail"));
        assert_eq!((error.to_string(), exit_code(&error)), (expected(rank, fault), 7), "{name}");
        assert!(stream.next_blocking().is_none());
    }
    while engine.failure().is_none() {
        assert!(started.elapsed() < LONG, "{name}: the failure was not noticed");
        thread::sleep(Duration::from_millis(10));
    }
    let noticed = started.elapsed();
    // The engine must wait for `ANSWER_TIMEOUT` (5 s) before it reports a rank that hangs.
    assert!(fault != RankFault::Hang || noticed > Duration::from_millis(4900), "{name}: reported after {noticed:?}");
    assert_eq!(engine.failure().unwrap().to_string(), expected(rank, fault), "{name}");
    assert!(engine.has_stopped() && !engine.is_responsive(Duration::from_secs(3600)), "{name}");
    // After the fault, calls and new requests fail with `GpuFailed` instead of waiting for the engine.
    let gpu_failed = |error: anyhow::Error| matches!(error.downcast_ref(), Some(Error::GpuFailed(_)));
    assert!(engine.with_runner(|_| ()).is_err_and(gpu_failed), "{name}");
    match engine.complete_ids(&prompt, options) {
        Ok(mut stream) => assert!(stream.next_blocking().unwrap().is_err_and(gpu_failed), "{name}"),
        Err(error) => assert!(gpu_failed(error), "{name}"),
    }
    let dropped = Instant::now();
    drop(engine);
    assert!(dropped.elapsed() < LONG, "{name}: {:?}", dropped.elapsed());
}

fn faults() -> Vec<TestCase<(RankFault, Work, Split)>> {
    let works = [
        ("idle", Work::Idle, Split::Tensor),
        ("prefill", Work::Prefill, Split::Tensor),
        ("decode", Work::Decode, Split::Tensor),
        ("decode_with_whole_layers", Work::Decode, Split::Layers),
        ("queued_decode", Work::QueuedDecode, Split::Tensor),
    ];
    let faults = [("error", RankFault::Error), ("panic", RankFault::Panic), ("hang", RankFault::Hang)];
    let cases = faults.into_iter().flat_map(|(fault_name, fault)| {
        works.map(|(name, work, split)| (format!("{fault_name}::{name}"), (fault, work, split)))
    });
    cases.map(|(name, value)| TestCase { name, need: None, value }).collect()
}

/// Tests the faults of all ranks at the same time, because an engine in which a rank hangs mostly waits.
#[test(each = faults)]
fn a_rank_that_fails_ends_the_engine_with_an_error_that_names_the_rank((fault, work, split): (RankFault, Work, Split)) {
    // The first rank runs on the engine thread. In an idle engine, this thread only waits for commands, so the first
    // rank cannot fail.
    let first = usize::from(work == Work::Idle);
    thread::scope(|scope| {
        for rank in first..RANKS {
            scope.spawn(move || check(rank, fault, work, split));
        }
    });
}

/// A rank must answer within [`ANSWER_TIMEOUT`], but an engine may wait longer than that for its next request.
#[test]
fn an_engine_that_is_idle_for_long_does_not_fail() {
    let engine = load(Work::Idle, Split::Tensor);
    thread::sleep(ANSWER_TIMEOUT + Duration::from_secs(3));
    assert!(engine.failure().is_none() && !engine.has_stopped());
    let options = GenerateOptions { max_tokens: Some(3), ignore_eos: true, ..greedy() };
    assert_eq!(Answer::read(engine.complete_ids(&[1, 2, 3], options).unwrap()).tokens.len(), 3);
}

/// Runs the program on three ranks with `fault` in `INFERNO_FAULT`. Returns the output and the run time.
fn run_with_fault(fault: &str, args: &[&str]) -> (Output, Duration) {
    let started = Instant::now();
    let mut command = inferno(&TempDir::new().unwrap());
    command.args(args).args(["--device", "cpu,cpu,cpu", "--context", "640"]).env("INFERNO_FAULT", fault);
    (command.output().unwrap(), started.elapsed())
}

#[test]
fn commands_exit_with_code_7_and_name_the_rank_that_failed() {
    let play = &["play", "demo", "--prompt", "Hello", "--max-tokens", "300"][..];
    let bench = &["bench", "demo", "-p", "128", "-n", "64", "-r", "50"][..];
    let serving = &["bench", "demo", "--concurrency", "4", "--input", "50", "--output", "300"][..];
    thread::scope(|scope| {
        for (args, fault, expected) in [
            (play, "1:error:3", "GPU 2 of 3 failed: injected fault of a rank"),
            (play, "2:panic:3", "GPU 3 of 3 failed: its thread panicked"),
            (play, "1:hang:3", "GPU 2 of 3 does not answer"),
            (play, "0:hang:3", "GPU 1 of 3 does not answer"),
            (play, "0:panic:3", "GPU 1 of 3 failed: its thread panicked"),
            (play, "1:panic:load", "GPU 2 of 3 failed: its thread panicked"),
            (play, "0:panic:load", "GPU 1 of 3 failed: its thread panicked"),
            (bench, "1:panic:0", "GPU 2 of 3 failed: its thread panicked"),
            (bench, "2:hang:0", "GPU 3 of 3 does not answer"),
            (bench, "0:hang:0", "GPU 1 of 3 does not answer"),
            (serving, "1:error:9", "GPU 2 of 3 failed: injected fault of a rank"),
            (serving, "1:hang:9", "GPU 2 of 3 does not answer"),
        ] {
            scope.spawn(move || {
                let (output, time) = run_with_fault(fault, args);
                let message = text(&output.stderr);
                assert_eq!(output.status.code(), Some(7), "{args:?} with {fault}: {message}");
                let errors: Vec<_> = message.lines().filter(|line| line.starts_with("error: ")).collect();
                let expected = format!("error: {expected}; the other GPUs were stopped");
                assert_eq!(errors, [expected], "{args:?} with {fault}");
                assert!(time < LONG, "{args:?} with {fault} took {time:?}");
            });
        }
    });
    let (output, _) = run_with_fault("1:error:load", play);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("error: GPU 2 of 3: injected fault of a rank"), "{}", text(&output.stderr));
}
