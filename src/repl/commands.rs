//! The slash commands of the chat.

use std::str::FromStr;

use super::session::{Reasoning, Session};

const HELP: &str = "\
/help             this list
/exit             leave (also Ctrl-D, or Ctrl-C twice)
/clear            forget the conversation
/system [TEXT]    show or replace the instructions, and start anew
/set [NAME VALUE] show or change the settings
/stats            what is loaded and how full the context is
\"\"\"               starts and ends a message of several lines; so does a \\ at the end of each";

/// What became of a line.
pub enum Outcome {
    /// It was a command; this is to be shown.
    Done(String),
    Leave,
    /// It is a message for the model.
    NoCommand,
}

/// Runs `line` if it is a command.
pub fn run(line: &str, session: &mut Session) -> Outcome {
    let line = line.trim();
    let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    match name {
        "/help" | "/?" => Outcome::Done(HELP.to_string()),
        "/exit" | "/quit" | "/bye" => Outcome::Leave,
        "/clear" => {
            session.clear();
            Outcome::Done("the conversation is forgotten".to_string())
        }
        "/system" => Outcome::Done(system(rest, session)),
        "/set" => Outcome::Done(set(rest, session).unwrap_or_else(|problem| problem)),
        "/stats" => Outcome::Done(stats(session)),
        // A path or a division may start with a slash; one word after it hardly does.
        _ if name.len() > 1 && name.starts_with('/') && name[1..].chars().all(|c| c.is_ascii_lowercase()) => {
            Outcome::Done(format!("there is no command {name}; /help shows those there are"))
        }
        _ => Outcome::NoCommand,
    }
}

fn system(text: &str, session: &mut Session) -> String {
    if !text.is_empty() {
        session.set_system(text);
        return "new instructions; the conversation starts anew".to_string();
    }
    let current = session.messages.iter().find(|message| message.role == crate::chat::Role::System);
    current.map_or_else(|| "there are no instructions".to_string(), |message| message.content.clone())
}

fn set(text: &str, session: &mut Session) -> Result<String, String> {
    let Some((name, value)) = text.split_once(char::is_whitespace) else {
        return if text.is_empty() { Ok(settings(session)) } else { Err(format!("/set {text} VALUE")) };
    };
    let value = value.trim();
    let mut sampling = session.options.sampling.clone();
    match name {
        "temperature" => sampling.temperature = parse(value)?,
        "top-k" => sampling.top_k = parse(value)?,
        "top-p" => sampling.top_p = parse(value)?,
        "min-p" => sampling.min_p = parse(value)?,
        "repetition-penalty" => sampling.repetition_penalty = parse(value)?,
        "frequency-penalty" => sampling.frequency_penalty = parse(value)?,
        "presence-penalty" => sampling.presence_penalty = parse(value)?,
        "seed" => sampling.seed = parse(value)?,
        "max-tokens" => session.options.max_tokens = if value == "none" { None } else { Some(parse(value)?) },
        "reasoning" => match value {
            "show" => session.reasoning = Reasoning::Shown,
            "hide" => session.reasoning = Reasoning::Hidden,
            effort => {
                session.render.reasoning_effort =
                    effort.parse().map_err(|_| "reasoning is low, medium, high, show or hide".to_string())?;
            }
        },
        other => return Err(format!("there is no setting {other}; /set shows those there are")),
    }
    if let Some(problem) = sampling.problem() {
        return Err(problem);
    }
    session.options.sampling = sampling;
    Ok(match value {
        "show" => "thoughts are shown".to_string(),
        "hide" => "thoughts are hidden".to_string(),
        value => format!("{name} is {value}"),
    })
}

fn parse<T: FromStr>(value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("'{value}' is not a number that fits here"))
}

fn settings(session: &Session) -> String {
    let sampling = &session.options.sampling;
    let max_tokens = session.options.max_tokens.map_or("none".to_string(), |max| max.to_string());
    let shown = if session.reasoning == Reasoning::Shown { "show" } else { "hide" };
    [
        ("temperature", sampling.temperature.to_string()),
        ("top-k", sampling.top_k.to_string()),
        ("top-p", sampling.top_p.to_string()),
        ("min-p", sampling.min_p.to_string()),
        ("repetition-penalty", sampling.repetition_penalty.to_string()),
        ("frequency-penalty", sampling.frequency_penalty.to_string()),
        ("presence-penalty", sampling.presence_penalty.to_string()),
        ("seed", sampling.seed.to_string()),
        ("max-tokens", max_tokens),
        ("reasoning", format!("{}, {shown}", session.render.reasoning_effort)),
    ]
    .map(|(name, value)| format!("{name:19} {value}"))
    .join("\n")
}

fn stats(session: &Session) -> String {
    let info = session.engine.info();
    let format = session.engine.language().chat.as_ref().map_or("none", |chat| chat.name());
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    [
        ("model", format!("{} {}", info.family, info.quantisation.as_deref().unwrap_or("unquantised"))),
        (
            "executor",
            match session.engine.why_eager() {
                None => session.engine.executor().to_string(),
                Some(why) => format!("{}, for {why}", session.engine.executor()),
            },
        ),
        ("attention", info.attention.to_string()),
        ("parameters", info.parameters.to_string()),
        ("device", info.device.name.clone()),
        ("dtype", format!("{:?}", info.dtype).to_lowercase()),
        ("weights", mb(info.weight_bytes)),
        ("cache", format!("{} for {} tokens", mb(info.cache_bytes), session.engine.context())),
        ("context used", session.engine.cached_tokens().to_string()),
        ("chat format", format.to_string()),
        ("messages", session.messages.len().to_string()),
        ("loaded in", format!("{:.2} s", info.load.total_s)),
    ]
    .map(|(name, value)| format!("{name:13} {value}"))
    .join("\n")
}
