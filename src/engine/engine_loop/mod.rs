//! The engine thread's loop: plan, step, deliver.
//!
//! Only the engine thread, which runs the first rank, and the threads of the other ranks use the model.
//!
//! - `plan`: the [`Scheduler`] decides which tokens of which sequences the next step computes.
//! - `step`: the [`Runner`] runs the model on the planned tokens, and chooses the tokens that follow.
//! - `deliver`: the loop adds the events of the chosen tokens to the outbox, and removes sequences that have ended.
//!   On a GPU, the loop usually sends these events while the GPU runs the next step.
//!
//! On a GPU, the loop queues most steps before it knows the tokens of the previous step.
//! If there is a decode graph, most decode steps of a single sequence run on this graph, which queues its own steps.
//! The section "Queued steps" of docs/scheduling.md explains why steps can be queued safely.
//!
//! The files of this folder:
//!
//! - `steps`: runs or queues a planned step, and delivers its tokens
//! - `stats`, `histogram`, `heartbeat`: show other threads what the engine thread does

mod heartbeat;
mod histogram;
pub mod stats;
mod steps;

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::blocks::BlockManager;
use super::fault::{Fault, FaultPlan};
use super::requests::{FinishReason, Outbox, Sequence};
use super::scheduler::{NewSequence, Scheduler, SchedulerConfig, SequenceId, SequenceWork};
use crate::error::Error;
use crate::runner::{QueuedStep, Runner, RunnerLimits};

pub use heartbeat::StopGuard;
pub use histogram::HistogramStats;
pub use stats::{Counters, EngineHistograms, EngineStats};

/// The time between two checks of the other ranks while the engine is idle.
const RANK_PING: Duration = Duration::from_secs(1);

/// A message from a client to the engine thread.
pub enum EngineCommand {
    /// Generate answers to one prompt: one answer per sequence.
    Submit(Vec<Sequence>),
    /// Call a function with the runner once all requests submitted earlier have ended.
    CallRunner(RunnerCall),
    /// Call a function that reads or fills blocks of the KV cache, between two steps.
    CallCache(CacheCall),
    /// Call a function with the scheduler and the time on its clock, before the next step is planned.
    CallScheduler(SchedulerCall),
    /// Inject a fault, for tests.
    InjectFault(Fault),
    /// Reject all later requests.
    Drain,
    /// End the thread. Unfinished requests fail.
    Shutdown,
}

/// A function that uses the runner while the scheduler has no sequences.
pub type RunnerCall = Box<dyn FnOnce(&mut Runner) + Send>;

/// A function that reads cached blocks or fills free blocks.
pub type CacheCall = Box<dyn FnOnce(&Runner, &mut BlockManager) + Send>;

/// A function that inspects the scheduler. Its second argument is the time on the scheduler's clock.
pub type SchedulerCall = Box<dyn FnOnce(&Scheduler, Duration) + Send>;

/// A request that the scheduler has not received yet, or a call that has not run.
enum Job {
    /// The answers to one request, which share a prompt.
    Sequences(Vec<Sequence>),
    Call(RunnerCall),
}

/// A queued step, and the sequences and positions in it.
struct QueuedWork {
    step: QueuedStep,
    work: Vec<SequenceWork>,
}

/// The state of the engine thread.
pub struct EngineLoop {
    runner: Runner,
    scheduler: Scheduler,
    commands: Receiver<EngineCommand>,
    counters: Arc<Counters>,
    /// Jobs in the order of submission. A call at the front waits until all sequences have ended.
    jobs: VecDeque<Job>,
    /// Calls that the loop runs before its next plan, after it has handled `jobs`.
    scheduler_calls: Vec<SchedulerCall>,
    /// The sequences in the scheduler, waiting or running.
    sequences: HashMap<SequenceId, Sequence>,
    next_id: SequenceId,
    /// The time at which the scheduler's clock is zero.
    clock_start: Instant,
    is_draining: bool,
    outbox: Outbox,
    /// The queued step whose tokens are not delivered yet.
    queued_step: Option<QueuedWork>,
    /// The fault that a test has planned, if any.
    faults: FaultPlan,
    /// Whether the device has stopped working, so that every later step would fail.
    is_device_broken: bool,
}

impl EngineLoop {
    /// Creates a loop in which at most `max_sequences` sequences run at once.
    pub fn new(
        runner: Runner,
        max_sequences: usize,
        commands: Receiver<EngineCommand>,
        counters: Arc<Counters>,
    ) -> Self {
        let RunnerLimits { context, chunk } = runner.limits();
        let prompt_segments = runner.prompt_segments();
        let config = SchedulerConfig { token_budget: chunk, max_sequences, context, prompt_segments };
        let windows = runner.cache().layout().windows().to_vec();
        let blocks = BlockManager::new(windows, runner.cache().blocks()).with_prompt_segments(prompt_segments);
        Self {
            faults: FaultPlan::from_env(&runner),
            runner,
            scheduler: Scheduler::new(config, blocks),
            commands,
            counters,
            jobs: VecDeque::new(),
            scheduler_calls: Vec::new(),
            sequences: HashMap::new(),
            next_id: 0,
            clock_start: Instant::now(),
            is_draining: false,
            outbox: Outbox::default(),
            queued_step: None,
            is_device_broken: false,
        }
    }

    /// Runs until a shutdown, until all handles are dropped, or until the device or a rank has failed.
    ///
    /// When this function returns, unfinished requests fail, because their event channels close.
    pub fn run(mut self) {
        // Check again after waiting for commands, because a rank may have failed during the wait.
        while !self.has_failed() && self.receive_commands() && !self.has_failed() {
            self.counters.heartbeat.begin_step();
            // End canceled requests first, so that the plan can use their blocks.
            self.end_canceled();
            self.handle_jobs();
            // Run scheduler calls after `handle_jobs`, so that each call sees the requests that were submitted before
            // it, except requests behind a `Job::Call` that still waits.
            for call in mem::take(&mut self.scheduler_calls) {
                call(&self.scheduler, self.clock_start.elapsed());
            }
            let plan = self.scheduler.plan(self.clock_start.elapsed());
            for &id in &plan.expired {
                self.end(id, Err(Error::WaitedTooLong.into()));
            }
            if plan.work.is_empty() {
                // If a step is queued, the next step can be planned only when its tokens are known.
                self.outbox.flush();
                self.deliver_queued();
                continue;
            }
            stats::add(&self.counters.steps, 1);
            self.run_plan(plan);
        }
        self.outbox.flush();
    }

    /// Receives all commands that have arrived. Waits for a command if the engine is idle.
    /// Returns false if the loop must end: after a shutdown command, or if all handles were dropped.
    fn receive_commands(&mut self) -> bool {
        loop {
            let command = if self.is_idle() {
                self.outbox.flush();
                self.counters.heartbeat.rest();
                self.wait_for_command()
            } else {
                self.commands.try_recv()
            };
            match command {
                Ok(EngineCommand::Submit(sequences)) if self.is_draining => {
                    for sequence in sequences {
                        end_sequence(sequence, Err(Error::Draining.into()), &self.counters, &mut self.outbox);
                    }
                }
                Ok(EngineCommand::Submit(sequences)) => self.jobs.push_back(Job::Sequences(sequences)),
                Ok(EngineCommand::CallCache(call)) => {
                    self.deliver_queued();
                    // Stop the decode graph and forget the tokens that a `RunnerCall` has cached,
                    // because a `CacheCall` may overwrite the blocks of both.
                    self.runner.reset();
                    call(&self.runner, self.scheduler.blocks_mut());
                }
                Ok(EngineCommand::CallScheduler(call)) => self.scheduler_calls.push(call),
                Ok(EngineCommand::InjectFault(fault)) => self.faults.set(fault, &self.runner),
                Ok(EngineCommand::Drain) => self.is_draining = true,
                Ok(EngineCommand::CallRunner(call)) => self.jobs.push_back(Job::Call(call)),
                Err(TryRecvError::Empty) => return true,
                Ok(EngineCommand::Shutdown) | Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Returns whether the loop has nothing to do before the next command.
    fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
            && self.jobs.is_empty()
            && self.queued_step.is_none()
            && self.scheduler_calls.is_empty()
    }

    /// Waits for the next command. Returns [`TryRecvError::Empty`] if a rank fails during the wait.
    fn wait_for_command(&self) -> Result<EngineCommand, TryRecvError> {
        if !self.runner.has_several_ranks() {
            return self.commands.recv().map_err(|_| TryRecvError::Disconnected);
        }
        self.runner.restart_ping_timeouts();
        self.runner.ping_ranks();
        loop {
            match self.commands.recv_timeout(RANK_PING) {
                Ok(command) => return Ok(command),
                Err(RecvTimeoutError::Disconnected) => return Err(TryRecvError::Disconnected),
                Err(RecvTimeoutError::Timeout) => self.runner.ping_ranks(),
            }
            if self.runner.has_failed_rank() {
                return Err(TryRecvError::Empty);
            }
        }
    }

    /// Returns whether the device has stopped working or a rank has failed. No step can run after that.
    fn has_failed(&self) -> bool {
        self.is_device_broken || self.runner.has_failed_rank()
    }

    /// Ends the sequences whose clients need no more tokens. See [`Sequence::is_canceled`].
    fn end_canceled(&mut self) {
        let canceled = self.sequences.iter().filter(|(_, sequence)| sequence.is_canceled());
        let canceled: Vec<_> = canceled.map(|(&id, sequence)| (id, sequence.client_end().reason())).collect();
        for (id, reason) in canceled {
            self.end(id, Ok(reason));
        }
        let (counters, outbox) = (&self.counters, &mut self.outbox);
        for job in &mut self.jobs {
            let Job::Sequences(sequences) = job else { continue };
            // Call `is_canceled` only once per sequence, because a client can cancel between two calls.
            for sequence in sequences.extract_if(.., |sequence| sequence.is_canceled()) {
                let reason = sequence.client_end().reason();
                end_sequence(sequence, Ok(reason), counters, outbox);
            }
        }
        self.jobs.retain(|job| !matches!(job, Job::Sequences(sequences) if sequences.is_empty()));
    }

    /// Handles `jobs` in order: passes requests to the scheduler, and runs calls.
    /// Stops at a call if the scheduler still has sequences.
    fn handle_jobs(&mut self) {
        while let Some(job) = self.jobs.pop_front() {
            match job {
                Job::Sequences(mut sequences) => {
                    let (id, arrival) = (self.next_id, self.clock_start.elapsed());
                    self.next_id += sequences.len() as SequenceId;
                    let prompt = Sequence::take_prompt(&mut sequences);
                    let Some(first) = sequences.first_mut() else { continue };
                    self.scheduler.submit(NewSequence {
                        id,
                        prompt,
                        cache_salt: first.cache_salt.take(),
                        prompt_segments: first.prompt_segments,
                        computes_whole_prompt: first.prompt_scorer.is_some(),
                        forks: (id + 1..self.next_id).collect(),
                        max_tokens: first.remaining(),
                        tenant: first.tenant,
                        priority: first.priority,
                        arrival,
                        deadline: first.max_wait.map(|wait| arrival.saturating_add(wait)),
                    });
                    self.sequences.extend((id..).zip(sequences));
                }
                Job::Call(call) if self.scheduler.is_idle() => {
                    self.deliver_queued();
                    // The call may overwrite any block, so cached prefixes are no longer valid.
                    self.scheduler.forget_prefixes();
                    self.outbox.flush();
                    call(&mut self.runner);
                    self.counters.cached_tokens.store(self.runner.cached_tokens() as u64, Ordering::Relaxed);
                }
                Job::Call(call) => return self.jobs.push_front(Job::Call(call)),
            }
        }
    }

    /// Removes a sequence and updates the counters. Adds its last event, a finish reason or an error, to the outbox.
    fn end(&mut self, id: SequenceId, outcome: Result<FinishReason>) {
        let preemptions = self.scheduler.preemptions(id);
        self.scheduler.finish(id);
        self.counters.publish(&self.scheduler);
        let Some(sequence) = self.sequences.remove(&id) else { return };
        self.counters.histograms.preemptions.observe(preemptions.into());
        end_sequence(sequence, outcome, &self.counters, &mut self.outbox);
    }
}

/// Counts the end of a sequence, and adds its last event, a finish reason or an error, to the outbox.
fn end_sequence(sequence: Sequence, outcome: Result<FinishReason>, counters: &Counters, outbox: &mut Outbox) {
    let counter = if sequence.has_started() { &counters.running } else { &counters.waiting };
    stats::subtract(counter, 1);
    stats::add(&counters.ended, 1);
    match outcome {
        Ok(reason) => {
            if reason == FinishReason::Canceled {
                counters.count_canceled(sequence.client_end());
            }
            sequence.finish(reason, outbox);
        }
        Err(error) => {
            stats::add(&counters.failed, 1);
            sequence.fail(error, outbox);
        }
    }
}
