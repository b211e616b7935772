//! The group of ranks that run a model, controlled by the first rank.
//!
//! The runner is the first rank. Every other rank is a follower: a thread with its part of the weights and KV cache.
//! Followers run the same passes as the runner, at the same time.
//! Within a pass, the ranks exchange their results through [`World`].

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use candle_core::{Device, Tensor};

use super::command::{OwnedStep, RankCache, RankCommand};
use super::failure::{RANK_PANICKED, RankFault, failure_message};
use super::follower::follow;
use super::rank_model::RankModel;
use super::scored_pass::forward_scored;
use crate::error::Error;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::nn::pass::PassBatch;
use crate::runner::decode_graph::GraphCommand;
use crate::runner::gpu::DecodeGraph;
use crate::runner::limits::{RunnerLimits, RunnerOptions};
use crate::runner::sampling::NoToken;
use crate::runner::step::{RowSampling, StepExecutor, StepSequence};
use crate::text::error_message;
use crate::world::{ANSWER_TIMEOUT, ProgressWatch, World};

/// How long to wait for follower threads to end after a failure. The thread of a rank that hangs may never end.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// How long [`RankGroup::with_caches`] waits for the results of the followers.
const CACHE_CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// How often the first rank checks, while it waits for followers, whether a rank has failed or a thread has ended.
const POLL: Duration = Duration::from_millis(20);

/// The ranks that run a model. If the runner is the only rank, there are no follower threads.
pub struct RankGroup {
    /// The world of the first rank.
    world: World,
    followers: Vec<FollowerHandle>,
    /// The fault that a test has injected into the first rank. The next pass or [`GraphCommand`] takes the fault.
    fault: Cell<Option<RankFault>>,
}

/// The first rank's connection to a follower.
struct FollowerHandle {
    commands: Sender<RankCommand>,
    thread: JoinHandle<()>,
    /// Notices when the follower does not answer pings. `None` before the first ping of a wait for commands.
    ping_watch: RefCell<Option<ProgressWatch>>,
}

impl RankGroup {
    /// Starts a thread for each rank in `others`, which holds all ranks except the first.
    pub fn start(
        world: World,
        others: Vec<(World, RankModel)>,
        limits: RunnerLimits,
        options: RunnerOptions,
    ) -> Result<Self> {
        let start = |(world, model): (World, RankModel)| -> Result<_> {
            let (commands, receiver) = mpsc::channel();
            let thread = thread::Builder::new().name(format!("rank {}", world.rank()));
            let follow = move || follow(&world, model, &receiver, limits, options);
            let thread = thread.spawn(follow).context("cannot start a thread")?;
            Ok(FollowerHandle { commands, thread, ping_watch: RefCell::new(None) })
        };
        let followers = others.into_iter().map(start).collect::<Result<_>>()?;
        Ok(Self { world, followers, fault: Cell::new(None) })
    }

    /// Returns the world of the first rank.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Returns whether only one rank runs the model.
    pub fn is_single(&self) -> bool {
        self.followers.is_empty()
    }

    pub fn has_failed_rank(&self) -> bool {
        self.world.end_reason().is_some()
    }

    /// Returns whether the exchange of data between ranks can be part of a CUDA graph.
    /// It cannot if the host copies the data.
    pub fn supports_graphs(&self) -> bool {
        self.is_single() || self.world.exchange().is_some()
    }

    /// Returns an error if a rank has failed.
    /// Call this function after the host has received the results of a step: a failure can make them wrong.
    pub fn check(&self) -> Result<()> {
        let checked = self.world.check();
        // Return only the reason: if RUST_BACKTRACE is set, the error of `World::check` also contains a backtrace.
        match self.world.end_reason() {
            Some(reason) => Err(Error::GpuFailed(reason).into()),
            None => Ok(checked?),
        }
    }

    /// Restarts the timeouts of [`ping`](Self::ping).
    /// Call this function before the first ping of each wait for commands, so that earlier time does not count.
    pub fn restart_ping_timeouts(&self) {
        for follower in &self.followers {
            follower.ping_watch.replace(None);
        }
    }

    /// Sends a ping to each follower. Ends the world if a follower has not answered for [`ANSWER_TIMEOUT`].
    ///
    /// The engine calls this function once a second while it waits for commands.
    pub fn ping(&self) {
        for (rank, follower) in (1..).zip(&self.followers) {
            let progress = self.world.progress(rank);
            let mut watch = follower.ping_watch.borrow_mut();
            if watch.get_or_insert_with(|| ProgressWatch::new(progress)).has_stalled(progress, ANSWER_TIMEOUT) {
                self.world.end_without_answer(rank);
            }
            // The send fails only if the follower's thread has ended. `follow` has then already ended the world.
            let _ = follower.commands.send(RankCommand::Ping);
        }
    }

    /// Makes a rank fail. Has no effect with a single rank. The first rank fails in its next pass or [`GraphCommand`].
    /// Any other rank fails after it has run the commands that it has already received.
    pub fn inject(&self, rank: usize, fault: RankFault) {
        match rank.checked_sub(1).and_then(|index| self.followers.get(index)) {
            Some(follower) => _ = follower.commands.send(RankCommand::Fail(fault)),
            None => self.fault.set(Some(fault)),
        }
    }

    /// Calls a function with the KV cache of every rank, between two passes. `cache` is the first rank's KV cache.
    /// Returns the results in rank order. If a call fails, returns its error, but does not end the world.
    /// Ends the world if a follower does not answer within [`CACHE_CALL_TIMEOUT`].
    pub fn with_caches<T: Send + 'static>(
        &self,
        cache: &KvCache,
        call: impl Fn(RankCache) -> Result<T> + Send + Sync + 'static,
    ) -> Result<Vec<T>> {
        self.check()?;
        let (results, receiver) = mpsc::channel();
        let call = Arc::new(call);
        let of_rank = call.clone();
        let send_result = move |of: RankCache| {
            let rank = of.rank;
            // The send fails only if the first rank no longer waits for the result.
            let _ = results.send((rank, of_rank(of)));
        };
        self.send(&RankCommand::Cache(Arc::new(send_result)))?;
        let mut all: Vec<Option<Result<T>>> = self.followers.iter().map(|_| None).collect();
        all.insert(0, Some(call(RankCache { rank: 0, cache })));
        let started = Instant::now();
        while let Some(missing) = all.iter().position(Option::is_none) {
            match receiver.recv_timeout(POLL) {
                Ok((rank, result)) => all[rank] = Some(result),
                Err(RecvTimeoutError::Timeout) if started.elapsed() <= CACHE_CALL_TIMEOUT => {}
                // The wait timed out, or all followers have dropped the call without an answer.
                Err(_) => self.world.end_without_answer(missing),
            }
            self.check()?;
        }
        all.into_iter().flatten().collect()
    }

    /// Runs a batch on `decoder`, the first rank's part of the model, and on all followers. Returns the logits.
    ///
    /// If one of several ranks fails, this pass and all later passes fail with that rank's error.
    /// After a failure, the keys and values of the ranks may no longer match.
    pub fn forward(&self, decoder: &Decoder, batch: &PassBatch, cache: &KvCache) -> Result<Tensor> {
        if self.is_single() {
            return decoder.forward(batch, cache);
        }
        // Reject an invalid batch before the ranks start: after a pass has failed on a rank, all later passes fail.
        decoder.validate(batch)?;
        let logits = self.together(RankCommand::Forward(Arc::new(batch.into())), || decoder.forward(batch, cache))?;
        logits.device().synchronize()?;
        self.check()?;
        Ok(logits)
    }

    /// Runs a batch like [`forward`](Self::forward), but with [`forward_scored`].
    pub fn forward_scored(
        &self,
        decoder: &Decoder,
        batch: &PassBatch,
        cache: &KvCache,
        ranges: &[Range<usize>],
        on_logits: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        if self.is_single() {
            return forward_scored(decoder, batch, cache, ranges, on_logits);
        }
        decoder.validate(batch)?;
        let command = RankCommand::Score(Arc::new(batch.into()), ranges.into());
        let logits = self.together(command, || forward_scored(decoder, batch, cache, ranges, on_logits))?;
        logits.device().synchronize()?;
        self.check()?;
        Ok(logits)
    }

    /// Returns whether all ranks can queue a step before the host knows the tokens of the previous step.
    pub fn can_queue(&self) -> bool {
        self.is_single() || self.world.exchange().is_some_and(|exchange| exchange.can_queue())
    }

    /// Queues a step on all followers, while `run` queues the step on the first rank.
    pub fn queue<T>(
        &self,
        executor: StepExecutor,
        sequences: &[StepSequence],
        samplings: &[RowSampling],
        run: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.is_single() {
            return run();
        }
        self.together(RankCommand::Queue(executor, Arc::new(OwnedStep::new(sequences)), samplings.into()), run)
    }

    /// Runs a decode step as a batch graph on all followers, while `run` runs the step on the first rank.
    pub fn run_batch<T>(
        &self,
        device: &Device,
        sequences: &[StepSequence],
        run: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.is_single() {
            return run();
        }
        let result = self.together(RankCommand::Batch(Arc::new(OwnedStep::new(sequences))), run)?;
        // If ranks share a GPU, wait for the step now.
        // A later copy to the host would also wait, but would keep the other ranks from launching kernels.
        if self.world.exchange().is_some_and(|exchange| !exchange.can_queue()) {
            device.synchronize()?;
        }
        Ok(result)
    }

    /// Runs a command on the decode graphs of all ranks.
    /// Returns the token of a [`Next`](GraphCommand::Next) command, or `None` for other commands.
    /// `graph` is the first rank's graph.
    /// Only [`StartFrom`](GraphCommand::StartFrom) needs `logits`, which come from the first rank's last pass.
    pub fn run_graph(
        &self,
        graph: &mut DecodeGraph,
        command: GraphCommand,
        logits: Option<&Tensor>,
    ) -> Result<Option<u32>> {
        if self.is_single() {
            return graph.run(&command, logits);
        }
        // Fail here if no step is left, because a failure on the followers would end the world.
        if let GraphCommand::Next { limit } = command {
            graph.steps_left(limit)?;
        }
        self.check()?;
        self.send(&RankCommand::Graph(command.clone()))?;
        let token = self.guarded(|| graph.run(&command, logits));
        match &token {
            // `NoToken` must end only the request. All ranks return this error at the same step.
            Err(error) if !error.is::<NoToken>() => self.fail(error),
            _ => {}
        }
        // Check for failed ranks, because a rank that fails during the step makes the token wrong.
        self.check()?;
        token
    }

    /// Waits for the next token of the decode graphs of all ranks. See [`GraphCommand::Next`].
    pub fn next_token(&self, graph: &mut DecodeGraph, limit: usize) -> Result<u32> {
        let token = self.run_graph(graph, GraphCommand::Next { limit }, None)?;
        token.context("internal error: the decode graph returned no token")
    }

    /// Sends a command to all followers and calls `run` on the first rank. If `run` fails, the world ends.
    fn together<T>(&self, command: RankCommand, run: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check()?;
        self.send(&command)?;
        self.guarded(run).or_else(|error| {
            self.fail(&error);
            self.check()?;
            Err(error)
        })
    }

    /// Calls `run` on the first rank, unless a test has injected a fault. Turns a panic into an error.
    fn guarded<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let run = || {
            self.fault.take().map_or(Ok(()), RankFault::inject)?;
            run()
        };
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(anyhow!(RANK_PANICKED)))
    }

    /// Ends the world because of an error on the first rank.
    fn fail(&self, error: &anyhow::Error) {
        self.world.end(&failure_message(&self.world, &error_message(error)));
    }

    /// Copies a block in the caches of all followers.
    pub fn copy_block(&self, from: u32, to: u32) -> Result<()> {
        self.send(&RankCommand::CopyBlock { from, to })
    }

    fn send(&self, command: &RankCommand) -> Result<()> {
        for follower in &self.followers {
            if follower.commands.send(command.clone()).is_err() {
                self.check()?;
                bail!("internal error: the thread of a rank has ended");
            }
        }
        Ok(())
    }
}

impl Drop for RankGroup {
    fn drop(&mut self) {
        let has_failed = self.has_failed_rank();
        self.world.close();
        // Drop the senders of all commands first, which ends the threads.
        let threads: Vec<_> = self.followers.drain(..).map(|follower| follower.thread).collect();
        let started = Instant::now();
        for thread in threads {
            while has_failed && !thread.is_finished() && started.elapsed() < END_TIMEOUT {
                thread::sleep(POLL);
            }
            // Do not join a thread that hangs after a failure. Such a thread ends with the process.
            if !has_failed || thread.is_finished() {
                // `follow` catches panics and passes errors to `World::end`, so the result holds no error.
                let _ = thread.join();
            }
        }
    }
}
