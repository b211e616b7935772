//! Text files that are attached to the next message.

/// One attached file: its path and its text.
pub struct Attachment {
    pub path: String,
    pub text: String,
}

/// Returns the message for the model: each attached file in a Markdown code fence, then `text`.
///
/// Each fence is longer than every run of backticks in its file, so the file cannot close the fence.
pub fn with_attachments(attachments: &[Attachment], text: &str) -> String {
    let mut message = String::new();
    for Attachment { path, text } in attachments {
        let longest_run = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(longest_run.max(2) + 1);
        message.push_str(&format!("{path}:\n{fence}\n{}\n{fence}\n\n", text.trim_end_matches('\n')));
    }
    message + text
}
