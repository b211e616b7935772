//! `/export`: writes the conversation to a Markdown or JSON file.

use std::io::Write;

use super::paths;
use crate::chat::Role;
use crate::conversation::Session;
use crate::files;

/// Writes the conversation to a new file. Returns a message for the user, on success and on failure.
pub fn run(arguments: &str, session: &Session) -> Result<String, String> {
    if session.messages().is_empty() {
        return Err("nothing to export yet".to_string());
    }
    let (format, path) = arguments.split_once(char::is_whitespace).unwrap_or((arguments, ""));
    let document = match format {
        "md" => markdown(session),
        "json" => json(session)?,
        _ => return Err("usage: /export md|json [PATH]".to_string()),
    };
    let name = session.saved_name().unwrap_or("conversation");
    let path = match path.trim() {
        "" => format!("{name}.{format}"),
        path => paths::unquote(path),
    };
    let target = paths::expand_home(&path);
    let cannot_write = |error| format!("cannot write {path}: {error}");
    let mut file = files::create_private(&target).map_err(cannot_write)?;
    file.write_all(document.as_bytes()).map_err(|error| {
        // Remove the incomplete file. `/export` never replaces a file, so a second attempt would fail.
        let _ = std::fs::remove_file(&target);
        cannot_write(error)
    })?;
    Ok(format!("written to {path}"))
}

fn markdown(session: &Session) -> String {
    let mut text = format!("# A conversation with {}\n", session.model().name());
    for message in session.messages() {
        let speaker = match message.role {
            Role::User => "You",
            Role::Assistant => "Model",
            Role::System | Role::Developer => "Instructions",
            Role::Tool => "Tool",
        };
        text.push_str(&format!("\n## {speaker}\n\n{}\n", message.content.trim()));
    }
    text
}

fn json(session: &Session) -> Result<String, String> {
    let object = serde_json::json!({
        "model": session.model_name(),
        "revision": session.model().revision(),
        "settings": session.all_settings(),
        "messages": session.messages(),
    });
    serde_json::to_string_pretty(&object).map(|text| text + "\n").map_err(|error| error.to_string())
}
