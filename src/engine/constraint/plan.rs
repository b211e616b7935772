//! The plan of an answer: a graph, as of a finite automaton. Each node says what the answer may contain next.
//! Each edge is a token, a list of tokens or a tag, and leads to the node that follows it.

use std::sync::Arc;

use super::compiler::CompiledGrammar;
use super::cpu_time::MaskBudget;
use crate::language::Language;

/// The index of a node in [`PlanGraph::nodes`].
pub type NodeId = usize;

/// The id of [`PlanNode::End`] in every plan.
pub const END: NodeId = 0;

/// The graph of an answer, and other data that the sequences of a request share.
pub struct Plan {
    pub language: Arc<Language>,
    pub graph: PlanGraph,
    /// The tokens that end a sequence: the stop tokens of the model and of the request.
    pub stops: Vec<u32>,
    pub vocab_size: usize,
    /// The token that llguidance's masks allow where the text of a grammar may end.
    pub end: u32,
    /// Limits the CPU time that all sequences of the request together spend on slow token masks.
    pub masks: MaskBudget,
}

/// The nodes of a plan.
pub struct PlanGraph {
    /// The first node is [`PlanNode::End`].
    pub nodes: Vec<PlanNode>,
    /// The id of the node where the answer starts.
    pub start: NodeId,
}

/// A token that leads to the node `to`.
#[derive(Clone, Copy)]
pub struct TokenEdge {
    pub token: u32,
    pub to: NodeId,
}

/// A list of tokens that leads to the node `to`, such as the header of a harmony message.
#[derive(Clone)]
pub struct TokenListEdge {
    pub tokens: Vec<u32>,
    pub to: NodeId,
}

/// A tag that leads to the node `to`. The tokenizer may split the tag into any ordinary tokens.
#[derive(Clone, Copy)]
pub struct TagEdge {
    pub tag: &'static str,
    pub to: NodeId,
}

/// What the answer may contain at one node of the plan, and the edges to other nodes.
pub enum PlanNode {
    /// The end of the answer, where only stop tokens are allowed.
    End,
    /// One of several lists of tokens. Example: the possible headers of a message.
    Choice(Vec<TokenListEdge>),
    /// Text without a grammar.
    FreeText(FreeText),
    /// Text that matches a grammar.
    Grammar {
        /// Boxed, because a compiled grammar is much larger than the other variants.
        grammar: Box<CompiledGrammar>,
        /// The tokens that may come instead of the text.
        instead: Vec<TokenEdge>,
        /// The tokens that may come after the whole text.
        after: Vec<TokenEdge>,
    },
}

/// Text without a grammar. If neither `exits` nor `tag` ends the text, it lasts until the sequence ends.
#[derive(Default)]
pub struct FreeText {
    /// The tokens that end the text.
    pub exits: Vec<TokenEdge>,
    /// A tag that ends the text if ordinary tokens spell it. A control token for the tag belongs in `exits`.
    pub tag: Option<TagEdge>,
    /// Tokens that must not be in the text: they would end the answer, or start a message or tool call, too early.
    pub premature: Vec<u32>,
    /// The token that replaces a premature token. If `None`, a premature token is an error.
    pub replacement: Option<u32>,
}

/// Returns an edge to the node `to` for each of `tokens`.
pub fn all_to(tokens: &[u32], to: NodeId) -> Vec<TokenEdge> {
    tokens.iter().map(|&token| TokenEdge { token, to }).collect()
}
