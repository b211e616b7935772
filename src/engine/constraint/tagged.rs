//! Plans an answer in any chat format except harmony: reasoning in `<think>` tags, tool calls in `<tool_call>` tags.
//!
//! The grammar of the answer applies from the first token, or from the end of the reasoning if there is any.
//!
//! Tool calls have the format of Hermes (github.com/NousResearch/Hermes-Function-Calling), as those of Qwen3:
//!
//! ```text
//! <tool_call>
//! {"name": NAME, "arguments": ARGUMENTS}
//! </tool_call>
//! ```
//!
//! The constraint allows only this order and these spaces and line breaks around the name and the arguments.
//! Tool calls can be constrained only if `<tool_call>` and `</tool_call>` are control tokens, and in no other format,
//! such as those of Llama 3 and Mistral.

use std::fmt::Write;

use anyhow::Result;
use serde_json::json;

use super::compiler::{check_optional_properties, invalid, lark_string, llguidance_schema};
use super::context::ConstrainedRequest;
use super::plan::{END, FreeText, NodeId, PlanGraph, PlanNode, TagEdge, TokenEdge, TokenListEdge, all_to};
use super::{Grammar, GrammarKind, ToolGrammar};
use crate::chat::{END_THINK, END_TOOL_CALL, LLAMA_CALLS, MISTRAL_CALLS, THINK, TOOL_CALL};

/// The start of the answer, if the prompt ends neither with `<think>` nor with `</think>`.
const START: NodeId = 1;
const REASONING: NodeId = 2;
/// The answer after its reasoning.
const ANSWER: NodeId = 3;
const TOOL: NodeId = 4;
/// What comes after a tool call.
const AFTER_TOOL: NodeId = 5;

/// The control tokens `<tool_call>` and `</tool_call>`.
#[derive(Clone, Copy)]
struct ToolTags {
    open: u32,
    close: u32,
}

/// Returns the graph of the answer to `prompt`, the rendered conversation.
pub fn graph(request: &ConstrainedRequest, prompt: &str) -> Result<PlanGraph> {
    let (constraint, stops) = (&request.constraint, request.stops());
    let control = |text: &str| control_token(request, text);
    let tags = tool_tags(request)?;
    let to_tool: Vec<TokenEdge> = tags.iter().map(|tags| TokenEdge { token: tags.open, to: TOOL }).collect();
    let to_reasoning = control(THINK).map(|token| TokenEdge { token, to: REASONING });

    let answer = |instead: Vec<TokenEdge>| -> Result<PlanNode> {
        match &constraint.answer {
            _ if constraint.requires_tool => Ok(choice(&instead)),
            Some(answer) => request.grammar(answer, instead, all_to(&stops, END)),
            None => Ok(PlanNode::FreeText(FreeText { exits: to_tool.clone(), ..FreeText::default() })),
        }
    };
    let start = answer([&to_tool[..], to_reasoning.as_slice()].concat())?;
    let end_think = control(END_THINK);
    let tag = Some(TagEdge { tag: END_THINK, to: ANSWER });
    let mut reasoning = FreeText { exits: to_tool.clone(), tag, ..FreeText::default() };
    reasoning.exits.extend(end_think.map(|token| TokenEdge { token, to: ANSWER }));
    if constraint.is_required() {
        reasoning.premature = request.language.stop_ids().to_vec();
        reasoning.premature.extend(control(TOOL_CALL).filter(|_| tags.is_none()));
        reasoning.replacement = end_think;
    }
    let mut nodes = vec![PlanNode::End, start, PlanNode::FreeText(reasoning), answer(to_tool.clone())?];
    if let Some(tags) = tags {
        // Compile the grammar of each tool on its own first, so that an error names the tool.
        // All tools together are one grammar, so the limit of optional properties also holds for all of them.
        for arguments in constraint.tools.iter().filter_map(|tool| tool.arguments.as_ref()) {
            request.compiler.compile(arguments)?;
        }
        check_optional_properties("tools", constraint.tools.iter().filter_map(ToolGrammar::schema))?;
        let after = if constraint.can_call_in_parallel { to_tool.clone() } else { Vec::new() };
        nodes.push(request.grammar(&tool_calls(&constraint.tools), Vec::new(), all_to(&[tags.close], AFTER_TOOL))?);
        nodes.push(if constraint.is_required() {
            choice(&[after, all_to(&stops, END)].concat())
        } else {
            PlanNode::FreeText(FreeText { exits: to_tool, ..FreeText::default() })
        });
    }
    Ok(PlanGraph { nodes, start: first_node(prompt) })
}

/// Returns the id of the control token `text`, or `None` if the tokenizer has no such control token.
fn control_token(request: &ConstrainedRequest, text: &str) -> Option<u32> {
    let tokenizer = &request.language.tokenizer;
    tokenizer.token_id(text).filter(|&id| tokenizer.is_control(id))
}

/// Returns the tags around tool calls, or `None` if the request has no tools or a tag is not a control token.
///
/// Fails instead of returning `None` if the constraint requires a tool call, or if a tool has a grammar for its
/// arguments and the tokenizer has a control token that starts tool calls of another format.
fn tool_tags(request: &ConstrainedRequest) -> Result<Option<ToolTags>> {
    let constraint = &request.constraint;
    let control = |text: &str| control_token(request, text);
    let has_other_calls = [MISTRAL_CALLS, LLAMA_CALLS].into_iter().any(|token| control(token).is_some());
    match (control(TOOL_CALL), control(END_TOOL_CALL)) {
        (Some(open), Some(close)) if !constraint.tools.is_empty() => Ok(Some(ToolTags { open, close })),
        _ if constraint.requires_tool && request.language.chat.as_ref().is_some_and(|chat| !chat.reads_tools()) => {
            Err(invalid("tool_choice", "the chat template of this model does not support tools"))
        }
        _ if constraint.requires_tool => {
            Err(invalid("tool_choice", "the chat format of this model does not support required tool calls"))
        }
        // The model could call tools in the other format, and the grammars would not constrain these calls.
        _ if has_other_calls && constraint.tools.iter().any(|tool| tool.arguments.is_some()) => {
            Err(invalid("tools", "the chat format of this model does not support strict tools"))
        }
        _ => Ok(None),
    }
}

/// Returns the id of the node at which the answer to `prompt` begins.
fn first_node(prompt: &str) -> NodeId {
    let prompt = prompt.trim_end();
    if prompt.ends_with(THINK) {
        REASONING
    } else if prompt.ends_with(END_THINK) {
        ANSWER
    } else {
        START
    }
}

/// Returns a node at which the answer must continue with the token of one of `edges`.
fn choice(edges: &[TokenEdge]) -> PlanNode {
    PlanNode::Choice(edges.iter().map(|edge| TokenListEdge { tokens: vec![edge.token], to: edge.to }).collect())
}

/// Returns a grammar that matches a call of one of `tools`, without the tags around it.
fn tool_calls(tools: &[ToolGrammar]) -> Grammar {
    let mut lark = String::new();
    let names: Vec<String> = (0..tools.len()).map(|index| format!("call{index}")).collect();
    let _ = writeln!(lark, "start: {}", names.join(" | "));
    for (index, tool) in tools.iter().enumerate() {
        let head = format!("\n{{\"name\": {}, \"arguments\": ", json!(tool.name));
        let _ = writeln!(lark, "call{index}: {} arguments{index} {}", lark_string(&head), lark_string("}\n"));
        let schema = llguidance_schema(tool.schema().unwrap_or(&json!({ "type": "object" })));
        let _ = writeln!(lark, "arguments{index}: %json {schema}");
    }
    let named = tools.iter().find_map(|tool| tool.arguments.as_ref());
    let name = named.map_or("tools", |arguments| arguments.name.as_str()).to_string();
    Grammar { name, kind: GrammarKind::Lark(lark) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::compiler::GrammarCompiler;
    use super::*;
    use crate::tokenizer::Tokenizer;

    #[test]
    fn tools_can_contain_any_character() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        let tokenizer = Tokenizer::from_dir(&demo).unwrap();
        let compiler = GrammarCompiler::new(tokenizer.table(), 2000, &[1993]).unwrap();
        for text in ["a\u{7f}b", "a\u{85}\u{2028}b", "a\"\\\n\0b"] {
            let schema = json!({ "type": "object", "properties": { text: { "const": text } }, "description": text });
            let arguments = Grammar { name: "tools".to_string(), kind: GrammarKind::JsonSchema(schema) };
            let tool = ToolGrammar { name: text.to_string(), arguments: Some(arguments) };
            compiler.compile(&tool_calls(&[tool])).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        }
    }
}
