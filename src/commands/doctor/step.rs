//! A whole decode step of the built-in demo, as this GPU's graph of fused kernels computes it, against the operations one by
//! one on a CPU.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device};

use crate::engine::executor::Executor;
use crate::hub::{Hub, demo};
use crate::kernels::selftest::Check;
use crate::models;
use crate::nn::decoder::{Batch, Decoder, LogitsOf};
use crate::nn::kv_cache::KvCache;
use crate::weights::quantised::Quantise;
use crate::weights::{Checkpoint, Loaded, Weights};

/// Steps: beyond the demo's window.
const STEPS: usize = 80;

/// With weights as they are and quantised, in both dtypes that graphs compute in.
pub fn run(device: &Device) -> Vec<Check> {
    let ways = [("", None), (", quantised", "q8_0".parse().ok())];
    let every = ways.into_iter().flat_map(|way| [(way, DType::BF16, 6e-2), (way, DType::F16, 2e-2)]);
    let check = |((what, quantise), dtype, tolerance)| {
        let started = Instant::now();
        let error = error(device, dtype, quantise).map_err(|error| format!("{error:#}"));
        let seconds = started.elapsed().as_secs_f64();
        Check { name: format!("decode step{what}"), dtype, error, tolerance, seconds }
    };
    every.map(check).collect()
}

/// The largest difference of any step's logits over the largest logit.
fn error(device: &Device, dtype: DType, quantise: Option<Quantise>) -> Result<f32> {
    let dir = Hub::from_env()?.find(demo::NAME, None)?.path;
    let (here, mut cache) = load(&dir, &Device::Cpu, DType::F32, quantise)?;
    let (there, cache_there) = load(&dir, device, dtype, quantise)?;
    let ids: Vec<u32> = (0..STEPS).map(|step| (step * 31 + 7) as u32 % here.vocab_size() as u32).collect();
    let batch = Batch { ids: &ids, tokens: &[STEPS], logits: LogitsOf::All };
    let want = here.forward(&batch, &mut [&mut cache])?.to_vec2::<f32>()?;
    let mut executor = Executor::plan(&there, &cache_there)?.map_err(anyhow::Error::msg).context("no graph")?;
    let mut most = 0f32;
    for (position, (&id, want)) in ids.iter().zip(&want).enumerate() {
        executor.start(position, id, None)?;
        executor.next(1)?;
        let got = executor.logits().to_vec1::<f32>()?;
        let scale = want.iter().fold(f32::MIN_POSITIVE, |scale, value| scale.max(value.abs()));
        for (got, want) in got.iter().zip(want) {
            let off = (got - want).abs() / scale;
            // What is no number stays.
            most = if off > most || off.is_nan() { off } else { most };
        }
    }
    Ok(most)
}

fn load(dir: &Path, device: &Device, dtype: DType, quantise: Option<Quantise>) -> Result<(Decoder, KvCache)> {
    let checkpoint = Checkpoint::open(dir)?;
    let report = |_| ();
    let loaded = Loaded::new(&report);
    let weights = match quantise {
        Some(quantise) => Weights::quantising(&checkpoint, device, dtype, &loaded, quantise),
        None => Weights::new(&checkpoint, device, dtype, &loaded)?,
    };
    let decoder = models::read_config(dir)?.architecture.build(&weights, STEPS)?;
    let cache = KvCache::new(decoder.cache_layers(), STEPS, STEPS, dtype, device)?;
    Ok((decoder, cache))
}
