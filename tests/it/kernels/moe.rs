//! Tests of routing and of the products of routed experts.
//! `experts.rs` in this folder tests the kernels that run only on a GPU.

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::kernels::SumOrder;
use inferno::kernels::moe::combine::combine;
use inferno::kernels::moe::experts::{ExpertWeights, expert_matmul};
use inferno::kernels::moe::mxfp4::{E2M1_VALUES, e8m0_to_f32};
use inferno::kernels::moe::routing::topk::{Softmax, topk_softmax};

use super::{assert_close, rounding, to_device};
use crate::harness::TestCase;
use crate::support::{DTYPES, Random, TestDevice, devices, devices_in_f32, golden, gpu, on_gpu, values};

/// The sizes of a routing test.
#[derive(Clone, Copy)]
struct RoutingCase {
    tokens: usize,
    experts: usize,
    /// The number of experts that the router chooses for each token.
    chosen: usize,
    softmax: Softmax,
}

fn routing_cases() -> Vec<TestCase<(RoutingCase, DType)>> {
    let sizes = [(1, 32, 4), (7, 128, 4), (65, 5, 3), (2, 3, 3), (9, 1000, 32)];
    let cases = sizes.into_iter().flat_map(|(tokens, experts, chosen)| {
        [("over_chosen", Softmax::OverChosen), ("over_all", Softmax::OverAll)].map(|(name, softmax)| {
            let name = format!("{tokens}_tokens::{chosen}_of_{experts}_experts::softmax_{name}");
            (name, RoutingCase { tokens, experts, chosen, softmax })
        })
    });
    on_gpu(cases, &DTYPES)
}

#[test(each = routing_cases)]
fn topk_softmax_matches_its_reference((case, dtype): (RoutingCase, DType)) {
    let RoutingCase { tokens, experts, chosen, softmax } = case;
    let logits = Random(3).tensor(&[tokens, experts], dtype);
    let (want_ids, want) = topk_softmax(&logits, chosen, softmax).unwrap();
    let (ids, weights) = topk_softmax(&to_device(&logits, &gpu(), dtype), chosen, softmax).unwrap();
    let list = |ids: &Tensor| ids.flatten_all().unwrap().to_vec1::<u32>().unwrap();
    assert_eq!(list(&ids), list(&want_ids), "chosen experts");
    assert_close("topk_softmax", &weights, &want, 1e-5);
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

/// The sizes of a test of `expert_matmul`.
#[derive(Clone, Copy)]
struct MatmulCase {
    tokens: usize,
    /// The number of experts that the router chooses for each token.
    chosen: usize,
    experts: usize,
    rows: usize,
    columns: usize,
}

fn matmul_cases() -> Vec<TestCase<(MatmulCase, DType)>> {
    use MatmulCase as Case;
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
    let named = |case: Case| {
        let Case { tokens, chosen, experts, rows, columns } = case;
        (format!("{tokens}_tokens::{chosen}_of_{experts}_experts::{rows}x{columns}"), case)
    };
    on_gpu(cases.map(named), &DTYPES)
}

#[test(each = matmul_cases)]
fn expert_matmul_matches_its_reference((case, dtype): (MatmulCase, DType)) {
    let MatmulCase { tokens, chosen, experts, rows, columns } = case;
    let (device, mut noise) = (gpu(), Random(5));
    let blocks = noise.bytes(&[experts, rows, columns / 32, 16], 0..256);
    let scales = noise.bytes(&[experts, rows, columns / 32], 118..126);
    let dense = noise.tensor(&[experts, rows, columns], dtype);
    let bias = noise.tensor(&[experts, rows], dtype);
    let ids: Vec<u32> = (0..tokens * chosen).map(|_| (noise.next() % experts as u64) as u32).collect();
    let ids = Tensor::from_vec(ids, (tokens, chosen), &Device::Cpu).unwrap();
    let shared = noise.tensor(&[tokens, columns], dtype);
    let own = noise.tensor(&[tokens, chosen, columns], dtype);
    let packed = ExpertWeights::Mxfp4 { blocks: blocks.clone(), scales: scales.clone() };
    let packed_on_device =
        ExpertWeights::Mxfp4 { blocks: blocks.to_device(&device).unwrap(), scales: scales.to_device(&device).unwrap() };
    let dense_on_device = ExpertWeights::Dense(to_device(&dense, &device, dtype));
    let pairs = [("MXFP4", packed, packed_on_device), ("dense", ExpertWeights::Dense(dense), dense_on_device)];
    for (format, host_weights, device_weights) in pairs {
        for (inputs, x, bias) in [("shared inputs and a bias", &shared, Some(&bias)), ("own inputs", &own, None)] {
            let what = format!("{format} weights, {inputs}");
            let want = expert_matmul(x, &host_weights, bias, &ids, SumOrder::Fastest).unwrap();
            let shares = noise.tensor(&[tokens, chosen], DType::F32);
            let combined =
                combine(&to_device(&want, &device, dtype), &to_device(&shares, &device, DType::F32)).unwrap();
            let want_combined = combine(&want.to_dtype(dtype).unwrap(), &shares).unwrap();
            assert_close(&format!("combine, {what}"), &combined, &want_combined, 1e-5);
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
            assert_close(&format!("expert_matmul, {what}"), &got, &want, rounding(dtype));
            let product = |id: u32| {
                let ids = Tensor::from_vec(vec![id; tokens * chosen], (tokens, chosen), &device).unwrap();
                let (x, bias) = (to_device(x, &device, dtype), device_bias.as_ref());
                values(&expert_matmul(&x, &device_weights, bias, &ids, SumOrder::Fastest).unwrap())
            };
            assert_eq!(product(u32::MAX), product(experts as u32 - 1), "{what}, ids past the last expert");
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
