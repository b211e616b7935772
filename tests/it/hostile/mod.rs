//! Tests of untrusted files, and of inputs that fuzzing found.

mod files;
mod fuzz_corpus;
mod language;
