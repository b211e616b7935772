//! Tests of vocabularies that are invalid, or too large to convert.

use inferno::tokenizer::Tokenizer;
use inferno::tokenizer::gguf::Vocabulary;
use inferno::weights::gguf::{GgufHeader, vocabulary};

use super::small;
use crate::harness::TestCase;
use crate::support::gguf::vocabulary::{Converted, NORMAL};
use crate::support::gguf::writer::Writer;
use crate::support::named_cases;

/// Returns the error from building a tokenizer from the metadata of a GGUF file, or `no error`.
fn vocabulary_error(writer: &Writer) -> String {
    let bytes = writer.bytes();
    let header = GgufHeader::parse(&bytes).unwrap();
    let tokenizer = vocabulary(&header.metadata(&bytes)).and_then(|vocabulary| Tokenizer::from_gguf(&vocabulary));
    tokenizer.err().map_or("no error".into(), |error| format!("{error:#}"))
}

/// Returns files with an invalid vocabulary, each with a text of the error message.
fn invalid_vocabularies() -> Vec<TestCase<(Writer, &'static str)>> {
    let plain = || small(|_, _, _| {});
    let merged = |merge: &str| small(|_, _, merges| merges.push(merge.into())).byte_level("gpt-2");
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let good = || plain().byte_level("gpt-2");
    let bare = |tokens: &[&str]| Writer::new().string(&key("model"), "gpt2").strings(&key("tokens"), tokens);
    let cases = vec![
        ("no_model", Writer::new(), "metadata key tokenizer.ggml.model is missing"),
        ("no_tokens", Writer::new().string(&key("model"), "gpt2"), "metadata key tokenizer.ggml.tokens is missing"),
        (
            "unsupported_model",
            plain().written("bert"),
            "tokenizer.ggml.model: 'bert' is not supported; supported: gpt2, llama",
        ),
        ("no_pre_tokenizer", plain().written("gpt2"), "metadata key tokenizer.ggml.pre is missing"),
        (
            "unsupported_pre_tokenizer",
            plain().byte_level("gpt-7"),
            "tokenizer.ggml.pre: 'gpt-7' is not supported; supported: default, gpt-2",
        ),
        (
            "no_merges",
            plain().written("gpt2").string(&key("pre"), "gpt-2"),
            "metadata key tokenizer.ggml.merges is missing",
        ),
        ("no_scores", plain().written("llama"), "metadata key tokenizer.ggml.scores is missing"),
        (
            "too_few_scores",
            plain().sentencepiece(&[0.0; 255]),
            "tokenizer.ggml.scores: its length is 255, but the vocabulary has 256 tokens",
        ),
        (
            "too_many_types",
            bare(&["a", "b"]).i32s(&key("token_type"), &[1; 3]),
            "tokenizer.ggml.token_type: its length is 3, but the vocabulary has 2 tokens",
        ),
        ("empty", bare(&[]), "tokenizer.ggml.tokens: 0 tokens; 1 to 2097152 are allowed"),
        ("duplicate_token", bare(&["a", "b", "a"]), "tokenizer.ggml.tokens: 'a' has two ids: 0 and 2"),
        (
            "scores_are_strings",
            bare(&["a"]).strings(&key("scores"), &["1"]),
            "metadata key tokenizer.ggml.scores[0]: expected floats",
        ),
        (
            "tokens_are_integers",
            Writer::new().string(&key("model"), "gpt2").i32s(&key("tokens"), &[1]),
            "tokens[0]: expected strings, found I32(1)",
        ),
        ("long_merge", merged(&"ab".repeat(1 << 20)), "ababab…' must be two tokens separated by a space"),
        ("merge_without_space", merged("ab"), "tokenizer.ggml.merges[0]: 'ab' must be two tokens separated by a space"),
        ("merge_of_three", merged("a b c"), "must be two tokens separated by a space"),
        ("merge_begins_with_a_space", merged(" a"), "must be two tokens separated by a space"),
        ("merge_ends_with_a_space", merged("a "), "must be two tokens separated by a space"),
        ("empty_merge", merged(""), "must be two tokens separated by a space"),
        (
            "merge_of_an_unknown_token",
            merged("a b"),
            "tokenizer.ggml.merges[0]: 'a b' needs a token that is not in the vocabulary",
        ),
        // The `tokenizers` crate can panic if the result of a merge is longer than every token,
        // so inferno must reject such a merge first.
        (
            "merge_longer_than_every_token",
            merged("Ā Ā"),
            "tokenizer.ggml.merges[0]: 'Ā Ā' needs a token that is not in the vocabulary",
        ),
        (
            "id_outside_the_vocabulary",
            good().u32(&key("bos_token_id"), 256),
            "tokenizer.ggml.bos_token_id: 256 is not a token id: the vocabulary has 256 tokens",
        ),
        (
            "largest_id",
            good().u32(&key("eot_token_id"), u32::MAX),
            "tokenizer.ggml.eot_token_id: 4294967295 is not a token id",
        ),
        (
            "id_is_a_string",
            good().string(&key("eos_token_id"), "x"),
            "tokenizer.ggml.eos_token_id: expected an integer",
        ),
        (
            "bos_without_id",
            good().bool(&key("add_bos_token"), true),
            "tokenizer.ggml.add_bos_token is true, but the file specifies no id for that token",
        ),
        (
            "eos_without_id",
            good().bool(&key("add_eos_token"), true),
            "tokenizer.ggml.add_eos_token is true, but the file specifies no id for that token",
        ),
        (
            "switch_is_an_integer",
            good().u32(&key("add_eos_token"), 1),
            "tokenizer.ggml.add_eos_token: expected a boolean, found U32(1)",
        ),
    ];
    named_cases(cases.into_iter().map(|(name, writer, message)| (name, (writer, message))))
}

#[test(each = invalid_vocabularies)]
fn invalid_vocabulary_is_an_error((writer, message): (Writer, &'static str)) {
    let error = vocabulary_error(&writer);
    assert!(error.contains(message), "expected {message:?}, found {error:?}");
}

#[test]
fn valid_vocabulary_is_no_error() {
    assert_eq!(vocabulary_error(&small(|_, _, _| {}).byte_level("gpt-2")), "no error");
}

#[test]
fn token_that_is_too_long_for_merges_is_an_error() {
    let vocabulary = Converted { tokens: vec!["a".repeat(30_000)], types: vec![NORMAL], merges: vec![] };
    let begin = std::time::Instant::now();
    let message = vocabulary_error(&vocabulary.sentencepiece(&[0.0]));
    assert!(message.contains("the tokens up to id 0 are too long to convert to BPE merges"), "{message}");
    assert!(begin.elapsed().as_secs() < 10);
}

#[test]
fn empty_vocabulary_is_an_error() {
    let error = Tokenizer::from_gguf(&Vocabulary::default()).err().unwrap().to_string();
    assert!(error.contains("0 tokens"), "{error}");
}
