//! Plans an answer in harmony, the chat format of gpt-oss.
//!
//! Headers are constrained, so that every message has a known channel, and every tool call names a declared tool.
//! Each header is allowed only in the tokenization of the training data, not as other tokens with the same text.
//! No grammar applies to reasoning.
//!
//! The variants of headers for tool calls resemble those in vLLM's `vllm/parser/harmony.py` (commit 053e68e).
//! Unlike in vLLM, a header may omit the content type, and no tool call may be in the channel `final`.

use anyhow::Result;

use super::context::ConstrainedRequest;
use super::plan::{END, Free, NodeId, PlanNode, all_to};
use crate::chat::{Harmony, harmony_recipient};
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

/// Returns the nodes of a plan, and the id of the first node.
pub fn nodes(
    request: &ConstrainedRequest,
    harmony: Harmony,
    has_generation_prompt: bool,
) -> Result<(Vec<PlanNode>, NodeId)> {
    let constraint = &request.constraint;
    let is_required = constraint.is_required();
    let headers = Headers { request, harmony };
    let stop_with = |token: u32| {
        let stops: Vec<u32> = [&[token], &request.stop_token_ids[..]].concat();
        all_to(&stops, END)
    };

    let mut later = headers.later()?;
    let mut first = vec![headers.message("analysis", ANALYSIS)?];
    first.extend(later.iter().cloned());
    if !is_required {
        later = first.clone();
    }
    let opening = [vec![harmony.start], headers.encode("assistant")?].concat();
    let opened = |headers: &[(Vec<u32>, NodeId)]| -> Vec<(Vec<u32>, NodeId)> {
        headers.iter().map(|(header, node)| ([&opening[..], header].concat(), *node)).collect()
    };
    // Within a message, the model must not start another message without `<|end|>`.
    // If `must_continue` is true, the model must also not end the answer, because a required message or tool call is
    // still missing.
    let text = |must_continue: bool| {
        let mut premature = vec![harmony.start, harmony.channel];
        if must_continue {
            premature.extend(request.language.stop_ids());
        }
        let exits = vec![(harmony.end, NEXT)];
        PlanNode::Free(Free { exits, premature, replacement: Some(harmony.end), ..Free::default() })
    };
    let answer = match &constraint.answer {
        Some(answer) if !constraint.requires_tool => {
            request.grammar(answer, Vec::new(), stop_with(harmony.end_of_turn))?
        }
        _ => text(is_required),
    };
    let first = if has_generation_prompt { first } else { opened(&first) };
    let before_tools: [(NodeId, PlanNode); TOOLS] = [
        (END, PlanNode::End),
        (FIRST, PlanNode::Choice(first)),
        (NEXT, PlanNode::Choice(opened(&later))),
        (ANALYSIS, text(is_required)),
        (FINAL, answer),
        (PREAMBLE, text(is_required)),
    ];
    debug_assert!(before_tools.iter().enumerate().all(|(index, (id, _))| index == *id), "a node's id is not its index");
    let mut nodes: Vec<PlanNode> = before_tools.into_iter().map(|(_, node)| node).collect();
    for tool in &constraint.tools {
        nodes.push(match &tool.arguments {
            Some(arguments) => {
                let mut after = stop_with(harmony.call.unwrap_or(harmony.end_of_turn));
                if constraint.can_call_in_parallel {
                    after.push((harmony.end, NEXT));
                }
                request.grammar(arguments, Vec::new(), after)?
            }
            // A tool call may end the answer, even if the constraint has a grammar for the answer's text.
            None => text(false),
        });
    }
    Ok((nodes, FIRST))
}

/// Encodes the headers of messages as tokens, without `<|start|>assistant`.
struct Headers<'r> {
    request: &'r ConstrainedRequest,
    harmony: Harmony,
}

impl Headers<'_> {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.request.language.tokenizer.encode(text, ControlTokens::Text)
    }

    /// Returns the header of a message in `channel`, paired with `node`, which follows the header.
    fn message(&self, channel: &str, node: NodeId) -> Result<(Vec<u32>, NodeId)> {
        let header = [&[self.harmony.channel], &self.encode(channel)?[..], &[self.harmony.message]].concat();
        Ok((header, node))
    }

    /// Returns the headers of all allowed messages except reasoning, each with the node that follows the header.
    fn later(&self) -> Result<Vec<(Vec<u32>, NodeId)>> {
        let constraint = &self.request.constraint;
        let mut headers = Vec::new();
        if !constraint.requires_tool {
            headers.push(self.message("final", FINAL)?);
        }
        if !constraint.is_required() {
            headers.push(self.message("commentary", PREAMBLE)?);
        }
        let Harmony { channel, message, .. } = self.harmony;
        // Encode the pieces of a header separately, as `chat/harmony.rs` does, so that the tokens are the same.
        let mut types = vec![Vec::new(), self.encode(" json")?];
        if let Some(constrain) = self.harmony.constrain {
            types.push([&self.encode(" ")?[..], &[constrain], &self.encode("json")?].concat());
        }
        let channels = [self.encode("commentary")?, self.encode("analysis")?];
        for (tool, node) in constraint.tools.iter().zip(TOOLS..) {
            let recipient = self.encode(&format!(" to={}", harmony_recipient(&tool.name)))?;
            for (name, content_type) in channels.iter().flat_map(|name| types.iter().map(move |kind| (name, kind))) {
                let after_channel = [&[channel], &name[..], &recipient, content_type, &[message]].concat();
                let before_channel = [&recipient[..], &[channel], name, content_type, &[message]].concat();
                headers.extend([(after_channel, node), (before_channel, node)]);
            }
        }
        Ok(headers)
    }
}
