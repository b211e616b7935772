//! Limits the number of open connections.

use prometheus::IntGauge;

/// The number of connections that the server accepts above the connection limit.
/// On these spare connections, the server reports its health and its metrics, and rejects all other requests.
const SPARE: usize = 64;

/// An open connection. It counts toward the limit until this value is dropped.
pub struct OpenConnection {
    open: IntGauge,
    /// Whether the connection limit was already reached when this connection was accepted.
    pub is_spare: bool,
}

impl OpenConnection {
    /// Counts a new connection. Returns `None` if all spare connections are in use too, so that the server must close
    /// the new connection at once.
    ///
    /// Calls must not run concurrently, because reading and incrementing the count are two operations.
    pub fn new(open: &IntGauge, limit: usize) -> Option<Self> {
        let others = usize::try_from(open.get()).unwrap_or_default();
        if others >= limit.saturating_add(SPARE) {
            return None;
        }
        open.inc();
        Some(Self { open: open.clone(), is_spare: others >= limit })
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.open.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_above_the_limit_are_spare_and_then_closed() {
        let open = IntGauge::new("open", "open").unwrap();
        let mut connections: Vec<_> = (0..2 + SPARE).map(|_| OpenConnection::new(&open, 2).unwrap()).collect();
        let spare: Vec<usize> = (0..2 + SPARE).filter(|&index| connections[index].is_spare).collect();
        assert_eq!(spare, (2..2 + SPARE).collect::<Vec<_>>());
        assert!(OpenConnection::new(&open, 2).is_none());
        connections.truncate(1);
        assert!(!OpenConnection::new(&open, 2).unwrap().is_spare);
        assert_eq!(open.get(), 1);
    }
}
