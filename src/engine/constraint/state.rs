//! [`ConstraintState`]: the position of one sequence in the plan of its answer.

use std::sync::Arc;

use anyhow::{Result, bail};
use llguidance::Matcher;

use super::compiler::invalid;
use super::cpu_time::thread_time;
use super::plan::{FreeText, NodeId, Plan, PlanNode, TagEdge};
use crate::kernels::sampling::TokenMask;

/// The position of one sequence in its plan. Clones are independent, but their matchers share lexer states.
#[derive(Clone)]
pub struct ConstraintState {
    plan: Arc<Plan>,
    node: NodeId,
    progress: NodeProgress,
    /// See [`ConstraintState::must_end`].
    must_end: bool,
}

/// The progress of a sequence at its current node.
#[derive(Clone)]
enum NodeProgress {
    End,
    /// The indices of the edges that are still possible, and how many of their tokens have been generated.
    Choice {
        possible: Vec<usize>,
        position: usize,
    },
    /// The last bytes of the text, which may be the start of the tag.
    FreeText {
        tail: Vec<u8>,
    },
    /// The position in a grammar, and whether the text has begun.
    /// The matcher consumes the `unread` tokens only in [`ConstraintState::allowed_tokens`],
    /// so that on a GPU, this work can overlap with the pass.
    Grammar {
        matcher: Box<Matcher>,
        unread: Vec<u32>,
        has_text: bool,
    },
}

impl ConstraintState {
    /// Returns the state at the start of a plan.
    pub fn new(plan: Arc<Plan>) -> Self {
        let start = plan.graph.start;
        let mut state = Self { plan, node: start, progress: NodeProgress::End, must_end: false };
        state.enter(start);
        state
    }

    fn enter(&mut self, node: NodeId) {
        self.node = node;
        self.progress = match &self.plan.graph.nodes[node] {
            PlanNode::End => NodeProgress::End,
            PlanNode::Choice(edges) => NodeProgress::Choice { possible: (0..edges.len()).collect(), position: 0 },
            PlanNode::FreeText(_) => NodeProgress::FreeText { tail: Vec::new() },
            PlanNode::Grammar { grammar, .. } => {
                let matcher = Box::new(grammar.matcher.clone());
                NodeProgress::Grammar { matcher, unread: Vec::new(), has_text: false }
            }
        };
    }

    /// Returns whether [`allowed_tokens`](Self::allowed_tokens) limits the next token.
    pub fn is_constrained(&self) -> bool {
        !matches!(self.progress, NodeProgress::FreeText { .. })
    }

    /// Returns whether the last mask allowed only stop tokens, or only tokens after the complete text of a grammar.
    pub fn must_end(&self) -> bool {
        self.must_end
    }

    /// Returns the tokens that may come next, or `None` for all tokens.
    /// Fails if the grammar's text cannot end here and no token other than a stop token can continue it,
    /// if computing the mask exceeds a limit of `GrammarCompiler`, or if the request's masks take too much CPU time.
    pub fn allowed_tokens(&mut self) -> Result<Option<TokenMask>> {
        let plan = self.plan.clone();
        let mut mask = TokenMask::none(plan.vocab_size);
        self.must_end = false;
        match (&mut self.progress, &plan.graph.nodes[self.node]) {
            (NodeProgress::Choice { possible, position }, PlanNode::Choice(edges)) => {
                possible.iter().for_each(|&index| mask.allow(edges[index].tokens[*position]));
                self.must_end = possible.iter().all(|&index| plan.stops.contains(&edges[index].tokens[*position]));
            }
            (NodeProgress::Grammar { matcher, unread, has_text }, PlanNode::Grammar { grammar, instead, after }) => {
                let read = std::mem::take(unread);
                let started = thread_time();
                let text = read_mask(matcher, &read).map_err(|problem| invalid(&grammar.name, &problem.to_string()))?;
                if !plan.masks.spend(thread_time().saturating_sub(started)) {
                    return Err(invalid(&grammar.name, "computing the allowed tokens takes too much CPU time"));
                }
                let can_end = match text {
                    Some(text) => {
                        mask = TokenMask::from_words(text.as_slice(), plan.vocab_size);
                        mask.is_allowed(plan.end)
                    }
                    None => true,
                };
                // A stop token ends the sequence, so it must not be part of the grammar's text.
                plan.stops.iter().chain([&plan.end]).for_each(|&stop| mask.forbid(stop));
                self.must_end = can_end && mask.is_empty();
                let ends = after.iter().filter(|_| can_end);
                ends.chain(instead.iter().filter(|_| !*has_text)).for_each(|edge| mask.allow(edge.token));
                if mask.is_empty() {
                    return Err(invalid(&grammar.name, "the grammar requires text that contains a stop token"));
                }
            }
            (NodeProgress::FreeText { .. }, _) => return Ok(None),
            _ => {
                plan.stops.iter().for_each(|&stop| mask.allow(stop));
                self.must_end = true;
            }
        }
        Ok(Some(mask))
    }

    /// Records the next token. Returns `token`, or its replacement if `token` is premature (see `FreeText::premature`).
    /// Fails if a premature token has no replacement, if no edge of a choice continues with `token`,
    /// or if text other than whitespace follows a tag in the same token.
    pub fn advance(&mut self, token: u32) -> Result<u32> {
        let plan = self.plan.clone();
        let mut token = token;
        let next = match (&mut self.progress, &plan.graph.nodes[self.node]) {
            (NodeProgress::Choice { possible, position }, PlanNode::Choice(edges)) => {
                possible.retain(|&index| edges[index].tokens[*position] == token);
                *position += 1;
                let Some(&first) = possible.first() else { bail!("internal error: token {token} was not allowed") };
                let edge = &edges[first];
                (edge.tokens.len() == *position).then_some(edge.to)
            }
            (NodeProgress::FreeText { tail }, PlanNode::FreeText(free)) => {
                if free.premature.contains(&token) {
                    let Some(replacement) = free.replacement else {
                        bail!("cannot match the constraint: the model ended its answer or called a tool too early");
                    };
                    token = replacement;
                }
                leave_free_text(free, tail, token, &plan)?
            }
            (NodeProgress::Grammar { unread, has_text, .. }, PlanNode::Grammar { instead, after, .. }) => {
                let mut edges = after.iter().chain(instead.iter().filter(|_| !*has_text));
                let node = edges.find(|edge| edge.token == token).map(|edge| edge.to);
                if node.is_none() {
                    unread.push(token);
                    *has_text = true;
                }
                node
            }
            _ => None,
        };
        if let Some(node) = next {
            self.enter(node);
        }
        Ok(token)
    }
}

/// Lets a matcher consume tokens.
/// Returns the tokens that may come next, or `None` if the text is complete and cannot continue.
fn read_mask(matcher: &mut Matcher, tokens: &[u32]) -> Result<Option<llguidance::toktrie::SimpleVob>> {
    if !tokens.is_empty() {
        matcher.consume_tokens(tokens)?;
    }
    if matcher.is_error() || !matcher.is_stopped() {
        // If the matcher has an error, `compute_mask` returns it.
        matcher.compute_mask().map(Some)
    } else if matcher.stop_reason().is_ok() {
        Ok(None)
    } else {
        bail!("{}", matcher.stop_reason())
    }
}

/// Returns the node that comes after free text, or `None` if `token` does not end the text.
/// Fails if `token` completes the tag and also contains text other than whitespace after it.
fn leave_free_text(free: &FreeText, tail: &mut Vec<u8>, token: u32, plan: &Plan) -> Result<Option<NodeId>> {
    if let Some(exit) = free.exits.iter().find(|exit| exit.token == token) {
        return Ok(Some(exit.to));
    }
    let (Some(TagEdge { tag, to }), table) = (free.tag, plan.language.tokenizer.table()) else { return Ok(None) };
    if table.is_control(token) {
        tail.clear();
        return Ok(None);
    }
    tail.extend(table.bytes(token));
    let Some(at) = tail.windows(tag.len()).position(|window| window == tag.as_bytes()) else {
        let excess = tail.len().saturating_sub(tag.len() - 1);
        tail.drain(..excess);
        return Ok(None);
    };
    // A grammar in the next node applies from the next token on, so it cannot check text after the tag in this token.
    if !tail[at + tag.len()..].iter().all(u8::is_ascii_whitespace) {
        bail!("cannot match the constraint: the model generated text after {tag} in the same token");
    }
    Ok(Some(to))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::engine::constraint::cpu_time::MaskBudget;
    use crate::engine::constraint::plan::{END, PlanGraph, TokenEdge, TokenListEdge};
    use crate::language::Language;
    use crate::tokenizer::{ControlTokens, Tokenizer};

    const STOP: u32 = 1993;

    /// Returns the state of a plan that begins with free text, at node 1. Node 2 allows two lists of tokens:
    /// 5, 6, 7 leads to more free text, and 5, 8 to the end.
    fn state(free: FreeText) -> ConstraintState {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        let tokenizer = Tokenizer::from_dir(&demo).unwrap();
        let language = Arc::new(Language::new(tokenizer, None, serde_json::Value::Null, vec![STOP]));
        let edges = vec![TokenListEdge { tokens: vec![5, 6, 7], to: 3 }, TokenListEdge { tokens: vec![5, 8], to: END }];
        let nodes = vec![
            PlanNode::End,
            PlanNode::FreeText(free),
            PlanNode::Choice(edges),
            PlanNode::FreeText(FreeText::default()),
        ];
        let graph = PlanGraph { nodes, start: 1 };
        let masks = MaskBudget::default();
        let plan = Plan { language, graph, stops: vec![STOP], vocab_size: 2000, end: STOP, masks };
        ConstraintState::new(Arc::new(plan))
    }

    fn push_text(state: &mut ConstraintState, text: &str) -> Result<()> {
        let ids = state.plan.language.tokenizer.encode(text, ControlTokens::Text).unwrap();
        ids.into_iter().try_for_each(|id| state.advance(id).map(drop))
    }

    fn allowed(state: &mut ConstraintState) -> Vec<u32> {
        let mask = state.allowed_tokens().unwrap().unwrap();
        (0..2000).filter(|&id| mask.is_allowed(id)).collect()
    }

    #[test]
    fn a_list_of_tokens_leads_to_its_node() {
        let mut state = state(FreeText { exits: vec![TokenEdge { token: 9, to: 2 }], ..FreeText::default() });
        assert!(!state.is_constrained() && state.allowed_tokens().unwrap().is_none());
        assert_eq!(state.advance(9).unwrap(), 9);
        let mut other = state.clone();
        assert_eq!(allowed(&mut state), [5]);
        state.advance(5).unwrap();
        assert_eq!(allowed(&mut state), [6, 8]);
        state.advance(6).unwrap();
        state.advance(7).unwrap();
        assert!(!state.is_constrained(), "the tokens 5, 6, 7 must lead to free text");
        assert_eq!(allowed(&mut other), [5], "clones must be independent");
        other.advance(5).unwrap();
        other.advance(8).unwrap();
        assert_eq!(allowed(&mut other), [STOP]);
        assert!(other.must_end());
    }

    #[test]
    fn a_tag_ends_free_text_in_any_tokens() {
        let tagged = || state(FreeText { tag: Some(TagEdge { tag: "</think>", to: 2 }), ..FreeText::default() });
        for text in ["</think>", "I think <think> a </ think></think>", "a<</think>"] {
            let mut state = tagged();
            push_text(&mut state, text).unwrap();
            assert!(state.is_constrained(), "{text}");
        }
        let mut state = tagged();
        push_text(&mut state, "</think").unwrap();
        // Token 1997 is a control token, which interrupts the tag.
        state.advance(1997).unwrap();
        push_text(&mut state, ">").unwrap();
        assert!(!state.is_constrained());
    }

    #[test]
    fn premature_tokens_are_replaced_or_are_errors() {
        let exits = || vec![TokenEdge { token: 9, to: 2 }];
        let free = |replacement| FreeText { exits: exits(), premature: vec![STOP], replacement, tag: None };
        let mut replaced = state(free(Some(9)));
        assert_eq!(replaced.advance(STOP).unwrap(), 9);
        assert_eq!(allowed(&mut replaced), [5]);
        assert!(state(free(None)).advance(STOP).is_err());
    }
}
