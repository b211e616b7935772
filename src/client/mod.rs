//! A client for servers with OpenAI's API, as the backend of a conversation.
//!
//! - `address`, `connection`, `sse`: URLs, requests, and streams of server-sent events
//! - `chunks`: the pieces of a streamed answer
//! - `models`, `remote_model`: the models of a server, and the [`Backend`](crate::conversation::Backend) for one of them

mod address;
mod chunks;
mod connection;
mod models;
mod remote_model;
mod sse;

pub use address::ServerUrl;
pub use connection::Connection;
pub use models::{ServedModel, find, list};
pub use remote_model::RemoteModel;
