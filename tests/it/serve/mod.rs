//! Tests of `inferno serve`. Most tests start a server process with the demo model and send requests to it.

mod access;
mod admission;
mod answers;
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
mod messages;
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
