//! `/export`: the conversation as a document, or for another program.

use std::io::Write;

use super::super::session::{Keep, Session};
use super::super::state;
use super::paths;
use crate::chat::Role;

pub fn run(text: &str, session: &Session) -> Result<String, String> {
    let (format, path) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let document = match format {
        "md" => markdown(session),
        "json" => json(session)?,
        _ => return Err("/export md|json [PATH]".to_string()),
    };
    if session.messages.is_empty() {
        return Err("there is nothing to export yet".to_string());
    }
    let name = match &session.keep {
        Keep::In(journal) => journal.name(),
        _ => "conversation",
    };
    let path = match path.trim() {
        "" => format!("{name}.{format}"),
        path => paths::typed(path),
    };
    let written = state::make_file(&paths::expanded(&path)).and_then(|mut file| file.write_all(document.as_bytes()));
    written.map_err(|error| format!("{path}: {error}"))?;
    Ok(format!("written to {path}"))
}

fn markdown(session: &Session) -> String {
    let mut text = format!("# A conversation with {}\n", session.snapshot.name);
    for message in &session.messages {
        let who = match message.role {
            Role::User => "You",
            Role::Assistant => "Model",
            Role::System | Role::Developer => "Instructions",
            Role::Tool => "Tool",
        };
        text.push_str(&format!("\n## {who}\n\n{}\n", message.content.trim()));
    }
    text
}

fn json(session: &Session) -> Result<String, String> {
    let object = serde_json::json!({
        "model": session.model_name(),
        "revision": session.snapshot.revision,
        "settings": session.all_settings(),
        "messages": session.messages,
    });
    serde_json::to_string_pretty(&object).map(|text| text + "\n").map_err(|error| error.to_string())
}
