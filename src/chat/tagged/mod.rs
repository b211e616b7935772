//! Parses the output of models with a Jinja template: tags such as `<think>`, and tool calls in several notations.

mod bare_call;
pub mod calls;
pub mod parser;
