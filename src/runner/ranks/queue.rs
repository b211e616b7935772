//! Queues a step on the GPU of one rank.

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::kernels::SumOrder;
use crate::kernels::step_inputs::StepInputs;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::KvCache;
use crate::nn::pass::{LogitRows, SequenceSpan, StepBatch};
use crate::runner::batch_graph::BatchGraphs;
use crate::runner::queue::{QueueBuffers, RowSampling};
use crate::runner::route::Route;
use crate::runner::step_sequence::StepSequence;

/// What a rank needs to queue a step on its GPU.
pub struct RankQueue<'r> {
    pub decoder: &'r Decoder,
    pub cache: &'r KvCache,
    pub batches: &'r mut BatchGraphs,
    pub buffers: &'r mut QueueBuffers,
    pub sum_order: SumOrder,
}

impl RankQueue<'_> {
    /// Queues the forward pass of all sequences and the choice of their next tokens. All ranks have the same logits and
    /// parameters, so their GPUs choose the same tokens. Returns the index of the step.
    pub fn queue(mut self, route: Route, sequences: &[StepSequence], samplings: &[RowSampling]) -> Result<usize> {
        let on_graph = match route {
            Route::BatchGraph => self.batches.try_run(self.decoder, self.cache, sequences, self.buffers)?,
            Route::DecodeGraph | Route::Operations => None,
        };
        let logits = match on_graph {
            Some(logits) => logits,
            None => self.forward(sequences)?,
        };
        let logits = if samplings.len() == sequences.len() {
            logits
        } else {
            let rows: Vec<u32> = samplings.iter().map(|sampling| sampling.index as u32).collect();
            logits.index_select(&Tensor::new(rows, logits.device())?, 0)?
        };
        self.buffers.choose(samplings, &logits)
    }

    /// Queues the forward pass of all sequences, operation by operation.
    fn forward(&mut self, sequences: &[StepSequence]) -> Result<Tensor> {
        let ids: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.ids).copied().collect();
        let mut sources = Vec::with_capacity(ids.len());
        for sequence in sequences {
            sources.push(self.buffers.source(sequence)?);
            sources.resize(sources.len() + sequence.ids.len() - 1, None);
        }
        let on_device = Tensor::zeros(ids.len(), DType::U32, self.cache.device())?;
        let inputs = StepInputs { ids: ids.clone(), sources, ..StepInputs::default() };
        self.buffers.write_inputs(&inputs, &on_device)?;
        let spans: Vec<SequenceSpan> = sequences.iter().map(StepSequence::span).collect();
        let batch = StepBatch { ids: &ids, sequences: &spans, logits: LogitRows::Last, sum_order: self.sum_order };
        self.decoder.forward_on_device(&on_device, &batch, self.cache)
    }
}
