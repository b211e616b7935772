//! Identifies the client that sent a request.

/// A client, identified by the index of its API key. All clients without a key count as one client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Client(usize);

impl Client {
    /// Creates the client whose API key has this index.
    pub fn new(index: usize) -> Self {
        Self(index)
    }

    /// Returns the index of the client's API key, or 0 for a client without a key.
    pub fn index(self) -> usize {
        self.0
    }
}
