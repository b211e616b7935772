//! The slash commands of the chat.

mod export;
mod file;
mod info;
mod paths;

use super::journal::{self, Change};
use super::session::{Keep, Session};
use super::settings;

struct Command {
    name: &'static str,
    arguments: &'static str,
    summary: &'static str,
    /// What `/help NAME` adds.
    details: &'static str,
}

const COMMANDS: &[Command] = &[
    Command { name: "help", arguments: "[COMMAND]", summary: "this list, or more about one", details: "" },
    Command { name: "exit", arguments: "", summary: "leave (also Ctrl-D, or Ctrl-C twice)", details: "" },
    Command {
        name: "clear",
        arguments: "",
        summary: "begin a new conversation",
        details: "The instructions of /system stay, and so do the settings. What was said is kept under its name, for /load.",
    },
    Command {
        name: "undo",
        arguments: "",
        summary: "take the last question and its answer back",
        details: "May be given again. The model has not seen what was taken back.",
    },
    Command {
        name: "regen",
        arguments: "",
        summary: "answer the last question anew",
        details: "With a temperature above 0 the answer will be another one. If it fails, or is stopped before its first \
                  word, the old one stays.",
    },
    Command {
        name: "system",
        arguments: "[TEXT]",
        summary: "show the instructions, or begin anew with others",
        details: "The flag --system does the same at the start.",
    },
    Command {
        name: "set",
        arguments: "[NAME VALUE]",
        summary: "show or change the settings",
        details: "Without a name it shows all; they have the names of the flags of `inferno play --help`. `/set stop none` \
                  and `/set max-tokens none` take a limit away, `/set plain on` shows answers as they were written.",
    },
    Command {
        name: "reasoning",
        arguments: "EFFORT",
        summary: "how much the model thinks: low, medium, high",
        details: "`show` and `hide` decide whether that is seen. Not every model knows efforts. There is no off: gpt-oss was not trained for it.",
    },
    Command {
        name: "file",
        arguments: "[PATH]",
        summary: "attach a text file to the next message",
        details: "May be given again for more files; without a path it shows what is attached, `/file none` drops it.",
    },
    Command {
        name: "save",
        arguments: "NAME",
        summary: "give this conversation a name",
        details: "Every conversation is kept turn by turn; a name is easier to find again, with /load NAME or \
                  `inferno play --resume NAME`.",
    },
    Command {
        name: "load",
        arguments: "[NAME]",
        summary: "go on with another conversation, or list them",
        details: "Its messages and settings come back in place of these; the model stays the one that is loaded.",
    },
    Command {
        name: "export",
        arguments: "md|json [PATH]",
        summary: "write the conversation to a file",
        details: "json has the messages in OpenAI's shape, thoughts included. A file that is there is not replaced.",
    },
    Command { name: "stats", arguments: "", summary: "what is loaded, and how fast", details: "" },
    Command {
        name: "context",
        arguments: "",
        summary: "how full the context is, and with what",
        details: "What happens at its end is `/set overflow stop|drop-oldest`.",
    },
    Command {
        name: "model",
        arguments: "[NAME]",
        summary: "go on with another model, or list them",
        details: "The conversation and what was set stay. If it cannot be loaded, the old one is loaded again.",
    },
];

/// What became of a line.
pub enum Outcome {
    /// It was a command; this is to be shown.
    Done(String),
    Leave,
    /// The last question is to be answered anew.
    Regenerate,
    /// Another model is to be loaded.
    Switch(String),
    /// It is a message for the model.
    NoCommand,
}

/// Names of all commands, as they are typed.
pub fn names() -> Vec<String> {
    COMMANDS.iter().map(|command| format!("/{}", command.name)).collect()
}

/// What can stand behind a command, as far as there is a list.
pub fn arguments(command: &str) -> Vec<String> {
    let words: Vec<&str> = match command {
        "/set" => settings::names().collect(),
        "/reasoning" => vec!["low", "medium", "high", "show", "hide"],
        "/help" => COMMANDS.iter().map(|command| command.name).collect(),
        _ => Vec::new(),
    };
    words.into_iter().map(str::to_string).collect()
}

/// Runs `line` if it is a command.
pub fn run(line: &str, session: &mut Session) -> Outcome {
    let line = line.trim();
    let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    // Lines that were pasted, or typed while an answer came, are a message, whatever the first begins with.
    if line.contains('\n') && name != "/system" {
        return Outcome::NoCommand;
    }
    let alone = ["/exit", "/quit", "/bye", "/clear", "/undo", "/regen", "/stats", "/context"];
    if alone.contains(&name) && !rest.is_empty() {
        return Outcome::Done(format!("{name} stands alone; {rest:?} was not expected"));
    }
    let done = match name {
        "/help" | "/?" => help(rest),
        "/exit" | "/quit" | "/bye" => return Outcome::Leave,
        "/clear" => session.clear().map(|before| left("the conversation is forgotten", before)).map_err(in_words),
        "/undo" => undo(session),
        "/regen" => return Outcome::Regenerate,
        "/system" => system(rest, session),
        "/set" => set(rest, session),
        "/reasoning" if rest.is_empty() => Ok(settings::value_of(session, "reasoning")),
        "/reasoning" => settings::set(session, "reasoning", rest),
        "/file" => file::attach(rest, session),
        "/save" => save(rest, session),
        "/load" => load(rest, session),
        "/export" => export::run(rest, session),
        "/stats" => Ok(info::stats(session)),
        "/context" => info::context(session).map_err(in_words),
        "/model" if rest.is_empty() => Ok(models(session)),
        "/model" => return Outcome::Switch(rest.to_string()),
        // A path or a division may start with a slash; one word after it hardly does.
        _ if name.len() > 1 && name.starts_with('/') && name[1..].chars().all(|c| c.is_ascii_lowercase()) => {
            Err(format!("there is no command {name}; /help shows those there are"))
        }
        _ => return Outcome::NoCommand,
    };
    Outcome::Done(done.unwrap_or_else(|problem| problem))
}

fn in_words(error: anyhow::Error) -> String {
    crate::text::error_message(&error)
}

/// What became of the conversation before.
fn left(done: &str, before: Option<String>) -> String {
    before.map_or_else(|| done.to_string(), |name| format!("{done}; what was said before is kept as {name}"))
}

fn help(name: &str) -> Result<String, String> {
    let usage = |command: &Command| format!("/{} {}", command.name, command.arguments).trim_end().to_string();
    if !name.is_empty() {
        let name = name.trim_start_matches('/');
        let command = COMMANDS.iter().find(|command| command.name == name);
        let command = command.ok_or_else(|| format!("there is no command /{name}; /help shows those there are"))?;
        return Ok(format!("{}: {}\n{}", usage(command), command.summary, command.details).trim_end().to_string());
    }
    let mut lines: Vec<String> =
        COMMANDS.iter().map(|command| format!("{:23} {}", usage(command), command.summary)).collect();
    for (keys, what) in [
        ("\"\"\"", "around a message of several lines; or \\ ends each"),
        ("Tab, Ctrl-R, Ctrl-G", "complete, search older lines, write in $EDITOR"),
        ("Ctrl-C, Ctrl-O", "while an answer comes: stop it, fold its thoughts"),
    ] {
        lines.push(format!("{keys:23} {what}"));
    }
    Ok(lines.join("\n"))
}

fn undo(session: &mut Session) -> Result<String, String> {
    match session.undo().map_err(in_words)? {
        Some(question) => {
            let first = question.lines().next_back().unwrap_or("");
            Ok(format!("taken back: {first}"))
        }
        None => Err("there is nothing to take back".to_string()),
    }
}

fn system(text: &str, session: &mut Session) -> Result<String, String> {
    if !text.is_empty() {
        let before = session.set_system(text).map_err(in_words)?;
        return Ok(left("new instructions; the conversation starts anew", before));
    }
    let current = session.messages.iter().find(|message| message.role == crate::chat::Role::System);
    Ok(current.map_or_else(|| "there are no instructions".to_string(), |message| message.content.clone()))
}

fn set(text: &str, session: &mut Session) -> Result<String, String> {
    match text.split_once(char::is_whitespace) {
        Some((name, value)) => settings::set(session, name, value.trim()),
        None if text.is_empty() => {
            let line = |name: &str| format!("{name:19} {}", settings::value_of(session, name));
            Ok(settings::names().map(line).collect::<Vec<_>>().join("\n"))
        }
        None => Err(format!("/set {text} VALUE")),
    }
}

fn save(name: &str, session: &mut Session) -> Result<String, String> {
    if name.is_empty() {
        return match &session.keep {
            Keep::In(journal) => Ok(format!("this conversation is {}; /save NAME renames it", journal.name())),
            _ => Err("/save NAME".to_string()),
        };
    }
    if matches!(session.keep, Keep::New) {
        // An earlier answer could not be kept: now it can, or the reason is told.
        session.keep(Change::Messages).map_err(in_words)?;
    }
    match &mut session.keep {
        Keep::In(journal) => {
            journal.rename(name).map_err(in_words)?;
            Ok(format!("saved: `inferno play --resume {name}` goes on with it"))
        }
        Keep::New => Err("there is nothing to save yet".to_string()),
        Keep::No => Err("conversations are not kept (INFERNO_NOHISTORY, or --raw)".to_string()),
    }
}

fn load(name: &str, session: &mut Session) -> Result<String, String> {
    if name.is_empty() {
        let names = journal::names();
        return if names.is_empty() { Err("there are no conversations yet".to_string()) } else { Ok(names.join("\n")) };
    }
    if matches!(&session.keep, Keep::In(journal) if journal.name() == name) {
        return Ok(format!("{name} is this conversation"));
    }
    let note = session.load(name).map_err(in_words)?;
    Ok(note.into_iter().chain([summary(session)]).collect::<Vec<_>>().join("\n"))
}

/// What there is to go on with.
pub fn summary(session: &Session) -> String {
    let mut questions = session.messages.iter().filter(|message| message.role == crate::chat::Role::User);
    let (count, last) = (questions.clone().count(), questions.next_back());
    let last = last.and_then(|message| message.content.lines().next_back()).unwrap_or("");
    let questions = if count == 1 { "question" } else { "questions" };
    format!("a conversation of {count} {questions}, the last of them: {last}")
}

fn models(session: &Session) -> String {
    let current = session.model_name();
    let mark = |name: String| if name == current { format!("{name} (this one)") } else { name };
    (session.models.names)().into_iter().map(mark).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_fits_the_smallest_windows() {
        for line in help("").unwrap().lines() {
            assert!(line.chars().count() <= 79, "{line}");
        }
        assert!(COMMANDS.iter().all(|command| help(command.name).is_ok()));
    }
}
