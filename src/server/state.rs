//! The server state that all request handlers share.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use tokio::sync::watch;

use super::http::error::ApiError;
use super::limits::Admission;
use super::metrics::Metrics;
use super::options::ServerOptions;
use super::orphans::Orphans;
use super::records::Recorder;
use crate::engine::EngineHandle;
use crate::error::Error;

/// The maximum duration of an engine step. If a step takes longer, the engine counts as stuck.
const MAX_STEP: Duration = Duration::from_secs(60);

/// The interval at which the server checks whether the engine has failed.
const ENGINE_POLL: Duration = Duration::from_millis(50);

/// The state of a server: its options, engine, admission limit, metrics and records, the answers that it keeps for
/// retries, and its lifecycle phase.
pub struct ServerState {
    pub options: ServerOptions,
    pub admission: Arc<Admission>,
    pub metrics: Arc<Metrics>,
    pub recorder: Recorder,
    pub orphans: Arc<Orphans>,
    /// The engine of the loaded model. Unset while the model loads.
    engine: OnceLock<EngineHandle>,
    /// The SHA-256 hash of each model file, for receipts.
    model_files: OnceLock<BTreeMap<String, String>>,
    phase: watch::Sender<Phase>,
    /// The time at which the server started, in Unix seconds.
    pub created: u64,
}

/// The lifecycle phases of a server, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Serving,
    /// The server accepts requests, but reports itself as unhealthy, so that routers send no more requests.
    Leaving,
    /// The server finishes the accepted requests and rejects new requests for answers.
    Draining,
    /// The server ends the requests in progress.
    Ending,
}

impl ServerState {
    /// Creates a server whose model is not loaded yet.
    pub fn new(options: ServerOptions) -> Result<Arc<Self>> {
        let limit = options.max_sequences.saturating_add(options.max_waiting);
        Ok(Arc::new(Self {
            admission: Arc::new(Admission::new(limit, options.api_keys.len())),
            metrics: Arc::new(Metrics::new(&options.model, options.has_vllm_metrics)?),
            recorder: Recorder::new(&options.record)?,
            orphans: Arc::default(),
            engine: OnceLock::new(),
            model_files: OnceLock::new(),
            phase: watch::Sender::new(Phase::Serving),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            options,
        }))
    }

    /// Sets the engine of the loaded model, so that the server accepts requests. Later calls have no effect.
    pub fn set_engine(&self, engine: EngineHandle) {
        let _ = self.engine.set(engine);
    }

    /// Sets the SHA-256 hash of each model file, for receipts. Later calls have no effect.
    pub fn set_model_files(&self, hashes: BTreeMap<String, String>) {
        let _ = self.model_files.set(hashes);
    }

    /// Returns the SHA-256 hash of each model file.
    /// Fails while the model loads, and always fails if the server was started without `--receipt-key`.
    pub fn model_files(&self) -> Result<&BTreeMap<String, String>, ApiError> {
        self.model_files.get().ok_or_else(ApiError::loading)
    }

    /// Returns the engine, or `None` while the model loads.
    pub fn engine(&self) -> Option<&EngineHandle> {
        self.engine.get()
    }

    /// Returns the engine. While the model loads, returns the error to send to the client.
    pub fn loaded_engine(&self) -> Result<&EngineHandle, ApiError> {
        self.engine().ok_or_else(ApiError::loading)
    }

    /// Returns the engine if the server accepts requests for answers. Otherwise, returns the error for the client.
    pub fn open_engine(&self) -> Result<&EngineHandle, ApiError> {
        self.engine_before(Phase::Draining)
    }

    /// Returns the engine if it is loaded and the server is not shutting down.
    /// Otherwise, returns the error to send to the client.
    pub fn healthy_engine(&self) -> Result<&EngineHandle, ApiError> {
        self.engine_before(Phase::Leaving)
    }

    fn engine_before(&self, phase: Phase) -> Result<&EngineHandle, ApiError> {
        let engine = self.loaded_engine()?;
        if *self.phase.borrow() < phase { Ok(engine) } else { Err(ApiError::shutting_down()) }
    }

    /// Returns false if the engine has failed, or if its current step has taken longer than `MAX_STEP`.
    /// Returns true for an idle engine and before the engine is loaded.
    pub fn is_alive(&self) -> bool {
        self.engine().is_none_or(|engine| engine.is_responsive(MAX_STEP))
    }

    /// Returns whether the engine can no longer answer requests, because its thread has ended or a device has failed.
    pub fn has_failed(&self) -> bool {
        self.engine().is_some_and(EngineHandle::has_stopped)
    }

    /// Returns the error of the failed device, or `None` if no device has failed.
    /// Always returns `None` if a single rank runs the model.
    pub fn failure(&self) -> Option<Error> {
        self.engine().and_then(EngineHandle::failure)
    }

    /// Waits until [`has_failed`](Self::has_failed) is true.
    pub async fn wait_for_failure(&self) {
        while !self.has_failed() {
            tokio::time::sleep(ENGINE_POLL).await;
        }
    }

    /// Makes the server report itself as unhealthy, so that routers send no more requests.
    pub fn leave(&self) {
        self.enter(Phase::Leaving);
    }

    /// Waits until all records that are still queued are written to the folder.
    pub fn finish_records(&self) {
        self.recorder.finish();
    }

    /// Makes the server reject new requests for answers. Routes such as `/v1/models` still work.
    pub fn drain(&self) {
        self.enter(Phase::Draining);
    }

    /// Ends all requests in progress.
    pub fn end(&self) {
        self.enter(Phase::Ending);
    }

    fn enter(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// Waits until [`end`](Self::end) is called.
    pub fn wait_for_end(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut phase = self.phase.subscribe();
        async move {
            // Waiting fails only if the server no longer exists. In that case, all its requests have ended.
            let _ = phase.wait_for(|phase| *phase == Phase::Ending).await;
        }
    }
}
