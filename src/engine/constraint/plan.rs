//! The plan of an answer: a graph. Each node says what the answer may contain next,
//! and each edge is a token, a token sequence or a tag that leads to another node.

use std::sync::Arc;

use super::compiler::CompiledGrammar;
use super::cpu_time::MaskBudget;
use crate::language::Language;

/// The index of a node in a plan.
pub type NodeId = usize;

/// The id of [`PlanNode::End`] in every plan.
pub const END: NodeId = 0;

/// The nodes of a plan, and other data that the sequences of a request share.
pub struct Plan {
    pub language: Arc<Language>,
    pub nodes: Vec<PlanNode>,
    /// The id of the node where the answer starts.
    pub start: NodeId,
    /// The tokens that end a sequence: the stop tokens of the model and of the request.
    pub stops: Vec<u32>,
    pub vocab_size: usize,
    /// The token that llguidance's masks allow where the text of a grammar may end.
    pub end: u32,
    /// Limits the CPU time that all sequences of the request together spend on slow token masks.
    pub masks: MaskBudget,
}

/// What the answer may contain at one node of the plan, and the nodes that may follow.
pub enum PlanNode {
    /// The end of the answer, where only stop tokens are allowed.
    End,
    /// One of several token sequences, each with the node that follows. Example: the possible headers of a message.
    Choice(Vec<(Vec<u32>, NodeId)>),
    /// Text without a grammar.
    Free(Free),
    /// Text that matches a grammar.
    Grammar {
        /// Boxed, because a compiled grammar is much larger than the other variants.
        grammar: Box<CompiledGrammar>,
        /// The tokens that may come instead of the text, each with the node that follows.
        instead: Vec<(u32, NodeId)>,
        /// The tokens that may come after the whole text, each with the node that follows.
        after: Vec<(u32, NodeId)>,
    },
}

/// Text without a grammar. If neither `exits` nor `tag` ends the text, it lasts until the sequence ends.
#[derive(Default)]
pub struct Free {
    /// The tokens that end the text, each with the node that follows.
    pub exits: Vec<(u32, NodeId)>,
    /// A tag that ends the text if ordinary tokens spell it, and the node that follows.
    /// A control token for the tag belongs in `exits`.
    pub tag: Option<(&'static str, NodeId)>,
    /// Tokens that must not be in the text: they would end the answer, or start a message or tool call, too early.
    pub premature: Vec<u32>,
    /// The token that replaces a premature token. If `None`, a premature token is an error.
    pub replacement: Option<u32>,
}

/// Pairs each of `tokens` with `node`, the node that follows the token.
pub fn all_to(tokens: &[u32], node: NodeId) -> Vec<(u32, NodeId)> {
    tokens.iter().map(|&token| (token, node)).collect()
}
