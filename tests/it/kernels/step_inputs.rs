//! Tests of the kernel that writes the inputs of a step.

use candle_core::{DType, Device, Tensor};
use inferno::kernels::launch::HostWords;
use inferno::kernels::step_inputs::StepInputs;

use crate::harness::TestCase;
use crate::support::{Random, gpu, gpu_case};

/// The elements of a step's inputs.
#[derive(Clone, Copy)]
struct InputSizes {
    /// The number of token ids.
    rows: usize,
    /// The number of words that every step sets.
    others: usize,
    /// The number of words that only `changes` can set.
    rest: usize,
}

/// A thread block writes up to 256 elements, so the last two cases need several blocks.
fn input_sizes() -> Vec<TestCase<InputSizes>> {
    use InputSizes as Sizes;
    let cases = [
        Sizes { rows: 1, others: 0, rest: 0 },
        Sizes { rows: 2, others: 3, rest: 5 },
        Sizes { rows: 7, others: 14, rest: 40 },
        Sizes { rows: 256, others: 256, rest: 300 },
        Sizes { rows: 300, others: 601, rest: 1000 },
    ];
    cases.map(|case| gpu_case(format!("{}_ids::{}_and_{}_words", case.rows, case.others, case.rest), case)).into()
}

/// The kernel takes each token id from the host or from the tokens of the previous step, with 0 in place of `NO_TOKEN`.
/// After the ids, it writes `words`. In the rest of the buffer, it writes only the elements that `changes` lists.
#[test(each = input_sizes)]
fn step_inputs_match_a_computation_on_the_host(sizes: InputSizes) {
    const NO_TOKEN: u32 = u32::MAX;
    const WORDS: usize = 8192;
    let InputSizes { rows, others, rest } = sizes;
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("{device:?} is not a GPU") };
    let host = HostWords::new(cuda, WORDS).unwrap();
    let mut random = Random(13);
    let mut tokens: Vec<u32> = (0..9).map(|_| random.next() as u32).collect();
    tokens[4] = NO_TOKEN;
    let tokens_on_device = Tensor::new(&tokens[..], &device).unwrap();
    let mut want: Vec<u32> = (0..rows + others + rest).map(|_| random.next() as u32).collect();
    let buffer = Tensor::new(&want[..], &device).unwrap();
    let mut step = || StepInputs {
        ids: (0..rows).map(|_| random.next() as u32).collect(),
        sources: (0..rows)
            .map(|row| match row % 3 {
                0 => None,
                1 => Some(4), // the token of a sequence for which no token could be chosen
                _ => Some(random.below(9) as u32),
            })
            .collect(),
        words: (0..others).map(|_| random.next() as u32).collect(),
        changes: (0..rest as u32).filter(|index| index % 3 > 0).map(|index| (index, random.next() as u32)).collect(),
    };
    // The range of host memory is large enough only in the second step.
    // In the other two steps, the inputs are copied to the device.
    for spare in [-1, 0, -(WORDS as isize)] {
        let inputs = step();
        for (row, (&id, source)) in inputs.ids.iter().zip(&inputs.sources).enumerate() {
            let id = source.map_or(id, |source| tokens[source as usize]);
            want[row] = if id == NO_TOKEN { 0 } else { id };
        }
        want[rows..rows + others].copy_from_slice(&inputs.words);
        for &(index, value) in &inputs.changes {
            want[rows + others + index as usize] = value;
        }
        let length = 2 * rows + others + 2 * inputs.changes.len();
        let range = 3..3 + length.saturating_add_signed(spare);
        inputs.write(&buffer, &tokens_on_device, host.range(range)).unwrap();
        assert_eq!(buffer.to_vec1::<u32>().unwrap(), want, "{spare} words to spare in host memory");
    }

    let inputs = step();
    let write = |inputs: &StepInputs, buffer: &Tensor| inputs.write(buffer, &tokens_on_device, host.range(0..WORDS));
    let invalid = [
        StepInputs { sources: vec![Some(9); rows], ..inputs.clone() },
        StepInputs { sources: vec![None; rows + 1], ..inputs.clone() },
        StepInputs { words: vec![0; others + rest + 1], changes: Vec::new(), ..inputs.clone() },
        StepInputs { changes: vec![(rest as u32, 0)], ..inputs.clone() },
    ];
    assert!(invalid.iter().all(|inputs| write(inputs, &buffer).is_err()));
    assert!(write(&inputs, &buffer.to_dtype(DType::F32).unwrap()).is_err());
    assert_eq!(buffer.to_vec1::<u32>().unwrap(), want, "refused inputs changed the buffer");
}
