//! The parts of HTTP that all routes share. The modules are:
//!
//! - `auth`: API keys, and protection against web pages of other sites
//! - `blocking`: runs slow work outside the worker threads of the async runtime
//! - `body`: reads request bodies and their fields, and writes JSON responses
//! - `error`: errors in the format of OpenAI's API
//! - `log`: the request log

pub mod auth;
pub mod blocking;
pub mod body;
pub mod error;
pub mod log;
