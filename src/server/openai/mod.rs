//! The routes of OpenAI's API. The modules are:
//!
//! - `chat/`, `completions/`, `responses/`: the routes that generate text
//! - `models`: describes the served model

pub mod chat;
pub mod completions;
pub mod models;
pub mod responses;
