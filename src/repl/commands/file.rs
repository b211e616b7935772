//! `/file`: texts that go with the next message.

use std::fs::File;
use std::io::Read;

use super::super::session::{Attachment, Session};
use super::paths;
use crate::tokenizer::ControlTokens;

/// More bytes than this for each token of the context cannot fit: few texts come to more than five in the mean.
const BYTES_PER_TOKEN: u64 = 16;

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
    let path = paths::typed(path);
    let context = session.engine().context();
    let text = read(&path, context).map_err(|problem| format!("{path}: {problem}"))?;
    let tokens = session.engine().tokenizer().encode(&text, ControlTokens::Text).map(|ids| ids.len());
    let size = tokens.map_or_else(|_| format!("{} bytes", text.len()), |tokens| format!("{tokens} tokens"));
    session.attached.retain(|attached| attached.path != path);
    session.attached.push(Attachment { path: path.clone(), text });
    Ok(format!("{path}, {size}, goes with the next message"))
}

/// A text that may fit the context. Whether it does is known only from its tokens, and to count those of a text that is too
/// large by far takes minutes.
fn read(path: &str, context: usize) -> Result<String, String> {
    let expanded = paths::expanded(path);
    let metadata = std::fs::metadata(&expanded).map_err(|error| error.to_string())?;
    // A pipe or a device might never end.
    if !metadata.is_file() {
        return Err("this is no file".to_string());
    }
    let largest = context as u64 * BYTES_PER_TOKEN;
    let mut bytes = Vec::new();
    let file = File::open(&expanded).map_err(|error| error.to_string())?;
    file.take(largest + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > largest {
        let size = metadata.len().max(bytes.len() as u64);
        return Err(format!("{size} bytes do not fit the context of {context} tokens (--context makes it larger)"));
    }
    String::from_utf8(bytes).map_err(|_| "this is not UTF-8 text".to_string())
}
