//! Tests of the sampler on the host, and of the search for stop strings.
//!
//! `kernels/sampling.rs` tests sampling on a GPU, and `runner/decode_graph.rs` tests sampling in the decode graph.

use std::collections::HashMap;

use inferno::SamplingParams;
use inferno::engine::StopFilter;
use inferno::engine::sampling::{Sampler, candidates};

use crate::support::engine::sampling;

/// Returns the ids that remain after top-k, top-p and min-p, sorted.
fn remaining(logits: &[f32], params: &SamplingParams) -> Vec<u32> {
    let mut ids: Vec<u32> = candidates(logits, params).iter().map(|candidate| candidate.id).collect();
    ids.sort();
    ids
}

fn logs(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

#[test]
fn top_k_top_p_and_min_p_keep_the_likeliest_tokens() {
    let logits = logs(&[0.1, 0.2, 0.3, 0.4]);
    assert_eq!(remaining(&logits, &sampling(|p| p.top_k = 2)), [2, 3]);
    assert_eq!(remaining(&logits, &sampling(|p| p.top_k = 9)), [0, 1, 2, 3]);
    assert_eq!(remaining(&logits, &sampling(|p| p.top_p = 0.0)), [3]);
    assert_eq!(remaining(&logits, &sampling(|p| p.top_p = 0.39)), [3]);
    assert_eq!(remaining(&logits, &sampling(|p| p.top_p = 0.69)), [2, 3]);
    assert_eq!(remaining(&logits, &sampling(|p| p.top_p = 0.75)), [1, 2, 3]);
    assert_eq!(remaining(&logits, &sampling(|p| p.min_p = 0.49)), [1, 2, 3]);
    assert_eq!(remaining(&logits, &sampling(|p| p.min_p = 0.51)), [2, 3]);
    // Temperature is applied before top-p. At temperature 0.5, the odds of the tokens are 1 : 4 : 9 : 16.
    // Tokens 2 and 3 have a total probability of 25/30, which is above the top-p of 0.8.
    assert_eq!(
        remaining(
            &logits,
            &sampling(|p| {
                p.temperature = 0.5;
                p.top_p = 0.8;
            })
        ),
        [2, 3]
    );
    // The nucleus of 2,500 tokens is far larger than the 64 most likely tokens, which the sampler sorts first.
    let flat = vec![0.0; 5000];
    assert_eq!(remaining(&flat, &sampling(|p| p.top_p = 0.5)).len(), 2500);
}

#[test]
fn candidate_weights_are_the_softmax_at_the_temperature() {
    let logits = [1.0f32, -2.0, 0.5, f32::NAN, f32::NEG_INFINITY];
    let params = sampling(|p| p.temperature = 0.7);
    let all = candidates(&logits, &params);
    let total: f64 = all.iter().map(|c| c.weight).sum();
    let want: Vec<f64> = logits[..3].iter().map(|&logit| (logit as f64 / 0.7).exp()).collect();
    let want_total: f64 = want.iter().sum();
    assert_eq!(all.len(), 3);
    for candidate in all {
        let want = want[candidate.id as usize] / want_total;
        assert!((candidate.weight / total - want).abs() < 1e-7);
    }
}

#[test]
fn draws_follow_the_distribution_and_the_seed() {
    let logits = logs(&[0.1, 0.2, 0.3, 0.4]);
    let draw = |seed: u64, count: usize| -> Vec<u32> {
        let mut sampler = Sampler::new(sampling(|p| p.seed = seed), &[]);
        (0..count).map(|_| sampler.sample(&mut logits.clone())).collect()
    };
    assert_eq!(draw(7, 50), draw(7, 50));
    assert_ne!(draw(7, 50), draw(8, 50));
    let mut counts: HashMap<u32, usize> = HashMap::new();
    for token in draw(1, 20_000) {
        *counts.entry(token).or_default() += 1;
    }
    for (token, p) in [0.1, 0.2, 0.3, 0.4].into_iter().enumerate() {
        // Each count must be within four standard deviations of its expected value.
        let (got, want) = (counts[&(token as u32)] as f64, 20_000.0 * p);
        assert!((got - want).abs() < 4.0 * (want * (1.0 - p)).sqrt(), "token {token}: {got} draws, expected {want}");
    }
    // The first draws of 2,000 consecutive seeds must also follow the distribution: token 3 is expected 800 times.
    let firsts: Vec<u32> = (0..2000).map(|seed| draw(seed, 1)[0]).collect();
    let threes = firsts.iter().filter(|&&token| token == 3).count() as f64;
    assert!((threes - 800.0).abs() < 4.0 * (480f64).sqrt(), "{threes}");
}

#[test]
fn penalties_change_logits_by_their_definitions() {
    let greedy = SamplingParams::greedy();
    // For tokens that have occurred, also in the prompt, the repetition penalty divides positive logits and multiplies
    // negative logits.
    let mut sampler = Sampler::new(SamplingParams { repetition_penalty: 2.0, ..greedy.clone() }, &[0, 1]);
    let mut logits = vec![4.0, -1.0, 3.0];
    assert_eq!(sampler.sample(&mut logits), 2);
    assert_eq!(logits, [2.0, -2.0, 3.0]);
    // The frequency penalty is subtracted for each occurrence of a token, but the presence penalty only once.
    // For both penalties, occurrences in the prompt do not count.
    let params = SamplingParams { frequency_penalty: 0.5, presence_penalty: 0.25, ..greedy };
    let mut sampler = Sampler::new(params, &[1]);
    for _ in 0..2 {
        sampler.sample(&mut [10.0, 0.0, 0.0]);
    }
    let mut logits = vec![1.0, 1.0, 1.0];
    sampler.sample(&mut logits);
    assert_eq!(logits, [-0.25, 1.0, 1.0]);
}

#[test]
fn stop_strings_are_found_across_token_borders() {
    let run = |stops: &[&str], pieces: &[&str]| {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut matcher = StopFilter::new(&stops);
        let shown: Vec<String> = pieces.iter().map(|piece| matcher.push(piece)).collect();
        (shown.concat(), matcher.finish(), matcher.is_stopped())
    };
    assert_eq!(run(&["STOP"], &["a S", "T", "OP b"]), ("a ".into(), "".into(), true));
    assert_eq!(run(&["STOP"], &["a S", "T", "Ab"]), ("a STAb".into(), "".into(), false));
    assert_eq!(run(&["STOP"], &["a ST"]), ("a ".into(), "ST".into(), false));
    assert_eq!(run(&["aab"], &["aaaab"]), ("aa".into(), "".into(), true));
    assert_eq!(run(&["x", "yz"], &["ay", "zx"]), ("a".into(), "".into(), true));
    assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), "".into(), true));
    assert_eq!(run(&[""], &["all"]), ("all".into(), "".into(), false));
}

#[test]
fn stop_strings_are_not_found_in_unsearched_text() {
    // A `~` marks text that is not searched for stop strings.
    let run = |stops: &[&str], pieces: &[&str]| {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut matcher = StopFilter::new(&stops);
        let push = |piece: &&str| match piece.strip_prefix('~') {
            Some(piece) => matcher.push_unsearched(piece),
            None => matcher.push(piece),
        };
        let shown: Vec<String> = pieces.iter().map(push).collect();
        let found = matcher.found().map(str::to_string);
        (shown.join("|"), matcher.finish(), found)
    };
    let found = |stop: &str| Some(stop.to_string());
    assert_eq!(run(&["STOP"], &["~a STOP", "b STOP c"]), ("a STOP|b ".into(), "".into(), found("STOP")));
    assert_eq!(run(&["STOP"], &["~a STOP", "b"]), ("a STOP|b".into(), "".into(), None));
    // A stop string can begin in unsearched text, so the matcher holds back text that may be its beginning.
    assert_eq!(run(&["STOP"], &["~a ST", "OP"]), ("a |".into(), "".into(), found("STOP")));
    assert_eq!(run(&["STOP"], &["~a S", "~T", "A"]), ("a ||STA".into(), "".into(), None));
    assert_eq!(run(&["STOP"], &["~a ST"]), ("a ".into(), "ST".into(), None));
    // The held-back text `abc` contains the stop string `b`, but `b` ends in unsearched text and does not count.
    assert_eq!(run(&["abcx", "b"], &["~abc", "d"]), ("|abcd".into(), "".into(), None));
    assert_eq!(run(&["abcx", "b"], &["~abc", "x"]), ("|".into(), "".into(), found("abcx")));
    assert_eq!(run(&["abcx", "b"], &["~abc", "ab"]), ("|abca".into(), "".into(), found("b")));
    assert_eq!(run(&["aa"], &["~aa", "a"]), ("a|".into(), "".into(), found("aa")));
    assert_eq!(run(&["éé!", "é"], &["~éé", "!"]), ("|".into(), "".into(), found("éé!")));
    assert_eq!(run(&["éé!", "é"], &["~éé", "?"]), ("|éé?".into(), "".into(), None));
}
