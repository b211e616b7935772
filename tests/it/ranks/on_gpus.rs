//! Tests of several ranks that run one model together on GPUs. With fewer GPUs than ranks, several ranks share a GPU.
//!
//! Each test runs alone, because another test could load kernels or allocate memory on the same GPUs.
//! Both can wait for running kernels, and a kernel that waits for another GPU might then wait forever.

use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use half::bf16;
use inferno::SamplingParams;
use inferno::device::{self, DeviceChoice, Devices, Split};
use inferno::kernels::exchange::{self, ExchangePath, ExchangeTimes};
use inferno::kernels::sampling::DeviceSampling;
use inferno::models;
use inferno::nn::kv_cache::KvCache;
use inferno::runner::{DecodeGraph, ExecutionMode};
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder};
use inferno::world::{ANSWER_TIMEOUT, Exchange, PartialResult, ResidualUpdate, World};

use crate::harness::TestCase;
use crate::ranks::{CONTEXT, assert_ranks_agree, logits_on, on_ranks, split_world};
use crate::runner::queued_steps;
use crate::support::engine::{GraphModel, assert_greedy, assert_greedy_within, generate, generate_at_once, two_gpus};
use crate::support::{
    DTYPES, DTYPES_OF_16_BITS, GOLDEN_MODELS, GoldenKind, GoldenModel, expected_logits, golden, gpu_case, logits_of,
    logits_tolerance, on_gpu,
};

const SPLITS: [Split; 2] = [Split::Tensor, Split::Layers];

fn split_name(split: Split) -> &'static str {
    match split {
        Split::Tensor => "tensor",
        Split::Layers => "layers",
    }
}

fn path_name(path: ExchangePath) -> &'static str {
    match path {
        ExchangePath::Direct => "direct",
        ExchangePath::HostMemory => "host_memory",
    }
}

fn paths() -> Vec<TestCase<ExchangePath>> {
    let case = |path| gpu_case(path_name(path).to_string(), path);
    [ExchangePath::Direct, ExchangePath::HostMemory].map(case).into()
}

fn splits() -> Vec<TestCase<Split>> {
    SPLITS.map(|split| gpu_case(split_name(split).to_string(), split)).into()
}

/// Returns a case for each tested combination of world size and exchange path.
fn sizes_and_paths() -> Vec<TestCase<(usize, ExchangePath)>> {
    let direct = [2, 3, 4].map(|size| (size, ExchangePath::Direct));
    let host_memory = [2, 3].map(|size| (size, ExchangePath::HostMemory));
    let case =
        |(size, path): (usize, ExchangePath)| gpu_case(format!("{size}_ranks::{}", path_name(path)), (size, path));
    direct.into_iter().chain(host_memory).map(case).collect()
}

/// A golden model, and the split with which two ranks run it.
#[derive(Clone, Copy)]
struct DividedModel {
    model: &'static GoldenModel,
    split: Split,
}

/// Returns a case for each combination of a golden model, a split and one of `dtypes`. Omits the 8-bit models.
fn divided_models(dtypes: &[DType]) -> Vec<TestCase<(DividedModel, DType)>> {
    let models = GOLDEN_MODELS.iter().filter(|model| model.kind != GoldenKind::Compressed);
    let divided = models.flat_map(|model| {
        SPLITS.map(|split| (format!("{}::{}", model.name, split_name(split)), DividedModel { model, split }))
    });
    on_gpu(divided, dtypes)
}

fn divided_models_in_16_bits() -> Vec<TestCase<(DividedModel, DType)>> {
    divided_models(&DTYPES_OF_16_BITS)
}

fn divided_models_in_all_dtypes() -> Vec<TestCase<(DividedModel, DType)>> {
    divided_models(&DTYPES)
}

/// Returns a case for each name with each of [`DTYPES`].
fn in_all_dtypes(names: &[&'static str]) -> Vec<TestCase<(&'static str, DType)>> {
    on_gpu(names.iter().map(|&name| (name.to_string(), name)), &DTYPES)
}

/// Calls `work` for each rank with its connected world, its GPU, and the exchange between the GPUs.
/// With fewer GPUs than ranks, several ranks share a GPU.
fn on_gpus<T: Send>(
    size: usize,
    path: ExchangePath,
    work: impl Fn(&World, &Device, &dyn Exchange) -> T + Sync,
) -> Vec<T> {
    on_ranks(size, |world| {
        let device = device::open(DeviceChoice::Cuda(world.rank() % device::gpu_count())).unwrap();
        let world = exchange::connect(world.clone(), &device, &[path]).unwrap();
        let exchange = world.exchange().expect("the GPUs cannot exchange data");
        work(&world, &device, &**exchange)
    })
}

/// Returns the elements of `x`. Synchronizes the device before the copy to the host.
/// On a shared GPU, a copy that waits for an exchange would keep the other ranks from launching kernels.
fn on_host(x: &Tensor) -> Vec<f32> {
    x.device().synchronize().unwrap();
    x.flatten_all().unwrap().to_vec1().unwrap()
}

#[test(each_alone = sizes_and_paths)]
fn gpus_exchange_tensors_of_all_sizes((size, path): (usize, ExchangePath)) {
    let value = |rank: usize, i: usize| ((i * 31 + rank * 17 + 5) % 1009) as f32;
    on_gpus(size, path, |world, device, exchange| {
        for round in 0..3 {
            // In f32, the last two tensors are larger than one region of a mailbox.
            for count in [1, 3, 4, 2880, 2881, 8 * 2880, 5_000_000, 5_000_003] {
                let x: Vec<f32> = (0..count).map(|i| value(world.rank(), i + round)).collect();
                let x = Tensor::from_vec(x, count, device).unwrap();
                let sum = on_host(&exchange.all_reduce(&x).unwrap());
                let expected = |i: usize| (0..size).map(|rank| value(rank, i + round)).sum::<f32>();
                assert!(
                    sum.iter().enumerate().all(|(i, &sum)| sum == expected(i)),
                    "wrong sum of {count} elements over {size} ranks in round {round}, {path:?}"
                );
                // Tensors whose length is not a multiple of 8 are summed without rounding.
                let sum = on_host(&exchange.all_reduce_rounded(&x).unwrap());
                let is_rounded = count % 8 == 0;
                let part = |rank, i| match value(rank, i + round) {
                    value if is_rounded => bf16::from_f32(value).to_f32(),
                    value => value,
                };
                let expected = |i: usize| match (0..size).map(|rank| part(rank, i)).sum::<f32>() {
                    // With more than two ranks, sums are rounded to bf16 as well.
                    sum if is_rounded && size > 2 => bf16::from_f32(sum).to_f32(),
                    sum => sum,
                };
                assert!(
                    sum.iter().enumerate().all(|(i, &sum)| sum == expected(i)),
                    "wrong rounded sum of {count} elements over {size} ranks in round {round}, {path:?}"
                );
            }
            for (rows, columns) in [(1, 1), (1, 113), (5, 1001), (33, 201_088)] {
                let own = world.share(columns, 1);
                let x = (0..rows).flat_map(|row| own.clone().map(move |column| value(row, column)));
                let x = Tensor::from_vec(x.collect::<Vec<_>>(), (rows, own.len()), device).unwrap();
                let all = on_host(&exchange.all_gather_columns(&x, columns, None).unwrap());
                let expected = (0..rows).flat_map(|row| (0..columns).map(move |column| value(row, column)));
                assert!(all.into_iter().eq(expected), "{rows} x {columns}");
            }
        }
        world.check().unwrap();
    });
}

/// Returns 8 terms whose sum is `y`: f32 `[8, rows, columns]`. A product has at most 8 terms.
fn product_terms(y: &Tensor) -> Tensor {
    let y = y.to_dtype(DType::F32).unwrap();
    let terms: Vec<Tensor> = [3.0, -4.0, 2.0, 1.0, -5.0, 0.0, 6.0, -2.0].map(|factor| (&y * factor).unwrap()).into();
    Tensor::stack(&terms, 0).unwrap()
}

/// Returns outputs of five experts per row, bf16 `[rows, 5, columns]`, and their routing weights.
/// The weighted sums equal `y`, which contains whole numbers.
fn expert_outputs(y: &Tensor) -> (Tensor, Tensor) {
    const WEIGHTS: [f32; 5] = [2.0, 1.0, 0.5, 0.25, 4.0];
    let (rows, columns) = y.dims2().unwrap();
    // y = 2 · half + rest. The other three terms add up to 0, and all outputs are exact in bf16.
    let outputs_for = |y: f32| {
        let half = (y / 2.0).floor();
        [half, y - 2.0 * half, 8.0, 16.0, -2.0]
    };
    let y = y.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
    let of_expert = |row: &[f32], expert: usize| row.iter().map(|&y| outputs_for(y)[expert]).collect::<Vec<f32>>();
    let outputs = y.iter().flat_map(|row| (0..WEIGHTS.len()).map(|expert| of_expert(row, expert))).flatten();
    let outputs = Tensor::from_vec(outputs.collect::<Vec<_>>(), (rows, WEIGHTS.len(), columns), &Device::Cpu).unwrap();
    let weights = Tensor::from_vec(WEIGHTS.repeat(rows), (rows, WEIGHTS.len()), &Device::Cpu).unwrap();
    (outputs.to_dtype(DType::BF16).unwrap(), weights)
}

/// How a rank passes its partial result to the exchange.
#[derive(Clone, Copy, PartialEq)]
enum PartialResultKind {
    /// f32 rows.
    Rows,
    /// Rows that the rank has already rounded to bf16.
    RoundedRows,
    /// The terms of a product, which are not yet added up.
    ProductTerms,
    /// The outputs of experts, which are not yet added up.
    Experts,
}

/// An update of the residual stream.
#[derive(Clone, Copy)]
struct Update {
    /// The kind of the first rank's partial result.
    first: PartialResultKind,
    /// The kind of the partial results of all other ranks.
    others: PartialResultKind,
    has_bias: bool,
    /// The dtype of the norm.
    dtype: DType,
}

impl Update {
    fn kind(&self, rank: usize) -> PartialResultKind {
        if rank == 0 { self.first } else { self.others }
    }
}

static UPDATES: [(&str, Update); 6] = {
    use DType::{BF16, F32};
    use PartialResultKind::{Experts, ProductTerms, RoundedRows, Rows};
    [
        ("rounded_rows", Update { first: Rows, others: RoundedRows, has_bias: true, dtype: BF16 }),
        ("terms", Update { first: ProductTerms, others: ProductTerms, has_bias: true, dtype: BF16 }),
        ("experts", Update { first: Experts, others: Experts, has_bias: true, dtype: BF16 }),
        ("rows", Update { first: Rows, others: Rows, has_bias: false, dtype: F32 }),
        ("rows_and_terms", Update { first: Rows, others: ProductTerms, has_bias: false, dtype: F32 }),
        ("rows_and_experts", Update { first: Rows, others: Experts, has_bias: false, dtype: F32 }),
    ]
};

/// Updates that a test runs one after another in the same world.
type Updates = &'static [(&'static str, Update)];

/// Returns a case for each of [`UPDATES`] alone, and a case for all of them together, with each tested combination of
/// world size and exchange path. In a case with all updates, each update finds a mailbox that other forms have used.
fn updates() -> Vec<TestCase<(usize, ExchangePath, Updates)>> {
    let with_updates = |TestCase { name: world, value: (size, path), .. }: TestCase<(usize, ExchangePath)>| {
        let alone = UPDATES.iter().map(|update| (update.0, std::slice::from_ref(update)));
        let cases = alone.chain([("all_forms", &UPDATES[..])]);
        cases.map(move |(name, updates)| gpu_case(format!("{world}::{name}"), (size, path, updates)))
    };
    sizes_and_paths().into_iter().flat_map(with_updates).collect()
}

/// The size of a residual stream, and how the ranks must update a stream of this size.
struct StreamSize {
    rows: usize,
    columns: usize,
    /// Whether two ranks divide the rows of a rounded update. Three or more ranks always do.
    is_divided_by_two: bool,
    /// Whether an update without rounding must be supported.
    has_exact_update: bool,
}

const STREAM_SIZES: [StreamSize; 7] = [
    StreamSize { rows: 1, columns: 8, is_divided_by_two: false, has_exact_update: true },
    StreamSize { rows: 2, columns: 64, is_divided_by_two: false, has_exact_update: true },
    StreamSize { rows: 7, columns: 2880, is_divided_by_two: false, has_exact_update: true },
    StreamSize { rows: 130, columns: 4096, is_divided_by_two: false, has_exact_update: true },
    // A rounded update of 3000 rows needs two launches.
    StreamSize { rows: 3000, columns: 2880, is_divided_by_two: true, has_exact_update: false },
    // Rows of more than 4,096 columns have several segments, of which the last one may not be full.
    StreamSize { rows: 9, columns: 4104, is_divided_by_two: false, has_exact_update: true },
    // For a row of 16,384 columns, a thread holds 32 columns, which is the maximum.
    StreamSize { rows: 5, columns: 16_384, is_divided_by_two: false, has_exact_update: true },
];

/// Adds partial results to a residual stream. Compares the sum and its RMSNorm with values computed on the host.
#[test(each_alone = updates)]
fn gpus_add_partial_results_to_the_residual_stream((size, path, updates): (usize, ExchangePath, Updates)) {
    on_gpus(size, path, |world, device, exchange| {
        for stream in &STREAM_SIZES {
            for rounds in [true, false] {
                for (name, update) in updates {
                    check_update(name, *update, stream, rounds, world, device, exchange);
                }
            }
        }
    });
}

/// Checks one update on one rank. If `rounds`, the ranks round their partial results to bf16.
fn check_update(
    name: &str,
    update: Update,
    stream: &StreamSize,
    rounds: bool,
    world: &World,
    device: &Device,
    exchange: &dyn Exchange,
) {
    const EPS: f32 = 1e-3;
    let Update { has_bias, dtype, .. } = update;
    let &StreamSize { rows, columns, is_divided_by_two, has_exact_update } = stream;
    let case = format!("{name}, {rows} x {columns}, rounds: {rounds}");
    // The partial result of a rank has the rank as its seed. All values are whole numbers, so their sums are exact.
    let (x_seed, bias_seed, weight_seed) = (90, 91, 92);
    let value = |seed: usize, i: usize| ((i * 31 + seed * 17 + i / 977 + 5) % 1009) as f32 - 504.0;
    let round = |value: f32| bf16::from_f32(value).to_f32();
    let tensor = |seed: usize, rows: usize| {
        let values: Vec<f32> = (0..rows * columns).map(|i| value(seed, i)).collect();
        Tensor::from_vec(values, (rows, columns), device).unwrap()
    };
    let row = |seed: usize| tensor(seed, 1).flatten_all().unwrap();

    let kind = update.kind(world.rank());
    let (x, y) = (tensor(x_seed, rows), tensor(world.rank(), rows));
    let y = if kind == PartialResultKind::RoundedRows { y.to_dtype(DType::BF16).unwrap() } else { y };
    let (outputs, weights) = expert_outputs(&y);
    let (outputs, weights) = (outputs.to_device(device).unwrap(), weights.to_device(device).unwrap());
    let terms = product_terms(&y);
    let partial = match kind {
        PartialResultKind::Rows | PartialResultKind::RoundedRows => PartialResult::Rows(&y),
        PartialResultKind::ProductTerms => PartialResult::ProductTerms(&terms),
        PartialResultKind::Experts => PartialResult::Experts { outputs: &outputs, weights: &weights },
    };
    let (bias, weight) = (row(bias_seed), row(weight_seed));
    let bias = has_bias.then_some(&bias);
    let update_of_rank = ResidualUpdate { x: &x, is_divided: false, partial, bias, weight: &weight, eps: EPS, dtype };
    let Some(updated) = exchange.update_residual(&update_of_rank, rounds).unwrap() else {
        assert!(!rounds && !has_exact_update, "{case}: the update is not supported");
        return;
    };
    assert_eq!(updated.is_divided, rounds && (world.size() > 2 || is_divided_by_two), "{case}");
    let sum = match updated.is_divided {
        true => exchange.all_gather_rows(&updated.x).unwrap(),
        false => updated.x,
    };
    let (sum, normed) = (on_host(&sum), updated.normed);
    assert_eq!(normed.dtype(), dtype);
    let normed = on_host(&normed.to_dtype(DType::F32).unwrap());
    world.check().unwrap();

    let part = |rank, i| match value(rank, i) {
        value if rounds || update.kind(rank) == PartialResultKind::RoundedRows => round(value),
        value => value,
    };
    let expected_sum = |i: usize| {
        let y: f32 = (0..world.size()).map(|rank| part(rank, i)).sum();
        value(x_seed, i) + y + if has_bias { value(bias_seed, i % columns) } else { 0.0 }
    };
    let is_bf16 = updated.is_divided || dtype == DType::BF16;
    // The sums are exact. The norm is rounded to bf16, which changes it by up to 2^-8 = 3.9e-3 of its size, or to f32.
    let tolerance = if is_bf16 { 4e-3 } else { 1e-5 };
    for row in 0..rows {
        let range = row * columns..(row + 1) * columns;
        let expected: Vec<f32> = range.clone().map(expected_sum).collect();
        assert!(sum[range.clone()] == expected, "{case}: the sums of row {row} differ from the host");
        let squares: f64 = expected.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        let scale = 1.0 / (squares / columns as f64 + f64::from(EPS)).sqrt();
        for (i, (&normed, &sum)) in normed[range].iter().zip(&expected).enumerate() {
            let expected = f64::from(sum) * scale * f64::from(value(weight_seed, i));
            let error = (f64::from(normed) - expected).abs();
            assert!(error <= expected.abs() * tolerance, "{case}: row {row}, column {i}: {normed}, not {expected}");
            assert!(!is_bf16 || normed == round(normed), "{case}: the norm is not rounded to bf16");
        }
    }
}

/// Runs many sums in a row and compares each sum with a sum that was computed beforehand.
/// `INFERNO_TEST_EXCHANGES` sets the number of sums, which is 10,000 by default.
#[test(each_alone = paths)]
fn many_sums_in_a_row_are_exact(path: ExchangePath) {
    const TENSORS: usize = 16;
    let sums = std::env::var("INFERNO_TEST_EXCHANGES").map_or(10_000, |sums| sums.parse::<usize>().unwrap());
    let size = device::gpu_count().clamp(2, 8);
    let value = |rank: usize, tensor: usize, i: usize| ((i * 31 + rank * 17 + tensor * 101 + 5) % 1009) as f32;
    on_gpus(size, path, |world, device, exchange| {
        let tensor = |value: &dyn Fn(usize) -> f32| {
            Tensor::from_vec((0..2880).map(value).collect::<Vec<_>>(), 2880, device).unwrap()
        };
        let parts: Vec<_> = (0..TENSORS).map(|k| tensor(&|i| value(world.rank(), k, i))).collect();
        let expected = |k, i| (0..size).map(|rank| value(rank, k, i)).sum::<f32>();
        let expected: Vec<_> = (0..TENSORS).map(|k| tensor(&|i| expected(k, i))).collect();
        // Load all kernels before the first sum: while a rank waits for another rank, no kernels can be loaded.
        let zeros = parts[0].zeros_like().unwrap();
        let mut error = (&zeros - zeros.clone()).unwrap().abs().unwrap().maximum(&zeros).unwrap();
        device.synchronize().unwrap();
        for sum in 0..sums {
            let difference = (exchange.all_reduce(&parts[sum % TENSORS]).unwrap() - &expected[sum % TENSORS]).unwrap();
            error = error.maximum(&difference.abs().unwrap()).unwrap();
            // Too many queued operations block the next launch. On a shared GPU, they also block the other rank.
            if sum % 50 == 0 {
                device.synchronize().unwrap();
            }
        }
        let error = on_host(&error).into_iter().fold(0.0, f32::max);
        world.check().unwrap();
        assert_eq!(error, 0.0, "not all {sums} sums of {size} ranks are exact");
    });
    println!("{sums} sums of {size} ranks are exact: {path:?}");
}

/// In an exchange, each data word is its own arrival flag, so no sent word may equal the mark of an empty word.
#[test(gpu_alone)]
fn gpus_exchange_every_kind_of_number() {
    let values = [f32::from_bits(u32::MAX), f32::NAN, f32::INFINITY, -0.0, f32::MIN_POSITIVE / 2.0, 1.0, 2.0, 3.0];
    // With three ranks, each rank sums only its share of the elements.
    on_gpus(3, ExchangePath::Direct, |world, device, exchange| {
        let many = Tensor::new(&values, device).unwrap().repeat(1 << 15).unwrap();
        for sum in on_host(&exchange.all_reduce_rounded(&many).unwrap()).chunks(8) {
            assert!(sum[0].is_nan() && sum[1].is_nan() && sum[2..4] == [f32::INFINITY, 0.0], "{sum:?}");
            assert_eq!(sum[5..], [3.0, 6.0, 9.0]);
        }
        world.check().unwrap();
    });
    let sums = on_gpus(2, ExchangePath::Direct, |world, device, exchange| {
        let x = Tensor::new(&values, device).unwrap();
        // Two values that are rounded to bf16 share a word, which must not equal the mark of an empty word, either.
        let many = Tensor::new(&values, device).unwrap().repeat(1 << 15).unwrap();
        let rounded = on_host(&exchange.all_reduce_rounded(&many).unwrap());
        for sum in rounded.chunks(8) {
            assert!(sum[0].is_nan() && sum[1].is_nan() && sum[2..4] == [f32::INFINITY, 0.0], "{sum:?}");
            assert_eq!(sum[5..], [2.0, 4.0, 6.0]);
        }
        // Too many queued operations block the next launch. On a shared GPU, they also block the other rank.
        for _ in 0..200 {
            (0..100).for_each(|_| drop(exchange.all_reduce(&x).unwrap()));
            device.synchronize().unwrap();
        }
        let sum = on_host(&exchange.all_reduce(&x).unwrap());
        world.check().unwrap();
        sum
    });
    for sum in sums {
        assert!(sum[0].is_nan() && sum[1].is_nan(), "{sum:?}");
        assert_eq!(sum[2..], values[2..].iter().map(|value| value + value).collect::<Vec<_>>());
    }
}

/// Checks that the measured times of small and large exchanges are plausible.
/// If the two ranks share one GPU, the data does not pass a link, so a large exchange can be as fast as a small one.
#[test(gpu_alone)]
fn the_exchange_of_gpus_can_be_measured() {
    let times = on_ranks(2, |world| {
        let device = device::open(DeviceChoice::Cuda(world.rank() % device::gpu_count())).unwrap();
        let Device::Cuda(device) = device else { panic!("not a GPU") };
        exchange::measure(world, &device, ExchangePath::Direct).unwrap().unwrap()
    });
    println!("{times:?}");
    let is_shared = device::gpu_count() < 2;
    let is_plausible =
        |times: &ExchangeTimes| times.small > 0.0 && times.large < 0.1 && (is_shared || times.small < times.large);
    assert!(times.iter().all(is_plausible), "{times:?}");
}

#[test(gpu_alone)]
fn a_gpu_that_does_not_answer_ends_the_world() {
    let errors = on_gpus(2, ExchangePath::Direct, |world, device, exchange| {
        let x = Tensor::new(&[1f32], device).unwrap();
        on_host(&exchange.all_reduce(&x).unwrap());
        world.check().unwrap();
        if world.is_first() {
            on_host(&exchange.all_reduce(&x).unwrap());
        } else {
            // The second rank announces a launch, but launches nothing.
            exchange.launch_together(&mut || Ok(())).unwrap();
        }
        std::thread::sleep(ANSWER_TIMEOUT + Duration::from_secs(2));
        world.check().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("GPU 2 of 2 does not answer")), "{errors:?}");
}

/// Before the first launch of a graph, a rank waits up to 60 s for the other ranks, which may be loading kernels.
/// Between two graph launches, no rank loads kernels.
/// A host that hangs there is therefore noticed after 5 s, as a GPU that hangs is.
#[test(gpu_alone)]
fn a_host_that_does_not_launch_its_graph_ends_the_world() {
    let errors = on_gpus(2, ExchangePath::Direct, |world, device, exchange| {
        on_host(&exchange.all_reduce(&Tensor::new(&[1f32], device).unwrap()).unwrap());
        exchange.launch_together(&mut || Ok(())).unwrap();
        if world.is_first() {
            // The call returns when its time limit expires, because the second rank launches no second graph.
            exchange.launch_together(&mut || Ok(())).unwrap();
        } else {
            std::thread::sleep(ANSWER_TIMEOUT + Duration::from_secs(2));
        }
        world.check().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("GPU 2 of 2 does not answer")), "{errors:?}");
}

/// Runs a golden model token by token on the decode graphs of two ranks.
/// The decode graph does not support all models, so a rank may have none, unless `graph_ranks` of the model is 2.
#[test(each_alone = divided_models_in_16_bits)]
fn decode_graphs_of_ranks_agree_with_transformers((DividedModel { model, split }, dtype): (DividedModel, DType)) {
    let name = model.name;
    let dir = golden(name);
    let (ids, expected) = expected_logits(&dir.join("golden.safetensors"));
    // The two dtypes use different exchange paths, so that the cases cover both paths.
    let path = if dtype == DType::F16 { ExchangePath::HostMemory } else { ExchangePath::Direct };
    let ranks = on_gpus(2, path, |world, device, _| graph_logits(world, split, device, dtype, &dir, &ids));
    match ranks.into_iter().collect::<Option<Vec<_>>>() {
        Some(ranks) => assert_ranks_agree(name, &ranks, &expected, logits_tolerance(dtype)),
        None => assert!(model.graph_ranks < 2, "a rank of {name} has no decode graph"),
    }
}

/// Returns the logits of all `ids`, computed by the decode graph of a rank, or `None` if any rank has no graph.
fn graph_logits(
    world: &World,
    split: Split,
    device: &Device,
    dtype: DType,
    dir: &Path,
    ids: &[u32],
) -> Option<Vec<f32>> {
    let (config, checkpoint) = (models::read_config(dir).unwrap(), Checkpoint::open(dir).unwrap());
    let world = &split_world(world, split, config.architecture.cache_layers().len());
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, device, dtype, &progress)
        .world(world.clone())
        .share_reads(false)
        .build()
        .unwrap();
    let decoder = config.build(&weights, CONTEXT).unwrap();
    let (cache, tables) = KvCache::for_one_sequence(decoder.cache_layout(), CONTEXT, dtype, device).unwrap();
    let plan = DecodeGraph::plan(&decoder, &cache, CONTEXT).unwrap();
    let has_graph = plan.is_ok();
    if world.gather_values(has_graph).unwrap().iter().any(|has_graph| !**has_graph) {
        return None;
    }
    let Ok(mut graph) = plan else { return None };
    // Run an eager pass to load the kernels. On a shared GPU, no kernels can be loaded while a rank waits for another.
    logits_of(&decoder, &ids[..1], dtype, device).unwrap();
    device.synchronize().unwrap();
    world.check().unwrap();
    let step = |(position, &id): (usize, &u32)| {
        world.barrier().unwrap();
        // Greedy steps do not collect the logits of all ranks. Steps with sampling parameters do.
        graph.start(0, position, id, Some(DeviceSampling::greedy()), &tables).unwrap();
        graph.next(1).unwrap();
        world.check().unwrap();
        on_host(graph.logits())
    };
    Some(ids.iter().enumerate().flat_map(step).collect())
}

/// Compares the logits of two ranks with transformers.
/// The ranks run on two GPUs, or on the same GPU if there is only one.
#[test(each_alone = divided_models_in_all_dtypes)]
fn ranks_on_gpus_agree_with_transformers((DividedModel { model, split }, dtype): (DividedModel, DType)) {
    let name = model.name;
    let dir = golden(name);
    let (ids, expected) = expected_logits(&dir.join("golden.safetensors"));
    let ranks = logits_on(&two_gpus(), split, dtype, &dir, None, &ids);
    assert_ranks_agree(name, &ranks, &expected, logits_tolerance(dtype));
}

fn models_of_eight_ranks() -> Vec<TestCase<(&'static str, DType)>> {
    in_all_dtypes(&["llama_new", "gpt_oss_new", "qwen3_moe", "gpt2"])
}

/// Compares the logits of eight ranks on one GPU with transformers.
/// There are more ranks than KV heads, so some ranks hold no heads.
#[test(each_alone = models_of_eight_ranks)]
fn eight_ranks_on_one_gpu_agree_with_transformers((name, dtype): (&'static str, DType)) {
    let (devices, dir) = (["cuda:0"; 8].join(",").parse().unwrap(), golden(name));
    let (ids, expected) = expected_logits(&dir.join("golden.safetensors"));
    let ranks = logits_on(&devices, Split::Tensor, dtype, &dir, None, &ids);
    assert_ranks_agree(name, &ranks, &expected, logits_tolerance(dtype));
}

fn families_of_gguf_files() -> Vec<TestCase<(&'static str, DType)>> {
    in_all_dtypes(&["llama", "qwen3_moe", "phi3", "gpt2", "gpt_oss"])
}

#[test(each_alone = families_of_gguf_files)]
fn ranks_on_gpus_agree_with_transformers_on_gguf_files((family, dtype): (&'static str, DType)) {
    let (ids, expected) = expected_logits(&golden("gguf_quantized").join(format!("{family}.safetensors")));
    let path = golden("gguf_quantized").join(format!("{family}.gguf"));
    let ranks = logits_on(&two_gpus(), Split::Tensor, dtype, &path, None, &ids);
    assert_ranks_agree(family, &ranks, &expected, logits_tolerance(dtype));
}

/// Two ranks choose the most likely tokens for many requests. Checks these tokens against the logits of one rank.
#[test(each_alone = splits)]
fn engines_of_several_gpus_answer_many_requests(split: Split) {
    // In f32, the logits of golden models differ from transformers by less than 1e-4 (`logits_tolerance`), both on one
    // rank and on two. If two ranks choose another token than one rank, its logit is thus less than 4e-4 too small.
    // These errors are relative to the largest |logit|.
    const TOLERANCE: f32 = 1e-3;
    let engine =
        |devices: Devices, split| queued_steps::demo().devices(devices).split(split).dtype(DType::F32).load().unwrap();
    let (one, two) = (engine("cuda".parse().unwrap(), Split::Tensor), engine(two_gpus(), split));
    let prompts: Vec<_> = (0..12).map(|index| one.random_tokens(index, 20 + 10 * index as usize)).collect();
    // Greedy steps need only the largest logits of each rank. Steps that sample, even with top_k 1, need all logits.
    let most_likely = SamplingParams { temperature: 1.0, top_k: 1, ..SamplingParams::greedy() };
    for sampling in [SamplingParams::greedy(), most_likely] {
        let answers = generate_at_once(&two, &prompts, &sampling, 40);
        for (prompt, answer) in prompts.iter().zip(answers) {
            assert_eq!(answer.tokens.len(), 40);
            assert_greedy_within(&one, prompt, &answer.tokens, TOLERANCE);
        }
    }
}

fn models_with_graphs() -> Vec<TestCase<(&'static str, Split)>> {
    let models = [
        ("mistral", Split::Tensor),
        ("mistral", Split::Layers),
        ("gpt_oss_graph", Split::Tensor),
        ("gpt_oss_graph", Split::Layers),
        ("gemma2_graph", Split::Tensor),
        ("gemma2_graph", Split::Layers),
    ];
    models.map(|(name, split)| gpu_case(format!("{name}::{}", split_name(split)), (name, split))).into()
}

/// A single sequence runs on decode graphs, and several sequences run on batch graphs.
#[test(each_alone = models_with_graphs)]
fn graphs_of_several_gpus_choose_the_most_likely_tokens((name, split): (&'static str, Split)) {
    let model = GraphModel::new(name);
    let builder =
        model.builder().devices(two_gpus()).split(split).dtype(DType::F16).context(110).sequences(4).chunk(16);
    let engine = builder.load().unwrap();
    assert_eq!(engine.execution_mode(), ExecutionMode::Graph, "{name}, {split:?}: {:?}", engine.no_decode_graph());
    let prompts: Vec<Vec<u32>> = (1..7).map(|index| engine.random_tokens(index, 9 * index as usize)).collect();
    for _ in 0..2 {
        for prompt in &prompts {
            let answer = generate(&engine, prompt, SamplingParams::greedy(), 40);
            assert_greedy(&engine, prompt, &answer.tokens);
        }
        let answers = generate_at_once(&engine, &prompts, &SamplingParams::greedy(), 40);
        for (prompt, answer) in prompts.iter().zip(answers) {
            assert_greedy(&engine, prompt, &answer.tokens);
        }
    }
    // The same seed samples the same tokens again, even with penalties.
    let sampling = SamplingParams { temperature: 1.0, repetition_penalty: 1.2, seed: 5, ..SamplingParams::greedy() };
    let drawn = || generate(&engine, &prompts[0], sampling.clone(), 40).tokens;
    assert_eq!(drawn(), drawn(), "{name}");
}
