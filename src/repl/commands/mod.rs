//! The slash commands of the chat.

mod export;
mod file;
mod info;
mod paths;

use crate::chat::Role;
use crate::conversation::{self, Session, journal};
use crate::text::counted;

/// A slash command and its help.
struct SlashCommand {
    name: &'static str,
    /// Other names of the command, which the help and Tab do not list.
    aliases: &'static [&'static str],
    /// The arguments as the help shows them. If this is empty, the command accepts no arguments.
    arguments: &'static str,
    summary: &'static str,
    /// Text that only `/help NAME` shows, below the summary.
    details: &'static str,
    /// Runs the command with the trimmed text after its name. An error is a message for the user.
    run: fn(&str, &mut Session) -> Result<CommandOutcome, String>,
}

/// All slash commands, in the order in which `/help` lists them.
const COMMANDS: &[SlashCommand] = &[
    SlashCommand {
        name: "help",
        aliases: &["?"],
        arguments: "[COMMAND]",
        summary: "list the commands, or explain one",
        details: "",
        run: |name, _| help(name).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "exit",
        aliases: &["quit", "bye"],
        arguments: "",
        summary: "leave (or press Ctrl-D, or Ctrl-C twice)",
        details: "",
        run: |_, _| Ok(CommandOutcome::Leave),
    },
    SlashCommand {
        name: "clear",
        aliases: &[],
        arguments: "",
        summary: "start a new conversation",
        details: "Keeps the system prompt and the settings. If the old conversation was saved, /load opens it.",
        run: |_, session| clear(session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "undo",
        aliases: &[],
        arguments: "",
        summary: "remove the last question and its answer",
        details: "Repeat /undo to remove earlier turns. The model no longer sees the removed messages.",
        run: |_, session| undo(session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "regen",
        aliases: &[],
        arguments: "",
        summary: "answer the last question again",
        details: "At a temperature above 0, the new answer can differ. The old answer stays if the new one fails or is \
                  stopped before its first word.",
        run: |_, _| Ok(CommandOutcome::Regenerate),
    },
    SlashCommand {
        name: "system",
        aliases: &[],
        arguments: "[TEXT]",
        summary: "show the system prompt, or start over with a new one",
        details: "To set the system prompt at startup, use the --system flag.",
        run: |text, session| system(text, session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "set",
        aliases: &[],
        arguments: "[NAME VALUE]",
        summary: "show or change the settings",
        details: "Settings have the same names as the flags of `inferno play`. `/set stop none` removes all stop \
                  strings. `/set max-tokens none` removes the token limit. `/set plain on` turns off Markdown \
                  formatting.",
        run: |arguments, session| set(arguments, session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "reasoning",
        aliases: &[],
        arguments: "EFFORT",
        summary: "set the reasoning effort: low, medium, high",
        details: "`/reasoning show` and `/reasoning hide` show or hide the reasoning. Not every model supports effort \
                  levels. gpt-oss always reasons; its reasoning cannot be turned off.",
        run: |effort, session| reasoning(effort, session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "file",
        aliases: &[],
        arguments: "[PATH]",
        summary: "attach a text file to the next message",
        details: "Repeat the command to attach more files. Without a path, the command lists the attached files. \
                  `/file none` detaches all files.",
        run: |path, session| file::run(path, session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "save",
        aliases: &[],
        arguments: "NAME",
        summary: "name this conversation",
        details: "Conversations are saved after each turn, except with --raw or INFERNO_NOHISTORY=1. To open one by \
                  name, type /load NAME or run `inferno play --resume NAME`. `/save NAME --cache` also saves the KV \
                  cache of the conversation. When you open the conversation again, its old messages then need no \
                  prefill. The saved KV cache can take several GB.",
        run: |arguments, session| save(arguments, session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "load",
        aliases: &[],
        arguments: "[NAME]",
        summary: "continue a saved conversation, or list all",
        details: "The saved messages and settings replace the current ones. The model stays the same.",
        run: |name, session| load(name, session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "export",
        aliases: &[],
        arguments: "md|json [PATH]",
        summary: "write the conversation to a new file",
        details: "Markdown contains the text of the messages. JSON contains the model, the revision, the settings, \
                  and the messages in OpenAI's format, with reasoning and tool calls. Existing files are not replaced.",
        run: |arguments, session| export::run(arguments, session).map(CommandOutcome::Done),
    },
    SlashCommand {
        name: "stats",
        aliases: &[],
        arguments: "",
        summary: "describe the model and the conversation",
        details: "",
        run: |_, session| Ok(CommandOutcome::Done(info::stats(session))),
    },
    SlashCommand {
        name: "context",
        aliases: &[],
        arguments: "",
        summary: "show how full the context is",
        details: "`/set overflow stop|drop-oldest` selects what happens when the context is full.",
        run: |_, session| info::context(session).map(CommandOutcome::Done).map_err(message),
    },
    SlashCommand {
        name: "model",
        aliases: &[],
        arguments: "[NAME]",
        summary: "switch to another model, or list all",
        details: "Keeps the conversation and the settings that you chose. If the new model cannot be loaded, the old \
                  model is loaded again.",
        run: model,
    },
];

/// What the chat does after an input line.
pub enum CommandOutcome {
    /// The command has finished, and the chat prints this text.
    Done(String),
    Leave,
    /// Answer the last question again.
    Regenerate,
    /// Switch to the model with this name.
    SwitchModel(String),
    /// The line is a message for the model.
    NotACommand,
}

/// Returns the names of all commands, with the slash.
pub fn names() -> Vec<String> {
    COMMANDS.iter().map(|command| format!("/{}", command.name)).collect()
}

/// Returns the fixed words that Tab completes after `command`, if any.
pub fn arguments(command: &str) -> Vec<String> {
    let words: Vec<&str> = match command {
        "/set" => conversation::setting_names().collect(),
        "/reasoning" => vec!["low", "medium", "high", "show", "hide"],
        "/help" => COMMANDS.iter().map(|command| command.name).collect(),
        _ => Vec::new(),
    };
    words.into_iter().map(str::to_string).collect()
}

/// Runs `line` if it is a slash command. Returns [`CommandOutcome::NotACommand`] if `line` is a message for the model.
pub fn run(line: &str, session: &mut Session) -> CommandOutcome {
    let line = line.trim();
    let (name, arguments) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let arguments = arguments.trim();
    // Multi-line input is a message, even if it starts with a command. Only `/system` accepts several lines.
    if line.contains('\n') && name != "/system" {
        return CommandOutcome::NotACommand;
    }
    let Some(word) = name.strip_prefix('/') else { return CommandOutcome::NotACommand };
    let Some(command) = find(word) else {
        // A message can start with a path, such as /etc/hosts.
        // Only a word of lowercase letters after the slash counts as a mistyped command.
        if word.is_empty() || !word.chars().all(|c| c.is_ascii_lowercase()) {
            return CommandOutcome::NotACommand;
        }
        return CommandOutcome::Done(unknown_command(word));
    };
    if command.arguments.is_empty() && !arguments.is_empty() {
        return CommandOutcome::Done(format!("{name} takes no arguments, but got {arguments:?}"));
    }
    (command.run)(arguments, session).unwrap_or_else(CommandOutcome::Done)
}

/// Returns the command with this name or alias, without the slash.
fn find(name: &str) -> Option<&'static SlashCommand> {
    COMMANDS.iter().find(|command| command.name == name || command.aliases.contains(&name))
}

fn message(error: anyhow::Error) -> String {
    crate::text::error_message(&error)
}

fn unknown_command(name: &str) -> String {
    format!("unknown command /{name}; /help lists the commands")
}

/// Appends the name of the old conversation to `text` if that conversation was saved.
fn with_saved_name(text: &str, old_name: Option<String>) -> String {
    old_name.map_or_else(|| text.to_string(), |name| format!("{text}; the old conversation is saved as {name}"))
}

fn help(name: &str) -> Result<String, String> {
    let usage = |command: &SlashCommand| format!("/{} {}", command.name, command.arguments).trim_end().to_string();
    if !name.is_empty() {
        let name = name.trim_start_matches('/');
        let command = find(name).ok_or_else(|| unknown_command(name))?;
        return Ok(format!("{}: {}\n{}", usage(command), command.summary, command.details).trim_end().to_string());
    }
    let mut lines: Vec<String> =
        COMMANDS.iter().map(|command| format!("{:23} {}", usage(command), command.summary)).collect();
    for (keys, effect) in [
        ("\"\"\"", "surround several lines, or end all but the last with \\"),
        ("Tab, Ctrl-R, Ctrl-G", "complete, search the history, open $EDITOR"),
        ("Ctrl-C, Ctrl-O", "while an answer streams: stop it, fold the reasoning"),
    ] {
        lines.push(format!("{keys:23} {effect}"));
    }
    Ok(lines.join("\n"))
}

fn clear(session: &mut Session) -> Result<String, String> {
    session.clear().map(|old| with_saved_name("new conversation", old)).map_err(message)
}

fn undo(session: &mut Session) -> Result<String, String> {
    match session.undo().map_err(message)? {
        Some(question) => Ok(format!("removed: {}", question.lines().next_back().unwrap_or(""))),
        None => Err("nothing to undo".to_string()),
    }
}

fn system(text: &str, session: &mut Session) -> Result<String, String> {
    if !text.is_empty() {
        let old_name = session.clear_with_system(text).map_err(message)?;
        return Ok(with_saved_name("new conversation with a new system prompt", old_name));
    }
    let system = session.messages().iter().find(|message| message.role == Role::System);
    Ok(system.map_or_else(|| "no system prompt".to_string(), |message| message.content.clone()))
}

fn set(arguments: &str, session: &mut Session) -> Result<String, String> {
    match arguments.split_once(char::is_whitespace) {
        Some((name, value)) => session.change_setting(name, value.trim()),
        None if arguments.is_empty() => {
            let line = |name: &str| format!("{name:19} {}", session.setting(name));
            Ok(conversation::setting_names().map(line).collect::<Vec<_>>().join("\n"))
        }
        None => Err(format!("usage: /set {arguments} VALUE")),
    }
}

fn reasoning(effort: &str, session: &mut Session) -> Result<String, String> {
    if effort.is_empty() { Ok(session.setting("reasoning")) } else { session.change_setting("reasoning", effort) }
}

fn save(arguments: &str, session: &mut Session) -> Result<String, String> {
    let mut words: Vec<&str> = arguments.split_whitespace().collect();
    let with_cache = words.pop_if(|last| *last == "--cache").is_some();
    let name = words.join(" ");
    let name = match session.saved_name() {
        Some(current) if name.is_empty() && with_cache => current.to_string(),
        Some(current) if name.is_empty() => {
            return Ok(format!("the current name is {current}; /save NAME changes it"));
        }
        None if name.is_empty() => return Err("usage: /save NAME".to_string()),
        _ => name,
    };
    session.rename(&name).map_err(message)?;
    let cached = if with_cache {
        format!(" with {} of its KV cache", counted(session.save_prefix().map_err(message)?, "token"))
    } else {
        String::new()
    };
    Ok(format!("saved{cached}; to continue it: inferno play --resume {name}"))
}

fn load(name: &str, session: &mut Session) -> Result<String, String> {
    if name.is_empty() {
        let names = journal::names();
        return if names.is_empty() { Err("no saved conversations yet".to_string()) } else { Ok(names.join("\n")) };
    }
    if session.saved_name() == Some(name) {
        return Ok(format!("{name} is already open"));
    }
    let warning = session.resume_with_saved_settings(name).map_err(message)?;
    let summary = format!("continuing {}", summary(session));
    Ok(warning.into_iter().chain([summary]).collect::<Vec<_>>().join("\n"))
}

/// Describes the conversation in one line: the number of questions, and the last line of the last question.
pub fn summary(session: &Session) -> String {
    let mut questions = session.messages().iter().filter(|message| message.role == Role::User);
    let (count, last) = (questions.clone().count(), questions.next_back());
    let last = last.and_then(|message| message.content.lines().next_back()).unwrap_or("");
    let questions = if count == 1 { "question" } else { "questions" };
    format!("a conversation with {count} {questions}; last: {last}")
}

fn model(name: &str, session: &mut Session) -> Result<CommandOutcome, String> {
    Ok(if name.is_empty() {
        CommandOutcome::Done(models(session))
    } else {
        CommandOutcome::SwitchModel(name.to_string())
    })
}

fn models(session: &Session) -> String {
    let current = session.model_name();
    let mark = |name: String| if name == current { format!("{name} (current)") } else { name };
    session.models().names().into_iter().map(mark).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_fits_in_79_columns() {
        for line in help("").unwrap().lines() {
            assert!(line.chars().count() <= 79, "{line}");
        }
        assert!(COMMANDS.iter().all(|command| help(command.name).is_ok()));
    }

    #[test]
    fn help_accepts_aliases() {
        for command in COMMANDS {
            for alias in command.aliases {
                assert_eq!(help(alias), help(command.name), "{alias}");
                assert_eq!(help(&format!("/{alias}")), help(command.name), "/{alias}");
            }
        }
        assert_eq!(help("leave"), Err(unknown_command("leave")));
    }
}
