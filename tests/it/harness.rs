//! Runs the tests in this binary in place of libtest. This page says how to write, skip and select tests.
//!
//! # Write a test
//!
//! Put the test into the module of its subject; the comment in `main.rs` lists the modules.
//! The name states what must hold, such as `interrupted_download_is_resumed`, so that the name of a failed test already
//! says what is broken.
//!
//! `#[test]` is this project's own attribute, which every module has without an import. It adds the function to the
//! tests of this harness. Its argument, if any, is a requirement or a list of cases. The doc comment of `test` in
//! `tests/macros/src/lib.rs` lists all arguments.
//!
//! Tests run in parallel. With `#[test(gpu_alone)]` or `#[test(each_alone = LIST)]`, a test runs while no other test
//! runs. Tests of several GPUs need this (see `tests_of_several_gpus_run_alone`).
//!
//! `main.rs` replaces `print!`, `println!` and `eprintln!`. Their output is shown only if the test fails, or with
//! `--no-capture`. Output of threads that the test starts is always shown.
//!
//! # Named cases
//!
//! `#[test(each = LIST)]` makes a test for each case. `LIST` is a function that returns the cases as a
//! `Vec<TestCase<T>>`, and the marked function takes a `T`:
//!
//! ```text
//! fn cuts() -> Vec<TestCase<usize>> {
//!     named_cases([("after_0_bytes", 0), ("after_9999_bytes", 9_999)])
//! }
//!
//! #[test(each = cuts)]
//! fn truncated_body_is_resumed(cut: usize) { ... }
//! ```
//!
//! The tests are then named `hub::hostile::truncated_body_is_resumed::after_0_bytes` and so on.
//! Each case passes, fails or is skipped separately, and can run without the others.
//! Prefer cases to a loop, because a loop stops at the first case that fails. A loop is enough for a table of inputs
//! that run in milliseconds; its assertions must then name the input.
//!
//! The harness calls `LIST` on every machine, even to print the names. `LIST` must therefore need no GPU and no
//! fixtures, and should do little work.
//!
//! # Skipped tests
//!
//! A test states what it needs: `#[test(gpu)]`, `#[test(fixtures)]` and so on, or the field `need` of a [`TestCase`].
//! libtest can ignore a test only at compile time. This harness checks a [`Need`] only when it runs the test.
//! If the machine or the build does not meet the need, the test is skipped: it is reported as `ignored`.
//! The last lines of the output say for each unmet need how many tests were skipped, and which command runs them:
//!
//! ```text
//! test weights::read_ahead::tensors_on_a_gpu_equal_those_of_the_file ... ignored (needs an NVIDIA GPU)
//! skipped: 12 tests need an NVIDIA GPU; run: INFERNO_REQUIRE_GPU=1 cargo test --features cuda
//! ```
//!
//! - With `INFERNO_REQUIRE_GPU=1`, tests that need a GPU are not skipped. Without a GPU, they fail.
//! - `--include-ignored` runs all tests, and `--ignored` runs only those with a need, whether or not it is met.
//! - Builds without CUDA also skip the tests in modules that are compiled only with CUDA, one for each function.
//! - Do not return early from a test whose requirement is missing, because the test would be reported as passed.
//!   `gpu_if_expected` and `fixtures_if_set` in `support` are for tests that run everywhere, but check more with a GPU
//!   or with fixtures.
//!
//! # Select tests
//!
//! A filter selects the tests whose names contain it. A name is the path of the function without the crate, followed
//! by the name of the case. Several filters select the tests that match any of them:
//!
//! ```text
//! cargo test --test it -- hub:: layers                              two modules
//! cargo test --test it -- golden::mean_nll                          one function, with all its cases
//! cargo test --test it -- golden::mean_nll --list                   prints the names of these cases
//! cargo test --test it -- --exact models::golden::mean_nll_agrees_with_transformers::qwen3::cpu_f32
//! ```
//!
//! Most options of libtest work, such as `--exact`, `--skip`, `--test-threads` and `--no-capture`,
//! and so do the variables `RUST_TEST_THREADS` and `RUST_TEST_NOCAPTURE`.
//!
//! # Helpers
//!
//! `support` has the helpers for tests of several modules; the comment in `support/mod.rs` lists them.
//! Helpers of one module are in the `mod.rs` of its folder. Examples are `serve/client.rs`, which starts a server and
//! sends requests to it, and the simulated machine in `hub/mod.rs`.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, RwLock};

use clap::Parser;
use inferno::device::{self, DeviceChoice};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::support::program::{can_mount, libraries_are_loaded_on_demand};

/// A function that returns the tests of one function marked `#[test]`: one test, or one test for each case.
/// `#[test]` is this project's own attribute (`tests/macros`), which submits the registration.
pub struct Registration(pub fn() -> Vec<Test>);

inventory::collect!(Registration);

pub struct Test {
    /// The full path: crate, modules, function and case (if any), joined with `::`.
    pub path: String,
    pub need: Option<Need>,
    /// Whether the test must run alone, with no other test at the same time.
    pub is_alone: bool,
    pub run: Box<dyn FnOnce() + Send>,
}

/// One case of a function marked `#[test(each = LIST)]` or `#[test(each_alone = LIST)]`.
pub struct TestCase<T> {
    /// The end of the test's name. It may contain `::`.
    pub name: String,
    pub need: Option<Need>,
    /// The argument of the function.
    pub value: T,
}

/// Returns the tests of a function marked `#[test(each = LIST)]` or `#[test(each_alone = LIST)]`: one for each case.
pub fn tests_of_cases<T: Send + 'static>(path: &str, cases: Vec<TestCase<T>>, is_alone: bool, run: fn(T)) -> Vec<Test> {
    assert!(!cases.is_empty(), "{path} has no cases");
    let test = |TestCase { name, need, value }: TestCase<T>| Test {
        path: format!("{path}::{name}"),
        need,
        is_alone,
        run: Box::new(move || run(value)),
    };
    cases.into_iter().map(test).collect()
}

impl Test {
    /// Returns the name that test filters match: the path without the crate.
    fn name(&self) -> &str {
        self.path.split_once("::").map_or(&self.path, |(_, name)| name)
    }
}

/// A requirement of a test. If the machine or the build does not meet it, the test is reported as ignored,
/// unless `--ignored` or `--include-ignored` is given.
#[derive(Clone, Copy, PartialEq)]
pub enum Need {
    Gpu,
    /// An NVIDIA GPU with compute capability 9.0.
    Hopper,
    /// An NVIDIA GPU, and a build with the feature `flash-attn`.
    FlashAttn,
    Fixtures,
    FullSize,
    /// A build of inferno that starts without an NVIDIA driver.
    NoDriver,
    /// The right to mount filesystems, for tests of full and read-only disks.
    Mount,
    /// A signal that this process does not ignore. Only cases whose signal is ignored have this need.
    DefaultSignal,
}

impl Need {
    const ALL: [Need; 8] = [
        Need::Gpu,
        Need::Hopper,
        Need::FlashAttn,
        Need::Fixtures,
        Need::FullSize,
        Need::NoDriver,
        Need::Mount,
        Need::DefaultSignal,
    ];

    /// Returns whether this machine and this build meet the requirement.
    /// For `Fixtures` and `FullSize`, checks only that the environment variable is set.
    /// With `INFERNO_REQUIRE_GPU=1`, GPU tests run even without a GPU, and fail.
    fn is_met(self) -> bool {
        match self {
            Need::Gpu => is_gpu_expected(),
            Need::Hopper => is_hopper_expected(),
            Need::FlashAttn => cfg!(feature = "flash-attn") && is_gpu_expected(),
            Need::Fixtures => std::env::var_os("INFERNO_FIXTURES").is_some(),
            Need::FullSize => std::env::var_os("INFERNO_FULL_SIZE").is_some(),
            Need::NoDriver => libraries_are_loaded_on_demand(),
            Need::Mount => can_mount(),
            Need::DefaultSignal => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Need::Gpu => "an NVIDIA GPU",
            Need::Hopper => "an NVIDIA Hopper GPU",
            Need::FlashAttn => "an NVIDIA GPU and a build with the feature flash-attn",
            Need::Fixtures => "the fixtures in INFERNO_FIXTURES",
            Need::FullSize => "a GPU and the model in INFERNO_FULL_SIZE",
            Need::NoDriver => "a build that starts without an NVIDIA driver",
            Need::Mount => "the right to mount filesystems",
            Need::DefaultSignal => "a signal that this process does not ignore",
        }
    }

    fn command(self) -> &'static str {
        match self {
            Need::Gpu => "INFERNO_REQUIRE_GPU=1 cargo test --features cuda",
            Need::Hopper => "INFERNO_REQUIRE_GPU=1 cargo test --features cuda, with a Hopper GPU as the first GPU",
            Need::FlashAttn => "INFERNO_REQUIRE_GPU=1 cargo test --features flash-attn",
            Need::Fixtures => "INFERNO_FIXTURES=DIR cargo test",
            Need::FullSize => "INFERNO_FULL_SIZE=DIR cargo test --release --features cuda full_size",
            Need::NoDriver => "cargo test --release --features cuda",
            Need::Mount => "cargo test, as a user for whom `unshare -Urm` succeeds",
            Need::DefaultSignal => "cargo test, but not under `nohup`",
        }
    }
}

/// Returns whether a GPU is present or `INFERNO_REQUIRE_GPU=1` requires one.
pub fn is_gpu_expected() -> bool {
    std::env::var("INFERNO_REQUIRE_GPU").is_ok_and(|value| !matches!(value.as_str(), "" | "0"))
        || inferno::device::gpu_count() > 0
}

/// Returns whether a GPU is expected, and the first GPU is a Hopper GPU. A GPU that cannot be opened counts as Hopper,
/// so that its tests run and fail.
fn is_hopper_expected() -> bool {
    static IS_EXPECTED: LazyLock<bool> = LazyLock::new(|| {
        let capability = || device::info(&device::open(DeviceChoice::FirstCuda).ok()?).ok()?.compute_capability;
        is_gpu_expected() && capability().is_none_or(|capability| capability == (9, 0))
    });
    *IS_EXPECTED
}

/// Fails a GPU test in a build without CUDA.
#[cfg(not(feature = "cuda"))]
fn fail_without_cuda() {
    panic!("this build does not include CUDA; run: {}", Need::Gpu.command());
}

/// Returns stand-ins for the tests in modules that are compiled only with CUDA, so that other builds list these tests.
/// Each stand-in is reported as ignored, or fails if it runs.
#[cfg(not(feature = "cuda"))]
fn tests_of_cuda_builds() -> Vec<Test> {
    let modules: &[(&str, &str)] = cuda_modules!();
    let tests =
        modules.iter().flat_map(|(module, source)| source.split("\n#[test").skip(1).map(move |rest| (module, rest)));
    let tests = tests.filter_map(|(module, rest)| {
        let (argument, function) = rest.split_once(']')?;
        let name = function.split_once("fn ")?.1.split('(').next()?;
        let need = if argument == "(full_size)" { Need::FullSize } else { Need::Gpu };
        Some(Test {
            path: format!("it::{module}::{name}"),
            need: Some(need),
            is_alone: false,
            run: Box::new(fail_without_cuda),
        })
    });
    tests.collect()
}

#[cfg(not(feature = "cuda"))]
#[test]
fn builds_without_cuda_list_the_tests_of_every_cuda_module() {
    let tests = tests_of_cuda_builds();
    for module in [
        "runner::decode_graph",
        "ranks::on_gpus",
        "kernels::attention_tiles",
        "kernels::experts",
        "kernels::matmul",
        "kernels::sampling",
        "kernels::step_inputs",
    ] {
        let start = format!("{module}::");
        assert!(tests.iter().any(|test| test.name().starts_with(&start)), "no test of the module {module} is listed");
    }
}

#[cfg(feature = "cuda")]
fn tests_of_cuda_builds() -> Vec<Test> {
    Vec::new()
}

/// Tests of several GPUs must run alone, because their kernels wait for kernels on other GPUs.
/// If another test loaded kernels or allocated GPU memory at the same time, the driver could wait for the running
/// kernels before it launches the kernels that they wait for, which would be a deadlock.
#[cfg(feature = "cuda")]
#[test]
fn tests_of_several_gpus_run_alone() {
    let tests: Vec<Test> =
        inventory::iter::<Registration>.into_iter().flat_map(|Registration(tests)| tests()).collect();
    let mut tests = tests.iter().filter(|test| test.name().starts_with("ranks::on_gpus::")).peekable();
    assert!(tests.peek().is_some(), "no test of the module ranks::on_gpus is registered");
    tests.for_each(|test| assert!(test.is_alone, "{} does not run alone", test.name()));
}

/// The command-line options of libtest-mimic, and two of libtest that it lacks: more than one filter, and
/// `--no-capture`.
#[derive(Parser)]
struct Options {
    #[command(flatten)]
    common: Arguments,
    #[arg(value_name = "FILTER", hide = true)]
    more_filters: Vec<String>,
    #[arg(long = "no-capture", hide = true)]
    no_capture: bool,
}

/// Runs the tests that the command line selects.
pub fn main() -> ExitCode {
    let Options { mut common, more_filters, no_capture } = Options::parse();
    let is_captured = !(no_capture || common.nocapture || std::env::var_os("RUST_TEST_NOCAPTURE").is_some());
    let threads = std::env::var("RUST_TEST_THREADS").ok().and_then(|threads| threads.parse().ok());
    common.test_threads = common.test_threads.or(threads);
    let registrations = inventory::iter::<Registration>.into_iter();
    let mut tests: Vec<Test> =
        registrations.flat_map(|Registration(tests)| tests()).chain(tests_of_cuda_builds()).collect();
    tests.sort_by(|a, b| a.path.cmp(&b.path));
    if !more_filters.is_empty() {
        let filters: Vec<String> = common.filter.take().into_iter().chain(more_filters).collect();
        let is_selected = |name: &str| filters.iter().any(|f| if common.exact { name == f } else { name.contains(f) });
        tests.retain(|test| is_selected(test.name()));
    }
    let skipped: Arc<[AtomicUsize; Need::ALL.len()]> = Arc::default();
    let runs_ignored = common.ignored || common.include_ignored;
    let trials = tests.into_iter().map(|test| {
        let (skipped, need) = (skipped.clone(), test.need);
        let trial = Trial::ignorable_test(test.name().to_string(), move || match need {
            Some(need) if !runs_ignored && !need.is_met() => {
                skipped[need as usize].fetch_add(1, Ordering::Relaxed);
                Ok(Completion::ignored_with(format!("needs {}", need.name())))
            }
            _ => {
                // `run_captured` catches panics, so a panicking test does not poison `RUNNING`.
                let (_others, _alone) = match test.is_alone {
                    true => (None, Some(RUNNING.write())),
                    false => (Some(RUNNING.read()), None),
                };
                IS_ALONE.set(test.is_alone);
                run_captured(test.run, is_captured).map(|()| Completion::Completed)
            }
        });
        // `--ignored` runs only the tests that have a requirement.
        trial.with_ignored_flag(common.ignored && need.is_some())
    });
    let trials = trials.collect();
    install_panic_hook();
    let conclusion = libtest_mimic::run(&common, trials);
    for need in Need::ALL {
        let count = skipped[need as usize].load(Ordering::Relaxed);
        if count > 0 {
            let tests_need = if count == 1 { "test needs" } else { "tests need" };
            std::println!("skipped: {count} {tests_need} {}; run: {}", need.name(), need.command());
        }
    }
    conclusion.exit_code()
}

/// A lock that every running test holds. Most tests share it. A test that must run alone holds it exclusively.
static RUNNING: RwLock<()> = RwLock::new(());

thread_local! {
    /// The output of the test on this thread, or `None` if output is not captured.
    static CAPTURED: RefCell<Option<String>> = const { RefCell::new(None) };
    /// Whether the test on this thread runs alone.
    static IS_ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the test on this thread runs alone.
pub fn is_alone() -> bool {
    IS_ALONE.get()
}

/// Runs one test. If `is_captured`, its output is shown only if the test fails.
fn run_captured(run: impl FnOnce(), is_captured: bool) -> Result<(), Failed> {
    CAPTURED.set(is_captured.then(String::new));
    let outcome = catch_unwind(AssertUnwindSafe(run));
    let output = CAPTURED.take().unwrap_or_default();
    outcome.map_err(|_| Failed::from(output))
}

/// Prints text, or buffers it if the output of this thread is captured.
/// `println!` and the other macros in `main.rs` call this function.
pub fn print(text: std::fmt::Arguments) {
    let is_kept = CAPTURED.with_borrow_mut(|captured| captured.as_mut().map(|output| output.write_fmt(text))).is_some();
    if !is_kept {
        std::print!("{text}");
    }
}

/// Installs a panic hook that adds panic messages to the captured output of the panicking thread.
/// On a thread without captured output, the default hook runs.
fn install_panic_hook() {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let is_kept = CAPTURED.with_borrow_mut(|captured| {
            captured.as_mut().map(|output| {
                let backtrace = Backtrace::capture();
                let _ = writeln!(output, "{panic}");
                if backtrace.status() == BacktraceStatus::Captured {
                    let _ = writeln!(output, "{backtrace}");
                }
            })
        });
        if is_kept.is_none() {
            default_hook(panic);
        }
    }));
}
