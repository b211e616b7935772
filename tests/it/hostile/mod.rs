//! Tests of untrusted files and prompts, and of six fuzz corpora with mutations of their files.

mod files;
mod fuzz_corpus;
mod language;
