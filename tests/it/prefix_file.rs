//! Tests of saved prefixes: keys and values that are written to a file and read back.

use std::fs;
use std::path::Path;

use inferno::Engine;
use inferno::device::DeviceChoice;
use inferno::nn::kv_cache::BLOCK_TOKENS;
use inferno::{EngineHandle, GenerateOptions};
use tempfile::tempdir;

use crate::support::demo_dir;
use crate::support::engine::{Answer, demo, greedy};

fn answer(engine: &EngineHandle, prompt: &[u32]) -> Answer {
    let options = GenerateOptions { ignore_eos: true, max_tokens: Some(8), ..greedy() };
    Answer::read(engine.complete_ids(prompt, options).unwrap())
}

/// Saves the prefix of a prompt in one engine, and continues the prompt in another engine.
fn check_round_trip(load: &dyn Fn() -> Engine, folder: &Path, length: usize) {
    let path = folder.join(format!("{length}.kv"));
    let first = load();
    let prompt = first.random_tokens(length as u64, length);
    let generated = answer(&first, &prompt).tokens;
    let blocks = length / BLOCK_TOKENS * BLOCK_TOKENS;
    // The answer can complete one more block.
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
    // Half of the demo model's layers have a sliding window of 64 tokens.
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
fn a_prefix_of_another_model_is_ignored_and_a_damaged_one_is_an_error() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.kv");
    let engine = demo(512);
    let prompt = engine.random_tokens(1, 200);
    answer(&engine, &prompt);
    assert_eq!(engine.save_prefix(&prompt, &path).unwrap(), 192);
    // An engine with another dtype ignores the file.
    let other = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).dtype(candle_core::DType::BF16).context(512);
    assert_eq!(other.load().unwrap().load_prefix(&path).unwrap(), 0);
    // An engine with a context of 64 tokens has too few free blocks.
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
