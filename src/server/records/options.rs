//! The server options for records of requests and for receipts.

use std::path::PathBuf;
use std::sync::Arc;

use super::receipt_key::ReceiptKey;

/// Where a server keeps records of requests, and whether it signs receipts.
#[derive(Clone, Debug, Default)]
pub struct RecordOptions {
    /// The maximum memory for the records of the most recent requests, in bytes. With 0, no record stays in memory.
    pub memory_bytes: usize,
    /// The folder to which records are written. `None` if no records are written.
    pub folder: Option<PathBuf>,
    /// The commit of the model, or a hash of the demo model's files. `None` if the model was loaded from a path.
    /// Each record contains this revision.
    pub revision: Option<String>,
    /// The key that signs receipts. `None` if the server does not sign receipts.
    pub receipt_key: Option<Arc<ReceiptKey>>,
}
