//! Tests of saved prefixes: keys and values that are written to a file and read back.

use std::fs;
use std::path::Path;

use candle_core::Device;
use inferno::Engine;
use inferno::device::{DeviceChoice, Split};
use inferno::engine::{Fault, FaultTime, PlannedFault, RankFault};
use inferno::nn::kv_cache::BLOCK_TOKENS;
use inferno::{EngineHandle, Error, GenerateOptions};
use tempfile::tempdir;

use crate::harness::TestCase;
use crate::support::engine::{Answer, cpus, demo, greedy};
use crate::support::gguf::models::{demo_as_gguf, saved};
use crate::support::{demo_dir, named_cases, relative_error, values};

fn answer(engine: &EngineHandle, prompt: &[u32]) -> Answer {
    let options = GenerateOptions { ignore_eos: true, max_tokens: Some(8), ..greedy() };
    Answer::read(engine.complete_ids(prompt, options).unwrap())
}

/// Saves a prefix with one engine, and loads it into a second engine.
/// Checks that the second engine reuses the prefix and gives the same answer. `length` is the number of prompt tokens.
/// If the prefix has no full block, checks only that no file is written.
fn check_round_trip(load: &dyn Fn() -> Engine, folder: &Path, length: usize) {
    let path = folder.join(format!("{length}.kv"));
    let first = load();
    let prompt = first.random_tokens(length as u64, length);
    let generated = answer(&first, &prompt).tokens;
    let blocks = length / BLOCK_TOKENS * BLOCK_TOKENS;
    // The generated tokens may complete another block, so the saved prefix can be longer than the prompt's full blocks.
    let all = [&prompt[..], &generated[..7]].concat();
    let saved = first.save_prefix(&all, &path).unwrap();
    assert!(saved >= blocks && saved <= all.len(), "{saved}");
    assert_eq!(path.exists(), saved > 0);
    let next = [&all[..], &first.random_tokens(7, 20)].concat();
    let want = answer(&first, &next);
    drop(first);
    if saved == 0 {
        return;
    }
    let second = load();
    assert_eq!(second.load_prefix(&path).unwrap(), saved);
    assert_eq!(second.load_prefix(&path).unwrap(), saved, "loading again must return the same number of tokens");
    assert_eq!(second.stats().used_blocks, 0);
    let got = answer(&second, &next);
    assert_eq!(got.tokens, want.tokens);
    assert_eq!(got.summary.cached_tokens, saved);
}

#[test]
fn a_saved_prefix_needs_no_prefill() {
    let folder = tempdir().unwrap();
    // Half of the demo model's layers have a window of 64 tokens. A file has only the end of a longer prefix for them.
    for length in [5, 60, 64, 65, 128, 200, 449] {
        check_round_trip(&|| demo(512), folder.path(), length);
    }
}

#[test(gpu)]
fn a_saved_prefix_needs_no_prefill_on_a_gpu() {
    let folder = tempdir().unwrap();
    let load = || Engine::builder(demo_dir()).device(DeviceChoice::FirstCuda).context(512).load().unwrap();
    for length in [65, 200] {
        check_round_trip(&load, folder.path(), length);
    }
}

#[test]
fn unusable_prefixes_are_ignored_and_damaged_ones_are_errors() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.kv");
    let engine = demo(512);
    let prompt = engine.random_tokens(1, 200);
    answer(&engine, &prompt);
    assert_eq!(engine.save_prefix(&prompt, &path).unwrap(), 192);
    // An engine with another dtype ignores a saved prefix.
    let other = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).dtype(candle_core::DType::BF16).context(512);
    assert_eq!(other.load().unwrap().load_prefix(&path).unwrap(), 0);
    // An engine with a context of 64 tokens has too few free blocks for the saved prefix.
    assert_eq!(demo(64).load_prefix(&path).unwrap(), 0);

    let bytes = fs::read(&path).unwrap();
    for end in [0, 7, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..end]).unwrap();
        let error = demo(512).load_prefix(&path).unwrap_err().to_string();
        assert!(error.contains("a.kv is damaged"), "{error}");
    }
    assert!(engine.load_prefix(&folder.path().join("none.kv")).unwrap_err().to_string().contains("cannot read"));
    assert_eq!(engine.stats().used_blocks, 0);
}

#[cfg(unix)]
#[test]
fn a_named_pipe_is_no_saved_prefix() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("pipe.kv");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
    let engine = demo(128);
    assert!(engine.load_prefix(&path).is_err());
    assert_eq!(answer(&engine, &[1, 2, 3]).tokens.len(), 8, "the engine must still answer");
}

/// Loads the demo model, which has 6 layers and 2 KV heads, on `ranks` ranks.
/// With tensor parallelism on four ranks, the third and fourth ranks hold no KV heads.
fn demo_on(ranks: usize, split: Split, context: usize) -> Engine {
    Engine::builder(demo_dir()).devices(cpus(ranks)).split(split).context(context).load().unwrap()
}

#[test]
fn a_prefix_of_one_gguf_file_is_not_loaded_for_another() {
    let (folder, model) = saved(&demo_as_gguf());
    let load = || Engine::builder(&model).device(DeviceChoice::Cpu).context(512).load().unwrap();
    let path = folder.path().join("a.kv");
    let engine = load();
    let prompt = engine.random_tokens(1, 200);
    answer(&engine, &prompt);
    assert_eq!(engine.save_prefix(&prompt, &path).unwrap(), 192);
    assert_eq!(load().load_prefix(&path).unwrap(), 192);
    drop(engine);
    // The new file has the same name and size. Only a byte of its last tensor differs, and the time of the change.
    let mut bytes = fs::read(&model).unwrap();
    let last = bytes.len() - 40;
    bytes[last] ^= 1;
    fs::write(&model, bytes).unwrap();
    assert_eq!(load().load_prefix(&path).unwrap(), 0);
}

/// A number of ranks, and how they divide the model.
type Ranks = (usize, Split);

const RANKS: [Ranks; 5] =
    [(1, Split::Tensor), (2, Split::Tensor), (4, Split::Tensor), (2, Split::Layers), (4, Split::Layers)];

fn ranks() -> Vec<TestCase<Ranks>> {
    named_cases(RANKS.map(|(ranks, split)| {
        let split_name = if split == Split::Layers { "layers" } else { "tensor" };
        (format!("{ranks}_ranks::{split_name}"), (ranks, split))
    }))
}

#[test(each = ranks)]
fn a_prefix_saved_by_any_number_of_ranks_continues_on_any_other_number((writers, writers_split): Ranks) {
    let folder = tempdir().unwrap();
    let expected_engine = demo(512);
    let prompt = expected_engine.random_tokens(5, 300);
    let next = [&prompt[..], &expected_engine.random_tokens(7, 20)].concat();
    let expected = answer(&expected_engine, &next).tokens;
    let save = |engine: Engine, name: &str| {
        let path = folder.path().join(name);
        answer(&engine, &prompt);
        assert_eq!(engine.save_prefix(&prompt, &path).unwrap(), 256);
        path
    };
    let path = save(demo_on(writers, writers_split, 512), "saved.kv");
    // Every saved prefix has all layers and KV heads, in the same order for any number of ranks.
    let read = |path: &Path| candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let (saved, one) = (read(&path), read(&save(demo(512), "one.kv")));
    assert_eq!(saved.len(), one.len());
    for (name, tensor) in &saved {
        assert_eq!(tensor.dims(), one[name].dims(), "{name}");
        // With `Split::Layers`, each layer is computed as by one rank. With `Split::Tensor`, sums have another order.
        let tolerance = if writers_split == Split::Layers { 0.0 } else { 1e-5 };
        let error = relative_error(&values(tensor), &values(&one[name]));
        assert!(error <= tolerance, "{name}: relative error {error:e}");
    }
    for (ranks, split) in RANKS {
        let what = format!("loaded by {ranks} ranks, {split:?}");
        let engine = demo_on(ranks, split, 512);
        assert_eq!(engine.load_prefix(&path).unwrap(), 256, "{what}");
        assert_eq!(engine.load_prefix(&path).unwrap(), 256, "{what} again");
        let got = answer(&engine, &next);
        assert_eq!((got.tokens, got.summary.cached_tokens), (expected.clone(), 256), "{what}");
        // Saving the loaded prefix must write the same file. This shows that every rank has read its own part.
        let again = folder.path().join("again.kv");
        assert_eq!(engine.save_prefix(&prompt, &again).unwrap(), 256, "{what}");
        assert!(fs::read(&path).unwrap() == fs::read(&again).unwrap(), "{what}: the saved files differ");
    }
}

#[test(each = ranks)]
fn unusable_prefixes_are_ignored_and_damaged_ones_are_errors_on_any_number_of_ranks((ranks, split): Ranks) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.kv");
    let engine = demo_on(ranks, split, 512);
    let prompt = engine.random_tokens(1, 200);
    assert_eq!(engine.save_prefix(&prompt, &path).unwrap(), 0, "a prefix was saved before it was computed");
    assert!(!path.exists());
    let expected = answer(&engine, &prompt).tokens;
    assert_eq!(engine.save_prefix(&prompt, &path).unwrap(), 192);
    // With a context of 64 tokens, the cache has too few free blocks for the prefix.
    assert_eq!(demo_on(ranks, split, 64).load_prefix(&path).unwrap(), 0);
    let other = Engine::builder(demo_dir()).devices(cpus(ranks)).split(split).context(512);
    let other = other.dtype(candle_core::DType::BF16).load().unwrap();
    assert_eq!(other.load_prefix(&path).unwrap(), 0, "a prefix with another dtype was loaded");

    let bytes = fs::read(&path).unwrap();
    let shape = b"\"shape\":[192,2,40]";
    let mut damaged = bytes.clone();
    let mut changed = 0;
    // Change shapes in the header of the prefix file, but keep the numbers of elements.
    // Only a check of the shapes finds this damage.
    for start in 0..damaged.len() - shape.len() {
        if damaged[start..].starts_with(shape) {
            damaged[start..start + shape.len()].copy_from_slice(b"\"shape\":[192,1,80]");
            changed += 1;
        }
    }
    assert!(changed > 0);
    let engine = demo_on(ranks, split, 512);
    for bytes in [&damaged[..], &bytes[..bytes.len() - 1], &bytes[..100]] {
        fs::write(&path, bytes).unwrap();
        let error = engine.load_prefix(&path).unwrap_err().to_string();
        assert!(error.contains("a.kv is damaged"), "{error}");
    }
    // After a damaged prefix file, the ranks continue to work and do not use the keys and values from that file.
    let got = answer(&engine, &prompt);
    assert_eq!((got.tokens, got.summary.cached_tokens), (expected, 0));
}

#[test]
fn a_prefix_that_a_failed_rank_cannot_load_is_not_damaged() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.kv");
    let engine = demo_on(2, Split::Tensor, 512);
    let prompt = engine.random_tokens(1, 200);
    answer(&engine, &prompt);
    assert_eq!(engine.save_prefix(&prompt, &path).unwrap(), 192);
    let fault = PlannedFault { rank: 1, fault: RankFault::Error, time: FaultTime::Step(0) };
    engine.inject_fault(Fault::Rank(fault)).unwrap();
    let error = engine.load_prefix(&path).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(Error::GpuFailed(_))), "{error:?}");
    assert!(!error.to_string().contains("damaged"), "{error}");
}
