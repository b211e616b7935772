//! Tests of the kernels that route tokens to experts and compute the MLPs of the experts.
//! These kernels run only on a GPU. The tests compare them with the operations that they replace.

use std::collections::HashSet;

use candle_core::{DType, Device, Tensor};
use inferno::kernels::SumOrder;
use inferno::kernels::activation::clamped_swiglu;
use inferno::kernels::launch::runs_hopper_code;
use inferno::kernels::matmul::matmul_f32;
use inferno::kernels::moe::experts::{ExpertWeights, expert_matmul};
use inferno::kernels::moe::mxfp4_tiles::expert_mlp::{ExpertLinear, expert_mlp};
use inferno::kernels::moe::mxfp4_tiles::{Mxfp4Tiles, RowOrder};
use inferno::kernels::moe::routing::expert_usage::{ExpertUsage, UsageCounts};
use inferno::kernels::moe::routing::route::RoutedPairs;
use inferno::kernels::moe::routing::topk::{Softmax, topk_softmax};
use inferno::kernels::norm::{Addend, add_norm};

use super::{assert_close, rounding, to_device};
use crate::harness::TestCase;
use crate::support::{DTYPES_OF_16_BITS, Random, gpu, on_gpu, values};

/// The sizes of the MLPs of the experts.
#[derive(Clone, Copy)]
struct MlpCase {
    tokens: usize,
    experts: usize,
    /// The number of experts that the router chooses for each token.
    chosen: usize,
    hidden: usize,
    intermediate: usize,
}

impl MlpCase {
    fn named(self) -> (String, Self) {
        let Self { tokens, experts, chosen, hidden, intermediate } = self;
        (format!("{tokens}_tokens::{chosen}_of_{experts}_experts::{hidden}x{intermediate}"), self)
    }
}

/// The weights of one linear layer of all experts, on the CPU. The blocks and their scales are in MXFP4.
struct Mxfp4Linear {
    blocks: Tensor,
    scales: Tensor,
    bias: Tensor,
}

impl Mxfp4Linear {
    /// Returns random weights. The bias is rounded to `dtype`.
    fn random(noise: &mut Random, [experts, rows, columns]: [usize; 3], dtype: DType) -> Self {
        let blocks = noise.bytes(&[experts, rows, columns / 32, 16], 0..256);
        let scales = noise.bytes(&[experts, rows, columns / 32], 120..125);
        let bias = noise.tensor(&[experts, rows], dtype);
        Self { blocks, scales, bias }
    }

    fn weights(&self) -> ExpertWeights {
        ExpertWeights::Mxfp4 { blocks: self.blocks.clone(), scales: self.scales.clone() }
    }

    fn tiles(&self, order: RowOrder, device: &Device, dtype: DType) -> TiledLinear {
        let [blocks, scales] = [&self.blocks, &self.scales].map(|tensor| tensor.to_device(device).unwrap());
        let tiles = Mxfp4Tiles::repack(&blocks, &scales, order).unwrap().unwrap();
        TiledLinear { tiles, bias: to_device(&self.bias, device, dtype) }
    }
}

/// An [`Mxfp4Linear`] on a GPU, in the layout of `expert_mlp`.
struct TiledLinear {
    tiles: Mxfp4Tiles,
    bias: Tensor,
}

impl TiledLinear {
    fn view(&self) -> ExpertLinear<'_> {
        ExpertLinear { tiles: &self.tiles, bias: &self.bias }
    }
}

fn mlp_cases() -> Vec<TestCase<(MlpCase, DType)>> {
    use MlpCase as Case;
    // Only cases whose hidden and intermediate sizes are multiples of 192 can use the `expert_few_pairs` kernels.
    let cases = [
        Case { tokens: 1, experts: 7, chosen: 4, hidden: 64, intermediate: 96 },
        Case { tokens: 5, experts: 4, chosen: 2, hidden: 96, intermediate: 160 },
        Case { tokens: 70, experts: 32, chosen: 4, hidden: 192, intermediate: 64 },
        Case { tokens: 300, experts: 3, chosen: 1, hidden: 64, intermediate: 32 },
        Case { tokens: 900, experts: 5, chosen: 4, hidden: 160, intermediate: 96 },
        Case { tokens: 1, experts: 7, chosen: 4, hidden: 192, intermediate: 192 },
        Case { tokens: 8, experts: 3, chosen: 2, hidden: 384, intermediate: 192 },
        Case { tokens: 9, experts: 32, chosen: 4, hidden: 192, intermediate: 576 },
        Case { tokens: 33, experts: 130, chosen: 4, hidden: 576, intermediate: 384 },
        Case { tokens: 50, experts: 10, chosen: 4, hidden: 192, intermediate: 384 },
        Case { tokens: 160, experts: 40, chosen: 4, hidden: 384, intermediate: 192 },
        // On Hopper GPUs, for at most 24 pairs per expert on average, a pipeline stage holds three column tiles.
        // Here the matrices have 4 and 5 column tiles, so the last stage holds fewer.
        Case { tokens: 50, experts: 10, chosen: 4, hidden: 256, intermediate: 320 },
        // For more than 24 and up to 80 pairs per expert, Hopper GPUs use tiles of another size. This case has 50.
        Case { tokens: 100, experts: 8, chosen: 4, hidden: 160, intermediate: 288 },
    ];
    on_gpu(cases.map(Case::named), &DTYPES_OF_16_BITS)
}

#[test(each = mlp_cases)]
fn expert_mlp_matches_separate_products((case, dtype): (MlpCase, DType)) {
    let MlpCase { tokens, experts, chosen, hidden, intermediate } = case;
    let (device, mut noise) = (gpu(), Random(9));
    // The inputs are about as large as normalized activations.
    // With much larger inputs, the SwiGLU would clamp almost all gate and up values.
    let x = (noise.tensor(&[tokens, hidden], dtype) * 0.5).unwrap();
    let up = Mxfp4Linear::random(&mut noise, [experts, 2 * intermediate, hidden], dtype);
    let down = Mxfp4Linear::random(&mut noise, [experts, hidden, intermediate], dtype);
    let ids: Vec<u32> = (0..tokens)
        .flat_map(|_| {
            // The routing is skewed: expert 0 is the first choice twice as often as any other expert.
            let first = (noise.next() % (1 + experts as u64)).saturating_sub(1) as u32;
            (0..chosen as u32).map(move |n| (first + n) % experts as u32)
        })
        .collect();
    let ids = Tensor::from_vec(ids, (tokens, chosen), &Device::Cpu).unwrap();
    let shares = noise.bytes(&[tokens, chosen], 1..200).to_dtype(DType::F32).unwrap();
    let shares = (shares / 200.0).unwrap();

    let h = expert_matmul(&x, &up.weights(), Some(&up.bias), &ids, SumOrder::Fastest).unwrap();
    let h = clamped_swiglu(&h, 7.0).unwrap();
    let y = expert_matmul(&h, &down.weights(), Some(&down.bias), &ids, SumOrder::Fastest).unwrap();
    let want = y.broadcast_mul(&shares.unsqueeze(2).unwrap()).unwrap().sum(1).unwrap();

    let on_device = |tensor: &Tensor| tensor.to_device(&device).unwrap();
    let (up, down) = (up.tiles(RowOrder::Paired, &device, dtype), down.tiles(RowOrder::Grouped, &device, dtype));
    let routed = RoutedPairs::new(&on_device(&ids), on_device(&shares), experts).unwrap();
    let outputs = expert_mlp(&on_device(&x), &routed, up.view(), down.view(), 7.0, SumOrder::Fastest).unwrap();
    let got = outputs.sum(DType::F32).unwrap();
    assert_close("rounded output", &outputs.sum(dtype).unwrap(), &got, rounding(dtype));
    let residual = on_device(&noise.tensor(&[tokens, hidden], DType::F32));
    let weight = on_device(&noise.tensor(&[hidden], DType::F32));
    for (out_dtype, tolerance) in [(DType::F32, 1e-5), (dtype, rounding(dtype))] {
        let (sum, normed) = outputs.add_norm(&residual, &weight, 1e-3, out_dtype).unwrap().unwrap();
        let y = Addend { terms: &got.unsqueeze(0).unwrap(), bias: None };
        let want = add_norm(&residual, Some(y), &weight, None, 1e-3, out_dtype).unwrap();
        assert_close("sum of x and the outputs", &sum, &want.0, 1e-6);
        assert_close("norm of the sum", &normed, &want.1, tolerance);
    }
    assert_close("output", &got, &want, 2.0 * rounding(dtype));
}

fn mlp_cases_in_fixed_order() -> Vec<TestCase<(MlpCase, DType)>> {
    // In the second case, the 960 rows of gate_up fill five row blocks, which produce 480 columns of output. The output
    // is padded to 512 columns, so there is a sixth row block, which has no weights. gpt-oss on two GPUs also has such
    // a row block. The TMA boxes of this row block are outside the tensor maps. TMA must still report their bytes to
    // the barrier, because gate_up would otherwise hang.
    let cases = [
        MlpCase { tokens: 200, experts: 32, chosen: 4, hidden: 2880, intermediate: 2880 },
        MlpCase { tokens: 200, experts: 128, chosen: 15, hidden: 2880, intermediate: 480 },
    ];
    on_gpu(cases.map(MlpCase::named), &DTYPES_OF_16_BITS)
}

/// With `SumOrder::Fixed`, the expert outputs of a token have the same bits in a step of any size.
#[test(each = mlp_cases_in_fixed_order)]
fn experts_in_fixed_order_do_not_depend_on_other_tokens((case, dtype): (MlpCase, DType)) {
    let MlpCase { tokens, experts, chosen, hidden, intermediate } = case;
    let (device, mut noise) = (gpu(), Random(9));
    let x = to_device(&(noise.tensor(&[tokens, hidden], DType::F32) * 0.5).unwrap(), &device, DType::F32);
    let mut linear = |rows, columns, order| {
        Mxfp4Linear::random(&mut noise, [experts, rows, columns], dtype).tiles(order, &device, dtype)
    };
    let up = linear(2 * intermediate, hidden, RowOrder::Paired);
    let down = linear(hidden, intermediate, RowOrder::Grouped);
    let router = to_device(&noise.tensor(&[experts, hidden], DType::F32), &device, DType::F32);
    let run = |first: usize, count: usize| {
        let x = x.narrow(0, first, count).unwrap().force_contiguous().unwrap();
        let routed = RoutedPairs::route(&x, &router, None, chosen, SumOrder::Fixed, None).unwrap();
        let outputs = expert_mlp(&x, &routed, up.view(), down.view(), 7.0, SumOrder::Fixed).unwrap();
        (values(&routed.weights), values(&outputs.sum(DType::F32).unwrap()))
    };
    let (shares, all) = run(0, tokens);
    for _ in 0..20 {
        assert!(run(0, tokens).1 == all, "two runs of the batch of {tokens} tokens differ");
    }
    for (first, count) in (0..64).map(|first| (first, 1)).chain([(0, 2), (5, 7), (20, 40), (3, 130)]) {
        let (got_shares, got) = run(first, count);
        assert!(
            got_shares == shares[first * chosen..][..count * chosen],
            "the routing of {count} tokens from index {first} differs from the batch of {tokens}"
        );
        assert!(
            got == all[first * hidden..][..count * hidden],
            "{count} tokens from index {first} differ from the batch of {tokens}"
        );
    }
}

#[test(gpu)]
fn routed_pairs_match_separate_operations() {
    struct Case {
        tokens: usize,
        experts: usize,
        /// The number of experts that the router chooses for each token.
        chosen: usize,
        hidden: usize,
    }
    // All cases use the same device, because an array in route.cu keeps its contents from launch to launch.
    // A case must leave nothing in the array that affects the next case.
    let device = gpu();
    // GPUs that run Hopper code route up to 256 tokens in one launch. `choose_experts` routes the other cases if the
    // hidden size is a multiple of 16 and `is_fastest` returns true, as with 257, 1999, 2048, 4224 and 5001 tokens on
    // an H200. There, thread blocks route two tiles of tokens with 4224 and 5001 tokens. Separate kernels route the
    // rest.
    for Case { tokens, experts, chosen, hidden: columns } in [
        Case { tokens: 1, experts: 3, chosen: 1, hidden: 4 },
        Case { tokens: 7, experts: 32, chosen: 4, hidden: 132 },
        Case { tokens: 64, experts: 5, chosen: 5, hidden: 60 },
        Case { tokens: 129, experts: 128, chosen: 8, hidden: 68 },
        Case { tokens: 256, experts: 33, chosen: 2, hidden: 64 },
        Case { tokens: 9, experts: 40, chosen: 4, hidden: 3204 },
        Case { tokens: 257, experts: 32, chosen: 4, hidden: 64 },
        Case { tokens: 300, experts: 3, chosen: 1, hidden: 4 },
        Case { tokens: 1000, experts: 33, chosen: 4, hidden: 3204 },
        Case { tokens: 1999, experts: 128, chosen: 8, hidden: 144 },
        Case { tokens: 2048, experts: 32, chosen: 4, hidden: 2880 },
        Case { tokens: 5001, experts: 32, chosen: 4, hidden: 160 },
        Case { tokens: 4224, experts: 100, chosen: 3, hidden: 48 },
        Case { tokens: 3000, experts: 200, chosen: 3, hidden: 48 },
        Case { tokens: 520, experts: 256, chosen: 32, hidden: 64 },
        Case { tokens: 256, experts: 256, chosen: 32, hidden: 64 },
        Case { tokens: 8, experts: 256, chosen: 32, hidden: 64 },
        Case { tokens: 1, experts: 1, chosen: 1, hidden: 4 },
    ] {
        let mut noise = Random(11);
        // With many tokens or many chosen experts, some logits are so close that rounding could change their order.
        // Multiples of 1/16 make the logits exact.
        let mut tensor = |dims: &[usize]| match noise.tensor(dims, DType::F32) {
            tensor if tokens > 500 || chosen > 8 => ((tensor * 16.0).unwrap().round().unwrap() / 16.0).unwrap(),
            tensor => tensor,
        };
        let (x, weight, bias) = (tensor(&[tokens, columns]), tensor(&[experts, columns]), tensor(&[experts]));
        let logits = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap().broadcast_add(&bias).unwrap();
        let (ids, want) = topk_softmax(&logits, chosen, Softmax::OverChosen).unwrap();
        let ids: Vec<u32> = ids.flatten_all().unwrap().to_vec1().unwrap();
        let is_one_launch = tokens <= 256 && runs_hopper_code(device.as_cuda_device().unwrap()).unwrap();
        let on_device = |tensor: &Tensor| tensor.to_device(&device).unwrap();
        let (x, weight, bias) = (on_device(&x), on_device(&weight), on_device(&bias));
        let usage = ExpertUsage::new(&device).unwrap();
        let used: HashSet<u32> = ids.iter().copied().collect();
        // Route several times in a row: every launch must leave the array `chosen_experts` in route.cu at zero.
        let route = || RoutedPairs::route(&x, &weight, Some(&bias), chosen, SumOrder::Fastest, Some(&usage)).unwrap();
        let launches: Vec<RoutedPairs> = (0..8).map(|_| route()).collect();
        for routed in launches {
            assert_close(&format!("{tokens} tokens, {chosen} of {experts} experts"), &routed.weights, &want, 1e-4);
            let sorted: Vec<u32> = routed.sorted.to_vec1().unwrap();
            let offsets: Vec<u32> = routed.offsets.to_vec1().unwrap();
            let rows: Vec<u32> = routed.rows.to_vec1().unwrap();
            let mut got = vec![None; tokens * chosen];
            let mut first_row = 0;
            for expert in 0..experts {
                let of_expert = &sorted[offsets[expert] as usize..offsets[expert + 1] as usize];
                assert!(!is_one_launch || of_expert.is_sorted(), "the pairs of expert {expert} are not in order");
                for (row, &pair) in (first_row..).zip(of_expert) {
                    assert_eq!(got[pair as usize].replace(expert as u32), None, "pair {pair} occurs twice");
                    assert_eq!(rows[pair as usize], row, "wrong row of pair {pair}");
                }
                first_row = (first_row + of_expert.len() as u32).next_multiple_of(8);
            }
            assert_eq!(got, ids.iter().copied().map(Some).collect::<Vec<_>>());
        }
        let counted = UsageCounts { batches: 8, experts: 8 * used.len() as u64 };
        let counted = if is_one_launch { counted } else { UsageCounts::default() };
        assert_eq!(usage.take().unwrap(), counted, "{tokens} tokens");
        assert_eq!(usage.take().unwrap(), UsageCounts::default());
    }
}
