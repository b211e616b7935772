//! The inputs of a step. A kernel (`step_inputs.cu`) writes them, because the host may not know the input tokens yet.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::launch::{Arguments, HostWords, Launch, LaunchShape, module};

/// The contents of a step's input buffer: `ids`, then `words`, then words that only `changes` sets.
/// The words that only `changes` sets keep their values from step to step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepInputs {
    /// The token ids. An id that has a source in `sources` is ignored.
    pub ids: Vec<u32>,
    /// For each id, the source of its replacement: an index into the tokens that the previous step chose.
    /// `None` keeps the id.
    pub sources: Vec<Option<u32>>,
    /// The words after the ids: the positions and slots of a batch graph. Every step writes all of these words.
    pub words: Vec<u32>,
    /// The index and the new value of each changed word. Index 0 is the first word after `words`.
    /// No index occurs twice in `changes`.
    pub changes: Vec<(u32, u32)>,
}

impl StepInputs {
    /// Returns the length of [`description`](Self::description).
    fn len(&self) -> usize {
        2 * self.ids.len() + self.words.len() + 2 * self.changes.len()
    }

    /// Returns the words from which the kernel reads these inputs, in the layout of `description` in `step_inputs.cu`.
    fn description(&self) -> Vec<u32> {
        let mut words = Vec::with_capacity(self.len());
        words.extend(&self.ids);
        words.extend(self.sources.iter().map(|source| source.map_or(0, |source| source + 1)));
        words.extend(&self.words);
        words.extend(self.changes.iter().flat_map(|&(index, value)| [index, value]));
        words
    }

    /// Queues a kernel that writes the inputs to `inputs`, a contiguous u32 vector.
    /// `tokens` are the tokens that the previous step chose: a u32 vector.
    ///
    /// If the description fits in `range` of `host`, the kernel reads it there, and the host waits for no earlier step.
    /// The caller must then leave the range unchanged until the kernel has ended.
    /// If the description does not fit, the host copies it to the device, and may wait for earlier steps.
    pub fn write(
        &self,
        inputs: &Tensor,
        tokens: &Tensor,
        host: &Arc<HostWords>,
        range: std::ops::Range<usize>,
    ) -> Result<()> {
        let (rows, others, changes) = (self.ids.len(), self.words.len(), self.changes.len());
        let (total, available) = (inputs.dims1()?, tokens.dims1()?);
        let Device::Cuda(device) = inputs.device() else { return super::unsupported("set_step_inputs", inputs) };
        let is_valid = self.sources.len() == rows
            && self.sources.iter().flatten().all(|&source| (source as usize) < available)
            && rows + others <= total
            && self.changes.iter().all(|&(index, _)| (index as usize) < total - rows - others);
        if !is_valid || inputs.dtype() != DType::U32 || tokens.dtype() != DType::U32 {
            bail!(
                "cannot write step inputs: wrong size, index or dtype: {rows} ids, {others} words, {changes} changes, \
                 buffer {:?}",
                inputs.shape()
            );
        }
        let description = self.description();
        let arguments = if description.len() <= range.len() {
            host.write(range.start, &description);
            Arguments::new().host_words(host, range.start)
        } else {
            Arguments::new().tensor(&Tensor::new(description, inputs.device())?)?
        };
        let arguments = arguments.tensor(tokens)?.tensor(inputs)?.int(rows).int(others).int(changes);
        let shape = LaunchShape::one_thread_each(rows + others + changes);
        let launch = Launch::new(module!("step_inputs"), "set_step_inputs", shape, arguments);
        // SAFETY: all indices are checked above, and the description has the length that the kernel reads.
        unsafe { launch.enqueue(device) }
    }
}
