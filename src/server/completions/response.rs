//! The bodies of text completion responses. Whole responses and chunks have the same shape.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::server::choice::{Finish, ScoredToken, finite_logprob};
use crate::server::reply::ReplyHeader;
use crate::server::usage::Usage;
use crate::tokenizer::Tokenizer;

/// A whole response, or a chunk of a stream.
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
    /// Adds the next part of the same choice.
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

/// The log probabilities of generated tokens, as parallel arrays.
#[derive(Default, Serialize)]
pub struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Map<String, Value>>,
    /// The offset of each token in the text, in characters.
    text_offset: Vec<usize>,
}

impl Logprobs {
    /// Adds tokens whose text starts at `offset`.
    pub fn extend(&mut self, tokens: &[ScoredToken], mut offset: usize, tokenizer: &Tokenizer) {
        let text = |id: u32| String::from_utf8_lossy(&tokenizer.table().bytes(id)).into_owned();
        for token in tokens {
            let top = token.logprobs.top.iter();
            let top = top.map(|&(id, logprob)| (text(id), json!(finite_logprob(logprob)))).collect();
            let token_text = text(token.id);
            let characters = token_text.chars().count();
            self.tokens.push(token_text);
            self.token_logprobs.push(finite_logprob(token.logprobs.chosen));
            self.top_logprobs.push(top);
            self.text_offset.push(offset);
            offset += characters;
        }
    }
}
