//! Compares CUDA kernels with their references in plain Rust, with candle, or with the operations that they replace.
//! The inputs include outliers, unusual sizes and cache rows filled with NaN.
//! Some tests check the references against independently computed values.
//!
//! `quantized/on_gpu.rs` tests the kernels of quantized matrices.
//! `runner/decode_graph.rs` tests the fused kernels of the decode graph, including the sampling kernels.

mod argument_structs;
mod attention;
#[cfg(feature = "cuda")]
mod attention_tiles;
#[cfg(feature = "cuda")]
mod experts;
#[cfg(all(feature = "cuda", debug_assertions))]
mod launches;
#[cfg(feature = "cuda")]
mod matmul;
mod moe;
#[cfg(feature = "cuda")]
mod sampling;
#[cfg(feature = "cuda")]
mod step_inputs;

use candle_core::{DType, Device, Tensor};
use inferno::kernels::activation::{Activation, clamped_swiglu, gated, gated_halves};
use inferno::kernels::bandwidth;
use inferno::kernels::norm::{Addend, add_norm};
use inferno::kernels::rows::{add_bias, copy_rows, embed, soft_cap};

use crate::harness::TestCase;
use crate::support::{DTYPES, Random, TestDevice, devices, devices_in_f32, gpu, on_gpu, relative_error, values};

/// Returns the largest allowed difference between a kernel and its reference, relative to the largest element.
fn rounding(dtype: DType) -> f32 {
    match dtype {
        // Kernels and references add the terms of a sum in different orders, and a sum can have thousands of terms.
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

/// Copies a tensor to a device and converts it to `dtype`.
fn to_device(tensor: &Tensor, device: &Device, dtype: DType) -> Tensor {
    tensor.to_dtype(dtype).unwrap().to_device(device).unwrap()
}

/// Asserts that two tensors are equal up to `tolerance`, relative to the largest element of `want`.
fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let error = relative_error(&values(got), &values(want));
    assert!(error <= tolerance, "{what}: relative error {error:e}, limit {tolerance:e}");
}

/// Like [`assert_close`] with the tolerance [`rounding`], but also compares each element relative to its own size:
/// the inputs have outliers, so the largest element can be a thousand times as large as most others.
///
/// For kernels that compute each element in f32 from few numbers, and round it to `dtype` only once.
fn assert_elements_close(what: &str, got: &Tensor, want: &Tensor, dtype: DType) {
    assert_close(what, got, want, rounding(dtype));
    let (got, want) = (values(got), values(want));
    if let Some(index) = wrong_element(&got, &want, rounding(dtype)) {
        panic!("{what}: element {index} is {}, expected {}", got[index], want[index]);
    }
}

/// Returns the first element whose error is more than `tolerance` times its expected value, plus the error of f32.
///
/// - A rounding to bf16 or f16 changes a number by at most 2^-8 or 2^-11 of its size. [`rounding`] is twice that.
/// - The factor of a norm has a relative error of about sqrt(5000) · 2^-25 = 2e-6, because up to 5000 squares are added
///   up in f32. In f32, [`rounding`] is five times that.
/// - If terms cancel out, their errors remain. About ten f32 roundings change a term by at most 10 · 2^-24 = 6e-7 of
///   its size. A term is at most a few times as large as the largest element, so `F32_ERROR` times this element is
///   enough. This also covers f16 numbers below 2^-14, which are rounded to multiples of 2^-24.
fn wrong_element(got: &[f32], want: &[f32], tolerance: f32) -> Option<usize> {
    const F32_ERROR: f32 = 4e-6;
    let largest = want.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    // A NaN is less than no bound, so it counts as wrong.
    let is_close = |(got, want): (&f32, &f32)| (got - want).abs() <= tolerance * want.abs() + F32_ERROR * largest;
    got.iter().zip(want).position(|pair| !is_close(pair))
}

#[test]
fn a_wrong_element_is_found_next_to_an_outlier() {
    let (want, tolerance) = ([1000.0, 1.0], rounding(DType::BF16));
    assert_eq!(wrong_element(&[1000.0, 1.007], &want, tolerance), None);
    let wrong = [1000.0, 1.02];
    assert!(relative_error(&wrong, &want) < tolerance);
    assert_eq!(wrong_element(&wrong, &want, tolerance), Some(1));
    assert_eq!(wrong_element(&[f32::NAN, 1.0], &want, tolerance), Some(0));
}

/// The sizes and options of an `add_norm` test.
#[derive(Clone, Copy)]
struct NormCase {
    tokens: usize,
    columns: usize,
    /// The number of terms of `y`, which the kernel adds to `x` before the norm. 0 means no `y`.
    terms: usize,
    has_bias: bool,
}

fn norm_cases() -> Vec<TestCase<(NormCase, DType)>> {
    use NormCase as Case;
    let cases = [
        Case { tokens: 1, columns: 2, terms: 1, has_bias: false },
        Case { tokens: 3, columns: 64, terms: 0, has_bias: false },
        Case { tokens: 6, columns: 2880, terms: 3, has_bias: false },
        Case { tokens: 2, columns: 5000, terms: 2, has_bias: true },
        Case { tokens: 3, columns: 33, terms: 0, has_bias: true },
        Case { tokens: 2, columns: 4101, terms: 8, has_bias: true },
    ];
    let named = |case: Case| (format!("{}x{}::{}_terms", case.tokens, case.columns, case.terms), case);
    on_gpu(cases.map(named), &DTYPES)
}

#[test(each = norm_cases)]
fn add_norm_matches_its_reference((case, dtype): (NormCase, DType)) {
    let NormCase { tokens, columns, terms, has_bias } = case;
    let mut noise = Random(7);
    let x = noise.tensor(&[tokens, columns], DType::F32);
    let y = noise.tensor(&[terms.max(1), tokens, columns], DType::F32);
    let weight = noise.tensor(&[columns], DType::F32);
    let y_bias = noise.tensor(&[columns], DType::F32);
    let bias = has_bias.then(|| noise.tensor(&[columns], DType::F32));
    let run = |device: &Device, dtype| {
        let on_device = |tensor: &Tensor| tensor.to_device(device).unwrap();
        let (y, y_bias, bias) = (on_device(&y), on_device(&y_bias), bias.as_ref().map(on_device));
        let y = (terms > 0).then_some(Addend { terms: &y, bias: (tokens % 2 == 0).then_some(&y_bias) });
        add_norm(&on_device(&x), y, &on_device(&weight), bias.as_ref(), 1e-5, dtype).unwrap()
    };
    let (want, got) = (run(&Device::Cpu, DType::F32), run(&gpu(), dtype));
    assert_close("sum", &got.0, &want.0, 1e-6);
    assert_elements_close("norm", &got.1, &want.1, dtype);
}

#[test(each = devices)]
fn gated_activations_match_candle(device: TestDevice) {
    let (device, dtype) = device.open();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let mut noise = Random(8);
        let (gate, up) = (noise.tensor(&[3, 1027], DType::F32), noise.tensor(&[3, 1027], DType::F32));
        let activate = |x: &Tensor| match activation {
            Activation::Silu => x.silu().unwrap(),
            Activation::GeluTanh => x.gelu().unwrap(),
        };
        let on_device = |tensor: &Tensor| tensor.to_device(&device).unwrap();
        let got = gated(&on_device(&gate), Some(&on_device(&up)), activation, dtype).unwrap();
        assert_elements_close(&format!("gated, {activation:?}"), &got, &(activate(&gate) * &up).unwrap(), dtype);
        let alone = gated(&on_device(&gate), None, activation, dtype).unwrap();
        assert_elements_close(&format!("gated without up, {activation:?}"), &alone, &activate(&gate), dtype);

        let both = noise.tensor(&[2, 3, 2 * 129], dtype);
        let half = |first| both.narrow(2, first, 129).unwrap();
        for input in [dtype, DType::F32] {
            let got = gated_halves(&to_device(&both, &device, input), activation, dtype).unwrap();
            let what = format!("gated_halves, {activation:?}, x in {input:?}");
            assert_eq!(got.dtype(), dtype, "{what}");
            assert_elements_close(&what, &got, &(activate(&half(0)) * half(129)).unwrap(), dtype);
        }
    }
}

#[test(each = devices_in_f32)]
fn soft_cap_matches_candle(device: TestDevice) {
    let (device, _) = device.open();
    let x = Random(12).tensor(&[3, 513], DType::F32);
    let want = ((&x / 5.0).unwrap().tanh().unwrap() * 5.0).unwrap();
    assert_close("soft_cap", &soft_cap(&x.to_device(&device).unwrap(), 5.0).unwrap(), &want, 1e-6);
}

fn swiglu_shapes() -> Vec<TestCase<([usize; 3], DType)>> {
    on_gpu(
        [[1, 1, 2], [3, 4, 64], [1, 5, 1026]].map(|shape| (shape.map(|size| size.to_string()).join("x"), shape)),
        &DTYPES,
    )
}

#[test(each = swiglu_shapes)]
fn clamped_swiglu_matches_its_reference((shape, dtype): ([usize; 3], DType)) {
    let x = Random(2).tensor(&shape, dtype);
    let got = clamped_swiglu(&to_device(&x, &gpu(), dtype), 7.0).unwrap();
    assert_elements_close("clamped_swiglu", &got, &clamped_swiglu(&x, 7.0).unwrap(), dtype);
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

#[test(each = devices)]
fn clamped_swiglu_keeps_nan(device: TestDevice) {
    let (device, dtype) = device.open();
    let x = Tensor::new(&[f32::NAN, 1.0, 1.0, f32::NAN, 1.0, 1.0], &Device::Cpu).unwrap();
    let got = values(&clamped_swiglu(&to_device(&x, &device, dtype), 7.0).unwrap());
    assert!(got[0].is_nan() && got[1].is_nan() && got[2].is_finite(), "{got:?}");
}

#[test(each = devices_in_f32)]
fn bandwidth_is_measured_only_on_a_gpu(device: TestDevice) {
    let (device, _) = device.open();
    let bandwidth = bandwidth::measure(&device).unwrap();
    assert_eq!(bandwidth.is_some(), device.is_cuda());
    if let Some(bandwidth) = bandwidth {
        println!("{bandwidth:?}");
        // The range of 10 GB/s to 100 TB/s includes every GPU. A kernel that does nothing would exceed 100 TB/s.
        let plausible = 1e10..1e14;
        assert!(plausible.contains(&bandwidth.read_bytes_per_s) && plausible.contains(&bandwidth.copy_bytes_per_s));
    }
}

#[test(each = devices)]
fn embed_add_bias_and_copy_rows_match_candle(device: TestDevice) {
    let (device, dtype) = device.open();
    let mut noise = Random(10);
    let (table, y) = (noise.tensor(&[50, 37], dtype), noise.tensor(&[9, 37], DType::F32));
    let ids = Tensor::new(&[3u32, 49, 0, 3, 17], &Device::Cpu).unwrap();
    let bias = noise.tensor(&[37], DType::F32);
    let on_device = |tensor: &Tensor| tensor.to_device(&device).unwrap();
    let got = embed(&to_device(&table, &device, dtype), &on_device(&ids), 1.5).unwrap();
    assert_close("embed", &got, &(table.index_select(&ids, 0).unwrap() * 1.5).unwrap(), 0.0);
    let too_large = Tensor::new(&[50u32, u32::MAX], &device).unwrap();
    let got = embed(&to_device(&table, &device, dtype), &too_large, 1.0);
    if device.is_cuda() {
        let last_row = table.narrow(0, 49, 1).unwrap().repeat((2, 1)).unwrap();
        assert_close("embed with ids past the last row", &got.unwrap(), &last_row, 0.0);
    } else {
        assert!(got.is_err());
    }
    let got = add_bias(&on_device(&y), &on_device(&bias)).unwrap();
    assert_close("add_bias", &got, &y.broadcast_add(&bias).unwrap(), 0.0);
    let (to, from) = (to_device(&table, &device, dtype), to_device(&y.narrow(0, 2, 4).unwrap(), &device, dtype));
    copy_rows(&to, &from, 45).unwrap();
    assert_eq!(values(&to.narrow(0, 45, 4).unwrap()), values(&from));
    assert_close("rows before", &to.narrow(0, 0, 45).unwrap(), &table.narrow(0, 0, 45).unwrap(), 0.0);
    assert_close("rows after", &to.narrow(0, 49, 1).unwrap(), &table.narrow(0, 49, 1).unwrap(), 0.0);
    assert!(copy_rows(&to, &from, 47).is_err());
}
