//! Constants of the exchange between GPUs, and the type of its benchmark results.

/// The size of each rank's mailbox in bytes.
/// In one operation, each sending rank uses only its own region of the mailbox (`exchange.cuh`).
/// A tensor that does not fit in a region, such as the partial results of a long chunk, needs several operations.
pub const MAILBOX_BYTES: usize = 128 << 20;

/// In bf16 models without `--deterministic`, ranks may round partial results of at least this many elements to bf16.
/// The time to exchange a smaller tensor is mostly latency, which rounding does not shorten.
pub const MIN_ROUNDED_ELEMENTS: usize = 1 << 18;

/// The mean time of summing one tensor over all ranks, for two tensor sizes.
/// The benchmark queues many sums in a row, without waiting for the GPU between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeTimes {
    /// The time in seconds to sum [`SMALL_ELEMENTS`] elements.
    pub small: f64,
    /// The time in seconds to sum [`LARGE_ELEMENTS`] elements.
    pub large: f64,
}

/// The number of elements in the benchmark's small tensor: the hidden state of one token in gpt-oss.
pub const SMALL_ELEMENTS: usize = 2880;
/// The number of elements in the benchmark's large tensor: roughly the hidden states of 364 prompt tokens in gpt-oss.
pub const LARGE_ELEMENTS: usize = 1 << 20;
