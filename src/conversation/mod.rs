//! Conversations, independent of how they are displayed: messages, settings, turns and a journal on disk.
//!
//! This module does not use the terminal. Interactive chat and one-shot mode both run a [`Session`] and display
//! each piece of text as it arrives.

mod attachment;
pub mod journal;
mod model_source;
mod overflow;
mod session;
mod settings;
pub mod state_folder;
mod turn;

pub use attachment::Attachment;
pub use journal::{Change, SavedConversation};
pub use model_source::{LoadedModel, ModelSource, NoModelLoaded, require_chat_format};
pub use overflow::{Overflow, visible_messages};
pub use session::{Recording, Session};
pub use settings::{ChatSettings, ReasoningVisibility, SettingValues, is_setting, names as setting_names};
pub use turn::Turn;
