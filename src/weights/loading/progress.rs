//! Tracks which tensors have been loaded and how many bytes they take in the files and in memory.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;

use candle_core::Tensor;

use crate::kernels;

/// Counts the bytes that the loaded tensors take in the files and in memory, and collects the names of the tensors.
/// Reports the number of bytes in the files to a callback.
pub struct LoadProgress<'p> {
    read_bytes: Cell<u64>,
    resident_bytes: Cell<u64>,
    /// The names of the loaded tensors. `unused` compares them with the names in the checkpoint.
    names: RefCell<HashSet<String>>,
    report: &'p dyn Fn(u64),
}

impl<'p> LoadProgress<'p> {
    /// Creates counters that call `report` after each tensor.
    ///
    /// `report` receives the total size in the files of the tensors loaded so far, in bytes.
    /// A tensor counts with its whole size, even if a rank loads only a part of it.
    pub fn new(report: &'p dyn Fn(u64)) -> Self {
        Self { read_bytes: Cell::new(0), resident_bytes: Cell::new(0), names: RefCell::default(), report }
    }

    /// Creates counters without a callback.
    pub fn silent() -> Self {
        Self::new(&|_| ())
    }

    /// Returns the number of bytes that the loaded tensors take in memory.
    pub fn resident_bytes(&self) -> u64 {
        self.resident_bytes.get()
    }

    /// Adds the size of a loaded tensor in its file to the total, and reports the new total.
    pub(super) fn add_read(&self, bytes: u64) {
        self.read_bytes.set(self.read_bytes.get() + bytes);
        (self.report)(self.read_bytes.get());
    }

    /// Adds the name of a tensor that is being loaded.
    pub(super) fn add_name(&self, name: &str) {
        self.names.borrow_mut().insert(name.to_string());
    }

    pub(super) fn has_loaded(&self, name: &str) -> bool {
        self.names.borrow().contains(name)
    }

    /// Adds the size of a loaded tensor to [`resident_bytes`](Self::resident_bytes).
    pub(super) fn add_resident(&self, bytes: u64) {
        self.resident_bytes.set(self.resident_bytes.get() + bytes);
    }

    /// Adds the size of `tensor` to [`resident_bytes`](Self::resident_bytes), and returns the tensor.
    pub(super) fn add_tensor(&self, tensor: Tensor) -> Tensor {
        self.add_resident(kernels::bytes(&tensor));
        tensor
    }
}
