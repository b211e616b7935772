//! Chat formats, which render messages to token ids and parse generated ids into channels of text.
//!
//! Models whose vocabulary contains harmony's control tokens, such as gpt-oss, use harmony.
//! All other chat models use a Jinja template.
//! Text from users and tools does not become a control token, with the exceptions that SECURITY.md lists.
//! The parsers accept malformed output and drop only headers, control tokens, tags and whitespace around tags.
//!
//! - `message`, `rendered`: a conversation, and the rendered prompt
//! - `format`: the chat format of a model
//! - `parser`, `channel`: split generated tokens into channels of text
//! - `harmony`: renders and parses harmony
//! - `template`: renders Jinja templates
//! - `tagged`: parses the output of models with a template
//! - `python`: the notations of Python for values, which templates write and models with a template generate
//! - `violations`: counts how often a model violates its chat format

mod channel;
mod format;
mod harmony;
mod message;
mod parser;
mod python;
mod rendered;
mod tagged;
mod template;
mod violations;

pub use channel::{Channel, Delta};
pub use format::{ChatFormat, TemplateFormat};
pub use harmony::{HarmonyTokens, harmony_recipient};
pub use message::{Message, ReasoningEffort, Role, ToolCall};
pub use parser::AnswerParser;
pub use rendered::{Render, RenderOptions, Rendered, today};
pub use tagged::calls::{LLAMA_CALLS, MISTRAL_CALLS};
pub use tagged::parser::{END_THINK, END_TOOL_CALL, THINK, TOOL_CALL};
pub use template::{RESERVED_VARIABLES, SpecialToken};
pub use violations::{FormatViolation, FormatViolations};
