//! `/file`: attaches text files to the next message.

use std::fs::File;
use std::io::Read;

use super::paths;
use crate::conversation::{Attachment, Session};
use crate::tokenizer::ControlTokens;

/// A file with more bytes than this per token of the context is refused. Hardly any text has more than five.
const MAX_BYTES_PER_TOKEN: u64 = 16;

/// Attaches a file, lists the attached files, or detaches them. Returns what to tell the person.
pub fn run(path: &str, session: &mut Session) -> Result<String, String> {
    match path {
        "" if session.attached.is_empty() => return Ok("nothing is attached; /file PATH attaches a text file".into()),
        "" => {
            let paths: Vec<&str> = session.attached.iter().map(|attachment| attachment.path.as_str()).collect();
            return Ok(format!("attached to the next message: {}", paths.join(", ")));
        }
        "none" => {
            session.attached.clear();
            return Ok("nothing is attached any more".to_string());
        }
        _ => {}
    }
    let path = paths::unquote(path);
    let context = session.engine().context();
    let text = read(&path, context).map_err(|reason| format!("cannot attach {path}: {reason}"))?;
    let tokens = session.engine().tokenizer().encode(&text, ControlTokens::Text).map(|ids| ids.len());
    let size = tokens.map_or_else(|_| format!("{} bytes", text.len()), |tokens| format!("{tokens} tokens"));
    session.attached.retain(|attachment| attachment.path != path);
    session.attached.push(Attachment { path: path.clone(), text });
    Ok(format!("{path} ({size}) goes with the next message"))
}

/// Reads a text that may fit the context.
///
/// Only its tokens tell whether it fits. The size is checked first, because encoding a huge text takes minutes.
fn read(path: &str, context: usize) -> Result<String, String> {
    let path = paths::expand_home(path);
    let metadata = std::fs::metadata(&path).map_err(|error| error.to_string())?;
    // A pipe or a device may never end.
    if !metadata.is_file() {
        return Err("it is not a regular file".to_string());
    }
    let limit = context as u64 * MAX_BYTES_PER_TOKEN;
    let mut bytes = Vec::new();
    let file = File::open(&path).map_err(|error| error.to_string())?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > limit {
        let size = metadata.len().max(bytes.len() as u64);
        return Err(format!("{size} bytes do not fit the context of {context} tokens; start with a larger --context"));
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_string())
}
