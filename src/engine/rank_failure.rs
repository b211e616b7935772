//! Reports the failure of one of several devices to the clients of an engine.
//!
//! The thread that notices the failure sends the error to all clients itself, because the engine thread may hang in a
//! device call.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::mpsc::{UnboundedSender, WeakUnboundedSender};

use super::requests::SequenceEvent;
use crate::error::Error;

/// The reason why a device has failed, if one has, and the clients to notify.
#[derive(Default)]
pub struct RankFailure {
    reason: OnceLock<String>,
    clients: Mutex<Vec<WeakUnboundedSender<SequenceEvent>>>,
}

impl RankFailure {
    /// Returns the error of the failed device, or `None` if no device has failed.
    pub fn error(&self) -> Option<Error> {
        self.reason.get().cloned().map(Error::GpuFailed)
    }

    /// Stores `reason`, and sends an error to all clients, which ends their streams. Later calls do nothing.
    pub fn report(&self, reason: &str) {
        if self.reason.set(reason.to_string()).is_ok() {
            for client in self.clients().drain(..) {
                self.tell(&client);
            }
        }
    }

    /// Adds the client of a sequence. If a device has already failed, the client gets the error at once.
    pub fn add(&self, client: &UnboundedSender<SequenceEvent>) {
        let mut clients = self.clients();
        // Before the list grows, remove the clients of ended sequences.
        if clients.len() == clients.capacity() {
            clients.retain(|client| client.strong_count() > 0);
        }
        clients.push(client.downgrade());
        drop(clients);
        // `report` may have notified the clients before this client was added to the list.
        self.tell(&client.downgrade());
    }

    fn tell(&self, client: &WeakUnboundedSender<SequenceEvent>) {
        if let (Some(error), Some(client)) = (self.error(), client.upgrade()) {
            // The send fails only if the client has dropped its stream.
            let _ = client.send(SequenceEvent::Failed(error.into()));
        }
    }

    fn clients(&self) -> MutexGuard<'_, Vec<WeakUnboundedSender<SequenceEvent>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
