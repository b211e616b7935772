//! `/file`: attaches text files to the next message.

use std::io::Read;

use super::paths;
use crate::conversation::{Attachment, Session};
use crate::files;
use crate::text::counted;

/// The maximum file size, in bytes per token of the context length.
/// Most texts have fewer than 5 bytes per token, so a file above the limit would rarely fit in the context.
const MAX_BYTES_PER_TOKEN: u64 = 16;

/// The maximum file size, in bytes, if the server does not report its context length.
const MAX_BYTES: u64 = 16 << 20;

/// Attaches a file, lists the attached files, or detaches all of them. Returns a message for the user.
pub fn run(path: &str, session: &mut Session) -> Result<String, String> {
    match path {
        "" if session.attached().is_empty() => return Ok("nothing is attached; /file PATH attaches a text file".into()),
        "" => {
            let paths: Vec<&str> = session.attached().iter().map(|attachment| attachment.path.as_str()).collect();
            return Ok(format!("attached to the next message: {}", paths.join(", ")));
        }
        "none" => {
            session.detach_all();
            return Ok("nothing is attached to the next message".to_string());
        }
        _ => {}
    }
    let path = paths::unquote(path);
    let text = read(&path, session.backend().context()).map_err(|reason| format!("cannot attach {path}: {reason}"))?;
    let tokens = session.backend().count_text(&text);
    let size = tokens.map_or_else(|| counted(text.len(), "byte"), |tokens| counted(tokens, "token"));
    session.attach(Attachment { path: path.clone(), text });
    Ok(format!("attached to the next message: {path} ({size})"))
}

/// Reads a regular UTF-8 file. Fails if the file has more than [`MAX_BYTES_PER_TOKEN`] bytes per token of the context,
/// or more than [`MAX_BYTES`] bytes if the context length is unknown.
///
/// The limits are in bytes, so that a huge file is rejected without tokenizing it, which would be slow.
fn read(path: &str, context: Option<usize>) -> Result<String, String> {
    let path = paths::expand_home(path);
    let metadata = std::fs::metadata(&path).map_err(|error| error.to_string())?;
    // Reject a device before opening it, because opening some devices has side effects.
    // `files::open` checks again, in case the file was replaced.
    if !metadata.is_file() {
        return Err("not a regular file".to_string());
    }
    let limit = context.map_or(MAX_BYTES, |context| context as u64 * MAX_BYTES_PER_TOKEN);
    let mut bytes = Vec::new();
    let file = files::open(&path).map_err(|error| error.root_cause().to_string())?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > limit {
        let size = metadata.len().max(bytes.len() as u64);
        return Err(match context {
            Some(context) => format!(
                "{size} bytes do not fit in a context of {}; attach a smaller file, \
                 or start the model with a larger --context",
                counted(context, "token")
            ),
            None => format!("{size} bytes exceed the limit of {} MiB; attach a smaller file", MAX_BYTES >> 20),
        });
    }
    String::from_utf8(bytes).map_err(|_| "not UTF-8 text".to_string())
}
