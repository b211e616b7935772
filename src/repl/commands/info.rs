//! `/stats` and `/context`: describe the model, the conversation and the use of the context.

use anyhow::Result;

use crate::conversation::{Overflow, Recording, Session};
use crate::text::counted;

/// Returns the text of `/stats`, which describes the model and the conversation.
pub fn stats(session: &Session) -> String {
    let saved_as = match session.recording() {
        Recording::Journal(journal) => journal.name(),
        Recording::FromFirstAnswer => "not saved yet",
        Recording::Off => "not saved",
    };
    let mut rows = vec![("model", session.model().name().to_string())];
    rows.extend(session.backend().stats());
    rows.push(("messages", session.messages().len().to_string()));
    rows.push(("saved as", saved_as.to_string()));
    table(&rows)
}

/// Returns the text of `/context`, which shows how full the context is. Fails if the messages cannot be rendered.
pub fn context(session: &Session) -> Result<String> {
    let backend = session.backend();
    let visible = session.visible_messages();
    let used = match (session.raw, visible.is_empty()) {
        (true, _) => backend.last_context_used(),
        // After a new conversation starts, the backend may still report the tokens of the earlier conversation.
        (false, true) => Some(0),
        (false, false) => session.count_tokens(&visible)?.or(backend.last_context_used()),
    };
    let mut rows = match (used, backend.context()) {
        (Some(used), Some(context)) => vec![
            ("used", format!("{used} of {} ({}%)", counted(context, "token"), used * 100 / context.max(1))),
            ("free", context.saturating_sub(used).to_string()),
        ],
        (Some(used), None) => {
            vec![("used", format!("{}; the server does not report the limit", counted(used, "token")))]
        }
        (None, Some(context)) => vec![("used", format!("unknown; the limit is {}", counted(context, "token")))],
        (None, None) => vec![("used", "unknown: the server does not count tokens".to_string())],
    };
    rows.extend(backend.context_stats());
    rows.push(("messages", session.messages().len().to_string()));
    if session.dropped() > 0 {
        rows.push(("not seen", format!("the oldest {}", counted(session.dropped(), "message"))));
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
