//! The engine thread's loop: plan, step, deliver. Only this thread uses the model.
//!
//! - `plan`: the [`Scheduler`] decides which tokens of which sequences the next step computes.
//! - `step`: the [`Runner`] runs the model on these tokens. If they include the last token of a sequence, it also
//!   chooses the next token.
//! - `deliver`: the loop prepares the events of the chosen tokens, and removes sequences that have ended. It sends the
//!   events while the device runs the next step.
//!
//! On a GPU, the loop plans and queues a step before it knows the tokens of the step before. It assumes that every
//! sequence goes on, and places a pending token at its end. If a sequence has ended instead, the queued step computes
//! one token of it in vain. Its blocks can be given to other sequences at once, because the device runs the steps in
//! order. A step whose choices depend on the tokens before, such as one with penalties, is not queued: it waits.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};

use super::blocks::BlockManager;
use super::outbox::Outbox;
use super::request::FinishReason;
use super::scheduler::{NewSequence, Scheduler, SchedulerConfig, SequenceId, SequenceWork, StepPlan};
use super::sequence::Sequence;
use super::stats::{self, Counters};
use crate::error::Error;
use crate::nn::kv_cache::KvCache;
use crate::runner::{ChooseToken, Chosen, QueuedStep, Runner, RunnerLimits, StepSequence};

/// A message from a client to the engine thread.
pub enum Command {
    /// Generate one or more answers to a prompt.
    Submit(Vec<Sequence>),
    /// Call a function with the runner, after all earlier requests.
    Run(RunnerCall),
    /// Call a function with the KV cache between two steps.
    Cache(CacheCall),
    /// Call a function with the scheduler and the current time between two steps.
    Inspect(InspectCall),
    /// Reject all later requests.
    Drain,
    /// End the thread. Unfinished requests end with an error.
    Shutdown,
}

/// A function that needs exclusive access to the model.
pub type RunnerCall = Box<dyn FnOnce(&mut Runner) + Send>;

/// A function that reads cached blocks, or fills free ones.
pub type CacheCall = Box<dyn FnOnce(&KvCache, &mut BlockManager) + Send>;

/// A function that looks at the waiting and running sequences.
pub type InspectCall = Box<dyn FnOnce(&mut Scheduler, Duration) + Send>;

/// A queued request or call.
enum Job {
    /// Sequences with the same prompt.
    Sequences(Vec<Sequence>),
    Call(RunnerCall),
}

/// A step whose tokens are not known yet, and its work.
struct QueuedWork {
    step: QueuedStep,
    work: Vec<SequenceWork>,
}

/// The state of the engine thread.
pub struct EngineLoop {
    runner: Runner,
    scheduler: Scheduler,
    commands: Receiver<Command>,
    counters: Arc<Counters>,
    /// The jobs that have not started. A call at the front waits until all sequences have ended.
    queue: VecDeque<Job>,
    /// Calls that run after the jobs that were submitted before them reach the scheduler.
    inspections: Vec<InspectCall>,
    /// The waiting and running sequences of the scheduler.
    sequences: HashMap<SequenceId, Sequence>,
    next_id: SequenceId,
    started: Instant,
    is_draining: bool,
    outbox: Outbox,
    queued: Option<QueuedWork>,
}

impl EngineLoop {
    /// Creates the loop. At most `max_sequences` sequences run at once.
    pub fn new(runner: Runner, max_sequences: usize, commands: Receiver<Command>, counters: Arc<Counters>) -> Self {
        let RunnerLimits { context, chunk } = runner.limits();
        let grid = runner.grid();
        let config = SchedulerConfig { token_budget: chunk, max_sequences, context, grid };
        let windows = runner.cache().layout().windows().to_vec();
        let blocks = BlockManager::new(windows, runner.cache().blocks()).with_grid(grid);
        Self {
            runner,
            scheduler: Scheduler::new(config, blocks),
            commands,
            counters,
            queue: VecDeque::new(),
            inspections: Vec::new(),
            sequences: HashMap::new(),
            next_id: 0,
            started: Instant::now(),
            is_draining: false,
            outbox: Outbox::default(),
            queued: None,
        }
    }

    /// Runs until shutdown, or until all handles are dropped.
    pub fn run(mut self) {
        while self.receive_commands() {
            self.counters.heartbeat.begin_step();
            self.end_canceled();
            self.admit();
            for call in mem::take(&mut self.inspections) {
                call(&mut self.scheduler, self.started.elapsed());
            }
            let plan = self.scheduler.plan(self.started.elapsed());
            for &id in &plan.expired {
                self.end(id, Err(Error::WaitedTooLong.into()));
            }
            if plan.work.is_empty() {
                self.outbox.flush();
                self.deliver_queued();
                continue;
            }
            stats::add(&self.counters.steps, 1);
            self.run_plan(plan);
        }
        self.outbox.flush();
    }

    /// Runs or queues one planned step. Delivers the tokens of the step that was queued before.
    fn run_plan(&mut self, mut plan: StepPlan) {
        let queued = match self.queue(&plan) {
            Ok(queued) => queued,
            Err(error) => {
                self.deliver_queued();
                return self.fail(&plan.work, error);
            }
        };
        if let Some(step) = queued {
            let is_ahead = self.queued.is_some();
            stats::add(&self.counters.steps_queued_ahead, u64::from(is_ahead));
            self.deliver_queued();
            self.record_queued(QueuedWork { step, work: plan.work });
            // The device runs the queued step now.
            return self.outbox.flush();
        }
        if self.queued.is_some() {
            self.deliver_queued();
            self.end_canceled();
            // Some sequences have ended, with their last token or because their client left.
            plan.work.retain(|work| self.scheduler.is_running(work.id));
            if plan.work.is_empty() {
                return;
            }
        }
        match self.step(&plan) {
            Ok(chosen) => self.deliver(&plan.work, chosen, false),
            Err(error) => self.fail(&plan.work, error),
        }
    }

    /// Waits for the tokens of the queued step, if there is one, and delivers them.
    fn deliver_queued(&mut self) {
        let Some(QueuedWork { step, work }) = self.queued.take() else { return };
        let Self { runner, sequences, .. } = self;
        let chosen = runner.take(step, &mut |index, token| {
            if let Some(sequence) = sequences.get_mut(&work[index].id) {
                sequence.sampler.record(token);
            }
        });
        match chosen {
            Ok(chosen) => self.deliver(&work, chosen, true),
            Err(error) => self.fail(&work, error),
        }
    }

    /// Records what a queued step will compute, so that the next step can be planned.
    fn record_queued(&mut self, queued: QueuedWork) {
        for SequenceWork { id, range, is_last } in &queued.work {
            let Some(sequence) = self.sequences.get(id) else { continue };
            self.scheduler.advance(*id, range.end);
            if *is_last && !sequence.is_prefill_only() {
                self.scheduler.push_pending(*id);
            }
        }
        self.queued = Some(queued);
    }

    /// Queues incoming commands. Blocks while idle. Returns whether the loop should continue.
    fn receive_commands(&mut self) -> bool {
        loop {
            let is_idle = self.scheduler.is_idle() && self.queue.is_empty() && self.queued.is_none();
            let is_idle = is_idle && self.inspections.is_empty();
            if is_idle {
                self.outbox.flush();
            }
            let command = match is_idle {
                true => {
                    self.counters.heartbeat.rest();
                    self.commands.recv().map_err(|_| TryRecvError::Disconnected)
                }
                false => self.commands.try_recv(),
            };
            match command {
                Ok(Command::Submit(sequences)) if self.is_draining => {
                    for sequence in sequences {
                        stats::subtract_one(&self.counters.waiting);
                        stats::add(&self.counters.ended, 1);
                        stats::add(&self.counters.failed, 1);
                        sequence.fail(Error::Draining.into(), &mut self.outbox);
                    }
                }
                Ok(Command::Submit(sequences)) => self.queue.push_back(Job::Sequences(sequences)),
                Ok(Command::Cache(call)) => {
                    self.deliver_queued();
                    // The call may fill blocks that the runner's single sequence still counts as cached.
                    self.runner.reset();
                    call(self.runner.cache(), self.scheduler.blocks_mut());
                }
                Ok(Command::Inspect(call)) => self.inspections.push(call),
                Ok(Command::Drain) => self.is_draining = true,
                Ok(Command::Run(call)) => self.queue.push_back(Job::Call(call)),
                Err(TryRecvError::Empty) => return true,
                Ok(Command::Shutdown) | Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Ends the requests that were canceled by their clients.
    fn end_canceled(&mut self) {
        let canceled: Vec<_> =
            self.sequences.iter().filter(|(_, sequence)| sequence.is_canceled()).map(|(&id, _)| id).collect();
        for id in canceled {
            self.end(id, Ok(FinishReason::Canceled));
        }
        let (counters, outbox) = (&self.counters, &mut self.outbox);
        for job in &mut self.queue {
            let Job::Sequences(sequences) = job else { continue };
            // Each flag is read only once, because a client can set it at any time.
            for sequence in sequences.extract_if(.., |sequence| sequence.is_canceled()) {
                stats::subtract_one(&counters.waiting);
                stats::add(&counters.ended, 1);
                stats::add(&counters.canceled, 1);
                sequence.finish(FinishReason::Canceled, outbox);
            }
        }
        self.queue.retain(|job| !matches!(job, Job::Sequences(sequences) if sequences.is_empty()));
    }

    /// Passes queued requests to the scheduler, up to the next call. Runs the call once all sequences have ended.
    fn admit(&mut self) {
        while let Some(job) = self.queue.pop_front() {
            match job {
                Job::Sequences(mut sequences) => {
                    let (id, arrival) = (self.next_id, self.started.elapsed());
                    self.next_id += sequences.len() as SequenceId;
                    let Some(first) = sequences.first_mut() else { continue };
                    self.scheduler.submit(NewSequence {
                        id,
                        prompt: first.take_prompt(),
                        cache_salt: first.cache_salt.take(),
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
                    // The call may overwrite any block.
                    self.scheduler.forget_prefixes();
                    self.outbox.flush();
                    call(&mut self.runner);
                    self.counters.cached_tokens.store(self.runner.cached_tokens() as u64, Ordering::Relaxed);
                }
                Job::Call(call) => return self.queue.push_front(Job::Call(call)),
            }
        }
    }

    /// Queues a planned step. Returns `None` if the step must wait for the tokens of the step before.
    fn queue(&mut self, plan: &StepPlan) -> Result<Option<QueuedStep>> {
        for copy in &plan.copies {
            self.runner.copy_block(copy.from, copy.to)?;
        }
        let Self { runner, scheduler, sequences, counters, outbox, .. } = self;
        runner.queue(&mut inputs(plan, scheduler, sequences, counters, outbox)?)
    }

    /// Runs a planned step whose copies are made. Returns the chosen token of each sequence in the plan.
    fn step(&mut self, plan: &StepPlan) -> Result<Vec<Chosen>> {
        let Self { runner, scheduler, sequences, counters, outbox, .. } = self;
        let mut inputs = inputs(plan, scheduler, sequences, counters, outbox)?;
        runner.step(&mut inputs, &mut || outbox.flush())
    }

    /// Ends the sequences of a failed step. The step may have written only some of its keys and values.
    fn fail(&mut self, work: &[SequenceWork], error: anyhow::Error) {
        let message = format!("{error:#}");
        let mut first = Some(error);
        for id in work.iter().map(|work| work.id) {
            self.end(id, Err(first.take().unwrap_or_else(|| anyhow!("{message}"))));
        }
        self.scheduler.forget_prefixes();
        self.counters.cached_tokens.store(0, Ordering::Relaxed);
    }

    /// Adds the events of a step's tokens, and ends the sequences that are complete. `was_queued` tells whether the step
    /// is already recorded in the scheduler, see [`record_queued`](Self::record_queued).
    fn deliver(&mut self, work: &[SequenceWork], chosen: Vec<Chosen>, was_queued: bool) {
        self.counters.publish(&self.scheduler);
        let context = self.runner.limits().context;
        for (SequenceWork { id, range, is_last }, chosen) in work.iter().zip(chosen) {
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            let is_prompt = range.len() > 1 || !sequence.has_generated();
            if is_prompt {
                stats::add(&self.counters.prompt_tokens, range.len() as u64);
            }
            let end = match chosen.map(|chosen| chosen.and_then(|token| sequence.accept(token))) {
                None if *is_last => Some(Ok(FinishReason::Length)),
                None => None,
                Some(Ok(token)) => {
                    stats::add(&self.counters.generated_tokens, 1);
                    // The step may have begun before the cancellation, so the first such token does not count.
                    if sequence.is_canceled() && sequence.note_canceled() {
                        stats::add(&self.counters.tokens_after_cancel, 1);
                    }
                    self.scheduler.push(*id, token.id);
                    sequence.push(token, context, &mut self.outbox).map(Ok)
                }
                Some(Err(error)) => Some(Err(error)),
            };
            // The keys and values of a failed sequence must not be reused.
            let cached = match &end {
                Some(Err(_)) => 0,
                _ => range.end,
            };
            match was_queued {
                true if cached == 0 => self.scheduler.forget_prefixes(),
                false if cached > 0 => self.scheduler.advance(*id, cached),
                _ => {}
            }
            self.counters.cached_tokens.store(cached as u64, Ordering::Relaxed);
            if let Some(outcome) = end {
                self.end(*id, outcome);
            }
        }
    }

    /// Ends a sequence and adds the event with the outcome.
    fn end(&mut self, id: SequenceId, outcome: Result<FinishReason>) {
        self.scheduler.finish(id);
        self.counters.publish(&self.scheduler);
        let Some(sequence) = self.sequences.remove(&id) else { return };
        let counters = &self.counters;
        stats::subtract_one(if sequence.has_started() { &counters.running } else { &counters.waiting });
        stats::add(&counters.ended, 1);
        match outcome {
            Ok(reason) => {
                if reason == FinishReason::Canceled {
                    stats::add(&counters.canceled, 1);
                }
                sequence.finish(reason, &mut self.outbox);
            }
            Err(error) => {
                stats::add(&counters.failed, 1);
                sequence.fail(error, &mut self.outbox);
            }
        }
    }
}

/// Returns the input of each sequence of a plan. Tells the clients of new sequences that they have started.
fn inputs<'s>(
    plan: &StepPlan,
    scheduler: &'s Scheduler,
    sequences: &'s mut HashMap<SequenceId, Sequence>,
    counters: &Counters,
    outbox: &mut Outbox,
) -> Result<Vec<StepSequence<'s>>> {
    let mut inputs = Vec::with_capacity(plan.work.len());
    let mut borrowed: HashMap<SequenceId, &mut Sequence> =
        sequences.iter_mut().map(|(&id, sequence)| (id, sequence)).collect();
    for SequenceWork { id, range, is_last } in &plan.work {
        let (Some(sequence), Some(tables)) = (borrowed.remove(id), scheduler.tables(*id)) else {
            bail!("internal error: the scheduler planned the unknown request {id}");
        };
        if !sequence.has_started() {
            stats::subtract_one(&counters.waiting);
            stats::add(&counters.running, 1);
            sequence.start(range.start, outbox);
        }
        let limit = sequence.remaining();
        let samples = *is_last && !sequence.is_prefill_only();
        inputs.push(StepSequence {
            id: *id,
            ids: &scheduler.tokens(*id)[range.clone()],
            awaits_input: *is_last && scheduler.is_pending(*id),
            position: range.start,
            tables,
            sampler: samples.then_some(&mut sequence.sampler),
            limit,
        });
    }
    Ok(inputs)
}
