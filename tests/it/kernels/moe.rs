//! Tests of routing and of the products of routed experts.

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::kernels::SumOrder;
use inferno::kernels::moe::combine::combine;
use inferno::kernels::moe::experts::{ExpertWeights, expert_matmul};
use inferno::kernels::moe::mxfp4::{E2M1_VALUES, e8m0_to_f32};
use inferno::kernels::moe::topk::{Softmax, topk_softmax};

use super::{assert_close, rounding, to_device};
use crate::support::{Random, TestDevice, devices, devices_in_f32, golden, gpu_with_dtypes, values};

#[test(gpu)]
fn topk_softmax_matches_its_reference() {
    for (device, dtype) in gpu_with_dtypes() {
        for (tokens, experts, chosen) in [(1, 32, 4), (7, 128, 4), (65, 5, 3), (2, 3, 3), (9, 1000, 32)] {
            for softmax in [Softmax::OverChosen, Softmax::OverAll] {
                let logits = Random(3).tensor(&[tokens, experts], dtype);
                let (want_ids, want) = topk_softmax(&logits, chosen, softmax).unwrap();
                let (ids, weights) = topk_softmax(&to_device(&logits, &device, dtype), chosen, softmax).unwrap();
                let list = |ids: &Tensor| ids.flatten_all().unwrap().to_vec1::<u32>().unwrap();
                assert_eq!(list(&ids), list(&want_ids), "{tokens} {experts} {chosen}");
                assert_close("topk_softmax", &weights, &want, 1e-5);
            }
        }
    }
}

#[test(each = devices)]
fn topk_softmax_prefers_lower_experts_in_ties_and_puts_nan_last(device: TestDevice) {
    let (device, dtype) = device.open();
    let logits = Tensor::new(&[[1f32, 2.0, f32::NAN, 2.0, 0.5, 2.0]], &Device::Cpu).unwrap();
    let (ids, weights) = topk_softmax(&to_device(&logits, &device, dtype), 4, Softmax::OverChosen).unwrap();
    assert_eq!(ids.to_vec2::<u32>().unwrap(), [[1, 3, 5, 0]]);
    let total: f32 = values(&weights).iter().sum();
    assert!((total - 1.0).abs() < 1e-6);
}

#[test(cuda)]
fn expert_mlp_matches_separate_products() {
    use inferno::kernels::activation::clamped_swiglu;
    use inferno::kernels::moe::expert_mlp::{ExpertLinear, expert_mlp};
    use inferno::kernels::moe::mxfp4_tiles::{Mxfp4Tiles, RowOrder};
    use inferno::kernels::moe::route::RoutedPairs;
    use inferno::kernels::norm::{Addend, add_norm};
    #[derive(Clone, Copy)]
    struct Case {
        tokens: usize,
        experts: usize,
        /// The number of experts that the router chooses for each token.
        chosen: usize,
        hidden: usize,
        intermediate: usize,
    }
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
    for (device, dtype) in gpu_with_dtypes().into_iter().filter(|(_, dtype)| *dtype != DType::F32) {
        for Case { tokens, experts, chosen, hidden: columns, intermediate } in cases {
            let mut noise = Random(9);
            // The inputs are about as large as normalized activations.
            // With much larger inputs, the SwiGLU would clamp almost all gate and up values.
            let x = (noise.tensor(&[tokens, columns], dtype) * 0.5).unwrap();
            let mut stack = |rows: usize, columns: usize| {
                let blocks = noise.bytes(&[experts, rows, columns / 32, 16], 0..256);
                let scales = noise.bytes(&[experts, rows, columns / 32], 120..125);
                let bias = noise.tensor(&[experts, rows], dtype);
                (blocks, scales, bias)
            };
            let (up, down) = (stack(2 * intermediate, columns), stack(columns, intermediate));
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

            let plain = |part: &(Tensor, Tensor, Tensor)| ExpertWeights::Mxfp4 {
                blocks: part.0.clone(),
                scales: part.1.clone(),
            };
            let h = expert_matmul(&x, &plain(&up), Some(&up.2), &ids, SumOrder::Fastest).unwrap();
            let h = clamped_swiglu(&h, 7.0).unwrap();
            let y = expert_matmul(&h, &plain(&down), Some(&down.2), &ids, SumOrder::Fastest).unwrap();
            let want = y.broadcast_mul(&shares.unsqueeze(2).unwrap()).unwrap().sum(1).unwrap();

            let on_device = |tensor: &Tensor| tensor.to_device(&device).unwrap();
            let tiles = |part: &(Tensor, Tensor, Tensor), order| {
                (
                    Mxfp4Tiles::repack(&on_device(&part.0), &on_device(&part.1), order).unwrap().unwrap(),
                    to_device(&part.2, &device, dtype),
                )
            };
            let (up, down) = (tiles(&up, RowOrder::Paired), tiles(&down, RowOrder::Grouped));
            let stack = |part| {
                let (tiles, bias): &(Mxfp4Tiles, Tensor) = part;
                ExpertLinear { tiles, bias }
            };
            let routed = RoutedPairs::new(&on_device(&ids), on_device(&shares), experts).unwrap();
            let (up, down) = (stack(&up), stack(&down));
            let outputs = expert_mlp(&on_device(&x), &routed, up, down, 7.0, SumOrder::Fastest).unwrap();
            let got = outputs.sum(DType::F32).unwrap();
            assert_close("rounded output", &outputs.sum(dtype).unwrap(), &got, rounding(dtype));
            let residual = on_device(&noise.tensor(&[tokens, columns], DType::F32));
            let weight = on_device(&noise.tensor(&[columns], DType::F32));
            for (out_dtype, tolerance) in [(DType::F32, 1e-5), (dtype, rounding(dtype))] {
                let (sum, normed) = outputs.add_norm(&residual, &weight, 1e-3, out_dtype).unwrap().unwrap();
                let y = Addend { parts: &got.unsqueeze(0).unwrap(), bias: None };
                let want = add_norm(&residual, Some(y), &weight, None, 1e-3, out_dtype).unwrap();
                assert_close("sum of x and the outputs", &sum, &want.0, 1e-6);
                assert_close("norm of the sum", &normed, &want.1, tolerance);
            }
            let what = format!("{tokens} tokens, {chosen} of {experts} experts, {columns}x{intermediate}, {dtype:?}");
            assert_close(&what, &got, &want, 2.0 * rounding(dtype));
        }
    }
}

/// With `SumOrder::Fixed`, the expert outputs of a token have the same bits in a step of any size.
#[test(cuda)]
fn experts_in_fixed_order_do_not_depend_on_other_tokens() {
    use inferno::kernels::moe::expert_mlp::{ExpertLinear, expert_mlp};
    use inferno::kernels::moe::mxfp4_tiles::{Mxfp4Tiles, RowOrder};
    use inferno::kernels::moe::route::RoutedPairs;
    // In the second case, the 960 rows of gate_up fill five row blocks, which produce 480 columns of output. The output
    // is padded to 512 columns, so there is a sixth row block, which has no weights. gpt-oss on two GPUs also has such
    // a row block. The TMA boxes of this row block are outside the tensor maps. TMA must still report their bytes to
    // the barrier, because gate_up would otherwise hang.
    for (experts, chosen, intermediate) in [(32, 4, 2880), (128, 15, 480)] {
        let (tokens, columns) = (200, 2880);
        for (device, dtype) in gpu_with_dtypes().into_iter().filter(|(_, dtype)| *dtype != DType::F32) {
            let mut noise = Random(9);
            let x = to_device(&(noise.tensor(&[tokens, columns], DType::F32) * 0.5).unwrap(), &device, DType::F32);
            let mut linear = |rows: usize, columns: usize, order| {
                let blocks = noise.bytes(&[experts, rows, columns / 32, 16], 0..256).to_device(&device).unwrap();
                let scales = noise.bytes(&[experts, rows, columns / 32], 120..125).to_device(&device).unwrap();
                let bias = to_device(&noise.tensor(&[experts, rows], dtype), &device, dtype);
                (Mxfp4Tiles::repack(&blocks, &scales, order).unwrap().unwrap(), bias)
            };
            let up = linear(2 * intermediate, columns, RowOrder::Paired);
            let down = linear(columns, intermediate, RowOrder::Grouped);
            let router = to_device(&noise.tensor(&[experts, columns], DType::F32), &device, DType::F32);
            let run = |first: usize, count: usize| {
                let x = x.narrow(0, first, count).unwrap().force_contiguous().unwrap();
                let routed = RoutedPairs::route(&x, &router, None, chosen, SumOrder::Fixed, None).unwrap();
                let (up, down) =
                    (ExpertLinear { tiles: &up.0, bias: &up.1 }, ExpertLinear { tiles: &down.0, bias: &down.1 });
                let outputs = expert_mlp(&x, &routed, up, down, 7.0, SumOrder::Fixed).unwrap();
                (values(&routed.weights), values(&outputs.sum(DType::F32).unwrap()))
            };
            let (shares, all) = run(0, tokens);
            for _ in 0..20 {
                assert!(run(0, tokens).1 == all, "{dtype:?}: two runs of the batch of {tokens} tokens differ");
            }
            for (first, count) in (0..64).map(|first| (first, 1)).chain([(0, 2), (5, 7), (20, 40), (3, 130)]) {
                let (got_shares, got) = run(first, count);
                assert!(
                    got_shares == shares[first * chosen..][..count * chosen],
                    "the routing of {count} tokens from index {first} differs from the batch of {tokens}"
                );
                assert!(
                    got == all[first * columns..][..count * columns],
                    "{dtype:?}: {count} tokens from index {first} differ from the batch of {tokens}"
                );
            }
        }
    }
}

#[test(cuda)]
fn routed_pairs_match_separate_operations() {
    use std::collections::HashSet;

    use crate::support::gpu;
    use inferno::kernels::launch::runs_hopper_code;
    use inferno::kernels::matmul::matmul_f32;
    use inferno::kernels::moe::expert_usage::{ExpertUsage, UsageCounts};
    use inferno::kernels::moe::route::RoutedPairs;
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
    // GPUs that run Hopper code route up to 256 tokens in one launch. `choose_experts` routes the other cases if the hidden
    // size is a multiple of 16 and `is_fastest` returns true, as with 257, 1999, 2048, 4224 and 5001 tokens on an H200.
    // There, thread blocks route two tiles of tokens with 4224 and 5001 tokens. Separate kernels route the rest.
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

#[test(gpu)]
fn expert_matmul_matches_its_reference() {
    #[derive(Clone, Copy)]
    struct Case {
        tokens: usize,
        /// The number of experts that the router chooses for each token.
        chosen: usize,
        experts: usize,
        rows: usize,
        columns: usize,
    }
    // In bf16 and f16, `expert_matmul` runs a GEMV kernel below 64 (token, expert) pairs, and a GEMM kernel otherwise.
    let cases = [
        Case { tokens: 1, chosen: 4, experts: 32, rows: 130, columns: 96 },
        Case { tokens: 3, chosen: 2, experts: 5, rows: 7, columns: 32 },
        Case { tokens: 15, chosen: 4, experts: 7, rows: 65, columns: 64 },
        Case { tokens: 16, chosen: 4, experts: 3, rows: 64, columns: 64 },
        Case { tokens: 33, chosen: 3, experts: 5, rows: 70, columns: 160 },
        Case { tokens: 200, chosen: 4, experts: 32, rows: 129, columns: 96 },
        Case { tokens: 131, chosen: 1, experts: 2, rows: 200, columns: 2880 },
        Case { tokens: 300, chosen: 2, experts: 3, rows: 259, columns: 320 },
        Case { tokens: 500, chosen: 1, experts: 2, rows: 136, columns: 128 },
        Case { tokens: 70, chosen: 2, experts: 3, rows: 20, columns: 2880 },
    ];
    for (device, dtype) in gpu_with_dtypes() {
        for Case { tokens, chosen, experts, rows, columns } in cases {
            let mut noise = Random(5);
            let blocks = noise.bytes(&[experts, rows, columns / 32, 16], 0..256);
            let scales = noise.bytes(&[experts, rows, columns / 32], 118..126);
            let dense = noise.tensor(&[experts, rows, columns], dtype);
            let bias = noise.tensor(&[experts, rows], dtype);
            let ids: Vec<u32> = (0..tokens * chosen).map(|_| (noise.next() % experts as u64) as u32).collect();
            let ids = Tensor::from_vec(ids, (tokens, chosen), &Device::Cpu).unwrap();
            let shared = noise.tensor(&[tokens, columns], dtype);
            let own = noise.tensor(&[tokens, chosen, columns], dtype);
            let packed = ExpertWeights::Mxfp4 { blocks: blocks.clone(), scales: scales.clone() };
            let packed_on_device = ExpertWeights::Mxfp4 {
                blocks: blocks.to_device(&device).unwrap(),
                scales: scales.to_device(&device).unwrap(),
            };
            let dense_on_device = ExpertWeights::Dense(to_device(&dense, &device, dtype));
            let pairs = [(packed, packed_on_device), (ExpertWeights::Dense(dense), dense_on_device)];
            for (host_weights, device_weights) in pairs {
                for (x, bias) in [(&shared, Some(&bias)), (&own, None)] {
                    let want = expert_matmul(x, &host_weights, bias, &ids, SumOrder::Fastest).unwrap();
                    let shares = noise.tensor(&[tokens, chosen], DType::F32);
                    let combined =
                        combine(&to_device(&want, &device, dtype), &to_device(&shares, &device, DType::F32)).unwrap();
                    let what =
                        format!("combine of {tokens} tokens, {chosen} of {experts} experts, {rows} rows, {dtype:?}");
                    let want_combined = combine(&want.to_dtype(dtype).unwrap(), &shares).unwrap();
                    assert_close(&what, &combined, &want_combined, 1e-5);
                    let device_bias = bias.map(|bias| to_device(bias, &device, dtype));
                    let device_ids = ids.to_device(&device).unwrap();
                    let got = expert_matmul(
                        &to_device(x, &device, dtype),
                        &device_weights,
                        device_bias.as_ref(),
                        &device_ids,
                        SumOrder::Fastest,
                    )
                    .unwrap();
                    let what = format!(
                        "expert_matmul of {tokens} tokens, {chosen} of {experts} experts, {rows}x{columns}, {dtype:?}"
                    );
                    assert_close(&what, &got, &want, rounding(dtype));
                }
            }
        }
    }
}

#[test(each = devices_in_f32)]
fn mxfp4_decodes_every_nibble_with_every_kind_of_scale(device: TestDevice) {
    let (device, dtype) = device.open();
    assert_eq!(e8m0_to_f32(127), 1.0);
    assert_eq!(e8m0_to_f32(0), 2f32.powi(-127));
    assert_eq!(e8m0_to_f32(254), 2f32.powi(127));
    assert!(e8m0_to_f32(255).is_nan());
    // Each expert has one weight row with one scale byte. Each input row is a unit vector that selects one weight.
    let scales: Vec<u8> = vec![0, 1, 2, 100, 126, 127, 128, 200, 251];
    let experts = scales.len();
    let nibbles: Vec<u8> = (0..16u8).map(|i| ((2 * (i % 8) + 1) << 4) | (2 * (i % 8))).collect();
    let blocks = Tensor::from_vec(nibbles.repeat(experts), (experts, 1, 1, 16), &device).unwrap();
    let scale_bytes = Tensor::from_vec(scales.clone(), (experts, 1, 1), &device).unwrap();
    let weights = ExpertWeights::Mxfp4 { blocks, scales: scale_bytes };
    let ids: Vec<u32> = (0..32 * experts).map(|i| (i % experts) as u32).collect();
    let ids = Tensor::from_vec(ids, (32, experts), &device).unwrap();
    let unit_vectors = Tensor::eye(32, dtype, &device).unwrap();
    let got = values(&expert_matmul(&unit_vectors, &weights, None, &ids, SumOrder::Fastest).unwrap());
    for (element, row) in got.chunks_exact(experts).enumerate() {
        for (value, scale) in row.iter().zip(&scales) {
            assert_eq!(*value, E2M1_VALUES[element % 16] * e8m0_to_f32(*scale), "element {element}, scale {scale}");
        }
    }
}

#[test(each = devices_in_f32)]
fn mxfp4_matches_transformers(device: TestDevice) {
    let (device, dtype) = device.open();
    let file = safetensors::load(golden("mxfp4.safetensors"), &Device::Cpu).unwrap();
    let (experts, rows, columns) = file["expected"].dims3().unwrap();
    let [blocks, scales] = ["blocks", "scales"].map(|name| file[name].to_device(&device).unwrap());
    let weights = ExpertWeights::Mxfp4 { blocks, scales };
    // A product with a unit vector returns one column of the weights.
    let unit_vectors = Tensor::eye(columns, dtype, &device).unwrap();
    let ids: Vec<u32> = (0..columns * experts).map(|i| (i % experts) as u32).collect();
    let ids = Tensor::from_vec(ids, (columns, experts), &device).unwrap();
    let got =
        expert_matmul(&unit_vectors, &weights, None, &ids, SumOrder::Fastest).unwrap().permute((1, 2, 0)).unwrap();
    let (got, want) = (values(&got), values(&file["expected"]));
    // 0 · NaN and 0 · ∞ are NaN, so a NaN or infinite weight makes the other products of its row NaN.
    // For a row with a NaN or infinite weight, check only that some value is not finite.
    for row in 0..experts * rows {
        let (got, want) = (&got[row * columns..][..columns], &want[row * columns..][..columns]);
        if want.iter().all(|value| value.is_finite()) {
            assert_eq!(got, want, "row {row}");
        } else {
            assert!(got.iter().any(|value| !value.is_finite()), "row {row}");
        }
    }
}
