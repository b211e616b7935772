//! `/file`: texts that go with the next message.

use std::fs::File;
use std::io::Read;

use super::super::session::{Attachment, Session};
use crate::tokenizer::Controls;

/// More than any context holds.
const LARGEST: u64 = 16 << 20;

pub fn attach(path: &str, session: &mut Session) -> Result<String, String> {
    match path {
        "" if session.attached.is_empty() => return Ok("nothing is attached; /file PATH attaches a text file".into()),
        "" => {
            let paths: Vec<&str> = session.attached.iter().map(|attached| attached.path.as_str()).collect();
            return Ok(format!("attached to the next message: {}", paths.join(", ")));
        }
        "none" => {
            session.attached.clear();
            return Ok("nothing is attached any more".to_string());
        }
        _ => {}
    }
    // As Tab leaves it: spaces are escaped.
    let path = path.trim_matches('"').replace("\\ ", " ");
    let text = read(&path).map_err(|problem| format!("{path}: {problem}"))?;
    let tokens = session.engine().tokenizer().encode(&text, Controls::Text).map(|ids| ids.len());
    let size = tokens.map_or_else(|_| format!("{} bytes", text.len()), |tokens| format!("{tokens} tokens"));
    session.attached.retain(|attached| attached.path != path);
    session.attached.push(Attachment { path: path.clone(), text });
    Ok(format!("{path}, {size}, goes with the next message"))
}

fn read(path: &str) -> Result<String, String> {
    let expanded = match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    };
    let metadata = std::fs::metadata(&expanded).map_err(|error| error.to_string())?;
    // A pipe or a device might never end.
    if !metadata.is_file() {
        return Err("this is no file".to_string());
    }
    let mut bytes = Vec::new();
    let file = File::open(&expanded).map_err(|error| error.to_string())?;
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > LARGEST {
        return Err("this is larger than any context".to_string());
    }
    String::from_utf8(bytes).map_err(|_| "this is not UTF-8 text".to_string())
}
