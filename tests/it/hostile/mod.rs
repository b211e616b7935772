//! Tests of untrusted files and prompts. Also runs six fuzz targets on their corpora and on mutated corpus files.

mod files;
mod fuzz_corpus;
mod language;
