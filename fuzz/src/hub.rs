//! Fuzzes the listing of a repository that a hub sends.

use std::collections::HashSet;
use std::path::{Component, Path};

use inferno::hub::{FileFilter, Listing, choose_files};

use super::MAX_BYTES;

/// Parses a listing and chooses the files of a download. The bytes after the first NUL byte, if any, are a shard index.
pub fn hub_json(data: &[u8]) {
    if data.len() > MAX_BYTES {
        return;
    }
    let mut parts = data.splitn(2, |byte| *byte == 0);
    let (json, index) = (parts.next().unwrap_or_default(), parts.next());
    let listing = match Listing::parse("org/model", json) {
        Ok(listing) => listing,
        Err(error) if error.is::<serde_json::Error>() => return,
        Err(error) => return check_message(&error),
    };
    let names: HashSet<&str> = listing.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names.len(), listing.files.len(), "two files have the same name");
    for name in &names {
        let is_inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        assert!(is_inside && !name.chars().any(char::is_control), "{name:?} is not a safe name");
    }
    let bytes = listing.files.iter().filter_map(|file| file.bytes).try_fold(0u64, u64::checked_add);
    assert!(bytes.is_some(), "the sizes overflow");
    let globs = |globs: &[&str]| globs.iter().map(|glob| glob.to_string()).collect();
    for (include, exclude) in
        [(&[][..], &[][..]), (&["*"], &[]), (&["*.safetensors", "*Q4*"], &["*.json"]), (&[], &["*"])]
    {
        let filter = FileFilter { include: globs(include), exclude: globs(exclude), tag: None };
        match choose_files("org/model", &listing.files, &filter, index) {
            Ok(files) => {
                let chosen: HashSet<&str> = files.iter().map(|file| file.name.as_str()).collect();
                assert!(!files.is_empty() && chosen.len() == files.len(), "a file was chosen twice");
                assert!(chosen.is_subset(&names), "a file was chosen that is not listed");
            }
            Err(error) => check_message(&error),
        }
    }
}

fn check_message(error: &anyhow::Error) {
    let message = format!("{error:#}");
    assert!(message.len() < 40_000, "the message has {} bytes", message.len());
    assert!(!message.chars().any(|c| c.is_control() && c != '\n'), "{message:?} has control characters");
}
