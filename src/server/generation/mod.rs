//! Runs requests and turns their events into the parts of responses. The modules are:
//!
//! - `generate_options`, `constraint`: read the generation options and the format of the answer from requests
//! - `answers`: submits requests to the engine and merges the events of their answers
//! - `choice`: turns the events of one answer into pieces of reasoning, content and tool calls
//! - `text_tokens`: assigns the tokens of an answer to its text, for log probabilities and token counts
//! - `event_stream`: streams the pieces of answers as they arrive
//! - `reply`, `usage`: the parts of responses that several routes share

mod answers;
pub mod choice;
pub mod constraint;
pub mod event_stream;
pub mod generate_options;
pub mod reply;
pub mod text_tokens;
pub mod usage;

pub use answers::{Answers, Submission, check_answer_count, submit};
