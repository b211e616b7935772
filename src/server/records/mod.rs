//! Keeps records of requests, and signs statements about them. The modules are:
//!
//! - `options`: the options for records
//! - `recorder`: keeps records, so that their answers can be reproduced
//! - `receipt`: signed statements about records; `receipt_key`: the keys that sign and verify them

mod options;
mod receipt;
mod receipt_key;
mod recorder;

pub use options::RecordOptions;
pub use receipt::Receipt;
pub use receipt_key::{PublicKey, ReceiptKey};
pub use recorder::Recorder;
