//! Assigns the generated tokens of one answer to its text.

use std::collections::VecDeque;

use crate::chat::{Channel, Delta};
use crate::engine::TokenLogprobs;
use crate::tokenizer::Tokenizer;

/// A token of the content with its log probabilities.
#[derive(Clone, Debug)]
pub struct ScoredToken {
    pub id: u32,
    pub logprobs: TokenLogprobs,
}

/// Returns the log probability, but at least -9999, as in OpenAI's API.
/// JSON cannot represent -inf, the value for impossible tokens.
pub fn finite_logprob(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// The tokens of one answer whose text was not sent yet.
///
/// Two filters can hold back the text of a token. First, the chat parser decides on which channel the text is.
/// Then, if the text is on the answer channel, the stop filter decides whether the text may begin a stop string.
#[derive(Default)]
pub struct TextTokens {
    /// `Some` if the tokens of the content include tokens without text: the tokens that were not sent yet.
    /// The other lists are then empty.
    all: Option<Vec<ScoredToken>>,
    /// The tokens whose text the parser holds back, and the tokens of headers and tags.
    unparsed: Vec<UnparsedToken>,
    /// The tokens whose text the stop filter holds back.
    held: VecDeque<HeldToken>,
    /// The number of bytes of answer text that have passed the parser.
    parsed_bytes: usize,
    /// The number of bytes of answer text that have passed the stop filter.
    released_bytes: usize,
    reasoning_tokens: usize,
}

enum UnparsedToken {
    Text(PendingToken),
    /// A control token, or a stop token of the request. In harmony, a control token belongs to a header or ends a
    /// message. In other formats, it is a tag, or a token that the parser drops.
    Control,
}

struct PendingToken {
    id: u32,
    logprobs: Option<TokenLogprobs>,
}

/// A token of the answer channel.
struct HeldToken {
    token: PendingToken,
    /// The offset in the answer text at which the text of the token begins.
    start: usize,
}

/// The size of a text that has passed the parser.
struct ParsedText {
    channel: Channel,
    bytes: usize,
    /// The least number of token bytes that decode to the text. It is less than `bytes` if the text has U+FFFD, which
    /// has 3 bytes but can replace a single invalid byte.
    min_token_bytes: usize,
}

impl ParsedText {
    /// `delivered` is the text of the delta. An answer delta can begin with text that has passed the parser earlier,
    /// and can lack the end of the new text, which the stop filter holds back.
    fn new(channel: Channel, bytes: usize, delivered: &str) -> Self {
        let replaced = delivered.matches('\u{FFFD}').count();
        Self { channel, bytes, min_token_bytes: bytes.saturating_sub(2 * replaced).max(1) }
    }
}

impl TextTokens {
    /// Creates the state of an answer that has no tokens yet. If `keeps_all`, the tokens of the content include tokens
    /// without text, such as stop tokens. Allowed only for an answer without a chat format.
    pub fn new(keeps_all: bool) -> Self {
        Self { all: keeps_all.then(Vec::new), ..Self::default() }
    }

    /// Returns the number of tokens on the reasoning channel so far.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Adds a generated token. `has_text` is false for control tokens and for the stop tokens of the request.
    pub fn push(&mut self, id: u32, logprobs: Option<TokenLogprobs>, has_text: bool) {
        let token = PendingToken { id, logprobs };
        if let Some(all) = &mut self.all {
            all.extend(scored(token));
        } else if has_text {
            self.unparsed.push(UnparsedToken::Text(token));
        } else if matches!(self.unparsed.last(), Some(UnparsedToken::Text(_))) {
            // The token only separates the text tokens before it from those after it, so one separator is enough.
            self.unparsed.push(UnparsedToken::Control);
        }
    }

    /// Assigns tokens to the text that has passed the parser with the last event.
    /// Returns the tokens of tool calls, without those that lack log probabilities.
    ///
    /// `deltas` are the texts of the event, after the stop filter. Neighbors are on different channels.
    /// `answer_bytes` is the length of all answer text that has passed the parser so far.
    pub fn assign(&mut self, deltas: &[Delta], answer_bytes: usize, tokenizer: &Tokenizer) -> Vec<ScoredToken> {
        let mut call_tokens = Vec::new();
        if self.all.is_some() {
            return call_tokens;
        }
        let texts = self.parsed_texts(deltas, answer_bytes);
        // The last tokens belong to the last text.
        for text in texts.iter().rev() {
            let tokens = self.take_last(text, tokenizer);
            match text.channel {
                Channel::Reasoning => self.reasoning_tokens += tokens.len(),
                Channel::Answer => self.hold(tokens, answer_bytes),
                Channel::ToolCall => {
                    let tokens = tokens.into_iter().filter_map(|(token, _)| scored(token));
                    call_tokens.splice(..0, tokens);
                }
            }
        }
        if !texts.is_empty() {
            // The tokens that are left over belong to headers and tags.
            self.unparsed.clear();
        }
        call_tokens
    }

    /// Returns the texts that have passed the parser with the last event, in order. None of them is empty.
    fn parsed_texts(&self, deltas: &[Delta], answer_bytes: usize) -> Vec<ParsedText> {
        let others = |deltas: &[Delta]| -> Vec<ParsedText> {
            let others = deltas.iter().filter(|delta| delta.channel != Channel::Answer);
            others.map(|delta| ParsedText::new(delta.channel, delta.text.len(), &delta.text)).collect()
        };
        // An answer delta can begin with text that has passed the parser earlier, and can lack text that has passed the
        // parser with this event. The length of the answer text therefore comes from `answer_bytes`. The new text is in
        // the last answer delta. If there is none, the stop filter holds all new answer text back.
        let last = deltas.iter().rposition(|delta| delta.channel == Channel::Answer);
        let (before, after) = deltas.split_at(last.unwrap_or(deltas.len()));
        let mut texts = others(before);
        let new_answer_bytes = answer_bytes - self.parsed_bytes;
        if new_answer_bytes > 0 {
            let delivered = after.first().map_or("", |delta| &delta.text);
            texts.push(ParsedText::new(Channel::Answer, new_answer_bytes, delivered));
        }
        texts.extend(others(after));
        texts
    }

    /// Removes and returns the last unparsed tokens that cover a text, each with the length of its text.
    fn take_last(&mut self, text: &ParsedText, tokenizer: &Tokenizer) -> VecDeque<(PendingToken, usize)> {
        let (mut tokens, mut covered) = (VecDeque::new(), 0);
        while covered < text.bytes {
            match self.unparsed.pop() {
                // A header before the text is not part of it. But the parser can also return text that it held back
                // before a control token, so go on if the tokens are too short for the text.
                Some(UnparsedToken::Control) if covered >= text.min_token_bytes => break,
                Some(UnparsedToken::Control) => {}
                Some(UnparsedToken::Text(token)) => {
                    let bytes = tokenizer.table().bytes(token.id).len();
                    covered += bytes;
                    tokens.push_front((token, bytes));
                }
                None => break,
            }
        }
        tokens
    }

    /// Adds tokens of answer text that ends at the offset `end` of the answer text.
    fn hold(&mut self, tokens: VecDeque<(PendingToken, usize)>, end: usize) {
        let mut left: usize = tokens.iter().map(|(_, bytes)| bytes).sum();
        for (token, bytes) in tokens {
            // The first token can begin before the text: the parser may have dropped whitespace.
            let start = end.saturating_sub(left).max(self.parsed_bytes);
            left -= bytes;
            self.held.push_back(HeldToken { token, start });
        }
        self.parsed_bytes = end;
    }

    /// Returns the tokens of the next `bytes` bytes of answer text, which the client now receives.
    /// A token belongs to the text in which it begins. Omits tokens without log probabilities.
    pub fn release(&mut self, bytes: usize) -> Vec<ScoredToken> {
        if let Some(all) = &mut self.all {
            return std::mem::take(all);
        }
        self.released_bytes += bytes;
        let released = self.held.partition_point(|held| held.start < self.released_bytes);
        self.held.drain(..released).filter_map(|held| scored(held.token)).collect()
    }

    /// Returns the tokens without text that come after all text, if the answer keeps such tokens.
    pub fn finish(&mut self) -> Vec<ScoredToken> {
        self.all.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

fn scored(PendingToken { id, logprobs }: PendingToken) -> Option<ScoredToken> {
    Some(ScoredToken { id, logprobs: logprobs? })
}
