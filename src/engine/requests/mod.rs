//! Requests: what a client asks for, and the state, events and text of each answer.
//!
//! - `request`: the prompt and the options that the client submits
//! - `sequence`: the state of one answer on the engine thread; `prompt_scorer`: scores its prompt
//! - `outbox`: the events that the engine thread sends to the client
//! - `client_end`: how and when the client ended the sequence
//! - `stream`: the answer on the client's thread; `event`: what the stream returns
//! - `answer_decoder`: turns the tokens of an answer into text; `stop`: finds stop strings
//! - `record`: records of requests and answers, from which the answers can be recomputed

mod answer_decoder;
mod client_end;
mod event;
mod outbox;
mod prompt_scorer;
mod record;
mod request;
mod sequence;
mod stop;
mod stream;

pub use answer_decoder::AnswerDecoder;
pub use client_end::ClientEnd;
pub use event::{AnswerProgress, Event, ScoredPrompt, Summary};
pub use outbox::{Outbox, SequenceEvent};
pub use prompt_scorer::PromptScorer;
pub use record::{EngineRecord, GenerationRecord, RecordedAnswer, RecordedRequest, RequestRecord};
pub use request::{FinishReason, GenerateOptions, Prompt, Request};
pub use sequence::Sequence;
pub use stop::StopFilter;
pub use stream::{BlockingEvents, RequestStream};
