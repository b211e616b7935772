//! Tests of attention, and of the kernel that splits q, k and v, applies RoPE and writes the KV cache.
//! `attention_tiles.rs` tests the tiles that need many heads.

use candle_core::{DType, Device, Tensor};
use inferno::kernels::SumOrder;
use inferno::kernels::attention::rope::{HeadSizes, QkNorm, Rotation, SplitQkvInputs, split_qkv};
use inferno::kernels::attention::{
    AttentionBackend, AttentionInputs, AttentionMask, BLOCK_TOKENS, CachedLayer, PassBlocks, QueryLayout, attention,
    slot,
};

use super::{assert_close, assert_elements_close, rounding, to_device};
use crate::harness::TestCase;
use crate::support::{DTYPES, Random, gpu, on_gpu, values};

/// The sizes and options of a `split_qkv` test.
#[derive(Clone, Copy)]
struct SplitCase {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// The number of dimensions of each head that RoPE rotates.
    rotated: usize,
    has_bias: bool,
    has_norms: bool,
}

fn split_cases() -> Vec<TestCase<(SplitCase, DType)>> {
    use SplitCase as Case;
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
    let named = |case: Case| {
        let Case { tokens, heads, kv_heads, head_dim, rotated, .. } = case;
        (format!("{tokens}_tokens::{heads}_and_{kv_heads}_heads_of_{head_dim}::{rotated}_rotated"), case)
    };
    on_gpu(cases.map(named), &DTYPES)
}

#[test(each = split_cases)]
fn split_qkv_matches_its_reference((case, dtype): (SplitCase, DType)) {
    let SplitCase { tokens, heads, kv_heads, head_dim, rotated, has_bias, has_norms } = case;
    let mut noise = Random(1);
    let sizes = HeadSizes { heads, kv_heads, head_dim };
    let width = sizes.qkv_rows();
    let terms = tokens % 3 + 1;
    let qkv = noise.tensor(&[terms, tokens, width], DType::F32);
    let bias = has_bias.then(|| noise.tensor(&[width], DType::F32));
    let (cos, sin) = (noise.tensor(&[400, rotated / 2], DType::F32), noise.tensor(&[400, rotated / 2], DType::F32));
    let norms = [noise.tensor(&[head_dim], DType::F32), noise.tensor(&[head_dim], DType::F32)];
    let positions: Vec<u32> = (0..tokens).map(|_| (noise.next() % 400) as u32).collect();
    let positions = Tensor::new(positions, &Device::Cpu).unwrap();
    // Consecutive tokens have slots in different blocks. With five or more tokens, the slots are not ascending.
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
        let (bias, slots) = (bias.as_ref(), &slots);
        let inputs = SplitQkvInputs { qkv: &qkv, bias, norms, rotation, sizes, layer, slots };
        let q = split_qkv(inputs).unwrap();
        (q, k.clone(), v.clone())
    };
    let (want, got) = (run(&Device::Cpu, DType::F32), run(&gpu(), dtype));
    assert_elements_close("q", &got.0, &want.0, dtype);
    assert_elements_close("k", &got.1, &want.1, dtype);
    assert_elements_close("v", &got.2, &want.2, dtype);
}

/// Head sizes, and whether the backends `own` and `flash` support them in bf16 and f16 on a GPU.
/// `flash` supports no soft cap, and needs a build with the feature `flash-attn`.
const SUPPORTED_HEAD_SIZES: [(usize, bool, bool); 9] = [
    (2, false, false),
    (10, false, false),
    (16, true, true),
    (40, false, true),
    (64, true, true),
    (80, true, true),
    (96, true, true),
    (128, true, true),
    (256, true, true),
];

/// Returns whether a backend must support a dtype, a head size of [`SUPPORTED_HEAD_SIZES`] and a soft cap on a GPU.
fn is_supported(backend: AttentionBackend, dtype: DType, head_dim: usize, softcap: Option<f32>) -> bool {
    let row = SUPPORTED_HEAD_SIZES.iter().find(|(size, ..)| *size == head_dim);
    let &(_, own, flash) = row.unwrap_or_else(|| panic!("add head size {head_dim} to SUPPORTED_HEAD_SIZES"));
    let is_16_bit = dtype != DType::F32;
    match backend {
        AttentionBackend::Own => own && is_16_bit,
        AttentionBackend::CandleFlashAttn => flash && is_16_bit && softcap.is_none() && cfg!(feature = "flash-attn"),
        AttentionBackend::Auto | AttentionBackend::Portable => true,
    }
}

#[test]
fn attention_backends_support_the_head_sizes_in_the_table() {
    let backends = [AttentionBackend::Own, AttentionBackend::CandleFlashAttn, AttentionBackend::Portable];
    for (head_dim, ..) in SUPPORTED_HEAD_SIZES {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for softcap in [None, Some(50.0)] {
                for backend in backends {
                    let chosen = backend.choose(true, dtype, head_dim, softcap);
                    let expected = is_supported(backend, dtype, head_dim, softcap);
                    let what = format!("{backend}, {dtype:?}, head size {head_dim}, cap {softcap:?}: {chosen:?}");
                    assert_eq!(chosen.is_ok(), expected, "{what}");
                }
            }
        }
    }
}

/// The sizes and options of one attention pass.
#[derive(Clone, Copy)]
pub struct AttentionCase {
    /// The number of new tokens and the position of the first one, for each sequence.
    pub spans: &'static [(usize, usize)],
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub window: Option<usize>,
    pub has_sinks: bool,
}

impl AttentionCase {
    /// Returns the case with its name.
    pub fn named(self) -> (String, Self) {
        let Self { spans, heads, kv_heads, head_dim, window, has_sinks } = self;
        let spans: Vec<_> = spans.iter().map(|(tokens, position)| format!("{tokens}_at_{position}")).collect();
        let window = window.map_or(String::new(), |window| format!("::window_{window}"));
        let sinks = if has_sinks { "::sinks" } else { "" };
        (format!("{}::{heads}_and_{kv_heads}_heads_of_{head_dim}{window}{sinks}", spans.join("+")), self)
    }
}

/// How an attention pass computes its output: options of [`AttentionInputs`], and the backend.
#[derive(Clone, Copy)]
struct AttentionOptions<'t> {
    mask: AttentionMask,
    sinks: Option<&'t Tensor>,
    sum_order: SumOrder,
    backend: AttentionBackend,
}

/// Runs attention for sequences with the new tokens `spans` and the block tables `tables`.
/// Each span has a number of tokens, and the position of the first one.
fn run_attention(
    q: &Tensor,
    layer: CachedLayer,
    spans: &[(usize, usize)],
    tables: &[Vec<u32>],
    options: AttentionOptions,
) -> Tensor {
    let AttentionOptions { mask, sinks, sum_order, backend } = options;
    let queries = QueryLayout::new(spans, q.device()).unwrap();
    let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
    let blocks = PassBlocks::new(&queries, &tables, layer.k.dim(0).unwrap() / BLOCK_TOKENS, q.device()).unwrap();
    let inputs = AttentionInputs { q, layer, queries: &queries, blocks: &blocks, sinks, mask, sum_order };
    attention(inputs, backend).unwrap()
}

/// Runs a case on `device` with every backend that supports it, and compares the outputs with the CPU reference.
pub fn check_attention(case: &AttentionCase, device: &Device, dtype: DType, softcap: Option<f32>) {
    let &AttentionCase { spans, heads, kv_heads, head_dim, window, has_sinks } = case;
    let mut noise = Random(4);
    let tokens: usize = spans.iter().map(|(tokens, _)| tokens).sum();
    let tables = random_tables(&mut noise, spans);
    let blocks = 1 + tables.iter().map(Vec::len).sum::<usize>();
    let rows = blocks * BLOCK_TOKENS;
    let q = noise.tensor(&[tokens, heads, head_dim], dtype);
    let k = noise.tensor(&[rows, kv_heads, head_dim], dtype);
    let v = noise.tensor(&[rows, kv_heads, head_dim], dtype);
    let mask = AttentionMask { window, scale: 1.0 / (head_dim as f32).sqrt(), softcap };
    // Cache rows that no query attends to hold NaN, so a kernel that uses such a row fails the test.
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
        let options = AttentionOptions { mask, sinks, sum_order: SumOrder::Fastest, backend };
        run_attention(q, CachedLayer { k, v }, spans, &tables, options)
    };
    let want = run(&q, &k, &v, sinks.as_ref(), AttentionBackend::Auto);
    let sinks = sinks.map(|sinks| to_device(&sinks, device, DType::F32));
    let [q, k, v] = [q, k, v].map(|tensor| to_device(&tensor, device, dtype));
    // The error of a sum grows with its length. In 16-bit dtypes, rounding the result hides this growth.
    let keys = spans.iter().map(|(tokens, position)| tokens + position).max().unwrap();
    let error_growth = if dtype == DType::F32 { 1.0 + keys as f32 / 2880.0 } else { 1.0 };
    for backend in [AttentionBackend::Own, AttentionBackend::CandleFlashAttn, AttentionBackend::Portable] {
        if !is_supported(backend, dtype, head_dim, softcap) {
            continue;
        }
        let got = run(&q, &k, &v, sinks.as_ref(), backend);
        assert_close(
            &format!("{backend} attention, cap {softcap:?}"),
            &got,
            &want,
            2.0 * error_growth * rounding(dtype),
        );
    }
}

const CASES: [AttentionCase; 27] = {
    use AttentionCase as Case;
    [
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
        // The next cases have several sequences: all decode, all have chunks of equal length, or the lengths differ.
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
    ]
};

#[test]
fn attention_is_tested_with_every_head_size_in_the_table() {
    for (head_dim, ..) in SUPPORTED_HEAD_SIZES {
        assert!(CASES.iter().any(|case| case.head_dim == head_dim), "no case has the head size {head_dim}");
    }
}

fn attention_cases() -> Vec<TestCase<(AttentionCase, DType)>> {
    on_gpu(CASES.map(AttentionCase::named), &DTYPES)
}

#[test(each = attention_cases)]
fn attention_matches_its_reference((case, dtype): (AttentionCase, DType)) {
    let device = gpu();
    check_attention(&case, &device, dtype, None);
    check_attention(&case, &device, dtype, Some(2.0));
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
    let run = |q: &Tensor, spans: &[(usize, usize)], tables: &[Vec<u32>]| {
        let mask = AttentionMask { window: Some(50), scale: 0.3, softcap: None };
        let (sum_order, backend) = (SumOrder::Fastest, AttentionBackend::Auto);
        let options = AttentionOptions { mask, sinks: None, sum_order, backend };
        run_attention(q, CachedLayer { k: &k, v: &v }, spans, tables, options)
    };
    let batched = run(&q, &spans, &tables);
    let mut first = 0;
    for (&(tokens, position), table) in spans.iter().zip(tables.chunks(1)) {
        let alone = run(&q.narrow(0, first, tokens).unwrap().contiguous().unwrap(), &[(tokens, position)], table);
        let what = format!("{tokens} tokens from position {position}");
        assert_close(&what, &batched.narrow(0, first, tokens).unwrap(), &alone, 0.0);
        first += tokens;
    }
}

#[test]
fn block_tables_are_checked() {
    let queries = QueryLayout::new(&[(1, 64)], &Device::Cpu).unwrap();
    let new = |table: &[u32]| PassBlocks::new(&queries, &[table], 3, &Device::Cpu);
    assert!(new(&[1, 2]).is_ok());
    assert!(new(&[1]).is_err(), "a block table without a block for position 64 was accepted");
    assert!(new(&[1, 3]).is_err(), "block 3 was accepted, although the cache has 3 blocks");
    assert!(PassBlocks::new(&queries, &[], 3, &Device::Cpu).is_err());
}

/// The heads and the sliding window of an attention test.
#[derive(Clone, Copy)]
struct HeadCase {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
}

fn head_cases() -> Vec<TestCase<(HeadCase, DType)>> {
    let cases = [
        ("heads_of_64", HeadCase { heads: 64, kv_heads: 8, head_dim: 64, window: None }),
        ("heads_of_64_with_window", HeadCase { heads: 64, kv_heads: 8, head_dim: 64, window: Some(128) }),
        ("heads_of_128", HeadCase { heads: 32, kv_heads: 8, head_dim: 128, window: None }),
    ];
    on_gpu(cases.map(|(name, case)| (name.to_string(), case)), &DTYPES)
}

/// With `SumOrder::Fixed`, the attention output of a decoding sequence has the same bits in a batch of any size.
#[test(each = head_cases)]
fn attention_in_fixed_order_does_not_depend_on_other_sequences((case, dtype): (HeadCase, DType)) {
    let HeadCase { heads, kv_heads, head_dim, window } = case;
    let spans: Vec<(usize, usize)> = (0..64).map(|index| (1, index * index * 701 % 3000)).collect();
    let (device, mut noise) = (gpu(), Random(3));
    let tables = random_tables(&mut noise, &spans);
    let blocks = 1 + tables.iter().map(Vec::len).sum::<usize>();
    let mut tensor = |shape: &[usize]| to_device(&noise.tensor(shape, dtype), &device, dtype);
    let q = tensor(&[64, heads, head_dim]);
    let (k, v) =
        (tensor(&[blocks * BLOCK_TOKENS, kv_heads, head_dim]), tensor(&[blocks * BLOCK_TOKENS, kv_heads, head_dim]));
    let mask = AttentionMask { window, scale: 0.1, softcap: None };
    let run = |first: usize, count: usize| {
        let range = first..first + count;
        let q = q.narrow(0, first, count).unwrap().force_contiguous().unwrap();
        let (sum_order, backend) = (SumOrder::Fixed, AttentionBackend::Auto);
        let options = AttentionOptions { mask, sinks: None, sum_order, backend };
        run_attention(&q, CachedLayer { k: &k, v: &v }, &spans[range.clone()], &tables[range], options)
    };
    let all = run(0, 64);
    for (first, count) in (0..64).map(|first| (first, 1)).chain([(0, 2), (5, 7), (20, 40)]) {
        let want = values(&all.narrow(0, first, count).unwrap());
        assert!(values(&run(first, count)) == want, "{count} sequences from index {first} differ from the batch of 64");
    }
}

#[test]
fn unsupported_attention_backend_is_rejected_with_its_reason() {
    let choose = |backend: AttentionBackend, on_gpu, dtype, head_dim| backend.choose(on_gpu, dtype, head_dim, None);
    assert_eq!(choose(AttentionBackend::Auto, true, DType::BF16, 64), Ok(AttentionBackend::Own));
    assert_eq!(choose(AttentionBackend::Auto, true, DType::F32, 64), Ok(AttentionBackend::Portable));
    assert_eq!(choose(AttentionBackend::Auto, false, DType::F32, 64), Ok(AttentionBackend::Portable));
    assert_eq!(choose(AttentionBackend::Portable, true, DType::BF16, 64), Ok(AttentionBackend::Portable));
    assert!(choose(AttentionBackend::Own, true, DType::BF16, 40).unwrap_err().contains("head size 40"));
    let capped = |backend: AttentionBackend| backend.choose(true, DType::BF16, 64, Some(50.0));
    assert_eq!(capped(AttentionBackend::Auto), Ok(AttentionBackend::Own));
    assert!(capped(AttentionBackend::CandleFlashAttn).is_err());
    assert!(choose(AttentionBackend::Own, false, DType::F32, 64).unwrap_err().contains("GPU"));
    assert!(choose(AttentionBackend::CandleFlashAttn, true, DType::F32, 64).is_err());
    assert_eq!(choose(AttentionBackend::CandleFlashAttn, true, DType::F16, 64).is_ok(), cfg!(feature = "flash-attn"));
}
