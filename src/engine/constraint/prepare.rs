//! Prepares the constraint of a request: compiles its grammars and creates the plan of the answer.

use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::compiler::invalid;
use super::context::ConstrainedRequest;
use super::cpu_time::{MaskBudget, ThreadClock, thread_time};
use super::plan::{END, Plan, PlanGraph, PlanNode, all_to};
use super::state::ConstraintState;
use super::{harmony, tagged};
use crate::chat::ChatFormat;
use crate::error::Error;

/// The maximum CPU time to compile the grammars of a request.
const MAX_COMPILE_CPU: Duration = Duration::from_millis(250);

/// The maximum time to wait until the grammars of a request are compiled.
/// On Linux, only a busy machine reaches this limit: an expensive grammar exceeds [`MAX_COMPILE_CPU`] first.
const MAX_COMPILE_WAIT: Duration = Duration::from_secs(5);

/// The interval at which the CPU time of the compiling thread is checked.
const COMPILE_POLL: Duration = Duration::from_millis(20);

/// The stack size of the thread that compiles grammars, in bytes. Deeply nested grammars cause deep recursion.
const COMPILE_STACK: usize = 32 << 20;

/// The limits on the time to compile the grammars of a request.
#[derive(Clone, Copy)]
struct CompileLimits {
    /// The maximum CPU time of the compiling thread.
    cpu: Duration,
    /// The maximum time to wait for the compiling thread.
    wait: Duration,
}

/// Compiles the grammars of a request. Returns the constraint state of a sequence before its first token.
///
/// Fails with [`Error::InvalidConstraint`] if the constraint is invalid, not supported or too expensive.
/// Fails with [`Error::CompilerBusy`] if the machine is too busy to compile the grammars in time.
/// On systems other than Linux, an expensive grammar can also cause this error.
pub fn prepare(request: ConstrainedRequest) -> Result<ConstraintState> {
    let name = request.constraint.answer.as_ref().map_or("tools", |answer| &answer.name).to_string();
    let limits = CompileLimits { cpu: MAX_COMPILE_CPU, wait: MAX_COMPILE_WAIT };
    let plan = run_limited(&name, limits, move || plan(request))?;
    Ok(ConstraintState::new(Arc::new(plan)))
}

/// Runs `compile` on a new thread, and waits for the result within `limits`.
/// `name` is the part of the request that the error names if `compile` exceeds the CPU limit or panics.
fn run_limited<T: Send + 'static>(
    name: &str,
    limits: CompileLimits,
    compile: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, result) = mpsc::sync_channel(1);
    let (clock_sender, clock) = mpsc::sync_channel(1);
    let run = move || {
        let _ = clock_sender.send(ThreadClock::new());
        let compiled = compile();
        // Each send fails only if the caller no longer waits. The compiler's own limits still bound this thread's work.
        let _ = sender.send((compiled, thread_time()));
    };
    let thread = thread::Builder::new().name("inferno-grammar".into()).stack_size(COMPILE_STACK);
    thread.spawn(run).context("cannot start a thread to compile a grammar")?;
    let too_slow = || invalid(name, &format!("compiling takes more than {} ms of CPU time", limits.cpu.as_millis()));
    let deadline = Instant::now() + limits.wait;
    let mut known = None;
    while Instant::now() < deadline {
        match result.recv_timeout(COMPILE_POLL) {
            Ok((Err(problem), _)) => return Err(problem),
            Ok((Ok(compiled), time)) if time <= limits.cpu => return Ok(compiled),
            Ok(_) => return Err(too_slow()),
            // The channel is disconnected because the compiling thread panicked.
            Err(RecvTimeoutError::Disconnected) => {
                return Err(invalid(
                    name,
                    "the grammar compiler crashed, which is a bug in inferno; simplify the grammar",
                ));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        known = known.or_else(|| clock.try_recv().ok());
        if known.as_ref().is_some_and(|clock: &ThreadClock| clock.elapsed() > limits.cpu) {
            return Err(too_slow());
        }
    }
    // On Linux, the cause is a busy machine and not the constraint, so the error is not `InvalidConstraint`.
    Err(Error::CompilerBusy { wait_s: limits.wait.as_secs_f64() }.into())
}

/// Compiles the grammars of a request, and creates the plan of its answer for the chat format.
fn plan(request: ConstrainedRequest) -> Result<Plan> {
    let stops = request.stops();
    let graph = match (&request.chat, &request.language.chat) {
        (Some(prompt), Some(ChatFormat::Harmony(tokens))) => {
            harmony::graph(&request, *tokens, prompt.has_generation_prompt)?
        }
        (Some(prompt), _) => tagged::graph(&request, &prompt.text)?,
        (None, _) => text_graph(&request, &stops)?,
    };
    let (vocab_size, end) = (request.compiler.vocab_size(), request.compiler.end());
    Ok(Plan { language: request.language, graph, stops, vocab_size, end, masks: MaskBudget::default() })
}

/// Returns the graph for a text completion, which has no chat format.
/// Fails if the constraint requires a tool call, or if it has no grammar for the text.
fn text_graph(request: &ConstrainedRequest, stops: &[u32]) -> Result<PlanGraph> {
    match &request.constraint.answer {
        Some(answer) if !request.constraint.requires_tool => {
            let text = request.grammar(answer, Vec::new(), all_to(stops, END))?;
            Ok(PlanGraph { nodes: vec![PlanNode::End, text], start: 1 })
        }
        _ => Err(invalid("tools", "a text completion cannot call tools")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(60);

    /// Returns the error message of `run_limited`, which must fail.
    fn failure(cpu: Duration, wait: Duration, compile: fn() -> Result<()>) -> String {
        format!("{:#}", run_limited("field", CompileLimits { cpu, wait }, compile).unwrap_err())
    }

    #[test]
    fn each_failure_has_its_own_message() {
        let invalid_grammar = failure(LONG, LONG, || Err(invalid("field", "unknown rule")));
        assert!(invalid_grammar.contains("field") && invalid_grammar.contains("unknown rule"), "{invalid_grammar}");
        // Use a long CPU limit, because a panic can print a backtrace, which takes CPU time.
        let panic = failure(LONG, LONG, || panic!("a panic of this test"));
        assert!(panic.contains("field") && panic.contains("the grammar compiler crashed"), "{panic}");
        let busy = failure(LONG, SHORT, || {
            thread::sleep(Duration::from_secs(1));
            Ok(())
        });
        assert!(!busy.contains("field") && busy.contains("within 0.1 s: the machine is busy"), "{busy}");
        #[cfg(target_os = "linux")]
        {
            let slow = failure(SHORT, LONG, || {
                while thread_time() < Duration::from_secs(1) {}
                Ok(())
            });
            assert!(slow.contains("field") && slow.contains("100 ms of CPU time"), "{slow}");
        }
        let limits = CompileLimits { cpu: MAX_COMPILE_CPU, wait: LONG };
        assert_eq!(run_limited("field", limits, || Ok(7)).unwrap(), 7);
    }
}
