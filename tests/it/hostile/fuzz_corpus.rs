//! Runs six of the fuzz targets on their corpora and on random mutations of the corpus files. The seed is fixed.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::support::Random;

#[path = "../../../fuzz/src/lib.rs"]
mod bodies;

/// The time limit for one mutated input.
const SLOWEST: Duration = Duration::from_secs(5);

/// Returns the number of mutations per corpus file: `INFERNO_MUTATIONS`, or 100 by default.
fn mutations() -> u64 {
    std::env::var("INFERNO_MUTATIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(100)
}

/// Numbers on which parsers often fail, such as the limits of integer types.
const NUMBERS: [u64; 12] = [0, 1, 2, 3, 31, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 62, i64::MAX as u64, u64::MAX];

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        // Half of the time, choose a position in the first 256 bytes, where binary files have a header.
        let reach = if random.below(2) == 0 { bytes.len().min(256) } else { bytes.len() };
        let at = random.below(reach);
        match random.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.next() as u8,
            2 | 3 => {
                let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            4 => bytes.truncate(at),
            5 => {
                let end = at + random.below(bytes.len() - at);
                let piece = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => {
                let end = (at + random.below(64)).min(bytes.len());
                bytes.drain(at..end);
            }
        }
    }
}

fn run(corpus: &str, body: fn(&[u8])) {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus")).join(corpus);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 3, "{}", folder.display());
    let mut random = Random(20261121);
    let (mut ran, mut slowest) = (0, Duration::ZERO);
    for file in files {
        let whole = std::fs::read(&file).unwrap();
        body(&whole);
        for number in 0..mutations() {
            let mut bytes = whole.clone();
            mutate(&mut bytes, &mut random);
            let begin = Instant::now();
            let outcome = std::panic::catch_unwind(|| body(&bytes));
            let took = begin.elapsed();
            slowest = slowest.max(took);
            if outcome.is_err() || took > SLOWEST {
                let saved = std::env::temp_dir().join(format!("inferno-{corpus}-{number}"));
                std::fs::write(&saved, &bytes).unwrap();
                println!(
                    "mutation {number} of {} panicked or took too long ({took:?}), saved as {}",
                    file.display(),
                    saved.display()
                );
            }
            if let Err(panic) = outcome {
                std::panic::resume_unwind(panic);
            }
            ran += 1;
        }
    }
    println!("{corpus}: {ran} mutations, the slowest took {slowest:?}");
    assert!(slowest < SLOWEST, "{corpus}: the slowest mutated input took {slowest:?}");
}

#[test]
fn mutated_gguf_files_are_checkpoints_or_errors() {
    run("gguf", bodies::gguf);
}

#[test]
fn mutated_hub_listings_are_listings_or_errors() {
    run("hub_json", bodies::hub::hub_json);
}

#[test]
fn mutated_safetensors_files_are_checkpoints_or_errors() {
    run("safetensors", bodies::safetensors);
}

#[test]
fn mutated_requests_are_answered_or_errors() {
    run("request_body", bodies::server::request_body);
}

#[test]
fn mutated_harmony_answers_are_parsed() {
    run("harmony_parser", bodies::language::harmony_parser);
}

#[test]
fn streams_of_mutated_answers_add_up_to_whole_answers() {
    run("answer", bodies::answer::answer);
}
