//! Runs requests and turns their events into the parts of responses. The modules are:
//!
//! - `generate_options`, `constraint`: read the generation options and the format of the answer from requests
//! - `submission`: admits requests and submits them to the engine
//! - `answers`: merges the events of the answers to one HTTP request
//! - `answer_stream`: turns the events of one answer into updates
//! - `accounting`: adds the answers to the metrics, the log and the records
//! - `pieces`: turns the events of one answer into pieces of reasoning, content and tool calls
//! - `text_tokens`: assigns the tokens of an answer to its text, for log probabilities and token counts
//! - `event_stream`: streams the pieces of answers as they arrive
//! - `reply`, `usage`: the parts of responses that several routes share

mod accounting;
mod answer_stream;
mod answers;
pub mod constraint;
pub mod event_stream;
pub mod generate_options;
pub mod pieces;
pub mod reply;
mod submission;
pub mod text_tokens;
pub mod usage;

pub use answers::Answers;
pub use submission::{Submission, check_answer_count, submit};
