//! Builds quantized matrices from quantized rows in a file, or from floats that are quantized during loading.
//!
//! - `target`: the format to which loading quantizes float matrices
//! - `matrix_rows`: the rows of a matrix, from which the matrix is built
//! - `row`: quantizes, packs or reads one row

mod matrix_rows;
mod row;
mod target;

pub use matrix_rows::{MatrixRows, QuantizedShape, WriteRow};
pub use row::read_floats;
pub use target::{QuantizationTarget, weight_format};
