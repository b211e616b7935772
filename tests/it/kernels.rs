//! Compares CUDA kernels with their references in plain Rust, with candle, or with the operations that they replace.
//! The inputs include outliers, unusual sizes and cache rows filled with NaN.
//! Some tests check the references against independently computed values.
//!
//! `quantized/mod.rs` tests the kernels of quantized matrices.
//! `decode_graph.rs` tests the fused kernels of the decode graph.

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::kernels::SumOrder;
use inferno::kernels::activation::{Activation, clamped_swiglu, gated, gated_halves};
use inferno::kernels::attention::rope::{HeadSizes, QkNorm, Rotation, split_qkv};
use inferno::kernels::attention::{
    AttentionBackend, AttentionInputs, AttentionMask, BLOCK_TOKENS, CachedLayer, PassBlocks, Queries, attention, slot,
};
use inferno::kernels::bandwidth;
use inferno::kernels::moe::combine::combine;
use inferno::kernels::moe::experts::{ExpertWeights, expert_matmul};
use inferno::kernels::moe::mxfp4::{E2M1_VALUES, e8m0_to_f32};
use inferno::kernels::moe::topk::{Softmax, topk_softmax};
use inferno::kernels::norm::{Addend, add_norm};
use inferno::kernels::rows::{add_bias, copy_rows, embed, soft_cap};

use crate::support::{Random, devices, golden, gpu_with_dtypes, relative_error, values};

fn rounding(dtype: DType) -> f32 {
    match dtype {
        // A sum can have thousands of terms. Kernels and references add the terms in different orders.
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

fn to_device(tensor: &Tensor, device: &Device, dtype: DType) -> Tensor {
    tensor.to_dtype(dtype).unwrap().to_device(device).unwrap()
}

fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let error = relative_error(&values(got), &values(want));
    assert!(error <= tolerance, "{what}: relative error {error:e}, limit {tolerance:e}");
}

#[test(gpu)]
fn split_qkv_matches_its_reference() {
    struct Case {
        tokens: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        /// The number of dimensions of each head that RoPE rotates.
        rotated: usize,
        has_bias: bool,
        has_norms: bool,
    }
    for (device, dtype) in gpu_with_dtypes() {
        let cases = [
            Case { tokens: 1, heads: 1, kv_heads: 1, head_dim: 2, rotated: 2, has_bias: false, has_norms: false },
            Case { tokens: 3, heads: 5, kv_heads: 1, head_dim: 64, rotated: 64, has_bias: true, has_norms: false },
            Case { tokens: 17, heads: 3, kv_heads: 3, head_dim: 10, rotated: 6, has_bias: true, has_norms: true },
            Case { tokens: 130, heads: 8, kv_heads: 2, head_dim: 128, rotated: 128, has_bias: false, has_norms: false },
            Case { tokens: 70, heads: 9, kv_heads: 1, head_dim: 64, rotated: 64, has_bias: true, has_norms: false },
            Case { tokens: 65, heads: 3, kv_heads: 2, head_dim: 256, rotated: 256, has_bias: true, has_norms: false },
            Case { tokens: 66, heads: 4, kv_heads: 2, head_dim: 128, rotated: 64, has_bias: true, has_norms: false },
            Case { tokens: 5, heads: 4, kv_heads: 2, head_dim: 128, rotated: 96, has_bias: false, has_norms: true },
            Case { tokens: 2, heads: 3, kv_heads: 1, head_dim: 256, rotated: 256, has_bias: false, has_norms: true },
        ];
        for Case { tokens, heads, kv_heads, head_dim, rotated, has_bias, has_norms } in cases {
            let mut noise = Random(1);
            let sizes = HeadSizes { heads, kv_heads, head_dim };
            let width = sizes.qkv_rows();
            let qkv = noise.tensor(&[tokens, width], DType::F32);
            let bias = has_bias.then(|| noise.tensor(&[width], DType::F32));
            let (cos, sin) =
                (noise.tensor(&[400, rotated / 2], DType::F32), noise.tensor(&[400, rotated / 2], DType::F32));
            let norms = [noise.tensor(&[head_dim], DType::F32), noise.tensor(&[head_dim], DType::F32)];
            let positions: Vec<u32> = (0..tokens).map(|_| (noise.next() % 400) as u32).collect();
            let positions = Tensor::new(positions, &Device::Cpu).unwrap();
            // Consecutive tokens have slots in different blocks. From five tokens on, the slots are not in order.
            let slots: Vec<u32> = (0..tokens).map(|token| (token * 77 % (4 * BLOCK_TOKENS)) as u32).collect();
            let slots = Tensor::new(slots, &Device::Cpu).unwrap();
            let run = |device: &Device, dtype| {
                let on_device = |tensor: &Tensor| tensor.to_device(device).unwrap();
                let (cos, sin, positions) = (on_device(&cos), on_device(&sin), on_device(&positions));
                let rotation = Rotation { cos: &cos, sin: &sin, positions: &positions };
                let [q, k] = norms.each_ref().map(on_device);
                let norms = has_norms.then_some(QkNorm { q: &q, k: &k, eps: 1e-3 });
                let cache = Tensor::zeros((4 * BLOCK_TOKENS, kv_heads, head_dim), dtype, device).unwrap();
                let (k, v) = (&cache, &cache.zeros_like().unwrap());
                let (qkv, bias, slots) = (on_device(&qkv), bias.as_ref().map(on_device), on_device(&slots));
                let layer = CachedLayer { k, v };
                let q = split_qkv(&qkv, bias.as_ref(), norms, rotation, sizes, layer, &slots).unwrap();
                (q, k.clone(), v.clone())
            };
            let (want, got) = (run(&Device::Cpu, DType::F32), run(&device, dtype));
            assert_close("q", &got.0, &want.0, rounding(dtype));
            assert_close("k", &got.1, &want.1, rounding(dtype));
            assert_close("v", &got.2, &want.2, rounding(dtype));
        }
    }
}

#[test(gpu)]
fn add_norm_matches_its_reference() {
    struct Case {
        tokens: usize,
        columns: usize,
        /// Whether the kernel adds `y` to `x` before the norm.
        has_y: bool,
        has_bias: bool,
    }
    for (device, dtype) in gpu_with_dtypes() {
        let cases = [
            Case { tokens: 1, columns: 2, has_y: true, has_bias: false },
            Case { tokens: 3, columns: 64, has_y: false, has_bias: false },
            Case { tokens: 6, columns: 2880, has_y: true, has_bias: false },
            Case { tokens: 2, columns: 5000, has_y: true, has_bias: true },
            Case { tokens: 3, columns: 33, has_y: false, has_bias: true },
            Case { tokens: 2, columns: 4101, has_y: true, has_bias: true },
        ];
        for Case { tokens, columns, has_y, has_bias } in cases {
            let mut noise = Random(7);
            let (x, y) = (noise.tensor(&[tokens, columns], DType::F32), noise.tensor(&[tokens, columns], DType::F32));
            let weight = noise.tensor(&[columns], DType::F32);
            let y_bias = noise.tensor(&[columns], DType::F32);
            let bias = has_bias.then(|| noise.tensor(&[columns], DType::F32));
            let run = |device: &Device, dtype| {
                let on_device = |tensor: &Tensor| tensor.to_device(device).unwrap();
                let (y, y_bias, bias) = (on_device(&y), on_device(&y_bias), bias.as_ref().map(on_device));
                let y = has_y.then_some(Addend { rows: &y, bias: (tokens % 2 == 0).then_some(&y_bias) });
                add_norm(&on_device(&x), y, &on_device(&weight), bias.as_ref(), 1e-5, dtype).unwrap()
            };
            let (want, got) = (run(&Device::Cpu, DType::F32), run(&device, dtype));
            assert_close("sum", &got.0, &want.0, 1e-6);
            assert_close("norm", &got.1, &want.1, rounding(dtype));
        }
    }
}

#[test]
fn gated_activations_match_candle() {
    for (device, dtype) in devices() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let mut noise = Random(8);
            let (gate, up) = (noise.tensor(&[3, 1027], DType::F32), noise.tensor(&[3, 1027], DType::F32));
            let activate = |x: &Tensor| match activation {
                Activation::Silu => x.silu().unwrap(),
                Activation::GeluTanh => x.gelu().unwrap(),
            };
            let on_device = |tensor: &Tensor| tensor.to_device(&device).unwrap();
            let got = gated(&on_device(&gate), Some(&on_device(&up)), activation, dtype).unwrap();
            assert_close("gated", &got, &(activate(&gate) * &up).unwrap(), rounding(dtype));
            let alone = gated(&on_device(&gate), None, activation, dtype).unwrap();
            assert_close("gated without up", &alone, &activate(&gate), rounding(dtype));

            let both = noise.tensor(&[2, 3, 2 * 129], dtype);
            let half = |first| both.narrow(2, first, 129).unwrap();
            for input in [dtype, DType::F32] {
                let got = gated_halves(&to_device(&both, &device, input), activation, dtype).unwrap();
                assert_eq!(got.dtype(), dtype);
                assert_close("gated_halves", &got, &(activate(&half(0)) * half(129)).unwrap(), rounding(dtype));
            }
        }
    }
}

#[test]
fn soft_cap_matches_candle() {
    for (device, _) in devices().into_iter().filter(|(_, dtype)| *dtype == DType::F32) {
        let x = Random(12).tensor(&[3, 513], DType::F32);
        let want = ((&x / 5.0).unwrap().tanh().unwrap() * 5.0).unwrap();
        assert_close("soft_cap", &soft_cap(&x.to_device(&device).unwrap(), 5.0).unwrap(), &want, 1e-6);
    }
}

#[test(gpu)]
fn clamped_swiglu_matches_its_reference() {
    for (device, dtype) in gpu_with_dtypes() {
        for shape in [[1, 1, 2], [3, 4, 64], [1, 5, 1026]] {
            let x = Random(2).tensor(&shape, dtype);
            let got = clamped_swiglu(&to_device(&x, &device, dtype), 7.0).unwrap();
            assert_close("clamped_swiglu", &got, &clamped_swiglu(&x, 7.0).unwrap(), rounding(dtype));
        }
    }
}

#[test]
fn clamped_swiglu_clamps_like_gpt_oss() {
    // A gate of 9 is clamped to 7, and an up value of -8 is clamped to -7. The first output is 7·σ(7·1.702)·(-7 + 1).
    // A gate of -20 is not clamped, because gates have no lower limit.
    let x = Tensor::new(&[9f32, -8.0, -20.0, 3.0], &Device::Cpu).unwrap();
    let got = values(&clamped_swiglu(&x, 7.0).unwrap());
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let want = [7.0 * sigmoid(7.0 * 1.702) * -6.0, -20.0 * sigmoid(-20.0 * 1.702) * 4.0];
    for (got, want) in got.iter().zip(want) {
        assert!((*got as f64 - want).abs() < 1e-5 * want.abs().max(1e-6), "got {got}, expected {want}");
    }
}

#[test]
fn clamped_swiglu_keeps_nan() {
    for (device, dtype) in devices() {
        let x = Tensor::new(&[f32::NAN, 1.0, 1.0, f32::NAN, 1.0, 1.0], &Device::Cpu).unwrap();
        let got = values(&clamped_swiglu(&to_device(&x, &device, dtype), 7.0).unwrap());
        assert!(got[0].is_nan() && got[1].is_nan() && got[2].is_finite(), "{got:?}");
    }
}

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

#[test]
fn topk_softmax_prefers_lower_experts_in_ties_and_puts_nan_last() {
    for (device, dtype) in devices() {
        let logits = Tensor::new(&[[1f32, 2.0, f32::NAN, 2.0, 0.5, 2.0]], &Device::Cpu).unwrap();
        let (ids, weights) = topk_softmax(&to_device(&logits, &device, dtype), 4, Softmax::OverChosen).unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), [[1, 3, 5, 0]]);
        let total: f32 = values(&weights).iter().sum();
        assert!((total - 1.0).abs() < 1e-6);
    }
}

#[test(gpu)]
fn attention_matches_its_reference() {
    struct Case {
        /// The number of new tokens and the position of the first one, for each sequence.
        spans: &'static [(usize, usize)],
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        window: Option<usize>,
        has_sinks: bool,
    }
    let cases: [Case; 33] = [
        Case { spans: &[(1, 0)], heads: 1, kv_heads: 1, head_dim: 2, window: None, has_sinks: false },
        Case { spans: &[(1, 250)], heads: 8, kv_heads: 2, head_dim: 64, window: None, has_sinks: true },
        Case { spans: &[(5, 35)], heads: 6, kv_heads: 3, head_dim: 10, window: None, has_sinks: false },
        Case { spans: &[(1, 1000)], heads: 64, kv_heads: 8, head_dim: 64, window: Some(128), has_sinks: true },
        Case { spans: &[(33, 500)], heads: 4, kv_heads: 2, head_dim: 80, window: Some(128), has_sinks: true },
        Case { spans: &[(7, 0)], heads: 6, kv_heads: 2, head_dim: 128, window: Some(3), has_sinks: true },
        Case { spans: &[(130, 127)], heads: 2, kv_heads: 1, head_dim: 256, window: Some(128), has_sinks: false },
        Case { spans: &[(1, 2900)], heads: 8, kv_heads: 8, head_dim: 256, window: None, has_sinks: true },
        Case { spans: &[(50, 250)], heads: 16, kv_heads: 4, head_dim: 64, window: None, has_sinks: true },
        Case { spans: &[(300, 64)], heads: 3, kv_heads: 1, head_dim: 40, window: Some(128), has_sinks: true },
        Case { spans: &[(1, 8500)], heads: 64, kv_heads: 8, head_dim: 64, window: None, has_sinks: true },
        Case { spans: &[(1, 2999)], heads: 32, kv_heads: 8, head_dim: 128, window: None, has_sinks: false },
        Case { spans: &[(3, 35)], heads: 10, kv_heads: 2, head_dim: 16, window: Some(9), has_sinks: true },
        Case { spans: &[(9, 2900)], heads: 32, kv_heads: 8, head_dim: 128, window: None, has_sinks: false },
        Case { spans: &[(200, 431)], heads: 12, kv_heads: 4, head_dim: 96, window: Some(250), has_sinks: true },
        Case { spans: &[(513, 17)], heads: 8, kv_heads: 8, head_dim: 128, window: None, has_sinks: false },
        Case { spans: &[(5, 250)], heads: 8, kv_heads: 2, head_dim: 256, window: Some(100), has_sinks: false },
        Case { spans: &[(3, 1290)], heads: 8, kv_heads: 4, head_dim: 256, window: None, has_sinks: false },
        Case { spans: &[(1, 1650)], heads: 8, kv_heads: 2, head_dim: 64, window: Some(600), has_sinks: true },
        Case { spans: &[(2, 1650)], heads: 4, kv_heads: 2, head_dim: 256, window: Some(600), has_sinks: false },
        // With 140 KV heads and 130 rows per head, there are 280 tiles of 128 rows.
        // These are at least two tiles per multiprocessor of an H200 (132), so the kernel uses tiles of 128 rows.
        Case { spans: &[(130, 3)], heads: 140, kv_heads: 140, head_dim: 256, window: None, has_sinks: true },
        Case { spans: &[(130, 3)], heads: 140, kv_heads: 140, head_dim: 128, window: Some(90), has_sinks: true },
        // In cases with several sequences, all decode, all compute chunks of equal length, or the lengths differ.
        Case {
            spans: &[(1, 250), (1, 0), (1, 999), (1, 64)],
            heads: 8,
            kv_heads: 2,
            head_dim: 64,
            window: None,
            has_sinks: true,
        },
        Case {
            spans: &[(1, 250), (1, 0), (1, 999), (1, 63)],
            heads: 64,
            kv_heads: 8,
            head_dim: 64,
            window: Some(128),
            has_sinks: true,
        },
        Case { spans: &[(70, 0), (70, 128)], heads: 8, kv_heads: 1, head_dim: 128, window: None, has_sinks: false },
        Case {
            spans: &[(1, 300), (130, 64), (1, 0), (5, 700), (33, 31)],
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            window: None,
            has_sinks: false,
        },
        Case {
            spans: &[(1, 300), (130, 64), (1, 0), (5, 700), (33, 31)],
            heads: 16,
            kv_heads: 2,
            head_dim: 64,
            window: Some(100),
            has_sinks: true,
        },
        Case {
            spans: &[(1, 3000), (2, 127), (300, 0)],
            heads: 4,
            kv_heads: 4,
            head_dim: 256,
            window: None,
            has_sinks: true,
        },
        Case { spans: &[(1, 100), (40, 100)], heads: 6, kv_heads: 3, head_dim: 10, window: Some(64), has_sinks: false },
        // With 140 KV heads, there are more 16-row tiles than multiprocessors (132 on an H200).
        // The sequences with few new tokens therefore use the kernel `16_rows_batch`.
        Case {
            spans: &[(1, 250), (1, 0), (1, 999)],
            heads: 140,
            kv_heads: 140,
            head_dim: 64,
            window: None,
            has_sinks: true,
        },
        Case {
            spans: &[(1, 250), (1, 0), (1, 999)],
            heads: 280,
            kv_heads: 140,
            head_dim: 64,
            window: Some(128),
            has_sinks: true,
        },
        Case { spans: &[(1, 250), (1, 400)], heads: 140, kv_heads: 140, head_dim: 256, window: None, has_sinks: false },
        Case {
            spans: &[(1, 300), (2, 999), (40, 0)],
            heads: 140,
            kv_heads: 140,
            head_dim: 128,
            window: Some(100),
            has_sinks: true,
        },
    ];
    for (device, dtype) in gpu_with_dtypes() {
        for (case, softcap) in cases.iter().flat_map(|case| [(case, None), (case, Some(2.0))]) {
            let &Case { spans, heads, kv_heads, head_dim, window, has_sinks } = case;
            let mut noise = Random(4);
            let tokens: usize = spans.iter().map(|(tokens, _)| tokens).sum();
            let tables = random_tables(&mut noise, spans);
            let blocks = 1 + tables.iter().map(Vec::len).sum::<usize>();
            let rows = blocks * BLOCK_TOKENS;
            let q = noise.tensor(&[tokens, heads, head_dim], dtype);
            let k = noise.tensor(&[rows, kv_heads, head_dim], dtype);
            let v = noise.tensor(&[rows, kv_heads, head_dim], dtype);
            let mask = AttentionMask { window, scale: 1.0 / (head_dim as f32).sqrt(), softcap };
            // Rows that no query attends to hold NaN, so a kernel that uses the values of such a row fails the test.
            let mut row_poison = vec![f32::NAN; rows];
            for (&(tokens, position), table) in spans.iter().zip(&tables) {
                for visible in mask.first_key(position)..position + tokens {
                    row_poison[slot(table, visible) as usize] = 0.0;
                }
            }
            let poison = Tensor::from_vec(row_poison, (rows, 1, 1), &Device::Cpu).unwrap();
            let (k, v) = (k.broadcast_add(&poison).unwrap(), v.broadcast_add(&poison).unwrap());
            let sinks = has_sinks.then(|| noise.tensor(&[heads], DType::F32));
            let run = |q: &Tensor, k: &Tensor, v: &Tensor, sinks: Option<&Tensor>, backend| {
                let queries = Queries::new(spans, q.device()).unwrap();
                let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
                let pass_blocks = PassBlocks::new(&queries, &tables, blocks, q.device()).unwrap();
                let layer = CachedLayer { k, v };
                let inputs = AttentionInputs {
                    q,
                    layer,
                    queries: &queries,
                    blocks: &pass_blocks,
                    sinks,
                    mask,
                    sum_order: SumOrder::Fastest,
                };
                attention(inputs, backend).unwrap()
            };
            let want = run(&q, &k, &v, sinks.as_ref(), AttentionBackend::Auto);
            let sinks = sinks.map(|sinks| to_device(&sinks, &device, DType::F32));
            let [q, k, v] = [q, k, v].map(|tensor| to_device(&tensor, &device, dtype));
            // The error of a sum grows with its length. In 16-bit dtypes, rounding the result hides this growth.
            let keys = spans.iter().map(|(tokens, position)| tokens + position).max().unwrap();
            let error_growth = if dtype == DType::F32 { 1.0 + keys as f32 / 2880.0 } else { 1.0 };
            for backend in [AttentionBackend::Own, AttentionBackend::CandleFlashAttn, AttentionBackend::Eager] {
                if backend.choose(device.is_cuda(), dtype, head_dim, softcap).is_err() {
                    continue;
                }
                let got = run(&q, &k, &v, sinks.as_ref(), backend);
                let what = format!(
                    "{spans:?}, {heads} heads, {kv_heads} KV heads, head size {head_dim}, {dtype:?}, cap {softcap:?}"
                );
                assert_close(&format!("{backend} attention {what}"), &got, &want, 2.0 * error_growth * rounding(dtype));
            }
        }
    }
}

/// Returns a block table for each sequence. No two sequences share a block, and block 0 stays unused.
fn random_tables(random: &mut Random, spans: &[(usize, usize)]) -> Vec<Vec<u32>> {
    let lengths: Vec<usize> =
        spans.iter().map(|(tokens, position)| (tokens + position).div_ceil(BLOCK_TOKENS)).collect();
    let mut free: Vec<u32> = (1..=lengths.iter().sum::<usize>() as u32).collect();
    let mut take = |_| free.swap_remove(random.below(free.len()));
    lengths.into_iter().map(|length| (0..length).map(&mut take).collect()).collect()
}

/// In a batch, no sequence may attend to the tokens of another sequence.
#[test]
fn attention_of_a_batch_equals_attention_of_its_sequences() {
    let spans = [(3, 70), (1, 0), (1, 200), (65, 1)];
    let mut noise = Random(11);
    let tables = random_tables(&mut noise, &spans);
    let blocks = 1 + tables.iter().map(Vec::len).sum::<usize>();
    let k = noise.tensor(&[blocks * BLOCK_TOKENS, 2, 8], DType::F32);
    let v = noise.tensor(&[blocks * BLOCK_TOKENS, 2, 8], DType::F32);
    let q = noise.tensor(&[70, 4, 8], DType::F32);
    let run = |q: &Tensor, spans: &[(usize, usize)], tables: &[&[u32]]| {
        let queries = Queries::new(spans, &Device::Cpu).unwrap();
        let pass_blocks = PassBlocks::new(&queries, tables, blocks, &Device::Cpu).unwrap();
        let mask = AttentionMask { window: Some(50), scale: 0.3, softcap: None };
        let layer = CachedLayer { k: &k, v: &v };
        let inputs = AttentionInputs {
            q,
            layer,
            queries: &queries,
            blocks: &pass_blocks,
            sinks: None,
            mask,
            sum_order: SumOrder::Fastest,
        };
        attention(inputs, AttentionBackend::Auto).unwrap()
    };
    let all: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
    let batched = run(&q, &spans, &all);
    let mut first = 0;
    for (&(tokens, position), table) in spans.iter().zip(&all) {
        let alone = run(&q.narrow(0, first, tokens).unwrap().contiguous().unwrap(), &[(tokens, position)], &[*table]);
        assert_close("a sequence", &batched.narrow(0, first, tokens).unwrap(), &alone, 0.0);
        first += tokens;
    }
}

#[test]
fn block_tables_are_checked() {
    let queries = Queries::new(&[(1, 64)], &Device::Cpu).unwrap();
    let new = |table: &[u32]| PassBlocks::new(&queries, &[table], 3, &Device::Cpu);
    assert!(new(&[1, 2]).is_ok());
    assert!(new(&[1]).is_err(), "a block table without a block for position 64 was accepted");
    assert!(new(&[1, 3]).is_err(), "block 3 was accepted, although the cache has 3 blocks");
    assert!(PassBlocks::new(&queries, &[], 3, &Device::Cpu).is_err());
}

#[cfg(feature = "cuda")]
#[test(gpu)]
fn expert_mlp_matches_separate_products() {
    use inferno::kernels::moe::expert_mlp::{ExpertLinear, expert_mlp};
    use inferno::kernels::moe::mxfp4_tiles::{Mxfp4Tiles, RowOrder};
    use inferno::kernels::moe::route::RoutedPairs;
    #[derive(Clone, Copy)]
    struct Case {
        tokens: usize,
        experts: usize,
        /// The number of experts that the router chooses for each token.
        chosen: usize,
        hidden: usize,
        intermediate: usize,
    }
    // Only cases whose hidden and intermediate sizes are multiples of 192 can use the `expert_few` kernels.
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
            let (up, down) = (tiles(&up, RowOrder::Paired), tiles(&down, RowOrder::Plain));
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
                let want = add_norm(&residual, Some((&got).into()), &weight, None, 1e-3, out_dtype).unwrap();
                assert_close("sum of x and the outputs", &sum, &want.0, 1e-6);
                assert_close("norm of the sum", &normed, &want.1, tolerance);
            }
            let what = format!("{tokens} tokens, {chosen} of {experts} experts, {columns}x{intermediate}, {dtype:?}");
            assert_close(&what, &got, &want, 2.0 * rounding(dtype));
        }
    }
}

/// With `SumOrder::Fixed`, the attention output of a sequence has the same bits in a batch of any size.
#[test(gpu)]
fn attention_in_fixed_order_does_not_depend_on_other_sequences() {
    for (device, dtype) in gpu_with_dtypes() {
        for (heads, kv_heads, head_dim, window) in [(64, 8, 64, None), (64, 8, 64, Some(128)), (32, 8, 128, None)] {
            let spans: Vec<(usize, usize)> = (0..64).map(|index| (1, index * index * 701 % 3000)).collect();
            let mut noise = Random(3);
            let tables = random_tables(&mut noise, &spans);
            let blocks = 1 + tables.iter().map(Vec::len).sum::<usize>();
            let mut tensor = |shape: &[usize]| to_device(&noise.tensor(shape, dtype), &device, dtype);
            let q = tensor(&[64, heads, head_dim]);
            let (k, v) = (
                tensor(&[blocks * BLOCK_TOKENS, kv_heads, head_dim]),
                tensor(&[blocks * BLOCK_TOKENS, kv_heads, head_dim]),
            );
            let mask = AttentionMask { window, scale: 0.1, softcap: None };
            let run = |first: usize, count: usize| {
                let queries = Queries::new(&spans[first..first + count], &device).unwrap();
                let tables: Vec<&[u32]> = tables[first..first + count].iter().map(Vec::as_slice).collect();
                let blocks = PassBlocks::new(&queries, &tables, blocks, &device).unwrap();
                let q = q.narrow(0, first, count).unwrap().force_contiguous().unwrap();
                let inputs = AttentionInputs {
                    q: &q,
                    layer: CachedLayer { k: &k, v: &v },
                    queries: &queries,
                    blocks: &blocks,
                    sinks: None,
                    mask,
                    sum_order: SumOrder::Fixed,
                };
                attention(inputs, AttentionBackend::Auto).unwrap()
            };
            let all = run(0, 64);
            for (first, count) in (0..64).map(|first| (first, 1)).chain([(0, 2), (5, 7), (20, 40)]) {
                let want = values(&all.narrow(0, first, count).unwrap());
                assert!(
                    values(&run(first, count)) == want,
                    "{dtype:?}, {heads} heads: {count} sequences from index {first} differ from the batch of 64"
                );
            }
        }
    }
}

/// With `SumOrder::Fixed`, the expert outputs of a token have the same bits in a step of any size.
#[cfg(feature = "cuda")]
#[test(gpu)]
fn experts_in_fixed_order_do_not_depend_on_other_tokens() {
    use inferno::kernels::moe::expert_mlp::{ExpertLinear, expert_mlp};
    use inferno::kernels::moe::mxfp4_tiles::{Mxfp4Tiles, RowOrder};
    use inferno::kernels::moe::route::RoutedPairs;
    // In the second case, as when two GPUs divide gpt-oss, the padding of gate_up's output needs a row block without
    // weights. Some copying warps then have nothing to copy. If they missed a phase of a barrier, gate_up would hang.
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
            let down = linear(columns, intermediate, RowOrder::Plain);
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
                assert!(run(0, tokens).1 == all, "{dtype:?}: two runs with all tokens differ");
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

#[cfg(feature = "cuda")]
#[test(gpu)]
fn products_of_few_tokens_match_their_reference() {
    use crate::support::gpu;
    use inferno::kernels::matmul::dense_few::{is_supported, matmul_few};
    use inferno::kernels::matmul::matmul_f32;
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("{device:?} is not a GPU") };
    // Each case is (rows, columns). The cases cover several warps per row, one warp per row, and an uneven last block.
    // A row can have fewer groups of 64 columns than warps, or more columns than the two input buffers hold.
    // The last two cases are unsupported: 40 rows are not a multiple of 16, and 65,536 rows are too many.
    let cases =
        [(16, 64), (5120, 2880), (2880, 4096), (4112, 64), (28_672, 192), (4096, 14_336), (40, 64), (65_536, 64)];
    for (rows, columns) in cases {
        for dtype in [DType::BF16, DType::F16] {
            let mut noise = Random((rows + columns) as u64);
            let (weight, x) = (noise.tensor(&[rows, columns], dtype), noise.tensor(&[9, columns], dtype));
            let want = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
            let (x, weight) = (to_device(&x, &device, dtype), to_device(&weight, &device, dtype));
            for tokens in [1, 2, 5, 8, 9] {
                let (x, want) = (x.narrow(0, 0, tokens).unwrap(), want.narrow(0, 0, tokens).unwrap());
                let what = format!("{rows}x{columns}, {dtype:?}, {tokens} tokens");
                let supported = is_supported(cuda, &x, &weight).unwrap();
                assert_eq!(supported, tokens < 9 && rows % 16 == 0 && rows < 65_536, "{what}");
                match matmul_few(cuda, &x, &weight) {
                    Ok(got) => assert_close(&what, &got, &want, 1e-5),
                    Err(error) => assert!(!supported, "{what}: {error}"),
                }
            }
        }
    }
}

#[test(gpu)]
fn products_with_few_rows_match_their_reference() {
    use crate::support::gpu;
    use inferno::kernels::matmul::matmul_f32;
    let device = gpu();
    // Routers of gpt-oss-20b, gpt-oss-120b and Qwen3-30B-A3B, and sizes that fill only part of a tile.
    // The last case has too many rows for the kernel `few_rows`.
    for (rows, columns) in [(32, 2880), (128, 2880), (128, 2048), (1, 16), (33, 144), (257, 64)] {
        let mut noise = Random((rows + columns) as u64);
        let (weight, x) = (noise.tensor(&[rows, columns], DType::F32), noise.tensor(&[4100, columns], DType::F32));
        let want = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
        let (x, weight) = (x.to_device(&device).unwrap(), weight.to_device(&device).unwrap());
        for tokens in [1, 15, 16, 17, 600, 4100] {
            let got = matmul_f32(&x.narrow(0, 0, tokens).unwrap(), &weight, SumOrder::Fastest).unwrap();
            assert_close(
                &format!("{rows}x{columns}, {tokens} tokens"),
                &got,
                &want.narrow(0, 0, tokens).unwrap(),
                1e-5,
            );
        }
    }
}

/// All numbers of tokens in a size class share one cuBLASLt algorithm (see `size_class`).
#[test(gpu)]
fn products_of_any_number_of_tokens_match_their_reference() {
    use crate::support::gpu;
    use inferno::kernels::matmul::{matmul_f32, matmul_rounded};
    let device = gpu();
    // Matrix sizes of gpt-oss-20b and Llama-3.1-8B, one GPU's half of a matrix, and unusual sizes.
    for (rows, columns) in [(5120, 2880), (2880, 4096), (4096, 14_336), (2880, 2048), (33, 72), (257, 100)] {
        for dtype in [DType::BF16, DType::F16] {
            let mut noise = Random((rows * 3 + columns) as u64);
            let (weight, x) = (noise.tensor(&[rows, columns], dtype), noise.tensor(&[520, columns], dtype));
            let want = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap();
            let tolerance = 1e-5 * (columns as f32 / 4096.0).max(1.0);
            let rounded = want.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
            let (x, weight) = (to_device(&x, &device, dtype), to_device(&weight, &device, dtype));
            for tokens in (1..=80).chain([100, 129, 250, 257, 321, 511, 513, 520]) {
                let x = x.narrow(0, 0, tokens).unwrap();
                let what = format!("{rows}x{columns}, {dtype:?}, {tokens} tokens");
                let first = |want: &Tensor| want.narrow(0, 0, tokens).unwrap();
                // Tensor cores round sums toward zero, so the error grows with the number of columns.
                assert_close(&what, &matmul_f32(&x, &weight, SumOrder::Fastest).unwrap(), &first(&want), tolerance);
                let got = matmul_rounded(&x, &weight, SumOrder::Fastest).unwrap().to_dtype(DType::F32).unwrap();
                // Two values that are rounded in opposite directions differ by one unit in the last place.
                assert_close(&what, &got, &first(&rounded), if dtype == DType::BF16 { 1e-2 } else { 1.3e-3 });
            }
        }
    }
}

/// With `SumOrder::Fixed`, the matrix product of a token has the same bits in a step of any size.
#[test(gpu)]
fn products_in_fixed_order_do_not_depend_on_other_tokens() {
    use crate::support::gpu;
    use inferno::kernels::matmul::matmul_f32;
    let device = gpu();
    // Matrix sizes of gpt-oss-20b and Llama-3.1-8B, and two unusual sizes.
    for (rows, columns) in
        [(5120, 2880), (2880, 4096), (201_088, 2880), (28_672, 4096), (4096, 14_336), (33, 72), (33, 80)]
    {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let mut noise = Random(rows as u64);
            let weight = to_device(&noise.tensor(&[rows, columns], DType::F32), &device, dtype);
            let x = to_device(&noise.tensor(&[200, columns], DType::F32), &device, dtype);
            let product = |first: usize, tokens: usize| {
                let product = matmul_f32(&x.narrow(0, first, tokens).unwrap(), &weight, SumOrder::Fixed).unwrap();
                values(&product.narrow(0, 0, 1).unwrap())
            };
            for first in [0, 63, 130] {
                let alone = product(first, 1);
                for tokens in [2, 7, 64, 65, 70] {
                    assert!(
                        product(first, tokens) == alone,
                        "{rows}x{columns}, {dtype:?}: token {first} in a batch of {tokens} differs from the token alone"
                    );
                }
            }
            // Token 130 is in row 130 of `x`, but in row 0 of the input of `product(130, 1)`. The row must not matter.
            let all = values(&matmul_f32(&x, &weight, SumOrder::Fixed).unwrap().narrow(0, 130, 1).unwrap());
            assert!(
                all == product(130, 1),
                "{rows}x{columns}, {dtype:?}: token 130 of 200 differs from the same token alone"
            );
        }
    }
}

#[cfg(feature = "cuda")]
#[test(gpu)]
fn routed_pairs_match_separate_operations() {
    use std::collections::HashSet;

    use crate::support::gpu;
    use inferno::kernels::launch::runs_hopper_code;
    use inferno::kernels::matmul::matmul_f32;
    use inferno::kernels::moe::expert_usage::ExpertUsage;
    use inferno::kernels::moe::route::RoutedPairs;
    struct Case {
        tokens: usize,
        experts: usize,
        /// The number of experts that the router chooses for each token.
        chosen: usize,
        hidden: usize,
    }
    // More than 256 tokens are routed in several launches, and so are all tokens on GPUs before Hopper.
    for Case { tokens, experts, chosen, hidden: columns } in [
        Case { tokens: 1, experts: 3, chosen: 1, hidden: 4 },
        Case { tokens: 7, experts: 32, chosen: 4, hidden: 132 },
        Case { tokens: 64, experts: 5, chosen: 5, hidden: 60 },
        Case { tokens: 129, experts: 128, chosen: 8, hidden: 68 },
        Case { tokens: 256, experts: 33, chosen: 2, hidden: 64 },
        Case { tokens: 9, experts: 40, chosen: 4, hidden: 3204 },
        Case { tokens: 257, experts: 32, chosen: 4, hidden: 64 },
    ] {
        let mut noise = Random(11);
        let (x, weight) = (noise.tensor(&[tokens, columns], DType::F32), noise.tensor(&[experts, columns], DType::F32));
        let bias = noise.tensor(&[experts], DType::F32);
        let logits = matmul_f32(&x, &weight, SumOrder::Fastest).unwrap().broadcast_add(&bias).unwrap();
        let (ids, want) = topk_softmax(&logits, chosen, Softmax::OverChosen).unwrap();
        let ids: Vec<u32> = ids.flatten_all().unwrap().to_vec1().unwrap();
        let device = gpu();
        let is_one_launch = tokens <= 256 && runs_hopper_code(device.as_cuda_device().unwrap()).unwrap();
        let on_device = |tensor: &Tensor| tensor.to_device(&device).unwrap();
        let (x, weight, bias) = (on_device(&x), on_device(&weight), on_device(&bias));
        let usage = ExpertUsage::new(&device).unwrap();
        let used: HashSet<u32> = ids.iter().copied().collect();
        // The kernels must reset their counters after a launch, because the second launch uses the same counters.
        for _ in 0..2 {
            let routed = RoutedPairs::route(&x, &weight, Some(&bias), chosen, SumOrder::Fastest, Some(&usage)).unwrap();
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
                    assert_eq!(rows[pair as usize], row, "the row of pair {pair}");
                }
                first_row = (first_row + of_expert.len() as u32).next_multiple_of(8);
            }
            assert_eq!(got, ids.iter().copied().map(Some).collect::<Vec<_>>());
        }
        let counted = if is_one_launch { (2, 2 * used.len() as u64) } else { (0, 0) };
        assert_eq!(usage.take().unwrap(), counted, "{tokens} tokens");
        assert_eq!(usage.take().unwrap(), (0, 0));
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
    // With 64 or more (token, expert) pairs, kernels in 16-bit dtypes use a GEMM.
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

#[test]
fn mxfp4_decodes_every_nibble_with_every_kind_of_scale() {
    assert_eq!(e8m0_to_f32(127), 1.0);
    assert_eq!(e8m0_to_f32(0), 2f32.powi(-127));
    assert_eq!(e8m0_to_f32(254), 2f32.powi(127));
    assert!(e8m0_to_f32(255).is_nan());
    for (device, dtype) in devices().into_iter().filter(|(_, dtype)| *dtype == DType::F32) {
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
}

#[test]
fn mxfp4_matches_transformers() {
    let file = safetensors::load(golden("mxfp4.safetensors"), &Device::Cpu).unwrap();
    let (experts, rows, columns) = file["expected"].dims3().unwrap();
    for (device, dtype) in devices().into_iter().filter(|(_, dtype)| *dtype == DType::F32) {
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
}

#[test]
fn bandwidth_is_measured_only_on_a_gpu() {
    for (device, _) in devices() {
        let bandwidth = bandwidth::measure(&device).unwrap();
        assert_eq!(bandwidth.is_some(), device.is_cuda());
        if let Some(bandwidth) = bandwidth {
            println!("{bandwidth:?}");
            // The range of 10 GB/s to 100 TB/s includes every GPU. A kernel that does nothing would exceed 100 TB/s.
            let plausible = 1e10..1e14;
            assert!(plausible.contains(&bandwidth.read_bytes_per_s) && plausible.contains(&bandwidth.copy_bytes_per_s));
        }
    }
}

#[test]
fn embed_add_bias_and_copy_rows_match_candle() {
    for (device, dtype) in devices() {
        let mut noise = Random(10);
        let (table, y) = (noise.tensor(&[50, 37], dtype), noise.tensor(&[9, 37], DType::F32));
        let ids = Tensor::new(&[3u32, 49, 0, 3, 17], &Device::Cpu).unwrap();
        let bias = noise.tensor(&[37], DType::F32);
        let on_device = |tensor: &Tensor| tensor.to_device(&device).unwrap();
        let got = embed(&to_device(&table, &device, dtype), &on_device(&ids), 1.5).unwrap();
        assert_close("embed", &got, &(table.index_select(&ids, 0).unwrap() * 1.5).unwrap(), 0.0);
        let got = add_bias(&on_device(&y), &on_device(&bias)).unwrap();
        assert_close("add_bias", &got, &y.broadcast_add(&bias).unwrap(), 0.0);
        let (to, from) = (to_device(&table, &device, dtype), to_device(&y.narrow(0, 2, 4).unwrap(), &device, dtype));
        copy_rows(&to, &from, 45).unwrap();
        assert_eq!(values(&to.narrow(0, 45, 4).unwrap()), values(&from));
        assert_close("rows before", &to.narrow(0, 0, 45).unwrap(), &table.narrow(0, 0, 45).unwrap(), 0.0);
        assert_close("rows after", &to.narrow(0, 49, 1).unwrap(), &table.narrow(0, 49, 1).unwrap(), 0.0);
        assert!(copy_rows(&to, &from, 47).is_err());
    }
}

#[test]
fn unsupported_attention_backend_is_rejected_with_its_reason() {
    let choose = |backend: AttentionBackend, on_gpu, dtype, head_dim| backend.choose(on_gpu, dtype, head_dim, None);
    assert_eq!(choose(AttentionBackend::Auto, true, DType::BF16, 64), Ok(AttentionBackend::Own));
    assert_eq!(choose(AttentionBackend::Auto, true, DType::F32, 64), Ok(AttentionBackend::Eager));
    assert_eq!(choose(AttentionBackend::Auto, false, DType::F32, 64), Ok(AttentionBackend::Eager));
    assert_eq!(choose(AttentionBackend::Eager, true, DType::BF16, 64), Ok(AttentionBackend::Eager));
    assert!(choose(AttentionBackend::Own, true, DType::BF16, 40).unwrap_err().contains("head size 40"));
    let capped = |backend: AttentionBackend| backend.choose(true, DType::BF16, 64, Some(50.0));
    assert_eq!(capped(AttentionBackend::Auto), Ok(AttentionBackend::Own));
    assert!(capped(AttentionBackend::CandleFlashAttn).is_err());
    assert!(choose(AttentionBackend::Own, false, DType::F32, 64).unwrap_err().contains("GPU"));
    assert!(choose(AttentionBackend::CandleFlashAttn, true, DType::F32, 64).is_err());
    assert_eq!(choose(AttentionBackend::CandleFlashAttn, true, DType::F16, 64).is_ok(), cfg!(feature = "flash-attn"));
}
