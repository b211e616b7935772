//! Tests of model families: configs, and results compared with transformers.

mod families;
mod full_size;
mod golden;
