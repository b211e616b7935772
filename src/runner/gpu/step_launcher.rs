//! Launches batch graphs and queued steps on the GPU of one rank.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

use super::batch_graph::{BatchGraphs, ComputedLogits, NeededLogits};
use super::queued_step_buffers::QueuedStepBuffers;
use crate::kernels::SumOrder;
use crate::kernels::step_inputs::StepInputs;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::nn::pass::{PassBatch, RowSelection, SequenceSpan};
use crate::runner::limits::{RunnerLimits, RunnerOptions};
use crate::runner::sampling::SamplerResult;
use crate::runner::step::{ExpectedToken, RowSampling, StepExecutor, StepSequence};

/// The batch graphs of a rank, and the buffers that these graphs share with queued steps.
pub struct StepLauncher {
    batches: BatchGraphs,
    buffers: QueuedStepBuffers,
    sum_order: SumOrder,
}

impl StepLauncher {
    /// Creates a launcher without graphs. The first step of each padded batch size captures a graph.
    /// Returns `None` if the device is not a GPU.
    pub fn new(device: &Device, limits: RunnerLimits, options: RunnerOptions) -> Result<Option<Self>> {
        let Device::Cuda(gpu) = device else { return Ok(None) };
        let sum_order = options.sum_order();
        let batches = BatchGraphs::new(gpu, limits.context, sum_order);
        Ok(Some(Self { batches, buffers: QueuedStepBuffers::new(gpu)?, sum_order }))
    }

    /// Returns whether batch graphs can run the decode steps of the model. See [`BatchGraphs::can_run_model`].
    pub fn can_run_model(&self, decoder: &Decoder) -> bool {
        self.batches.can_run_model(decoder)
    }

    /// Launches a decode step as a batch graph, and does not wait for its result.
    /// Returns the logits, f32 `[sequences, vocab]`. The next step can overwrite the logits.
    ///
    /// If the graph fails and there is only one rank, returns `None`. The caller must then run the step operation by
    /// operation. With several ranks, a failure is an error.
    pub fn run(&mut self, decoder: &Decoder, cache: &KvCache, sequences: &[StepSequence]) -> Result<Option<Tensor>> {
        let logits = self.batches.run(decoder, cache, sequences, NeededLogits::All, &mut self.buffers)?;
        self.buffers.skip();
        match logits {
            Some(ComputedLogits::All(own)) => decoder.logits_of_ranks(&own).map(Some),
            Some(ComputedLogits::Best(_)) => bail!("internal error: the step has computed only the best logits"),
            None => Ok(None),
        }
    }

    /// Queues the forward pass of all sequences, and the sampling of a token for each entry of `samplings`.
    /// Returns the index of the step, which [`wait`](Self::wait) takes.
    /// All ranks have the same sampling parameters, and choose from the logits of all ranks, so their GPUs choose the
    /// same tokens. If the step runs as a batch graph and needs only the best logits, the ranks may store and exchange
    /// only these.
    pub fn queue(
        &mut self,
        decoder: &Decoder,
        cache: &KvCache,
        executor: StepExecutor,
        sequences: &[StepSequence],
        samplings: &[RowSampling],
    ) -> Result<usize> {
        let needs = needed_logits(samplings);
        let on_graph = match executor {
            StepExecutor::BatchGraph => self.batches.run(decoder, cache, sequences, needs, &mut self.buffers)?,
            StepExecutor::DecodeGraph | StepExecutor::Eager => None,
        };
        let logits = match on_graph {
            Some(logits) => logits,
            None => ComputedLogits::All(self.queue_operations(decoder, cache, sequences)?),
        };
        let rows: Vec<u32> = samplings.iter().map(|sampling| sampling.index as u32).collect();
        let sampled = |logits: Tensor| {
            if rows.len() == sequences.len() {
                return Ok(logits);
            }
            logits.index_select(&Tensor::new(rows.as_slice(), logits.device())?, 0)
        };
        match logits {
            ComputedLogits::Best(best) => self.buffers.choose_best(samplings, &sampled(best)?),
            ComputedLogits::All(own) => self.buffers.choose(samplings, &decoder.logits_of_ranks(&sampled(own)?)?),
        }
    }

    /// Queues the forward pass of all sequences, operation by operation.
    /// Returns this rank's part of the logits of each sequence's last token (see [`Decoder::own_logits`]).
    fn queue_operations(&mut self, decoder: &Decoder, cache: &KvCache, sequences: &[StepSequence]) -> Result<Tensor> {
        let ids: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.ids).copied().collect();
        let mut sources = Vec::with_capacity(ids.len());
        for sequence in sequences {
            sources.push(self.buffers.source(sequence)?);
            sources.resize(sources.len() + sequence.ids.len() - 1, None);
        }
        let on_device = Tensor::zeros(ids.len(), DType::U32, cache.device())?;
        let inputs = StepInputs { ids: ids.clone(), sources, ..StepInputs::default() };
        self.buffers.write_inputs(&inputs, &on_device)?;
        let spans: Vec<SequenceSpan> = sequences.iter().map(StepSequence::span).collect();
        let batch = PassBatch { ids: &ids, sequences: &spans, rows: RowSelection::Last, sum_order: self.sum_order };
        let pass = decoder.prepare(&batch, cache)?;
        let hidden = decoder.hidden_states(&on_device, &pass, cache, None)?;
        decoder.own_logits(&hidden, self.sum_order, None)
    }

    /// Waits for the tokens of a queued step. See [`QueuedStepBuffers::wait`].
    pub fn wait(
        &self,
        index: usize,
        expected: &[Option<ExpectedToken>],
        record: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<SamplerResult>> {
        self.buffers.wait(index, expected, record)
    }
}

/// Returns which logits a queued step needs. A sequence needs only the best logits if its token is the one with the
/// largest unedited logit, and the step reports no log probabilities for it.
fn needed_logits(samplings: &[RowSampling]) -> NeededLogits {
    let needs_best = |sampling: &RowSampling| {
        sampling.params.temperature == 0.0 && sampling.edits.is_empty() && sampling.logprobs.is_none()
    };
    if !samplings.is_empty() && samplings.iter().all(needs_best) { NeededLogits::Best } else { NeededLogits::All }
}
