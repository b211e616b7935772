//! The options for records.

use std::path::PathBuf;
use std::sync::Arc;

use super::receipt_key::ReceiptKey;

/// The options for the records of requests.
#[derive(Clone, Debug, Default)]
pub struct RecordOptions {
    /// The maximum memory for the records of the most recent requests, in bytes. If it is 0, no record stays in memory.
    pub memory_bytes: usize,
    /// The folder to which all records are written. If it is `None`, no records are written.
    pub folder: Option<PathBuf>,
    /// The commit of the model, or a hash of the demo's files. Each record contains it.
    pub revision: Option<String>,
    /// The key that signs receipts. If it is `None`, the server does not sign receipts.
    pub receipt_key: Option<Arc<ReceiptKey>>,
}
