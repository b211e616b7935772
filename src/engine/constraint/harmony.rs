//! Plans an answer in harmony, the chat format of gpt-oss. `chat/harmony` describes the format.
//!
//! Headers are constrained, so that every message has a known channel, and every tool call names a declared tool.
//! Each header is allowed only in the tokenization of the training data, not as other tokens with the same text.
//! The grammar of the answer applies to the message in the channel `final`, which follows any reasoning.
//! If the model tries to leave a message without `<|end|>`, this token replaces the token that the model chose.
//!
//! The variants of headers for tool calls resemble those in vLLM's `vllm/parser/harmony.py` (commit 053e68e).
//! Unlike in vLLM, a header may omit the content type, and no tool call may be in the channel `final`.

use anyhow::Result;

use super::ToolGrammar;
use super::context::ConstrainedRequest;
use super::plan::{END, FreeText, NodeId, PlanGraph, PlanNode, TokenEdge, TokenListEdge, all_to};
use crate::chat::{HarmonyTokens, harmony_recipient};
use crate::tokenizer::ControlTokens;

/// The header of the first message. The header omits `<|start|>assistant` if the prompt ends with this text.
const FIRST: NodeId = 1;
/// The header of a later message.
const NEXT: NodeId = 2;
const ANALYSIS: NodeId = 3;
const FINAL: NodeId = 4;
/// A commentary message that is not a tool call, such as text before a tool call.
const PREAMBLE: NodeId = 5;
/// The arguments of a call to the first tool. The nodes for the other tools follow, in order.
const TOOLS: NodeId = 6;

/// Returns the graph of an answer in harmony.
/// If `has_generation_prompt` is true, the prompt ends with `<|start|>assistant`, and the answer begins in a header.
pub fn graph(request: &ConstrainedRequest, tokens: HarmonyTokens, has_generation_prompt: bool) -> Result<PlanGraph> {
    let (constraint, planner) = (&request.constraint, HarmonyPlanner { request, tokens });
    let headers = planner.headers()?;
    let with_reasoning = [vec![planner.header("analysis", ANALYSIS)?], headers.clone()].concat();
    // If the answer must have a constrained message or call, only its first message can be reasoning.
    let next = if constraint.is_required() { headers } else { with_reasoning.clone() };
    let first = if has_generation_prompt { with_reasoning } else { planner.with_start(with_reasoning)? };
    // A required message or tool call must follow reasoning and preambles, so these must not end the answer.
    let too_early = if constraint.is_required() { request.language.stop_ids() } else { &[] };
    let before_tools: [(NodeId, PlanNode); TOOLS] = [
        (END, PlanNode::End),
        (FIRST, PlanNode::Choice(first)),
        (NEXT, PlanNode::Choice(planner.with_start(next)?)),
        (ANALYSIS, planner.text(too_early)),
        (FINAL, planner.final_message(too_early)?),
        (PREAMBLE, planner.text(too_early)),
    ];
    debug_assert!(before_tools.iter().enumerate().all(|(index, (id, _))| index == *id), "a node's id is not its index");
    let mut nodes: Vec<PlanNode> = before_tools.into_iter().map(|(_, node)| node).collect();
    for tool in &constraint.tools {
        nodes.push(planner.arguments(tool)?);
    }
    Ok(PlanGraph { nodes, start: FIRST })
}

/// Creates the nodes and edges of a graph.
struct HarmonyPlanner<'r> {
    request: &'r ConstrainedRequest,
    tokens: HarmonyTokens,
}

impl HarmonyPlanner<'_> {
    /// Returns the node for the content of a message without a grammar. `too_early` are stop tokens that would end the
    /// answer before it has matched the constraint.
    fn text(&self, too_early: &[u32]) -> PlanNode {
        // Within a message, the model must not start another message without `<|end|>`.
        let premature = [&[self.tokens.start, self.tokens.channel], too_early].concat();
        let exits = all_to(&[self.tokens.end], NEXT);
        PlanNode::FreeText(FreeText { exits, premature, replacement: Some(self.tokens.end), ..FreeText::default() })
    }

    /// Returns the node for the content of a message in the channel `final`.
    fn final_message(&self, too_early: &[u32]) -> Result<PlanNode> {
        match &self.request.constraint.answer {
            Some(answer) if !self.request.constraint.requires_tool => {
                self.request.grammar(answer, Vec::new(), self.answer_ends(self.tokens.end_of_turn))
            }
            _ => Ok(self.text(too_early)),
        }
    }

    /// Returns the node for the arguments of a call of `tool`.
    fn arguments(&self, tool: &ToolGrammar) -> Result<PlanNode> {
        let Some(arguments) = &tool.arguments else {
            // A tool call may end the answer, even if the constraint has a grammar for the answer's text.
            return Ok(self.text(&[]));
        };
        let mut after = self.answer_ends(self.tokens.call.unwrap_or(self.tokens.end_of_turn));
        if self.request.constraint.can_call_in_parallel {
            after.push(TokenEdge { token: self.tokens.end, to: NEXT });
        }
        self.request.grammar(arguments, Vec::new(), after)
    }

    /// Returns edges that end the answer: `token` and the stop tokens of the request.
    fn answer_ends(&self, token: u32) -> Vec<TokenEdge> {
        all_to(&[&[token], &self.request.stop_token_ids[..]].concat(), END)
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.request.language.tokenizer.encode(text, ControlTokens::Text)
    }

    /// Adds `<|start|>assistant` before each header.
    fn with_start(&self, mut headers: Vec<TokenListEdge>) -> Result<Vec<TokenListEdge>> {
        let start = [vec![self.tokens.start], self.encode("assistant")?].concat();
        for header in &mut headers {
            header.tokens.splice(0..0, start.iter().copied());
        }
        Ok(headers)
    }

    /// Returns the header of a message in `channel`, without `<|start|>assistant`. The header leads to the node `to`.
    fn header(&self, channel: &str, to: NodeId) -> Result<TokenListEdge> {
        let tokens = [&[self.tokens.channel], &self.encode(channel)?[..], &[self.tokens.message]].concat();
        Ok(TokenListEdge { tokens, to })
    }

    /// Returns the headers of all allowed messages except reasoning, without `<|start|>assistant`.
    fn headers(&self) -> Result<Vec<TokenListEdge>> {
        let constraint = &self.request.constraint;
        let mut headers = Vec::new();
        if !constraint.requires_tool {
            headers.push(self.header("final", FINAL)?);
        }
        if !constraint.is_required() {
            headers.push(self.header("commentary", PREAMBLE)?);
        }
        for (tool, to) in constraint.tools.iter().zip(TOOLS..) {
            headers.extend(self.call_headers(tool)?.into_iter().map(|tokens| TokenListEdge { tokens, to }));
        }
        Ok(headers)
    }

    /// Returns the allowed headers of a call of `tool`, without `<|start|>assistant`.
    fn call_headers(&self, tool: &ToolGrammar) -> Result<Vec<Vec<u32>>> {
        let HarmonyTokens { channel, message, constrain, .. } = self.tokens;
        // Encode the parts of a header separately, as `chat/harmony` does, so that the tokens are the same.
        let recipient = self.encode(&format!(" to={}", harmony_recipient(&tool.name)))?;
        let mut content_types = vec![Vec::new(), self.encode(" json")?];
        if let Some(constrain) = constrain {
            content_types.push([&self.encode(" ")?[..], &[constrain], &self.encode("json")?].concat());
        }
        let mut headers = Vec::new();
        for name in [self.encode("commentary")?, self.encode("analysis")?] {
            for content_type in &content_types {
                headers.push([&[channel], &name[..], &recipient, content_type, &[message]].concat());
                headers.push([&recipient[..], &[channel], &name, content_type, &[message]].concat());
            }
        }
        Ok(headers)
    }
}
