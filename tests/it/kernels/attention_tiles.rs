//! Tests of attention whose row tiles fill the GPU. With few heads, other tiles would be chosen.

use candle_core::{DType, Device, Tensor};
use inferno::kernels::SumOrder;
use inferno::kernels::attention::{AttentionMask, BLOCK_TOKENS, CachedLayer, FlashAttention, QueryLayout};
use inferno::kernels::launch::{max_shared_bytes, multiprocessors};

use super::attention::{AttentionCase, check_attention};
use crate::harness::TestCase;
use crate::support::{DTYPES, gpu, on_gpu};

/// An attention pass, and the names of the tiles that an H100 must choose for it.
#[derive(Clone, Copy)]
struct TileCase {
    tiles: &'static [&'static str],
    /// The pass. Its numbers of heads are per multiprocessor.
    pass: AttentionCase,
}

fn tile_cases() -> Vec<TestCase<(TileCase, DType)>> {
    use AttentionCase as Case;
    // With 130 rows per KV head, there are two tiles of 128 rows per multiprocessor.
    let prefill = Case { spans: &[(130, 3)], heads: 1, kv_heads: 1, head_dim: 128, window: Some(90), has_sinks: true };
    // Three sequences with one new token each have three tiles of 16 rows per multiprocessor.
    let decode = Case {
        spans: &[(1, 250), (1, 0), (1, 999)],
        heads: 1,
        kv_heads: 1,
        head_dim: 64,
        window: None,
        has_sinks: true,
    };
    let small_window = Case { window: Some(128), ..decode };
    let cases: [(&'static [&'static str], Case); 14] = [
        (&["128_rows"], prefill),
        (&["128_rows"], Case { head_dim: 256, window: None, ..prefill }),
        (&["16_rows_batch"], decode),
        (&["16_rows_batch_half"], Case { spans: &[(1, 700), (1, 1200), (1, 64), (1, 2)], ..decode }),
        // The first sequence has enough keys for two partitions.
        (&["16_rows_batch"], Case { spans: &[(1, 2500), (1, 30)], ..decode }),
        (&["16_rows_batch"], Case { spans: &[(1, 250), (1, 400)], head_dim: 256, has_sinks: false, ..decode }),
        // With a small window, the kernel depends on the number of thread blocks per multiprocessor.
        (&["16_rows_batch"], Case { spans: &[(1, 250), (1, 90)], ..small_window }),
        (&["16_rows_batch_half"], Case { heads: 2, ..small_window }),
        (&["16_rows_batch_half"], Case { spans: &[(1, 250), (1, 90)], head_dim: 256, ..small_window }),
        (&["16_rows_batch_quarter"], Case { spans: &[(1, 250), (1, 0), (1, 127), (1, 128), (1, 300)], ..small_window }),
        (&["16_rows_batch_quarter"], Case { head_dim: 256, ..small_window }),
        (&["16_rows_batch_quarter"], Case { spans: &[(1, 130); 5], head_dim: 128, ..small_window }),
        (&["16_rows_batch_half"], Case { spans: &[(1, 90); 4], head_dim: 80, ..small_window }),
        (
            &["16_rows_batch", "64_rows"],
            Case { spans: &[(1, 300), (2, 999), (40, 0)], head_dim: 128, window: Some(100), ..decode },
        ),
    ];
    let named = |(tiles, pass): (&'static [&'static str], Case)| {
        let (name, pass) = pass.named();
        (format!("{}::{name}", tiles.join("+")), TileCase { tiles, pass })
    };
    on_gpu(cases.map(named), &DTYPES)
}

/// Every case has one KV head per multiprocessor, so that its row tiles fill the GPU.
/// With few heads, other tiles would be chosen, except for the prompt of 40 tokens in the last case.
#[test(each = tile_cases)]
fn attention_with_tiles_that_fill_the_gpu_matches_its_reference((case, dtype): (TileCase, DType)) {
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("not a GPU") };
    let multiprocessors = multiprocessors(cuda).unwrap();
    let (heads, kv_heads) = (case.pass.heads * multiprocessors, case.pass.kv_heads * multiprocessors);
    let pass = AttentionCase { heads, kv_heads, ..case.pass };
    let AttentionCase { spans, head_dim, window, .. } = pass;
    if dtype != DType::F32 {
        let zeros = |rows: usize, heads: usize| Tensor::zeros((rows, heads, head_dim), dtype, &device).unwrap();
        let q = zeros(spans.iter().map(|(tokens, _)| tokens).sum(), heads);
        let k = zeros(BLOCK_TOKENS, kv_heads);
        let layer = CachedLayer { k: &k, v: &k };
        let queries = QueryLayout::new(spans, &device).unwrap();
        let mask = AttentionMask { window, scale: 1.0, softcap: None };
        let chosen = FlashAttention::for_pass(cuda, &q, layer, &queries, mask, SumOrder::Fastest).unwrap();
        let chosen: Vec<&str> = chosen.iter().map(FlashAttention::tile_name).collect();
        // The choice of the kernel depends on the shared memory of the GPU. The expected names are for an H100.
        if max_shared_bytes(cuda).unwrap() >= 232_448 {
            assert_eq!(chosen, case.tiles);
        } else {
            let rows = |names: &[&str]| names.iter().map(|name| name.starts_with("16_")).collect::<Vec<_>>();
            assert_eq!(rows(&chosen), rows(case.tiles));
        }
    }
    check_attention(&pass, &device, dtype, None);
    check_attention(&pass, &device, dtype, Some(2.0));
}
