//! The engine thread's loop: plan, step, deliver. Only this thread uses the model.
//!
//! Each decode step sends its token to the client. `deliver` sends the finish reason or the error of a sequence.
//!
//! Requests run one at a time, in submission order.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};

use anyhow::{Result, anyhow};

use super::request::FinishReason;
use super::sequence::Sequence;
use super::stats::{self, Counters};
use crate::language::Language;
use crate::runner::{DecodeStep, Runner};

/// A message from a client to the engine thread.
pub enum Command {
    /// Answer a request.
    Submit(Box<Sequence>),
    /// Call a function with the runner, after all earlier requests.
    Run(RunnerCall),
    /// Reject all later requests.
    Drain,
    /// End the thread. Unfinished requests end with an error.
    Shutdown,
}

/// A function that needs exclusive access to the model.
pub type RunnerCall = Box<dyn FnOnce(&mut Runner) + Send>;

/// A queued request or call.
enum Job {
    Sequence(Box<Sequence>),
    Call(RunnerCall),
}

/// The action that the engine loop performs next.
enum Plan {
    /// Start the sequence: keep the longest prefix of its prompt that is already in the KV cache.
    Start,
    /// Prefill the chunk of the prompt in this range of token positions.
    Prefill(Range<usize>),
    /// Generate a token.
    Decode,
    /// End the running sequence.
    Finish(FinishReason),
}

/// The state of the engine thread.
pub struct EngineLoop {
    runner: Runner,
    language: Arc<Language>,
    commands: Receiver<Command>,
    counters: Arc<Counters>,
    waiting: VecDeque<Job>,
    running: Option<Box<Sequence>>,
    is_draining: bool,
}

impl EngineLoop {
    pub fn new(runner: Runner, language: Arc<Language>, commands: Receiver<Command>, counters: Arc<Counters>) -> Self {
        Self { runner, language, commands, counters, waiting: VecDeque::new(), running: None, is_draining: false }
    }

    /// Runs until shutdown, or until all handles are dropped.
    pub fn run(mut self) {
        while self.receive_commands() {
            self.end_canceled();
            self.admit();
            if let Some(sequence) = &mut self.running {
                let plan = plan(sequence, &self.runner);
                let outcome = step(plan, sequence, &mut self.runner, &self.language, &self.counters);
                if outcome.is_err() {
                    // After an error, the contents of the KV cache are unknown.
                    self.runner.reset();
                }
                self.count_cached_tokens();
                self.deliver(outcome);
            }
        }
    }

    /// Queues incoming commands. Blocks while idle. Returns whether the loop should continue.
    fn receive_commands(&mut self) -> bool {
        loop {
            let is_idle = self.running.is_none() && self.waiting.is_empty();
            let command = match is_idle {
                true => self.commands.recv().map_err(|_| TryRecvError::Disconnected),
                false => self.commands.try_recv(),
            };
            match command {
                Ok(Command::Submit(sequence)) if self.is_draining => {
                    stats::subtract_one(&self.counters.waiting);
                    stats::add(&self.counters.ended, 1);
                    stats::add(&self.counters.failed, 1);
                    sequence.fail(anyhow!("cannot accept a request: the engine is draining"));
                }
                Ok(Command::Submit(sequence)) => self.waiting.push_back(Job::Sequence(sequence)),
                Ok(Command::Drain) => self.is_draining = true,
                Ok(Command::Run(call)) => self.waiting.push_back(Job::Call(call)),
                Err(TryRecvError::Empty) => return true,
                Ok(Command::Shutdown) | Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Ends the queued requests that were canceled by their clients.
    fn end_canceled(&mut self) {
        let counters = &self.counters;
        self.waiting.retain(|job| match job {
            Job::Sequence(sequence) if sequence.is_canceled() => {
                stats::subtract_one(&counters.waiting);
                stats::add(&counters.ended, 1);
                stats::add(&counters.canceled, 1);
                sequence.finish(FinishReason::Canceled);
                false
            }
            _ => true,
        });
    }

    /// Starts the next job if no sequence is running. If the job is a call, runs it to completion.
    fn admit(&mut self) {
        if self.running.is_some() {
            return;
        }
        match self.waiting.pop_front() {
            None => {}
            Some(Job::Call(call)) => {
                call(&mut self.runner);
                self.count_cached_tokens();
            }
            Some(Job::Sequence(sequence)) => {
                stats::subtract_one(&self.counters.waiting);
                stats::add(&self.counters.running, 1);
                self.running = Some(sequence);
            }
        }
    }

    /// Updates the counter of cached tokens, which clients can read.
    fn count_cached_tokens(&self) {
        self.counters.cached_tokens.store(self.runner.cached_tokens() as u64, Ordering::Relaxed);
    }

    /// Ends the running sequence and sends the outcome to its client. Does nothing for `Ok(None)`.
    fn deliver(&mut self, outcome: Result<Option<FinishReason>>) {
        let outcome = match outcome {
            Ok(None) => return,
            Ok(Some(reason)) => Ok(reason),
            Err(error) => Err(error),
        };
        let Some(sequence) = self.running.take() else { return };
        stats::subtract_one(&self.counters.running);
        stats::add(&self.counters.ended, 1);
        match outcome {
            Ok(reason) => {
                if reason == FinishReason::Canceled {
                    stats::add(&self.counters.canceled, 1);
                }
                sequence.finish(reason);
            }
            Err(error) => {
                stats::add(&self.counters.failed, 1);
                sequence.fail(error);
            }
        }
    }
}

/// Plans the next step of the running sequence.
fn plan(sequence: &Sequence, runner: &Runner) -> Plan {
    if sequence.is_canceled() {
        Plan::Finish(FinishReason::Canceled)
    } else if sequence.is_new() {
        Plan::Start
    } else if let Some(chunk) = sequence.next_chunk(runner.chunk()) {
        Plan::Prefill(chunk)
    } else if sequence.is_prefill_only() {
        Plan::Finish(FinishReason::Length)
    } else {
        Plan::Decode
    }
}

/// Runs one planned step. Returns the finish reason if the step ends the sequence.
fn step(
    plan: Plan,
    sequence: &mut Sequence,
    runner: &mut Runner,
    language: &Language,
    counters: &Counters,
) -> Result<Option<FinishReason>> {
    match plan {
        Plan::Start => {
            let cached_tokens = runner.reuse_prefix(sequence.prompt())?;
            sequence.start(cached_tokens);
        }
        Plan::Prefill(chunk) => {
            let logits = runner.prefill(&sequence.prompt()[chunk.clone()])?;
            stats::add(&counters.prompt_tokens, chunk.len() as u64);
            if sequence.advance_prefill(chunk.end) {
                runner.set_savepoint()?;
                if !sequence.is_prefill_only() {
                    runner.start_decode(&logits, &sequence.sampler)?;
                }
            }
        }
        Plan::Decode => {
            let (input, limit) = (sequence.last, sequence.remaining());
            let token = runner.step(&mut DecodeStep { input, sampler: &mut sequence.sampler, limit })?;
            stats::add(&counters.generated_tokens, 1);
            return Ok(sequence.push(token, language.is_stop(token), runner.context()));
        }
        Plan::Finish(reason) => return Ok(Some(reason)),
    }
    Ok(None)
}
