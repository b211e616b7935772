//! The inputs of a step. A kernel (`step_inputs.cu`) writes them, because the host may not know the input tokens yet:
//! the previous step chooses them.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::launch::{Arguments, HostWordRange, Launch, LaunchShape, module};

/// What to write to the input buffer of a step. The buffer holds `ids`, then `words`, then further words,
/// which keep their values from step to step unless `changes` sets them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepInputs {
    /// The token ids. The ids of tokens that have a source in `sources` are ignored.
    pub ids: Vec<u32>,
    /// For each token, its index in the tokens that the previous step chose. `None` if `ids` has the id.
    pub sources: Vec<Option<u32>>,
    /// The words after the ids: positions and slots in a step of a batch graph, otherwise none.
    pub words: Vec<u32>,
    /// The index and the new value of each changed word. Index 0 is the first word after `words`.
    /// No index may occur twice, because different threads write the values.
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
    /// If the description fits in `range`, writes it there without waiting for earlier steps.
    /// The caller must then leave the range unchanged until the kernel has ended.
    /// If the description does not fit, copies it to the device, which may wait for earlier steps.
    pub fn write(&self, inputs: &Tensor, tokens: &Tensor, range: HostWordRange) -> Result<()> {
        let rows = self.ids.len();
        let others = self.words.len();
        let changes = self.changes.len();
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
        let arguments = if range.has_room_for(description.len()) {
            range.write(&description);
            Arguments::new().host_words(&range)
        } else {
            Arguments::new().tensor(&Tensor::new(description, inputs.device())?)?
        };
        let arguments = arguments.tensor(tokens)?.tensor(inputs)?.int(rows).int(others).int(changes);
        let shape = LaunchShape::one_thread_each(rows + others + changes);
        let launch = Launch::new(module!("step_inputs"), "set_step_inputs", shape, arguments);
        // SAFETY: sources and indices are checked above, and the description has the length that the kernel reads.
        unsafe { launch.enqueue(device) }
    }
}
