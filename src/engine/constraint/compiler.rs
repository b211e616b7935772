//! Compiles grammars with llguidance, within limits.

use std::collections::HashSet;
use std::iter;
use std::sync::Arc;

use anyhow::{Result, bail};
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, panic_utils};
use serde_json::{Value, json};

use super::cache::GrammarCache;
use super::{Grammar, GrammarKind};
use crate::error::Error;
use crate::tokenizer::TokenTable;

/// The length of the longest token that a grammar can use, in bytes. llguidance's trie supports up to 1,024 bytes.
const MAX_TOKEN_BYTES: usize = 1000;

/// The maximum total size of all tokens in llguidance's trie, in bytes.
/// The trie has at most one node per byte, besides its root, and supports fewer than 2^22 (about 4.2 million) nodes.
const MAX_TRIE_BYTES: usize = 4_000_000;

/// The maximum number of optional properties if only one object of a schema has optional properties.
/// In general, [`optional_pairs`] must not exceed the square of this limit.
/// The compile time grows with the square of the number of optional properties, which llguidance does not limit.
/// The time limits in `prepare.rs` end the wait, but not the compiling thread, so they do not replace this limit.
const MAX_OPTIONAL: usize = 1000;

/// The maximum length of the reason in an [`Error::InvalidConstraint`], in characters.
/// Messages from llguidance can be long.
const MAX_REASON: usize = 500;

/// llguidance's error message if a grammar allows no next token.
const NOTHING_ALLOWED: &str = "NoExtensionBias";

/// The whitespace allowed between the parts of a JSON value: one space, or one line break with limited indentation.
/// Without this limit, a model could generate whitespace until the context is full.
const JSON_WHITESPACE: &str = r" |\r?\n[ \t]{0,128}";

/// Compiles grammars for one vocabulary.
pub struct GrammarCompiler {
    factory: ParserFactory,
    cache: GrammarCache,
    vocab_size: usize,
    /// The token that represents the end of the text in token masks.
    end: u32,
}

/// The result of [`GrammarCompiler::compile`].
#[derive(Clone)]
pub struct CompiledGrammar {
    /// The name of the grammar, for error messages.
    pub name: Arc<str>,
    pub matcher: Matcher,
}

impl GrammarCompiler {
    /// Creates a compiler for a vocabulary. Builds llguidance's token trie, which is slow for large vocabularies.
    ///
    /// `vocab_size` is the number of logits per token.
    /// Fails if no stop token has text and an id below `vocab_size`, if all tokens together have more than
    /// `MAX_TRIE_BYTES` bytes, or if llguidance rejects the vocabulary.
    pub fn new(table: &TokenTable, vocab_size: usize, stop_ids: &[u32]) -> Result<Self> {
        let is_usable = |id: &u32| (*id as usize) < vocab_size && !table.bytes(*id).is_empty();
        let Some(end) = stop_ids.iter().copied().find(is_usable) else {
            bail!("the vocabulary has no stop token, so an answer with a constraint could not end");
        };
        let words: Vec<Vec<u8>> = (0..vocab_size as u32).map(|id| token_bytes(table, id)).collect();
        if words.iter().map(Vec::len).sum::<usize>() > MAX_TRIE_BYTES {
            bail!("the tokens of the vocabulary have more than {MAX_TRIE_BYTES} bytes in total");
        }
        let build = std::panic::AssertUnwindSafe(|| {
            let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, end), &words);
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SlicedBiasComputer::json_slices();
            ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
        });
        let mut factory = panic_utils::catch_unwind(build)?;
        factory.quiet();
        let limits = factory.limits_mut();
        // At the speeds in llguidance's documentation of these limits, building a lexer takes at most about 20 ms of
        // CPU time, and computing a token mask takes at most about 10 ms.
        limits.initial_lexer_fuel = 1_000_000;
        limits.step_lexer_fuel = 100_000;
        limits.step_max_items = 50_000;
        // According to llguidance's documentation, a lexer state takes 1 to 2 kB, so a lexer takes at most 100 MB.
        limits.max_lexer_states = 50_000;
        limits.verbose_errors = false;
        Ok(Self { factory, cache: GrammarCache::default(), vocab_size, end })
    }

    /// Returns the number of logits per token, which is also the number of tokens in a token mask.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the end-of-text token of the grammars: a token mask allows this token where the text may end.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// Compiles a grammar, or returns the cached result of an earlier compilation.
    ///
    /// Fails with [`Error::InvalidConstraint`] if the grammar is invalid, not supported or too expensive.
    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar> {
        let (key, name) = (GrammarCache::key(&grammar.kind), grammar.name.as_str().into());
        if let Some(matcher) = key.and_then(|key| self.cache.get(&key)) {
            return Ok(CompiledGrammar { name, matcher });
        }
        let matcher = self.compile_anew(grammar)?;
        if let Some(key) = key {
            self.cache.insert(key, &matcher);
        }
        Ok(CompiledGrammar { name, matcher })
    }

    fn compile_anew(&self, grammar: &Grammar) -> Result<Matcher> {
        if let GrammarKind::JsonSchema(schema) = &grammar.kind {
            check_optional_properties(&grammar.name, iter::once(schema))?;
        }
        let top_level = match &grammar.kind {
            GrammarKind::JsonSchema(schema) => TopLevelGrammar::from_json_schema(llguidance_schema(schema)),
            GrammarKind::JsonObject => {
                TopLevelGrammar::from_json_schema(llguidance_schema(&json!({ "type": "object" })))
            }
            GrammarKind::Regex(regex) => TopLevelGrammar::from_regex(regex),
            GrammarKind::Choice(texts) if texts.is_empty() => {
                return Err(invalid(&grammar.name, "expected at least one text"));
            }
            GrammarKind::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| lark_string(text)).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
            GrammarKind::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let mut matcher = Matcher::new(self.factory.create_parser(top_level));
        if let Some(problem) = matcher.get_error() {
            return Err(invalid(&grammar.name, &problem));
        }
        // Computing the first token mask fails if the grammar allows no first token, or if the mask is too expensive.
        matcher.compute_mask().map_err(|problem| invalid(&grammar.name, &problem.to_string()))?;
        Ok(matcher)
    }
}

/// Returns a Lark string that matches exactly `text`.
pub fn lark_string(text: &str) -> String {
    // Lark strings have the syntax of JSON strings, except that they cannot contain DEL.
    json!(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Returns a schema in the form that llguidance expects, with [`JSON_WHITESPACE`] as the allowed whitespace.
///
/// Replaces the options for llguidance in the schema (`x-guidance`), because some options make llguidance ignore
/// keywords that it cannot enforce.
pub fn llguidance_schema(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Bool(false) => json!({ "enum": [] }),
        other => other.clone(),
    };
    if let Some(fields) = schema.as_object_mut() {
        fields.insert("x-guidance".to_string(), json!({ "whitespace_pattern": JSON_WHITESPACE }));
    }
    schema
}

/// Returns a measure of the time to compile a schema: the sum, over all its objects, of the square of the number of
/// optional properties.
fn optional_pairs(schema: &Value) -> usize {
    let fields = match schema {
        Value::Array(items) => return items.iter().map(optional_pairs).sum(),
        Value::Object(fields) => fields,
        _ => return 0,
    };
    let required: HashSet<&str> = match fields.get("required") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => HashSet::new(),
    };
    let optional = match fields.get("properties") {
        Some(Value::Object(properties)) => properties.keys().filter(|name| !required.contains(name.as_str())).count(),
        _ => 0,
    };
    fields.values().map(optional_pairs).sum::<usize>() + optional.pow(2)
}

/// Fails if the schemas together have too many optional properties. `name` is the part of the request at fault.
pub fn check_optional_properties<'s>(name: &str, schemas: impl Iterator<Item = &'s Value>) -> Result<()> {
    if schemas.map(optional_pairs).sum::<usize>() <= MAX_OPTIONAL.pow(2) {
        return Ok(());
    }
    let problem = format!("too many optional properties: up to {MAX_OPTIONAL} in one object, fewer in each of several");
    Err(invalid(name, &problem))
}

/// Returns an [`Error::InvalidConstraint`] for `name`, the part of the request at fault.
///
/// `problem` is the reason: inferno's own text, or a message from llguidance.
/// The error omits llguidance's debugging details, and contains at most `MAX_REASON` characters of the reason.
pub fn invalid(name: &str, problem: &str) -> anyhow::Error {
    // A line that starts with `<` begins llguidance's debugging details, such as a backtrace.
    let problem = problem.split("\n<").next().unwrap_or_default().trim();
    let problem = if problem == NOTHING_ALLOWED { "the grammar allows no next token" } else { problem };
    let reason: String = problem.chars().take(MAX_REASON).collect();
    Error::InvalidConstraint { name: name.to_string(), reason }.into()
}

/// Returns the bytes of a token in the form that llguidance expects.
///
/// The bytes of a control token start with 0xFF. A token that no grammar can use has no bytes.
fn token_bytes(table: &TokenTable, id: u32) -> Vec<u8> {
    let bytes = table.bytes(id);
    if bytes.is_empty() || bytes.len() > MAX_TOKEN_BYTES {
        return Vec::new();
    }
    if table.is_control(id) {
        [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat()
    } else if bytes[0] == TokTrie::SPECIAL_TOKEN_MARKER {
        // llguidance would mistake this token for a control token.
        // No grammar can match the token as text, because UTF-8 never contains 0xFF.
        Vec::new()
    } else {
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::tokenizer::{ControlTokens, Tokenizer};

    const STOP: u32 = 1993;

    /// Checks that a grammar matches `text` and no other text: before each token of `text`, the grammar allows only
    /// tokens that continue `text`, and after the last token, only the stop token.
    fn assert_matches_only(compiler: &GrammarCompiler, tokenizer: &Tokenizer, kind: GrammarKind, text: &str) {
        let grammar = Grammar { name: "choice".to_string(), kind };
        let mut matcher = compiler.compile(&grammar).unwrap_or_else(|error| panic!("{text:?}: {error}")).matcher;
        let ids = tokenizer.encode(text, ControlTokens::Text).unwrap();
        let mut rest = text.as_bytes();
        for id in ids {
            let mask = matcher.compute_mask().unwrap();
            for allowed in (0..compiler.vocab_size() as u32).filter(|&id| mask.is_allowed(id)) {
                let bytes = tokenizer.table().bytes(allowed);
                assert!(allowed != STOP && rest.starts_with(&bytes), "{text:?}: allows {bytes:?} before {rest:?}");
            }
            matcher.consume_token(id).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            rest = &rest[tokenizer.table().bytes(id).len()..];
        }
        assert!(rest.is_empty() && matcher.is_accepting().unwrap(), "{text:?}: {rest:?}");
        assert!(matcher.compute_mask_or_eos().unwrap().iter().eq([STOP]), "{text:?}");
    }

    #[test]
    fn choices_can_contain_any_character() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        let tokenizer = Tokenizer::from_dir(&demo).unwrap();
        let compiler = GrammarCompiler::new(tokenizer.table(), 2000, &[STOP]).unwrap();
        let check = |text: &str| {
            assert_matches_only(&compiler, &tokenizer, GrammarKind::Choice(vec![text.to_string()]), text);
        };
        // Test all characters of ASCII and Latin-1, including control characters.
        for character in '\0'..='\u{ff}' {
            check(&character.to_string());
            check(&format!("a{character}{character}b"));
        }
        // Test line separators, the byte order mark, the ends of code point ranges, and noncharacters.
        for character in "\u{2028}\u{2029}\u{feff}\u{d7ff}\u{e000}\u{fffe}\u{ffff}\u{10000}\u{10ffff}".chars() {
            check(&format!("a{character}b"));
        }
        for start in (0x100..0x11_0000).step_by(4999) {
            check(&(start..start + 5).filter_map(char::from_u32).collect::<String>());
        }
        for text in [
            "\"", "\"\"", "\\", "\\\"", "\\u007f", "\\x41", "\"i", "a\"i", "//", "/* a */", "#", "%json {}", " ",
            "\r\n", "a | b",
        ] {
            check(text);
        }
    }
}
