//! Keeps compiled grammars, because many clients send the same schema with every request.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use llguidance::Matcher;
use ring::digest::{SHA256, digest};

use super::GrammarKind;

/// The maximum number of grammars to keep. The least recently used grammar is dropped first.
const MAX_GRAMMARS: usize = 32;

/// The maximum size of a cached grammar as JSON text, in bytes.
/// Longer grammars usually compile to larger matchers, so this limit reduces the memory of the cache.
const MAX_TEXT: usize = 64 << 10;

/// The SHA-256 hash of the JSON text of a [`GrammarKind`].
pub type GrammarKey = [u8; 32];

/// The most recently used compiled grammars.
#[derive(Default)]
pub struct GrammarCache(Mutex<VecDeque<(GrammarKey, Matcher)>>);

impl GrammarCache {
    /// Returns the key of a grammar, or `None` if the grammar is too large for the cache.
    pub fn key(kind: &GrammarKind) -> Option<GrammarKey> {
        let text = serde_json::to_vec(kind).ok().filter(|text| text.len() <= MAX_TEXT)?;
        digest(&SHA256, &text).as_ref().try_into().ok()
    }

    /// Returns a matcher at the start of the grammar, or `None` if the grammar is not cached.
    pub fn get(&self, key: &GrammarKey) -> Option<Matcher> {
        let mut grammars = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let index = grammars.iter().position(|(other, _)| other == key)?;
        let entry = grammars.remove(index)?;
        // Clone deeply. Simple clones would share lexer states, and with them the limit on the number of lexer states.
        let matcher = entry.1.deep_clone();
        grammars.push_back(entry);
        Some(matcher)
    }

    /// Adds a matcher, which must be at the start of its grammar.
    pub fn insert(&self, key: GrammarKey, matcher: &Matcher) {
        let mut grammars = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        grammars.retain(|(other, _)| *other != key);
        grammars.push_back((key, matcher.deep_clone()));
        if grammars.len() > MAX_GRAMMARS {
            grammars.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammars_that_were_used_last_are_kept() {
        let cache = GrammarCache::default();
        let key = |index: usize| GrammarCache::key(&GrammarKind::Regex(index.to_string())).unwrap();
        let matcher = Matcher::new(Err(anyhow::anyhow!("no grammar")));
        for index in 0..MAX_GRAMMARS {
            assert!(cache.get(&key(index)).is_none());
            cache.insert(key(index), &matcher);
        }
        assert!(cache.get(&key(0)).is_some());
        cache.insert(key(1000), &matcher);
        let is_kept = |index| cache.get(&key(index)).is_some();
        assert_eq!([0, 1, 2, 1000].map(is_kept), [true, false, true, true]);
    }

    #[test]
    fn keys_depend_on_the_kind_and_large_grammars_have_none() {
        let key = GrammarCache::key;
        let text = || "a".to_string();
        assert_ne!(key(&GrammarKind::Regex(text())), key(&GrammarKind::Lark(text())));
        assert_eq!(key(&GrammarKind::Regex(text())), key(&GrammarKind::Regex(text())));
        assert_eq!(key(&GrammarKind::Regex("a".repeat(MAX_TEXT))), None);
    }
}
