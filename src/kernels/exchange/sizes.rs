//! The sizes of the exchange between GPUs, and its times.

/// The memory of each GPU for the values of the others, in bytes. Long prompts need several operations if their tensors are
/// larger than the part of a rank.
pub const MAILBOX_BYTES: usize = 64 << 20;

/// The time in which the GPUs of all ranks add a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeTimes {
    /// For [`SMALL_ELEMENTS`], in seconds. The host queues one operation after another.
    pub small: f64,
    /// For [`LARGE_ELEMENTS`], in seconds.
    pub large: f64,
}

/// The elements of the hidden state of one token in gpt-oss.
pub const SMALL_ELEMENTS: usize = 2880;
/// The elements of a part of a prompt.
pub const LARGE_ELEMENTS: usize = 1 << 20;
