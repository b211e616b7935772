//! Conversations, independent of how they are displayed: messages, settings, turns and a journal on disk.
//!
//! - `session/`, `turn`: a conversation with its messages and settings, and the result of one turn
//! - `backend`, `local_model`, `model_source`: the model that answers
//! - `overflow`, `attachment`, `settings`: a full context, attached files, and what `/set` changes
//! - `journal`, `state_folder`: conversations on disk
//!
//! This module does not use the terminal.
//! Interactive chat and one-shot mode both run a [`Session`], and receive each piece of text as it arrives.

mod attachment;
mod backend;
pub mod journal;
mod local_model;
mod model_source;
mod overflow;
mod session;
mod settings;
pub mod state_folder;
mod turn;

pub use attachment::Attachment;
pub use backend::{Backend, BackendAnswer, OnDelta, TurnPrompt, TurnRequest};
pub use journal::{ConversationChange, Recording, SavedConversation};
pub use local_model::LocalModel;
pub use model_source::{LoadedModel, ModelId, ModelSource, NoModelLoaded, require_chat_format};
pub use overflow::{CannotDropOldest, Overflow, visible_messages};
pub use session::Session;
pub use settings::{ChatSettings, ReasoningVisibility, SettingValues, is_setting, names as setting_names};
pub use turn::{Turn, TurnSummary};
