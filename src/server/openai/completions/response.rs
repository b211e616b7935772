//! The bodies of text completion responses. Non-streamed responses and the chunks of a stream have the same shape.

use serde::{Serialize, Serializer};

use crate::engine::{ScoredPrompt, TokenLogprobs};
use crate::server::generation::pieces::Finish;
use crate::server::generation::reply::ReplyHeader;
use crate::server::generation::text_tokens::{ScoredToken, finite_logprob};
use crate::server::generation::usage::Usage;
use crate::tokenizer::Tokenizer;

/// The body of a response that is not streamed, or a chunk of a stream.
#[derive(Serialize)]
pub struct Completion<'a> {
    #[serde(flatten)]
    pub header: &'a ReplyHeader,
    pub choices: Vec<WireChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

#[derive(Serialize)]
pub struct WireChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<Logprobs>,
    pub finish_reason: Option<Finish>,
}

impl WireChoice {
    /// Appends the next part of the same choice.
    pub fn append(&mut self, part: WireChoice) {
        self.text.push_str(&part.text);
        if let (Some(all), Some(more)) = (&mut self.logprobs, part.logprobs) {
            all.tokens.extend(more.tokens);
            all.token_logprobs.extend(more.token_logprobs);
            all.top_logprobs.extend(more.top_logprobs);
            all.text_offset.extend(more.text_offset);
        }
        self.finish_reason = part.finish_reason.or(self.finish_reason);
    }
}

/// The log probabilities of tokens, as parallel arrays.
#[derive(Default, Serialize)]
pub struct Logprobs {
    tokens: Vec<String>,
    /// The log probability of each token. `None` for the first token of a prompt, because no token precedes it.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Alternatives>>,
    /// The character offset of each token in the text. Approximate, for example if several tokens form one character.
    text_offset: Vec<usize>,
}

/// The most likely tokens with their log probabilities, serialized as an object.
struct Alternatives(Vec<(String, f32)>);

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

impl Logprobs {
    /// Adds the log probabilities of generated tokens, whose text starts at character `offset`.
    /// Returns the offset at which the text of these tokens ends.
    pub fn extend(&mut self, tokens: &[ScoredToken], mut offset: usize, tokenizer: &Tokenizer) -> usize {
        for token in tokens {
            self.push(token.id, Some(&token.logprobs), offset, tokenizer);
            offset += begun_characters(&tokenizer.table().bytes(token.id));
        }
        offset
    }

    /// Adds the log probabilities of prompt tokens. `echo` is the text of the prompt.
    pub fn add_prompt(&mut self, prompt: &ScoredPrompt, echo: &str, tokenizer: &Tokenizer) {
        let offsets = echo_offsets(&prompt.tokens, echo, tokenizer);
        let logprobs = std::iter::once(None).chain(prompt.logprobs.iter().map(Some));
        for ((&id, offset), logprobs) in prompt.tokens.iter().zip(offsets).zip(logprobs) {
            self.push(id, logprobs, offset, tokenizer);
        }
    }

    fn push(&mut self, id: u32, logprobs: Option<&TokenLogprobs>, offset: usize, tokenizer: &Tokenizer) {
        self.tokens.push(text_of(id, tokenizer));
        self.token_logprobs.push(logprobs.map(|logprobs| finite_logprob(logprobs.chosen)));
        self.top_logprobs.push(logprobs.map(|logprobs| {
            let mut top: Vec<(String, f32)> = Vec::with_capacity(logprobs.top.len());
            for &(id, logprob) in &logprobs.top {
                let text = text_of(id, tokenizer);
                // Different tokens can have the same text, because incomplete characters become U+FFFD.
                // Keep only the most likely of them, because the keys of a JSON object must differ.
                if top.iter().all(|(other, _)| *other != text) {
                    top.push((text, finite_logprob(logprob)));
                }
            }
            Alternatives(top)
        }));
        self.text_offset.push(offset);
    }
}

fn text_of(id: u32, tokenizer: &Tokenizer) -> String {
    String::from_utf8_lossy(&tokenizer.table().bytes(id)).into_owned()
}

/// Returns the number of characters that begin in `bytes`, which may begin or end inside a character.
fn begun_characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte & 0xC0 != 0x80).count()
}

/// Returns the character offset at which each prompt token starts in `echo`, the text of the prompt.
///
/// `echo` may lack the control token at the start of the prompt, and the space that a tokenizer puts before the text.
fn echo_offsets(tokens: &[u32], echo: &str, tokenizer: &Tokenizer) -> Vec<usize> {
    let mut offsets = Vec::with_capacity(tokens.len());
    let mut byte = 0;
    let mut characters = 0;
    for &id in tokens {
        offsets.push(characters);
        let (token, rest) = (tokenizer.table().bytes(id), &echo.as_bytes()[byte..]);
        let length = match &*token {
            token if rest.starts_with(token) => token.len(),
            _ if tokenizer.is_control(id) => 0,
            [b' ', token @ ..] if rest.starts_with(token) => token.len(),
            token => token.len().min(rest.len()),
        };
        characters += begun_characters(&rest[..length]);
        byte += length;
    }
    offsets
}
