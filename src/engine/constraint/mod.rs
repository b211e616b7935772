//! Constrains answers: their text and the arguments of their tool calls must match grammars.
//! A grammar is a JSON schema, any JSON object, a regular expression, a choice of texts, or a Lark grammar.
//!
//! # Approach
//!
//! Before the sampler chooses a token, [`ConstraintState`] computes the set of tokens that may come next, as a mask.
//! All other tokens get a logit of -inf. Two levels decide which tokens these are:
//!
//! - The chat format: a [`plan::Plan`] is a finite automaton over the tokens of the whole answer. Its nodes are
//!   headers, reasoning, tool calls and text, and it says in which of them a grammar applies.
//!   `harmony` and `tagged` create it for the two kinds of chat format, and `prepare` for text completions.
//! - The grammar: llguidance (github.com/guidance-ai/llguidance), which vLLM, SGLang and llama.cpp can use too.
//!   It reads the bytes of the text with an Earley parser, whose lexer uses derivatives of regular expressions, and
//!   walks a trie of all tokens to find those with which the text can still match. [`GrammarCompiler`] sets it up.
//!   Its `docs/json_schema.md` and `docs/syntax.md` define what a schema and a Lark grammar mean.
//!
//! # Guarantees and limits
//!
//! - Text under a grammar is always the beginning of a text that matches. An answer that ends because of `max_tokens`
//!   or a full context can be incomplete.
//! - A grammar is never loosened: a schema with a keyword that llguidance cannot enforce is refused, and if the masks
//!   of an answer take too much CPU time, the request fails.
//! - The properties of a JSON object come in the order of the schema. Whitespace in JSON is limited (`compiler`).
//! - The model may split the text into tokens in any way, not only as the tokenizer would.
//! - No grammar applies to reasoning. Reasoning ends with a control token or with the text `</think>`.
//! - Requests are untrusted. `prepare` limits the time to compile a grammar, `compiler` its size and memory, and
//!   `cpu_time` the time to compute masks.

mod cache;
mod compiler;
mod context;
mod cpu_time;
mod harmony;
mod plan;
mod prepare;
mod state;
mod tagged;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use compiler::GrammarCompiler;
pub use context::{ChatPrompt, ConstrainedRequest};
pub use prepare::prepare;
pub use state::ConstraintState;

/// The required form of an answer: the grammar of its text, and the tools that the answer may call.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Constraint {
    /// The grammar of the text. `None` allows any text.
    pub answer: Option<Grammar>,
    /// The tools that may be called. In formats other than harmony, calls to these tools are constrained only if
    /// `<tool_call>` and `</tool_call>` are control tokens.
    pub tools: Vec<ToolGrammar>,
    /// Whether the answer must call a tool. If so, it has only reasoning and tool calls, and `answer` is ignored.
    pub requires_tool: bool,
    /// Whether the answer may call several tools, in chat formats that support it.
    /// Some plans allow a second call even if this field is false. The server then ends the answer before that call.
    pub can_call_in_parallel: bool,
}

/// A tool that the answer may call, and what its arguments must match.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ToolGrammar {
    pub name: String,
    /// The grammar of the arguments. `None` allows any text in harmony, and any JSON object in other formats.
    pub arguments: Option<Grammar>,
}

impl ToolGrammar {
    /// Returns the JSON schema of the arguments, if they have one.
    fn schema(&self) -> Option<&Value> {
        match &self.arguments.as_ref()?.kind {
            GrammarKind::JsonSchema(schema) => Some(schema),
            _ => None,
        }
    }
}

/// A grammar with a name for error messages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Grammar {
    /// What the grammar belongs to, such as the name of a request field.
    pub name: String,
    pub kind: GrammarKind,
}

/// What a text must match.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum GrammarKind {
    /// A JSON value that matches a schema. Requests fail if llguidance cannot enforce the whole schema.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// Text that matches a regular expression as a whole. The syntax is that of the `regex` crate, without `\b` and
    /// similar assertions.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// Text that matches a grammar in llguidance's variant of Lark.
    Lark(String),
}

impl Constraint {
    /// Creates a constraint with a grammar for the text, and without tools.
    pub fn new(kind: GrammarKind) -> Self {
        Self { answer: Some(Grammar { name: "the grammar".to_string(), kind }), ..Self::default() }
    }

    /// Returns whether every answer is constrained: its text must match a grammar, or it must call a tool.
    /// Returns false if only the arguments of optional tools are constrained.
    fn is_required(&self) -> bool {
        self.answer.is_some() || self.requires_tool
    }
}
