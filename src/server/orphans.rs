//! Keeps answers whose clients lost the connection, because a retry may ask for the same answer.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::response::Response;
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle};

/// How long the server keeps an answer for a retry after the connection broke.
/// OpenAI's clients wait at most 0.5 s before the first retry and at most 1 s before the second.
const GRACE: Duration = Duration::from_secs(2);

/// The hash that identifies a request. All retries of a request have the same hash.
pub type RetryKey = [u8; 32];

/// The answers whose clients have disconnected and may retry.
#[derive(Default)]
pub struct Orphans(Mutex<OrphanTable>);

/// The orphaned answers. Their numbers keep the timer of an old answer from removing a newer one with the same key.
#[derive(Default)]
struct OrphanTable {
    waiting: HashMap<RetryKey, (u64, Orphan)>,
    next: u64,
}

/// The task that computes an answer, and the id of the first request for this answer.
struct Orphan {
    task: AnswerTask,
    request_id: String,
}

/// A task that computes a response. Dropping this value aborts the task, which cancels the answer.
struct AnswerTask(JoinHandle<Response>);

impl Drop for AnswerTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Orphans {
    fn lock(&self) -> MutexGuard<'_, OrphanTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an answer for a retry until [`GRACE`] has passed. Cancels an older orphaned answer with the same key.
    fn insert(self: &Arc<Self>, key: RetryKey, orphan: Orphan) {
        // If there is no async runtime, the server has already stopped, so no retry can arrive.
        let Ok(runtime) = Handle::try_current() else { return };
        let mut table = self.lock();
        let number = table.next;
        table.next += 1;
        let replaced = table.waiting.insert(key, (number, orphan));
        drop(table);
        drop(replaced);
        let orphans = self.clone();
        runtime.spawn(async move {
            tokio::time::sleep(GRACE).await;
            let mut table = orphans.lock();
            let expired = match table.waiting.get(&key) {
                Some((other, _)) if *other == number => table.waiting.remove(&key),
                _ => None,
            };
            drop(table);
            drop(expired);
        });
    }

    fn take(&self, key: &RetryKey) -> Option<Orphan> {
        self.lock().waiting.remove(key).map(|(_, orphan)| orphan)
    }
}

/// A client that waits for a response. If the waiter is dropped before the response is ready, the answer is orphaned.
/// A streamed response is ready when its stream begins, so an answer whose stream has begun is never orphaned.
pub struct Waiter {
    orphans: Arc<Orphans>,
    key: RetryKey,
    orphan: Option<Orphan>,
}

impl Waiter {
    /// Starts a task that computes an answer. The task can outlive the waiter,
    /// so that a retry can still get the answer.
    pub fn new(
        orphans: &Arc<Orphans>,
        key: RetryKey,
        request_id: String,
        answer: impl Future<Output = Response> + Send + 'static,
    ) -> Self {
        let task = AnswerTask(tokio::spawn(answer));
        Self { orphans: orphans.clone(), key, orphan: Some(Orphan { task, request_id }) }
    }

    /// Takes over the answer that an earlier attempt with this key left behind, or returns `None` if there is none.
    pub fn adopt(orphans: &Arc<Orphans>, key: RetryKey) -> Option<Self> {
        let orphan = orphans.take(&key)?;
        Some(Self { orphans: orphans.clone(), key, orphan: Some(orphan) })
    }

    /// Returns the id of the first request for this answer.
    pub fn request_id(&self) -> &str {
        self.orphan.as_ref().map_or("", |orphan| &orphan.request_id)
    }

    /// Waits for the response. Fails if the task that computes the answer panicked.
    pub async fn response(mut self) -> Result<Response, JoinError> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Response, JoinError>> {
        let Some(orphan) = &mut self.orphan else { return Poll::Pending };
        let response = std::task::ready!(Pin::new(&mut orphan.task.0).poll(context));
        self.orphan = None;
        Poll::Ready(response)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(orphan) = self.orphan.take() {
            self.orphans.insert(self.key, orphan);
        }
    }
}
