//! Reads the bytes of tensors from weights files: whole tensors, or the part of each tensor that a rank holds.
//!
//! - `source`: reads bytes of files
//! - `reader`: which threads of a rank read the tensors of safetensors files
//! - `read_ahead`: reads whole tensors on background threads before they are requested
//! - `part`: the part of each tensor that a rank holds
//! - `part_reader`: reads large tensors, or parts of them, with several threads
//! - `shared_reads`: divides the reads among ranks that need the same bytes

mod part;
mod part_reader;
mod read_ahead;
mod reader;
mod shared_reads;
mod source;

pub use part::{Axis, DimOrder, PartToRead, Slice, TensorPart};
pub use part_reader::PartReader;
pub use read_ahead::{ReadAheadOptions, ReadAheadReader, ReadRequest, Residency};
pub use reader::{PartSource, RankReader, ReaderThreads, TensorReader};
pub use shared_reads::{RowsToConvert, SharedReads, convert_all};
pub use source::{ByteRange, RowBuffer, RowSource, StoredBytes, StoredRows, WeightsFile};
