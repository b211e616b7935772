//! The mailbox size of the exchange between GPUs, and the tensor sizes and results of its benchmark.

/// The size of each rank's mailbox in bytes.
/// A tensor that is larger than a region of the mailbox, such as the output of a long chunk, needs several operations.
pub const MAILBOX_BYTES: usize = 64 << 20;

/// The mean time of one sum over all ranks, for two tensor sizes.
/// The host queues many sums in a row, without waiting between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeTimes {
    /// The time for [`SMALL_ELEMENTS`] elements, in seconds.
    pub small: f64,
    /// The time for [`LARGE_ELEMENTS`] elements, in seconds.
    pub large: f64,
}

/// The number of elements in a small tensor: the hidden state of one token in gpt-oss.
pub const SMALL_ELEMENTS: usize = 2880;
/// The number of elements in a large tensor: about the hidden states of 364 prompt tokens in gpt-oss.
pub const LARGE_ELEMENTS: usize = 1 << 20;
