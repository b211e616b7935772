//! The plan of an answer: the answer's parts, and the tokens that lead from one part to the next.

use std::sync::Arc;

use super::compiler::CompiledGrammar;
use super::cpu_time::MaskBudget;
use crate::language::Language;

/// The index of a part in a plan.
pub type PartId = usize;

/// The id of the part in which an answer ends. Only stop tokens are allowed in this part.
pub const END: PartId = 0;

/// The possible parts of an answer, and the data that all sequences of a request share.
pub struct Plan {
    pub language: Arc<Language>,
    pub parts: Vec<AnswerPart>,
    /// The id of the part where the answer starts.
    pub start: PartId,
    /// The tokens that end the sequence.
    pub stops: Vec<u32>,
    pub vocab_size: usize,
    /// The token that represents the end of the text in token masks.
    pub end: u32,
    /// Limits the total CPU time that the sequences of the request spend on token masks.
    pub masks: MaskBudget,
}

/// One part of an answer, and the tokens that are allowed in it.
pub enum AnswerPart {
    /// The end of the answer, where only stop tokens are allowed.
    End,
    /// One of several token sequences, such as the possible headers of a message.
    Choice(Vec<(Vec<u32>, PartId)>),
    /// Text without a grammar.
    Free(Free),
    /// Text that matches a grammar.
    Grammar {
        /// Boxed, because a compiled grammar is much larger than the other variants.
        grammar: Box<CompiledGrammar>,
        /// The tokens that may come instead of the text, each with the part that follows.
        instead: Vec<(u32, PartId)>,
        /// The tokens that may come after the whole text, each with the part that follows.
        after: Vec<(u32, PartId)>,
    },
}

/// Text without a grammar, up to a token or a tag.
#[derive(Default)]
pub struct Free {
    /// The tokens that end the text, each with the part that follows.
    pub exits: Vec<(u32, PartId)>,
    /// A tag that ends the text if ordinary tokens spell it, and the part that follows.
    /// A control token for the tag belongs in `exits`.
    pub tag: Option<(&'static str, PartId)>,
    /// Tokens that are not allowed in the text: they would end the answer, or start a message or tool call, too early.
    pub premature: Vec<u32>,
    /// The token that replaces a premature token. If `None`, a premature token is an error.
    pub replacement: Option<u32>,
}

/// Pairs each of `tokens` with `part`, the part that follows the token.
pub fn all_to(tokens: &[u32], part: PartId) -> Vec<(u32, PartId)> {
    tokens.iter().map(|&token| (token, part)).collect()
}
