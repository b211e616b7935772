//! Fuzzes the config of a model and saved conversations.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_core::DType;
use inferno::conversation::journal::{self, ConversationState, Journal};
use inferno::conversation::{ConversationChange, SavedConversation};
use inferno::device::DeviceInfo;
use inferno::engine::memory::{DeviceKind, MemoryPlan};
use inferno::weights::Inventory;
use inferno::{files, models};

use super::MAX_BYTES;

/// The name of the conversation that the target `journal` reads.
const NAME: &str = "fuzzed";

/// Parses a config.json and plans the memory of a model without weights.
pub fn config_json(data: &[u8]) {
    if data.len() > MAX_BYTES {
        return;
    }
    let Ok(config) = files::parse_json(data).and_then(models::parse_config) else { return };
    let architecture = config.architecture.as_ref();
    assert!(!architecture.cache_layers().is_empty());
    assert!(architecture.vocab_size() > 0 && architecture.hidden_size() > 0);
    for (kind, dtype) in [(DeviceKind::Gpu, DType::BF16), (DeviceKind::Cpu, DType::F32)] {
        let plan = MemoryPlan::new(&Inventory::default(), architecture, dtype, kind);
        assert!((1..=architecture.max_position_embeddings()).contains(&plan.default_context()));
        let _ = plan.cache_growth(2048);
        for free_bytes in [0, 1 << 30, 80 << 30, u64::MAX] {
            let device =
                DeviceInfo { name: "a GPU".into(), compute_capability: None, free_bytes, total_bytes: u64::MAX };
            if let Ok(capacity) = plan.choose(None, &device) {
                assert!(plan.bytes(capacity) <= free_bytes);
            }
            if let Some(context) = plan.largest_context(&device) {
                assert!(plan.choose(Some(context), &device).is_ok());
            }
        }
    }
}

/// Reads a saved conversation, continues it, and reads it again.
pub fn journal(data: &[u8]) {
    if data.len() > MAX_BYTES {
        return;
    }
    let folder = state_folder().join("inferno/conversations");
    let path = folder.join(format!("{NAME}.jsonl"));
    // Earlier calls left backups of damaged conversations.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    fs::write(&path, data).unwrap();
    let read = journal::read_saved(Some(NAME));
    let (mut journal, saved) = match Journal::open(Some(NAME)) {
        Ok(opened) => opened,
        Err(error) => {
            assert!(read.is_err(), "cannot open a conversation that can be read: {error}");
            assert_eq!(fs::read(&path).unwrap(), data, "opening failed and changed the conversation");
            return;
        }
    };
    let is_damaged = saved.damage.is_some();
    let saved = SavedConversation { damage: None, ..saved };
    assert_eq!(SavedConversation { damage: None, ..read.unwrap() }, saved);
    let backup = fs::read(path.with_extension("damaged")).ok();
    assert_eq!(backup.as_deref(), is_damaged.then_some(data), "only a damaged conversation must be copied");
    assert_eq!(journal::read_saved(Some(NAME)).unwrap(), saved, "opening must remove the damage");

    let SavedConversation { model, settings, messages, .. } = &saved;
    journal.write_change(ConversationChange::Messages, &ConversationState { model, settings, messages }).unwrap();
    assert_eq!(journal::read_saved(Some(NAME)).unwrap(), saved);
}

/// Makes inferno save conversations in a temporary folder. Returns the folder, which is never removed.
fn state_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("inferno-fuzz-state-{}", std::process::id()));
        // SAFETY: apart from Rust code, only libFuzzer's memory check runs in another thread, and it reads no variable.
        // The standard library locks the environment for Rust code.
        unsafe { std::env::set_var("XDG_STATE_HOME", &folder) };
        folder
    })
}
