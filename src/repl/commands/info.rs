//! `/stats` and `/context`.

use anyhow::Result;

use super::super::overflow::{self, Overflow};
use super::super::session::{Keep, Session};
use crate::text;

pub fn stats(session: &Session) -> String {
    let engine = session.engine();
    let info = engine.info();
    let format = engine.language().chat.as_ref().map_or("none", |chat| chat.name());
    let kept = match &session.keep {
        Keep::In(journal) => journal.name(),
        Keep::New => "from the first answer on",
        Keep::No => "no",
    };
    lines(&[
        (
            "model",
            format!(
                "{}: {} {}",
                session.snapshot.name,
                info.family,
                info.quantization.as_deref().unwrap_or("unquantized")
            ),
        ),
        (
            "executor",
            match engine.eager_reason() {
                None => engine.executor().to_string(),
                Some(reason) => format!("{} ({reason})", engine.executor()),
            },
        ),
        ("attention", info.attention.to_string()),
        ("parameters", info.parameters.to_string()),
        ("device", info.device.name.clone()),
        ("dtype", format!("{:?}", info.dtype).to_lowercase()),
        ("weights", text::size(info.weight_bytes)),
        ("cache", format!("{} for {} tokens", text::size(info.cache_bytes), engine.context())),
        ("context used", engine.cached_tokens().to_string()),
        ("chat format", format.to_string()),
        ("messages", session.messages.len().to_string()),
        ("kept as", kept.to_string()),
        ("loaded in", format!("{:.2} s", info.load.total_s)),
    ])
}

pub fn context(session: &Session) -> Result<String> {
    let engine = session.engine();
    let seen = overflow::seen(&session.messages, session.left_out);
    let used = match (session.raw, seen.is_empty()) {
        (true, _) => engine.cached_tokens(),
        // What is still in the cache is no part of the conversation any more.
        (false, true) => 0,
        (false, false) => engine.language().render(&seen, &session.render)?.ids.len(),
    };
    let context = engine.context();
    let mut shown = vec![
        ("used", format!("{used} of {context} tokens ({} %)", used * 100 / context.max(1))),
        ("free", context.saturating_sub(used).to_string()),
        ("in the cache", format!("{}, which need not be read again", engine.cached_tokens())),
        ("model allows", engine.info().max_context.to_string()),
        ("messages", session.messages.len().to_string()),
    ];
    if session.left_out > 0 {
        shown.push(("not seen", format!("the oldest {} messages", session.left_out)));
    }
    shown.push((
        "at the end",
        match session.overflow {
            Overflow::Stop => "stop: it says so; /set overflow drop-oldest goes on without the oldest".to_string(),
            Overflow::DropOldest => "drop-oldest: the model no longer sees the oldest messages".to_string(),
        },
    ));
    Ok(lines(&shown))
}

fn lines(named: &[(&str, String)]) -> String {
    named.iter().map(|(name, value)| format!("{name:13} {value}")).collect::<Vec<_>>().join("\n")
}
