//! A client for servers with OpenAI's API. `play --url` uses it as the backend of a conversation.
//! `replay` uses it to fetch a record.
//!
//! - `address`, `connection`, `sse`: URLs, requests, and streams of server-sent events
//! - `certificates`: the certificates that a client trusts
//! - `refused`: responses with an error status, and redirects
//! - `chunks`: parses the chunks of a streamed answer
//! - `models`: the list of models on a server
//! - `remote_model`: a model on a server as a [`Backend`](crate::conversation::Backend)

mod address;
mod certificates;
mod chunks;
mod connection;
mod models;
mod refused;
mod remote_model;
mod sse;

pub use address::ServerUrl;
pub use connection::Connection;
pub use models::{ServedModel, find, list};
pub use remote_model::RemoteModel;
