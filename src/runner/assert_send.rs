//! [`assert_send`], which checks at compile time that a type can move to another thread.

/// Fails to compile unless values of type `T` can move to another thread.
pub const fn assert_send<T: Send>() {}
