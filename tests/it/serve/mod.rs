//! Tests of `inferno serve`. Most tests start a server process with the demo model and send requests to it.
//!
//! - chat and text completions: `answers`, `fields`, `tools`, `structured`, `deterministic`, `demo`
//! - other APIs: `anthropic`, `ollama`; `responses`, `response_fields`, `stored_responses`: the Responses API
//! - routes, clients and connections: `routes`, `access`, `admission`, `connections`, `tls`, `remote_play`
//! - disconnects, faults and abuse: `cancel`, `retries`, `faults`, `hostile`
//! - the server itself: `loading`, `lifecycle`, `health`, `records`, `receipts`
//! - `client`: a server process and an HTTP client for these tests

mod access;
mod admission;
mod answers;
mod anthropic;
mod cancel;
mod client;
mod connections;
mod demo;
mod deterministic;
mod faults;
mod fields;
mod health;
mod hostile;
mod lifecycle;
mod loading;
mod ollama;
mod receipts;
mod records;
mod remote_play;
mod response_fields;
mod responses;
mod retries;
mod routes;
mod stored_responses;
mod structured;
mod tls;
mod tools;
