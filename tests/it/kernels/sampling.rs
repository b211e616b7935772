//! Tests of the kernels that sample, edit and mask rows of logits.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use inferno::SamplingParams;
use inferno::engine::sampling::Sampler;
use inferno::kernels::launch::{HostMailbox, HostWords};
use inferno::kernels::sampling::{
    DeviceSampling, EditedRow, MAILBOX_NO_TOKEN, Penalties, RowEdits, TokenMask, best_logits, edit_rows, mask_logits,
    queue_best, sample_rows,
};
use inferno::runner::TokenSampler;
use inferno::world::share;

use crate::harness::TestCase;
use crate::support::{Random, gpu, gpu_case};

const INF: f32 = f32::INFINITY;

/// Returns the cases of a test that runs with vocabularies of these sizes.
fn vocabularies(sizes: impl IntoIterator<Item = usize>) -> Vec<TestCase<usize>> {
    sizes.into_iter().map(|vocab| gpu_case(format!("{vocab}_tokens"), vocab)).collect()
}

fn sampled_vocabularies() -> Vec<TestCase<usize>> {
    vocabularies([1, 31, 301, 5000, 40_000])
}

/// Each row of a batch has its own sampling parameters. The token of each row must equal the host sampler's choice.
#[test(each = sampled_vocabularies)]
fn sampled_rows_match_host_sampling(vocab: usize) {
    let device = gpu();
    let base = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
    let mut params = vec![
        SamplingParams::greedy(),
        base.clone(),
        SamplingParams { temperature: 0.6, ..base.clone() },
        SamplingParams { top_k: 7, temperature: 1.7, ..base.clone() },
        SamplingParams { top_p: 0.7, ..base.clone() },
        SamplingParams { top_p: 0.0, ..base.clone() },
        SamplingParams { min_p: 0.3, ..base.clone() },
        // At temperature 0.01, the kernel rounds most probabilities to 0, so fewer than 50 tokens remain.
        SamplingParams { top_k: 50, temperature: 0.01, ..base.clone() },
        SamplingParams { top_k: 50, top_p: 0.9, temperature: 1e-7, ..base.clone() },
        SamplingParams { top_k: 50, top_p: 0.9, min_p: 0.02, temperature: 1.3, ..base.clone() },
        SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.2, presence_penalty: -0.1, ..base.clone() },
        SamplingParams { temperature: 0.0, repetition_penalty: 1.5, ..base },
    ];
    let mut random = Random(9);
    for seed in 0..20 {
        params.iter_mut().for_each(|params| params.seed = seed);
        let prompt: Vec<u32> = (0..20).map(|_| random.below(vocab) as u32).collect();
        let mut hosts: Vec<Sampler> = params.iter().map(|params| Sampler::new(params.clone(), &prompt)).collect();
        for _ in 0..3 {
            let logits = (random.tensor(&[hosts.len(), vocab], DType::F32) * 4.0).unwrap();
            let rows: Vec<_> = hosts.iter().map(TokenSampler::on_device).collect();
            let tokens = sample(&logits.to_device(&device).unwrap(), &rows);
            for (row, (host, token)) in hosts.iter_mut().zip(tokens).enumerate() {
                let want = host.sample(&mut logits.get(row).unwrap().to_vec1::<f32>().unwrap());
                assert_eq!(token, Some(want), "{:?}", params[row]);
            }
        }
    }
}

#[test(gpu)]
fn greedy_sampling_of_rows_chooses_the_lowest_id_with_the_largest_logit() {
    let device = gpu();
    let tied = (0..9000).map(|id| if [5, 4101, 8999].contains(&id) { 2.0 } else { 0.0f32 }).collect();
    let tied = Tensor::from_vec(tied, (1, 9000), &device).unwrap();
    assert_eq!(sample(&tied, &[None]), [Some(5)]);
}

/// If every logit of a row is NaN or -inf, the row gets no token.
#[test(gpu)]
fn sampling_of_rows_never_chooses_a_token_whose_logit_is_nan_or_negative_infinity() {
    let device = gpu();
    let special = Tensor::new(&[[f32::NAN, -INF, 3.0, 3.0], [f32::NAN, -INF, -INF, f32::NAN]], &device).unwrap();
    for temperature in [0.0, 1.0] {
        let host = Sampler::new(SamplingParams { temperature, ..SamplingParams::greedy() }, &[]);
        let tokens = sample(&special, &[host.on_device(), host.on_device()]);
        assert!(matches!(tokens[..], [Some(2 | 3), None]), "temperature {temperature}: {tokens:?}");
    }
}

/// Logits that several GPUs divide among themselves.
#[derive(Clone, Copy)]
struct DividedLogits {
    rows: usize,
    vocab: usize,
    gpus: usize,
}

fn divided_logits() -> Vec<TestCase<DividedLogits>> {
    use DividedLogits as Case;
    let cases = [
        Case { rows: 1, vocab: 1, gpus: 1 },
        Case { rows: 3, vocab: 7, gpus: 2 },
        Case { rows: 5, vocab: 301, gpus: 3 },
        Case { rows: 2, vocab: 40_000, gpus: 8 },
        Case { rows: 128, vocab: 9001, gpus: 2 },
    ];
    let named = |case: Case| gpu_case(format!("{}x{}::{}_gpus", case.rows, case.vocab, case.gpus), case);
    cases.map(named).into()
}

/// With several GPUs, each finds candidates for the largest logit of a row among its own part of the vocabulary.
/// The token with the largest logit must be chosen from the candidates of all GPUs.
/// In this test, one GPU computes the candidates for every part.
#[test(each = divided_logits)]
fn the_largest_logits_of_several_gpus_determine_the_greedy_token(case: DividedLogits) {
    let DividedLogits { rows, vocab, gpus } = case;
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("{device:?} is not a GPU") };
    let mut random = Random(3);
    // With clamped and rounded noise, several ids of a long row have the largest logit.
    let noise = random.tensor(&[rows, vocab], DType::F32).clamp(-2.0, 2.0).unwrap();
    let mut logits: Vec<Vec<f32>> = ((noise * 16.0).unwrap().round().unwrap() / 4.0).unwrap().to_vec2().unwrap();
    logits[0][vocab / 2] = f32::NAN;
    if rows > 1 {
        logits[1].fill(-INF);
    }
    if rows > 2 {
        // The two zeros are equal, so the lower id must be chosen.
        logits[2].fill(-1.0);
        (logits[2][vocab / 3], logits[2][vocab - 1]) = (-0.0, 0.0);
    }
    let all = Tensor::new(logits.clone(), &device).unwrap();
    let best: Vec<Tensor> = (0..gpus)
        .map(|gpu| share(vocab, 1, gpu, gpus))
        .map(|own| best_logits(&all.narrow(1, own.start, own.len()).unwrap().contiguous().unwrap(), own.start))
        .collect::<Result<_, _>>()
        .unwrap();
    let tokens = Tensor::zeros(rows, DType::U32, &device).unwrap();
    let mailbox = HostMailbox::new(cuda, rows + 1).unwrap();
    queue_best(&Tensor::cat(&best, 1).unwrap(), &tokens, mailbox.slots_from(1)).unwrap();
    let want: Vec<Option<u32>> = logits
        .iter()
        .map(|row| {
            let largest = row.iter().copied().fold(-INF, f32::max);
            let is_largest = |logit: &f32| *logit == largest && largest > -INF;
            row.iter().position(is_largest).map(|id| id as u32)
        })
        .collect();
    let sent: Vec<u32> = (1..=rows).map(|slot| mailbox.wait(slot).unwrap()).collect();
    assert_eq!(sent, want.iter().map(|id| id.map_or(MAILBOX_NO_TOKEN, |id| id + 1)).collect::<Vec<_>>());
    let on_device: Vec<u32> = tokens.to_vec1().unwrap();
    assert_eq!(on_device, want.iter().map(|id| id.unwrap_or(u32::MAX)).collect::<Vec<_>>());
}

/// Samples a token from each row of `logits` and returns the tokens.
/// Also samples several copies of the rows in one launch, and checks that each copy gets the same tokens.
/// On Hopper GPUs, the kernel uses fewer thread blocks per row if there are more rows.
fn sample(logits: &Tensor, rows: &[Option<DeviceSampling>]) -> Vec<Option<u32>> {
    let copies = [24, 60, 200].map(|total| total / rows.len());
    // sample_rows applies penalties in place, so make all copies before the first call.
    let repeated = copies.map(|copies| logits.repeat((copies, 1)).unwrap());
    let tokens = sample_rows(logits, rows).unwrap();
    for (copies, logits) in copies.into_iter().zip(repeated) {
        let got = sample_rows(&logits, &vec![rows; copies].concat()).unwrap();
        assert_eq!(got, tokens.repeat(copies), "{copies} copies of {} rows", rows.len());
    }
    tokens
}

/// Compares the kernel with the host sampler where the cutoffs of top-k and top-p are among 20,000 similar logits.
/// These logits differ by at most 0.02, and are far below the largest logit.
/// With one or two thread blocks per row, each block has more logits in the histogram bin of the cutoff than fit in
/// its shared memory. With four or eight blocks, they fit. [`sample`] tests all four numbers of blocks on an H200.
/// The difference between each logit and the largest one is exact in f32, so no two of these logits get the same
/// probability.
#[test(gpu)]
fn cutoffs_among_similar_logits_match_host_sampling() {
    let device = gpu();
    let count = 20_000;
    let base = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
    let mut logits: Vec<f32> = (0..count).map(|id| (id * 7919 % count) as f32 / (1 << 20) as f32).collect();
    logits.push(9.0);
    for seed in 0..20 {
        let top_k = SamplingParams { top_k: 7000, seed, ..base.clone() };
        let top_p = SamplingParams { top_p: 0.8, seed, ..base.clone() };
        let both = SamplingParams { top_k: 13_000, top_p: 0.7, seed, ..base.clone() };
        let mut hosts = [top_k, top_p, both].map(|params| Sampler::new(params, &[]));
        let rows = Tensor::from_vec(logits.repeat(3), (3, logits.len()), &device).unwrap();
        let sampling: Vec<_> = hosts.iter().map(TokenSampler::on_device).collect();
        let tokens = sample(&rows, &sampling);
        for (what, (host, token)) in ["top-k", "top-p", "both"].into_iter().zip(hosts.iter_mut().zip(tokens)) {
            assert_eq!(token, Some(host.sample(&mut logits.clone())), "{what}, seed {seed}");
        }
    }
}

fn edited_vocabularies() -> Vec<TestCase<usize>> {
    vocabularies([1, 31, 301, 5000])
}

/// The kernel edits rows of logits like the reference, `RowEdits::apply`, and leaves unedited rows unchanged.
/// A token in flight was chosen by the previous step, and only the device knows it.
/// It may have occurred earlier in its sequence, so `seen` may already list it.
#[test(each = edited_vocabularies)]
fn edited_rows_match_the_reference(vocab: usize) {
    const NO_TOKEN: u32 = u32::MAX;
    const WORDS: usize = 4096;
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("{device:?} is not a GPU") };
    let host = HostWords::new(cuda, WORDS).unwrap();
    let mut random = Random(11);
    let tokens: Vec<u32> = (0..8).map(|_| random.below(vocab) as u32).chain([NO_TOKEN]).collect();
    let mut distinct = |most: usize| -> Vec<u32> {
        let ids: BTreeSet<u32> = (0..random.below(most)).map(|_| random.below(vocab + 3) as u32).collect();
        ids.into_iter().collect()
    };
    let lists: Vec<[Vec<u32>; 2]> = (0..9).map(|_| [distinct(40), distinct(1000)]).collect();
    let edits: Vec<RowEdits> = lists
        .into_iter()
        .enumerate()
        .map(|(row, [values, mut seen])| {
            // In even rows, `seen` lists the token in flight, as if the token had also occurred earlier.
            seen.retain(|&token| token != tokens[row]);
            if row.is_multiple_of(2) && tokens[row] != NO_TOKEN {
                seen.push(tokens[row]);
            }
            RowEdits {
                values: values.into_iter().map(|token| (token, random.normal())).collect(),
                penalties: match row % 3 {
                    0 => Penalties { repetition: 1.3, ..Penalties::NONE },
                    1 => Penalties { repetition: 1.0, frequency: 0.3, presence: -0.7 },
                    _ => Penalties { repetition: 0.8, frequency: -0.2, presence: 0.4 },
                },
                seen: seen.into_iter().map(|token| (token, random.below(4) as u32)).collect(),
            }
        })
        .collect();
    let logits = random.tensor(&[11, vocab], DType::F32);
    let on_device = Tensor::new(&tokens[..], &device).unwrap();
    // Row 4 has no token in flight. Row 8 has `NO_TOKEN`, as if the previous step could not choose a token.
    // Rows 9 and 10 are not edited.
    let source = |row: usize| (row != 4).then_some(row as u32);
    let rows: Vec<EditedRow> =
        edits.iter().enumerate().map(|(row, edits)| EditedRow { row, edits, in_flight: source(row) }).collect();
    let mut want = logits.to_vec2::<f32>().unwrap();
    for EditedRow { row, edits, in_flight } in &rows {
        let in_flight = in_flight.map(|source| tokens[source as usize]).filter(|&token| token != NO_TOKEN);
        edits.apply(&mut want[*row], in_flight);
    }
    // The encoded edits do not fit in the empty range of host memory, so they are copied to the device.
    for (description, range) in [("in host memory", 3..WORDS), ("on the device", 0..0)] {
        let edited = logits.to_device(&device).unwrap();
        for rows in rows.chunks(2) {
            edit_rows(&edited, rows, &on_device, host.range(range.clone())).unwrap();
            device.synchronize().unwrap();
        }
        for (row, (got, want)) in edited.to_vec2::<f32>().unwrap().iter().zip(&want).enumerate() {
            for (token, (&got, &want)) in got.iter().zip(want).enumerate() {
                // The GPU rounds once per multiply-add (FMA), but the host rounds twice, so last bits may differ.
                let error = (got - want).abs();
                let what = format!("edits {description}, row {row}, token {token}");
                assert!(error <= 1e-6 * want.abs().max(1.0), "{what}: got {got}, expected {want}");
            }
        }
    }
    let edited = logits.to_device(&device).unwrap();
    let invalid = |row, in_flight| EditedRow { row, in_flight, ..rows[0] };
    for rows in [vec![invalid(11, None)], vec![invalid(0, Some(9))], vec![rows[0], rows[0]]] {
        assert!(edit_rows(&edited, &rows, &on_device, host.range(0..WORDS)).is_err());
    }
}

fn masked_vocabularies() -> Vec<TestCase<usize>> {
    vocabularies([1, 31, 32, 33, 256, 257, 5000])
}

/// A token mask changes only its own row of logits, exactly as masking on the host does.
#[test(each = masked_vocabularies)]
fn masked_rows_match_masking_on_the_host(vocab: usize) {
    let device = gpu();
    let mut random = Random(5);
    let logits = random.tensor(&[6, vocab], DType::F32);
    let mut mask = |row: u32| {
        let mut mask = TokenMask::none(vocab);
        (0..vocab as u32).filter(|_| random.below(3) == 0).for_each(|id| mask.allow(id));
        (row, mask)
    };
    let masks = [mask(5), mask(0), mask(3), (2, TokenMask::none(vocab))];
    let masked = logits.to_device(&device).unwrap();
    mask_logits(&masked, &masks).unwrap();
    let mut want = logits.to_vec2::<f32>().unwrap();
    masks.iter().for_each(|(row, mask)| mask.apply(&mut want[*row as usize]));
    assert_eq!(masked.to_vec2::<f32>().unwrap(), want);
    mask_logits(&masked, &[]).unwrap();
    assert!(mask_logits(&masked, &[(6, TokenMask::none(vocab))]).is_err());
    assert!(mask_logits(&masked, &[(0, TokenMask::none(vocab + 32))]).is_err());
}
