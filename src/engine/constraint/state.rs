//! The position of one sequence in the plan of its answer.

use std::sync::Arc;

use anyhow::{Result, bail};
use llguidance::Matcher;

use super::compiler::invalid;
use super::plan::{Free, Part, PartId, Plan};
use crate::kernels::token_mask::TokenMask;

/// The position of one sequence in its plan. Clones are independent, and share caches of their grammars.
#[derive(Clone)]
pub struct ConstraintState {
    plan: Arc<Plan>,
    part: PartId,
    progress: Progress,
    /// Whether the last mask allowed only tokens that end the answer.
    must_end: bool,
}

/// The position in a part.
#[derive(Clone)]
enum Progress {
    End,
    /// The token sequences that are still possible, and the number of their tokens so far.
    Choice {
        possible: Vec<usize>,
        position: usize,
    },
    /// The end of the text, as long as it may be the start of a tag.
    Free {
        tail: Vec<u8>,
    },
    /// `unread` are the tokens that the matcher has not consumed yet, so that it can do so while the GPU works.
    Grammar {
        matcher: Box<Matcher>,
        unread: Vec<u32>,
        has_text: bool,
    },
}

impl ConstraintState {
    /// Returns the state at the start of a plan.
    pub fn new(plan: Arc<Plan>) -> Self {
        let start = plan.start;
        let mut state = Self { plan, part: start, progress: Progress::End, must_end: false };
        state.enter(start);
        state
    }

    fn enter(&mut self, part: PartId) {
        self.part = part;
        self.progress = match &self.plan.parts[part] {
            Part::End => Progress::End,
            Part::Choice(sequences) => Progress::Choice { possible: (0..sequences.len()).collect(), position: 0 },
            Part::Free(_) => Progress::Free { tail: Vec::new() },
            Part::Grammar { grammar, .. } => {
                let matcher = Box::new(grammar.matcher.clone());
                Progress::Grammar { matcher, unread: Vec::new(), has_text: false }
            }
        };
    }

    /// Returns whether only some tokens may come next.
    pub fn is_constrained(&self) -> bool {
        !matches!(self.progress, Progress::Free { .. })
    }

    /// Returns whether the last mask allowed only tokens that end the answer.
    pub fn must_end(&self) -> bool {
        self.must_end
    }

    /// Returns the tokens that may come next, or `None` if all may. Fails if the grammar cannot be followed any further.
    pub fn allowed_tokens(&mut self) -> Result<Option<TokenMask>> {
        let plan = self.plan.clone();
        let mut mask = TokenMask::none(plan.vocab_size);
        self.must_end = false;
        match (&mut self.progress, &plan.parts[self.part]) {
            (Progress::Choice { possible, position }, Part::Choice(sequences)) => {
                possible.iter().for_each(|&index| mask.allow(sequences[index].0[*position]));
                self.must_end = possible.iter().all(|&index| plan.stops.contains(&sequences[index].0[*position]));
            }
            (Progress::Grammar { matcher, unread, has_text }, Part::Grammar { grammar, instead, after }) => {
                let read = std::mem::take(unread);
                let text = read_mask(matcher, &read).map_err(|problem| invalid(&grammar.name, &problem.to_string()))?;
                let can_end = match text {
                    Some(text) => {
                        mask = TokenMask::from_words(text.as_slice(), plan.vocab_size);
                        mask.is_allowed(plan.end)
                    }
                    None => true,
                };
                // A stop token ends the sequence, so it may come only after the whole text.
                plan.stops.iter().chain([&plan.end]).for_each(|&stop| mask.forbid(stop));
                self.must_end = can_end && mask.is_empty();
                let ends = after.iter().filter(|_| can_end);
                ends.chain(instead.iter().filter(|_| !*has_text)).for_each(|&(token, _)| mask.allow(token));
            }
            (Progress::Free { .. }, _) => return Ok(None),
            _ => {
                plan.stops.iter().for_each(|&stop| mask.allow(stop));
                self.must_end = true;
            }
        }
        Ok(Some(mask))
    }

    /// Records the next token. Returns the token to use, which is another one if the answer must not end yet.
    pub fn advance(&mut self, token: u32) -> Result<u32> {
        let plan = self.plan.clone();
        let mut token = token;
        let next = match (&mut self.progress, &plan.parts[self.part]) {
            (Progress::Choice { possible, position }, Part::Choice(sequences)) => {
                possible.retain(|&index| sequences[index].0[*position] == token);
                *position += 1;
                let Some(&first) = possible.first() else { bail!("internal error: token {token} was not allowed") };
                let (sequence, part) = &sequences[first];
                (sequence.len() == *position).then_some(*part)
            }
            (Progress::Free { tail }, Part::Free(free)) => {
                if free.premature.contains(&token) {
                    let Some(replacement) = free.replacement else {
                        bail!("the model ended its answer before the part that the request's constraint requires");
                    };
                    token = replacement;
                }
                leave_free(free, tail, token, &plan)?
            }
            (Progress::Grammar { unread, has_text, .. }, Part::Grammar { instead, after, .. }) => {
                let leaves = after.iter().chain(instead.iter().filter(|_| !*has_text));
                let part = leaves.clone().find(|(exit, _)| *exit == token).map(|(_, part)| *part);
                if part.is_none() {
                    unread.push(token);
                    *has_text = true;
                }
                part
            }
            _ => None,
        };
        if let Some(part) = next {
            self.enter(part);
        }
        Ok(token)
    }
}

/// Lets a matcher consume tokens. Returns the tokens that may come next, or `None` if the text is complete.
fn read_mask(matcher: &mut Matcher, tokens: &[u32]) -> Result<Option<llguidance::toktrie::SimpleVob>> {
    if !tokens.is_empty() {
        matcher.consume_tokens(tokens)?;
    }
    match matcher.is_stopped() && !matcher.is_error() {
        true if matcher.stop_reason().is_ok() => Ok(None),
        true => bail!("{}", matcher.stop_reason()),
        false => matcher.compute_mask().map(Some),
    }
}

/// Returns the part that comes after free text, if `token` ends the text.
fn leave_free(free: &Free, tail: &mut Vec<u8>, token: u32, plan: &Plan) -> Result<Option<PartId>> {
    if let Some((_, part)) = free.exits.iter().find(|(exit, _)| *exit == token) {
        return Ok(Some(*part));
    }
    let (Some((tag, part)), table) = (free.tag, plan.language.tokenizer.table()) else { return Ok(None) };
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
    // The grammar has not seen the text after the tag.
    if !tail[at + tag.len()..].iter().all(u8::is_ascii_whitespace) {
        bail!("the model continued its answer in the token that ends {tag}");
    }
    Ok(Some(part))
}
