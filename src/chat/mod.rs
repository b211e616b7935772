//! Chat formats: messages to token ids, and generated ids to channels of text.
//!
//! gpt-oss has harmony, which is implemented here.
//! Every other model has a Jinja template.
//! In both cases, text from people and tools never becomes a control token.
//! Generated text is never lost, and parsing it never fails.

mod channel;
mod format;
mod harmony;
mod harmony_header;
mod harmony_parser;
mod injection;
mod message;
mod parser;
mod python;
mod rendered;
mod tagged_parser;
mod template;
mod template_functions;
mod typescript;

pub use channel::{Channel, Delta};
pub use format::{ChatFormat, HarmonyFormat, TemplateFormat};
pub use message::{Message, ReasoningEffort, Role, ToolCall};
pub use parser::Parser;
pub use rendered::{RenderOptions, Rendered};
