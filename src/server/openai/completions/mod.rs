//! The route `POST /v1/completions`.

mod request;
mod response;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;

use crate::server::generation::event_stream::{self, EventBuffer, EventWriter};
use crate::server::generation::generate_options::StreamOptions;
use crate::server::generation::pieces::{AnswerPiece, AnswerUpdate};
use crate::server::generation::reply::{self, ReplyHeader};
use crate::server::generation::{self, Answers, Submission};
use crate::server::http::body::{json_response, read_json};
use crate::server::http::error::ApiError;
use crate::server::http::log::RequestLog;
use crate::server::state::ServerState;
use crate::tokenizer::Tokenizer;
use request::CompletionRequest;
use response::{Completion, Logprobs, WireChoice};

/// The maximum number of prompt log probabilities in a response, including those of alternative tokens.
/// Each log probability takes about 100 bytes of memory until the response is sent.
const MAX_PROMPT_LOGPROBS: usize = 1 << 19;

/// Handles a text completion request. Streams the response if the field `stream` is true.
pub async fn create(
    State(server): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: Request,
) -> Result<Response, ApiError> {
    let engine = server.open_engine()?.clone();
    let fields = read_json(request, &server.options.timeouts).await?;
    let completion = CompletionRequest::read(fields, &server, &engine)?;
    let submission = Submission {
        requests: completion.requests,
        answers_per_prompt: completion.answers_per_prompt,
        can_call_in_parallel: true,
        must_call_named: false,
        keeps_all_tokens: true,
        is_stream: completion.stream.is_stream,
        prompt_field: "prompt",
    };
    let answers = generation::submit(&server, log, submission).await?;
    check_prompt_logprobs(&answers)?;
    let texts = Texts::new(&completion.echoes, completion.answers_per_prompt, completion.has_logprobs);
    let header = ReplyHeader::new(&server, &answers, "cmpl-", "text_completion");
    let response = if completion.stream.is_stream {
        let writer = ChunkWriter { header, stream: completion.stream, texts };
        event_stream::response(answers, writer, server.options.timeouts.ping)
    } else {
        whole(header, answers, texts).await?
    };
    Ok(reply::with_ignored(response, &completion.ignored))
}

/// Fails if the log probabilities of the prompts would take too much memory.
fn check_prompt_logprobs(answers: &Answers) -> Result<(), ApiError> {
    let prompts = (0..answers.len()).filter_map(|index| answers.scored_prompt(index));
    let entries: usize = prompts.map(|prompt| prompt.tokens.len() * (1 + prompt.top)).sum();
    if entries > MAX_PROMPT_LOGPROBS {
        let problem = format!(
            "the response needs {entries} prompt log probabilities, but the limit is {MAX_PROMPT_LOGPROBS}: \
             lower 'logprobs' or 'n', or send fewer or shorter prompts"
        );
        return Err(ApiError::invalid("logprobs", problem));
    }
    Ok(())
}

/// Turns the pieces of answers into the entries of `choices`, for streamed and non-streamed responses.
struct Texts {
    /// For each choice, the prompt text that the response must still repeat before the answer, or `None`.
    echoes: Vec<Option<String>>,
    /// For each choice, the length of its text so far in characters.
    offsets: Vec<usize>,
    /// For each choice, the offset at which the text of its last listed token ends, in characters. It is after the text
    /// so far if the stop filter holds back the end of the token.
    token_ends: Vec<usize>,
    has_logprobs: bool,
}

impl Texts {
    /// Creates the state before the first piece. `echoes` has one entry per prompt: the text to repeat, or `None`.
    fn new(echoes: &[Option<String>], answers_per_prompt: usize, has_logprobs: bool) -> Self {
        let repeated = |echo: &Option<String>| std::iter::repeat_n(echo.clone(), answers_per_prompt);
        let echoes: Vec<_> = echoes.iter().flat_map(repeated).collect();
        let zeros = || vec![0; echoes.len()];
        Self { offsets: zeros(), token_ends: zeros(), echoes, has_logprobs }
    }

    /// Returns the next part of a choice, made from `update`. The first part starts with the prompt to repeat, if any.
    fn choice(&mut self, index: usize, update: AnswerUpdate, answers: &Answers) -> WireChoice {
        let tokenizer: &Tokenizer = answers.engine().tokenizer();
        let echo = self.echoes[index].take();
        let mut logprobs = self.has_logprobs.then(Logprobs::default);
        if let (Some(echo), Some(logprobs)) = (&echo, &mut logprobs)
            && let Some(prompt) = answers.scored_prompt(index)
        {
            logprobs.add_prompt(prompt, echo, tokenizer);
        }
        let mut text = echo.unwrap_or_default();
        self.offsets[index] += text.chars().count();
        for piece in update.pieces {
            let AnswerPiece::Content(content, tokens) = piece else { continue };
            if let Some(logprobs) = &mut logprobs {
                let start = self.token_ends[index].max(self.offsets[index]);
                self.token_ends[index] = logprobs.extend(&tokens, start, tokenizer);
            }
            self.offsets[index] += content.chars().count();
            text.push_str(&content);
        }
        WireChoice { index, text, logprobs, finish_reason: update.finish }
    }
}

/// Collects the answers into a single response.
async fn whole(header: ReplyHeader, mut answers: Answers, mut texts: Texts) -> Result<Response, ApiError> {
    let empty = |index| WireChoice {
        index,
        text: String::new(),
        logprobs: texts.has_logprobs.then(Logprobs::default),
        finish_reason: None,
    };
    let mut choices: Vec<WireChoice> = (0..answers.len()).map(empty).collect();
    while let Some(next) = answers.next().await {
        let (index, update) = next?;
        choices[index].append(texts.choice(index, update, &answers));
    }
    json_response(&Completion { header: &header, choices, usage: Some(Some(answers.usage())) })
}

/// Writes the chunks of a streamed text completion.
struct ChunkWriter {
    header: ReplyHeader,
    stream: StreamOptions,
    texts: Texts,
}

impl EventWriter for ChunkWriter {
    fn write(&mut self, index: usize, update: AnswerUpdate, answers: &Answers, out: &mut EventBuffer) {
        let choices = vec![self.texts.choice(index, update, answers)];
        let usage = self.stream.chunk_usage(|| answers.usage());
        out.push(&Completion { header: &self.header, choices, usage });
    }

    fn finish(&mut self, answers: &Answers, out: &mut EventBuffer) {
        if self.stream.has_usage {
            let usage = Some(Some(answers.usage()));
            out.push(&Completion { header: &self.header, choices: Vec::new(), usage });
        }
    }
}
