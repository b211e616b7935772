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

/// Compiles the grammars of a request. Returns the constraint state of a sequence before its first token.
///
/// If a grammar is invalid, not supported or too large, fails with
/// [`Error::InvalidConstraint`](crate::error::Error::InvalidConstraint).
pub fn prepare(request: ConstrainedRequest) -> Result<ConstraintState> {
    let (sender, result) = mpsc::sync_channel(1);
    let name = request.constraint.answer.as_ref().map_or("tools", |answer| &answer.name).to_string();
    let (clock_sender, clock) = mpsc::sync_channel(1);
    let compile = move || {
        // This does not block, because the channel has room for the clock.
        let _ = clock_sender.send(ThreadClock::new());
        let plan = plan(request);
        // The receiver may have given up. This thread still ends, because the compiler has limits of its own.
        let _ = sender.send((plan, thread_time()));
    };
    let thread = thread::Builder::new().name("inferno-grammar".into()).stack_size(COMPILE_STACK);
    thread.spawn(compile).context("cannot start a thread to compile a grammar")?;
    let (deadline, mut known) = (Instant::now() + MAX_COMPILE_WAIT, None);
    while Instant::now() < deadline {
        match result.recv_timeout(COMPILE_POLL) {
            Ok((Err(problem), _)) => return Err(problem),
            Ok((Ok(plan), time)) if time <= MAX_COMPILE_CPU => return Ok(ConstraintState::new(Arc::new(plan))),
            Ok(_) | Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        known = known.or_else(|| clock.try_recv().ok());
        if known.as_ref().is_some_and(|clock: &ThreadClock| clock.elapsed() > MAX_COMPILE_CPU) {
            break;
        }
    }
    Err(invalid(&name, &format!("compiling takes more than {} ms", MAX_COMPILE_CPU.as_millis())))
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

/// Returns the parts of a text completion, which has no chat format.
fn text_parts(request: &ConstrainedRequest, stops: &[u32]) -> Result<(Vec<Part>, PartId)> {
    match &request.constraint.answer {
        Some(answer) if !request.constraint.requires_tool => {
            Ok((vec![Part::End, request.grammar(answer, Vec::new(), all_to(stops, END))?], 1))
        }
        _ => Err(invalid("tools", "a text completion cannot call tools")),
    }
}
