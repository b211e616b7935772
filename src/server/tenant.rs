//! Identifies the tenant that a request belongs to.

/// A tenant: the holder of an API key. All clients without a key belong to one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tenant(usize);

impl Tenant {
    /// Creates the tenant whose API key has this index.
    pub fn new(index: usize) -> Self {
        Self(index)
    }

    /// Returns the index of the tenant's API key, or 0 for the tenant of clients without a key.
    pub fn index(self) -> usize {
        self.0
    }
}
