//! Fuzzes the routes of `inferno serve`. Their engine has no model: its answers follow a script.

use std::sync::{Mutex, OnceLock, PoisonError};

use axum::body::Body;
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use inferno::engine::scripted::{Script, ScriptedEngine};
use inferno::language::Language;
use inferno::server::{self, RecordOptions, ServerOptions, ServerState, Timeouts};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use super::MAX_BYTES;

/// The routes from which the target selects.
/// `/v1/admission`, `/api/show` and `/api/pull` also read a body, but the target does not select them.
const ROUTES: [&str; 10] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
];

/// The name of the model in requests.
pub const MODEL: &str = "demo";

/// The most bytes of an error response.
const MAX_ERROR_BYTES: usize = 8 << 10;

/// The router of a server, its scripted engine, and the tokio runtime on which requests run.
pub struct Harness {
    runtime: Runtime,
    router: TowerToHyperService<axum::Router>,
    engine: ScriptedEngine,
    _server: std::sync::Arc<ServerState>,
}

pub struct Response {
    pub status: u16,
    pub content_type: String,
    pub body: Vec<u8>,
}

impl Harness {
    /// Calls a function with the harness. Only one call runs at a time, because all share the script of the engine.
    pub fn with<T>(call: impl FnOnce(&Harness) -> T) -> T {
        static HARNESS: OnceLock<Mutex<Harness>> = OnceLock::new();
        let harness = HARNESS.get_or_init(|| Mutex::new(Self::start()));
        call(&harness.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("tokenizer.json", include_str!("../../assets/demo/tokenizer.json")),
            ("tokenizer_config.json", include_str!("../../assets/demo/tokenizer_config.json")),
            ("config.json", include_str!("../../assets/demo/config.json")),
            ("generation_config.json", include_str!("../../assets/demo/generation_config.json")),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let language = Language::load(folder.path()).unwrap();
        let vocab_size = language.tokenizer.vocab_size();
        let engine = ScriptedEngine::start(language, vocab_size).unwrap();
        let server = ServerState::new(ServerOptions {
            model: MODEL.to_string(),
            api_keys: Vec::new(),
            cors_origins: Vec::new(),
            no_auth: true,
            max_sequences: 256,
            max_waiting: 0,
            max_connections: 100,
            timeouts: Timeouts::default(),
            tls: None,
            has_vllm_metrics: false,
            record: RecordOptions::default(),
        });
        let server = server.unwrap();
        server.set_engine(engine.handle());
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let router = TowerToHyperService::new(server::router(&server));
        Self { runtime, router, engine, _server: server }
    }

    /// Sets the answer to the next requests.
    pub fn set_script(&self, script: Script) {
        self.engine.set_script(script);
    }

    /// Sends a request and reads the whole response.
    pub fn post(&self, path: &str, body: Vec<u8>) -> Response {
        let request = axum::http::Request::post(path).header("content-type", "application/json");
        let request = request.body(Body::from(body)).unwrap();
        self.runtime.block_on(async {
            let response = self.router.call(request).await.unwrap();
            let (parts, body) = response.into_parts();
            let content_type = parts.headers["content-type"].to_str().unwrap().to_string();
            let body = body.collect().await.unwrap().to_bytes().to_vec();
            Response { status: parts.status.as_u16(), content_type, body }
        })
    }
}

/// Sends a body to the route that the first byte selects. Checks that the response is valid, and that its status is
/// 200, 400 or 404: no body may cause a server error.
pub fn request_body(data: &[u8]) {
    let Some((&route, body)) = data.split_first() else { return };
    if body.len() > MAX_BYTES {
        return;
    }
    let path = ROUTES[usize::from(route) % ROUTES.len()];
    Harness::with(|harness| {
        harness.set_script(Script::default());
        let response = harness.post(path, body.to_vec());
        let text = String::from_utf8(response.body).expect("a response is text");
        assert!(matches!(response.status, 200 | 400 | 404), "{path}: {} {text}", response.status);
        if response.status != 200 {
            assert!(text.len() <= MAX_ERROR_BYTES, "{path}: the error has {} bytes", text.len());
            return check_error(path, &serde_json::from_str(&text).expect("an error is JSON"));
        }
        match response.content_type.as_str() {
            "application/json" => drop(serde_json::from_str::<Value>(&text).expect("a response is JSON")),
            "application/x-ndjson" => drop(super::answer::lines(&text)),
            _ => drop(super::answer::events(&text)),
        }
    });
}

/// Checks that the body of an error has the form that the API of `path` defines, and a message that is not empty.
pub fn check_error(path: &str, body: &Value) {
    let keys = |value: &Value| value.as_object().map(|map| map.keys().cloned().collect::<Vec<_>>()).unwrap_or_default();
    let error = &body["error"];
    let message = match path {
        _ if path.starts_with("/api") => error,
        _ if path.starts_with("/v1/messages") => {
            assert_eq!((keys(body).len(), &body["type"], keys(error).len()), (3, &Value::from("error"), 2), "{body}");
            &error["message"]
        }
        _ => {
            assert_eq!(keys(error), ["message", "type", "param", "code"], "{body}");
            &error["message"]
        }
    };
    assert!(message.as_str().is_some_and(|message| !message.is_empty()), "{body}");
}
