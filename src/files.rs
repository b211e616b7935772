//! Reads untrusted files, such as config.json or a saved conversation, and rejects files above a size limit.
//! Also parses untrusted JSON and creates private files.
//!
//! The type and size are checked on the open file, so replacing the file on disk after the checks has no effect.
//! Only [`read_input`], [`read_input_text`] and [`read_stdin`] accept pipes and devices.
//! All other functions that open files for reading reject a pipe at once. A plain [`File::open`] would wait until
//! another program opens the pipe for writing.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;

use crate::text::{library_error, size};

const KB: u64 = 1000;
const MB: u64 = 1000 * KB;

// The limits on model files are above the sizes in published models, so that only damaged or hostile files exceed them.

/// The maximum size of config.json, in bytes.
pub const MAX_CONFIG_BYTES: u64 = MB;
/// The maximum size of generation_config.json, in bytes.
pub const MAX_GENERATION_CONFIG_BYTES: u64 = MB;
/// The maximum size of chat_template.jinja, or of a chat template in a GGUF file, in bytes.
/// For a chat template in tokenizer_config.json, only [`MAX_TOKENIZER_CONFIG_BYTES`] applies.
pub const MAX_CHAT_TEMPLATE_BYTES: u64 = MB;
/// The maximum size of tokenizer_config.json or special_tokens_map.json, in bytes.
pub const MAX_TOKENIZER_CONFIG_BYTES: u64 = 16 * MB;
/// The maximum size of tokenizer.json, in bytes. The tokenizer.json of gpt-oss has 28 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 128 * MB;
/// The maximum size of a shard index, in bytes.
pub const MAX_SHARD_INDEX_BYTES: u64 = 32 * MB;
/// The maximum size of a saved conversation, in bytes.
pub const MAX_JOURNAL_BYTES: u64 = 128 * MB;
/// The maximum size of a conversation for `tokenize --chat`, in bytes.
/// 16 MB of English text is about 4 million tokens.
pub const MAX_CONVERSATION_BYTES: u64 = 16 * MB;
/// The maximum size, in bytes, of a text that `tokenize` or `perplexity` reads, or of a message edited in $EDITOR.
pub const MAX_TEXT_BYTES: u64 = 256 * MB;
/// The maximum size of inferno's own config.toml, in bytes.
pub const MAX_CONFIGURATION_BYTES: u64 = MB;
/// The maximum size of the record of a partial download, in bytes.
pub const MAX_DOWNLOAD_RECORD_BYTES: u64 = 16 * MB;
/// The maximum size, in bytes, of a file with a single value, such as a commit hash, an access token or a time.
pub const MAX_SINGLE_VALUE_BYTES: u64 = 64 * KB;

/// The maximum number of values in a JSON text that [`parse_json`] accepts.
/// A limit on the size of the text is not enough, because a parsed value can take many times the memory of its text.
const MAX_JSON_VALUES: usize = 1 << 20;

/// Opens a regular file for reading. Fails for pipes, directories and devices.
pub fn open(path: &Path) -> Result<File> {
    open_regular(path).with_context(|| cannot_read(path))
}

/// Reads a regular file of at most `limit` bytes. Fails for larger files, pipes, directories and devices.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    read_to_limit(&file, limit).with_context(|| cannot_read(path))
}

/// Like [`read`], but returns `None` if the file does not exist.
pub fn read_if_present(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let file = match open_regular(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(error).with_context(|| cannot_read(path)),
    };
    read_to_limit(&file, limit).with_context(|| cannot_read(path)).map(Some)
}

/// Reads a text file like [`read`]. Fails if the text is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    to_text(&cannot_read(path), read(path, limit)?)
}

/// Like [`read_text`], but returns `None` if the file does not exist.
pub fn read_text_if_present(path: &Path, limit: u64) -> Result<Option<String>> {
    read_if_present(path, limit)?.map(|bytes| to_text(&cannot_read(path), bytes)).transpose()
}

/// Reads a JSON file like [`read`], and parses its contents like [`parse_json`].
pub fn read_json<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<T> {
    parse_json(&read(path, limit)?).with_context(|| cannot_read(path))
}

/// Like [`read_json`], but returns `None` if the file does not exist.
pub fn read_json_if_present<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<Option<T>> {
    let Some(bytes) = read_if_present(path, limit)? else { return Ok(None) };
    parse_json(&bytes).with_context(|| cannot_read(path)).map(Some)
}

/// Parses untrusted JSON. Fails if `bytes` is not valid JSON, is nested too deeply or does not match the type `T`,
/// or if [`check_json_values`] counts more than 2^20 values.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    parse_json_up_to(MAX_JSON_VALUES, bytes)
}

/// Parses JSON like [`parse_json`], but with `limit` as the maximum number of values.
pub fn parse_json_up_to<T: DeserializeOwned>(limit: usize, bytes: &[u8]) -> Result<T> {
    check_json_values(limit, bytes)?;
    match serde_json::from_slice(bytes) {
        Ok(value) => Ok(value),
        Err(error) if error.is_data() => bail!("{}", library_error(&error)),
        Err(error) => bail!("not valid JSON: {}", library_error(&error)),
    }
}

/// Creates a file for reading and appending. On Unix, its mode is 0600. Fails if the file exists.
pub fn create_private(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Fails if `json` has more than `limit` values. Object keys count as values.
///
/// Counts punctuation instead of parsing the text, so an empty array or object counts as two values.
pub fn check_json_values(limit: usize, json: &[u8]) -> Result<()> {
    if count_json_values(json) > limit {
        bail!("more than {limit} JSON values");
    }
    Ok(())
}

/// Reads the first `bytes` bytes of a regular file, or all bytes of a shorter file.
pub fn read_head(path: &Path, bytes: u64) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    open(path)?.take(bytes).read_to_end(&mut head).with_context(|| cannot_read(path))?;
    Ok(head)
}

/// Reads a file, pipe or device that the user named, as in `--file <(command)`.
/// Fails if the input has more than `limit` bytes.
pub fn read_input(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = File::open(path).with_context(|| cannot_read(path))?;
    read_to_limit(&file, limit).with_context(|| cannot_read(path))
}

/// Reads standard input to its end. Fails if the input has more than `limit` bytes or is not UTF-8.
pub fn read_stdin(limit: u64) -> Result<String> {
    let failed = "cannot read standard input";
    let mut bytes = Vec::new();
    io::stdin().take(limit + 1).read_to_end(&mut bytes).context(failed)?;
    if bytes.len() as u64 > limit {
        bail!("{failed}: it is larger than {}", size(limit).replace(".0 ", " "));
    }
    to_text(failed, bytes)
}

/// Reads a file like [`read_input`]. Fails if the file is not UTF-8.
pub fn read_input_text(path: &Path, limit: u64) -> Result<String> {
    to_text(&cannot_read(path), read_input(path, limit)?)
}

fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use nix::libc::{O_NOCTTY, O_NONBLOCK};
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, O_NONBLOCK | O_NOCTTY);
    }
    let file = options.open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file"))
    }
}

/// Reads a file to its end. Fails if the file has more than `limit` bytes.
/// Reads at most `limit + 1` bytes, because a growing file, a pipe or a device may never end.
fn read_to_limit(file: &File, limit: u64) -> Result<Vec<u8>> {
    let expected = file.metadata()?.len();
    let mut bytes = Vec::new();
    if expected <= limit {
        bytes.reserve(expected as usize + 1);
        file.take(limit + 1).read_to_end(&mut bytes)?;
    }
    if expected > limit || bytes.len() as u64 > limit {
        bail!("the file is larger than {}", size(limit).replace(".0 ", " "));
    }
    Ok(bytes)
}

/// Converts bytes to text. If they are not UTF-8, fails with a message that starts with `failed`.
pub fn to_text(failed: &str, bytes: Vec<u8>) -> Result<String> {
    match String::from_utf8(bytes) {
        Ok(text) => Ok(text),
        Err(error) => bail!("{failed}: not valid UTF-8 at offset {}", error.utf8_error().valid_up_to()),
    }
}

/// Returns an upper bound on the number of values in a JSON text.
/// The bound is 1 plus the number of `,`, `:`, `[` and `{` outside strings.
fn count_json_values(json: &[u8]) -> usize {
    let (mut count, mut bytes) = (1, json.iter());
    while let Some(byte) = bytes.next() {
        match byte {
            b',' | b':' | b'[' | b'{' => count += 1,
            b'"' => loop {
                match bytes.next() {
                    Some(b'\\') => drop(bytes.next()),
                    Some(b'"') | None => break,
                    Some(_) => {}
                }
            },
            _ => {}
        }
    }
    count
}

fn cannot_read(path: &Path) -> String {
    format!("cannot read {}", path.display())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::Value;

    use super::*;

    fn message<T>(result: Result<T>) -> String {
        result.err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    #[test]
    fn only_regular_files_up_to_the_limit_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let (path, absent) = (folder.path().join("a"), folder.path().join("absent"));
        fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        assert_eq!(message(read(&path, 4)), format!("cannot read {}: the file is larger than 4 B", path.display()));
        assert!(message(read(folder.path(), 4)).ends_with("not a regular file"));
        assert!(message(read(&absent, 4)).starts_with("cannot read "));
        assert!(read_if_present(&absent, 4).unwrap().is_none());
        assert!(read_if_present(&path.join("b"), 4).unwrap().is_none());
        assert!(message(read_if_present(folder.path(), 4)).ends_with("not a regular file"));
        assert_eq!(read_head(&path, 2).unwrap(), b"12");
        fs::write(&path, b"a\xff").unwrap();
        assert!(message(read_text(&path, 5)).ends_with("not valid UTF-8 at offset 1"));
    }

    #[test]
    #[cfg(unix)]
    fn pipes_and_devices_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [pipe.as_path(), Path::new("/dev/zero"), Path::new("/dev/null")] {
            assert!(message(read(path, MB)).ends_with("not a regular file"), "{}", path.display());
            assert!(message(read_if_present(path, MB)).ends_with("not a regular file"), "{}", path.display());
        }
        assert!(message(read_input(Path::new("/dev/zero"), MB)).ends_with("the file is larger than 1 MB"));
    }

    #[test]
    fn json_values_are_counted_before_parsing() {
        assert_eq!(count_json_values(br#"{"a,[\",": [1, 2, {}], "b": ""}"#), 9);
        let list = |values: usize| format!("[{}0]", "0,".repeat(values));
        assert!(parse_json::<Value>(list(1000).as_bytes()).is_ok());
        assert!(message(parse_json::<Value>(list(1 << 20).as_bytes())).starts_with("more than 1048576"));
        let text = format!("\"{}\"", ",".repeat(1 << 21));
        assert!(parse_json::<Value>(text.as_bytes()).is_ok());
        assert!(message(parse_json::<Value>(b"{")).starts_with("not valid JSON: EOF"));
        assert!(message(parse_json::<u8>(br#""a""#)).starts_with("invalid type"));
    }
}
