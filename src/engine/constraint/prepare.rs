//! Prepares the constraint of a request: compiles its grammars and creates the plan of the answer.

use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::compiler::invalid;
use super::context::ConstrainedRequest;
use super::cpu_time::{MaskBudget, ThreadClock, thread_time};
use super::plan::{END, Part, PartId, Plan, all_to};
use super::state::ConstraintState;
use super::{harmony, tagged};
use crate::chat::ChatFormat;

/// The maximum CPU time to compile the grammars of a request.
const MAX_COMPILE_CPU: Duration = Duration::from_millis(250);

/// The longest time to wait for the grammars of a request. Reached only if the machine is busy.
const MAX_COMPILE_WAIT: Duration = Duration::from_secs(1);

/// The interval at which the CPU time of the compiling thread is checked.
const COMPILE_POLL: Duration = Duration::from_millis(20);

/// The stack size of the thread that compiles grammars, in bytes. Nested grammars need deep recursion.
const COMPILE_STACK: usize = 32 << 20;

/// The limits on the time to compile the grammars of a request.
#[derive(Clone, Copy)]
struct CompileLimits {
    /// The CPU time of the compiling thread.
    cpu: Duration,
    /// The time to wait for the compiling thread.
    wait: Duration,
}

/// Compiles the grammars of a request. Returns the constraint state of a sequence before its first token.
///
/// If a grammar is invalid, not supported or too large, fails with
/// [`Error::InvalidConstraint`](crate::error::Error::InvalidConstraint).
pub fn prepare(request: ConstrainedRequest) -> Result<ConstraintState> {
    let name = request.constraint.answer.as_ref().map_or("tools", |answer| &answer.name).to_string();
    let limits = CompileLimits { cpu: MAX_COMPILE_CPU, wait: MAX_COMPILE_WAIT };
    let plan = run_limited(&name, limits, move || plan(request))?;
    Ok(ConstraintState::new(Arc::new(plan)))
}

/// Runs `compile` on its own thread within `limits`. Errors about the limits name the request field `name`.
fn run_limited<T: Send + 'static>(
    name: &str,
    limits: CompileLimits,
    compile: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, result) = mpsc::sync_channel(1);
    let (clock_sender, clock) = mpsc::sync_channel(1);
    let run = move || {
        // This does not block, because the channel has room for the clock.
        let _ = clock_sender.send(ThreadClock::new());
        let compiled = compile();
        // The receiver may have given up. This thread still ends, because the compiler has limits of its own.
        let _ = sender.send((compiled, thread_time()));
    };
    let thread = thread::Builder::new().name("inferno-grammar".into()).stack_size(COMPILE_STACK);
    thread.spawn(run).context("cannot start a thread to compile a grammar")?;
    let too_slow = || invalid(name, &format!("compiling takes more than {} ms of CPU time", limits.cpu.as_millis()));
    let (deadline, mut known) = (Instant::now() + limits.wait, None);
    while Instant::now() < deadline {
        match result.recv_timeout(COMPILE_POLL) {
            Ok((Err(problem), _)) => return Err(problem),
            Ok((Ok(compiled), time)) if time <= limits.cpu => return Ok(compiled),
            Ok(_) => return Err(too_slow()),
            // The thread panicked.
            Err(RecvTimeoutError::Disconnected) => {
                return Err(invalid(name, "the grammar compiler failed: this is a bug in inferno or llguidance"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        known = known.or_else(|| clock.try_recv().ok());
        if known.as_ref().is_some_and(|clock: &ThreadClock| clock.elapsed() > limits.cpu) {
            return Err(too_slow());
        }
    }
    let seconds = limits.wait.as_secs_f64();
    Err(invalid(name, &format!("compiling takes more than {seconds} s because the server is busy: please try again")))
}

/// Creates the plan of the answer.
fn plan(request: ConstrainedRequest) -> Result<Plan> {
    let stops = request.stops();
    let (parts, start) = match (&request.chat, &request.language.chat) {
        (Some(prompt), Some(ChatFormat::Harmony(format))) => {
            harmony::parts(&request, format.control_tokens(), prompt.has_generation_prompt)?
        }
        (Some(prompt), _) => tagged::parts(&request, &prompt.text)?,
        (None, _) => text_parts(&request, &stops)?,
    };
    let (vocab_size, end) = (request.compiler.vocab_size(), request.compiler.end());
    Ok(Plan { language: request.language, parts, start, stops, vocab_size, end, masks: MaskBudget::default() })
}

/// Returns the parts of a text without a chat format.
fn text_parts(request: &ConstrainedRequest, stops: &[u32]) -> Result<(Vec<Part>, PartId)> {
    match &request.constraint.answer {
        Some(answer) if !request.constraint.requires_tool => {
            Ok((vec![Part::End, request.grammar(answer, Vec::new(), all_to(stops, END))?], 1))
        }
        _ => Err(invalid("tools", "a text completion cannot call tools")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the message if `compile` fails within 20 ms of CPU time and 300 ms.
    fn failure(compile: impl FnOnce() -> Result<()> + Send + 'static) -> String {
        let limits = CompileLimits { cpu: Duration::from_millis(20), wait: Duration::from_millis(300) };
        format!("{:#}", run_limited("field", limits, compile).unwrap_err())
    }

    #[test]
    fn each_failure_has_its_own_message() {
        // The name of the field and the cause must both be in the message.
        let fails = |cause: &str, compile: fn() -> Result<()>| {
            let message = failure(compile);
            assert!(message.contains("field") && message.contains(cause), "{message}");
        };
        fails("unknown rule", || Err(invalid("field", "unknown rule")));
        fails("the grammar compiler failed", || panic!("a panic of this test"));
        fails("the server is busy", || {
            thread::sleep(Duration::from_secs(1));
            Ok(())
        });
        #[cfg(target_os = "linux")]
        fails("20 ms of CPU time", || {
            while thread_time() < Duration::from_secs(1) {}
            Ok(())
        });
        let limits = CompileLimits { cpu: MAX_COMPILE_CPU, wait: Duration::from_secs(60) };
        assert_eq!(run_limited("field", limits, || Ok(7)).unwrap(), 7);
    }
}
