//! The client that sent a request.

/// The index of the API key with which a client sent its request. All clients without a key count as one client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Client(usize);

impl Client {
    /// Creates the client that sends the API key with this index.
    pub fn new(index: usize) -> Self {
        Self(index)
    }

    /// Returns the index of the client's API key, or 0 for a client without a key.
    pub fn index(self) -> usize {
        self.0
    }
}
