//! What a chat is, however it is shown: messages, settings, a journal on disk, and one turn at a time.
//!
//! Nothing here knows of a terminal. The chat and one-shot answers both drive a [`Session`] and show each piece of text
//! that a turn hands them.

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
