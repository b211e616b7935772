//! `/stats` and `/context`.

use anyhow::Result;

use crate::conversation::{Overflow, Recording, Session, visible_messages};
use crate::text;

/// Returns the text of `/stats`, which describes the loaded model and the conversation.
pub fn stats(session: &Session) -> String {
    let engine = session.engine();
    let info = engine.info();
    let quantization = info.quantization.as_deref().unwrap_or("unquantized");
    let chat_format = engine.language().chat.as_ref().map_or("none", |chat| chat.name());
    let saved_as = match &session.recording {
        Recording::Journal(journal) => journal.name(),
        Recording::FromFirstAnswer => "not saved yet",
        Recording::Off => "not saved",
    };
    let executor = match engine.eager_reason() {
        None => engine.executor().to_string(),
        Some(reason) => format!("{}, because {reason}", engine.executor()),
    };
    table(&[
        ("model", format!("{}: {} {quantization}", session.snapshot.name, info.family)),
        ("executor", executor),
        ("attention", info.attention.to_string()),
        ("parameters", info.parameters.to_string()),
        ("device", info.device.name.clone()),
        ("dtype", format!("{:?}", info.dtype).to_lowercase()),
        ("weights", text::size(info.weight_bytes)),
        ("cache", format!("{} for {} tokens", text::size(info.cache_bytes), engine.context())),
        ("context used", engine.cached_tokens().to_string()),
        ("chat format", chat_format.to_string()),
        ("messages", session.messages.len().to_string()),
        ("saved as", saved_as.to_string()),
        ("loaded in", format!("{:.2} s", info.load.total_s)),
    ])
}

/// Returns the text of `/context`, which shows how full the context is.
pub fn context(session: &Session) -> Result<String> {
    let engine = session.engine();
    let visible = visible_messages(&session.messages, session.dropped);
    let used = match (session.raw, visible.is_empty()) {
        (true, _) => engine.cached_tokens(),
        // Do not count the cached tokens, because they may be from an earlier conversation.
        (false, true) => 0,
        (false, false) => session.count_tokens(&visible)?,
    };
    let context = engine.context();
    let mut rows = vec![
        ("used", format!("{used} of {context} tokens ({}%)", used * 100 / context.max(1))),
        ("free", context.saturating_sub(used).to_string()),
        ("cached", format!("{} tokens, which need no prefill", engine.cached_tokens())),
        ("model allows", engine.info().max_context.to_string()),
        ("messages", session.messages.len().to_string()),
    ];
    if session.dropped > 0 {
        rows.push(("not seen", format!("the oldest {} messages", session.dropped)));
    }
    rows.push((
        "when full",
        match session.settings.overflow {
            Overflow::Stop => "stop; /set overflow drop-oldest continues without the oldest messages".to_string(),
            Overflow::DropOldest => "drop-oldest: the model no longer sees the oldest messages".to_string(),
        },
    ));
    Ok(table(&rows))
}

fn table(rows: &[(&str, String)]) -> String {
    rows.iter().map(|(name, value)| format!("{name:13} {value}")).collect::<Vec<_>>().join("\n")
}
