//! The plan of an answer: the answer's parts, and the tokens that lead from one part to the next.

use std::sync::Arc;

use super::compiler::CompiledGrammar;
use super::cpu_time::MaskBudget;
use crate::language::Language;

/// The index of a part in a plan.
pub type PartId = usize;

/// The id of [`AnswerPart::End`] in every plan.
pub const END: PartId = 0;

/// The possible parts of an answer, and other data that the sequences of a request share.
pub struct Plan {
    pub language: Arc<Language>,
    pub parts: Vec<AnswerPart>,
    /// The id of the part where the answer starts.
    pub start: PartId,
    /// The tokens that end a sequence: the stop tokens of the model and of the request.
    pub stops: Vec<u32>,
    pub vocab_size: usize,
    /// The token that llguidance's masks allow where the text of a grammar may end.
    pub end: u32,
    /// Limits the CPU time that all sequences of the request together spend on slow token masks.
    pub masks: MaskBudget,
}

/// What one part of an answer may contain, and the parts that may follow.
pub enum AnswerPart {
    /// The end of the answer, where only stop tokens are allowed.
    End,
    /// One of several token sequences, each with the part that follows. Example: the possible headers of a message.
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

/// Text without a grammar. If neither `exits` nor `tag` ends the text, it lasts until the sequence ends.
#[derive(Default)]
pub struct Free {
    /// The tokens that end the text, each with the part that follows.
    pub exits: Vec<(u32, PartId)>,
    /// A tag that ends the text if ordinary tokens spell it, and the part that follows.
    /// A control token for the tag belongs in `exits`.
    pub tag: Option<(&'static str, PartId)>,
    /// Tokens that must not be in the text: they would end the answer, or start a message or tool call, too early.
    pub premature: Vec<u32>,
    /// The token that replaces a premature token. If `None`, a premature token is an error.
    pub replacement: Option<u32>,
}

/// Pairs each of `tokens` with `part`, the part that follows the token.
pub fn all_to(tokens: &[u32], part: PartId) -> Vec<(u32, PartId)> {
    tokens.iter().map(|&token| (token, part)).collect()
}
