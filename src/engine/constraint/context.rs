//! [`ConstrainedRequest`]: a constraint, and what its compilation needs.

use std::sync::Arc;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::compiler::GrammarCompiler;
use super::plan::{PlanNode, TokenEdge};
use super::{Constraint, Grammar};
use crate::language::Language;

/// A rendered conversation. The answer begins at the end of the rendered text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatPrompt {
    pub text: String,
    /// Whether the text ends with the generation prompt, which is the start of the answer's first message.
    pub has_generation_prompt: bool,
}

/// A request with a constraint, before its grammars are compiled.
pub struct ConstrainedRequest {
    pub compiler: Arc<GrammarCompiler>,
    pub language: Arc<Language>,
    pub constraint: Constraint,
    /// `None` for text completions, which have no chat format.
    pub chat: Option<ChatPrompt>,
    /// The stop tokens of the request, in addition to the model's stop tokens.
    pub stop_token_ids: Vec<u32>,
}

impl ConstrainedRequest {
    /// Returns the stop tokens of the model and of the request.
    pub fn stops(&self) -> Vec<u32> {
        self.language.stop_ids().iter().chain(&self.stop_token_ids).copied().collect()
    }

    /// Compiles a grammar. Returns a [`PlanNode::Grammar`] with the edges `instead` and `after`.
    pub fn grammar(&self, grammar: &Grammar, instead: Vec<TokenEdge>, after: Vec<TokenEdge>) -> Result<PlanNode> {
        let grammar = Box::new(self.compiler.compile(grammar)?);
        Ok(PlanNode::Grammar { grammar, instead, after })
    }
}
