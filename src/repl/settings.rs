//! The settings that `/set` shows and changes, by the names of the flags that they start as.

use std::str::FromStr;

use super::journal::Change;
use super::overflow::Overflow;
use super::session::{Reasoning, Session};
use crate::chat::ReasoningEffort;

/// All names, in the order in which they are shown.
pub const NAMES: [&str; 14] = [
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "repetition-penalty",
    "frequency-penalty",
    "presence-penalty",
    "seed",
    "max-tokens",
    "stop",
    "reasoning",
    "hide-reasoning",
    "plain",
    "overflow",
];

/// Changes a setting, and remembers that it was asked for.
pub fn set(session: &mut Session, name: &str, value: &str) -> Result<String, String> {
    let (name, value) = match (name, value) {
        ("reasoning", "show") => ("hide-reasoning", "false"),
        ("reasoning", "hide") => ("hide-reasoning", "true"),
        other => other,
    };
    let value = match name {
        // As flags take it.
        "hide-reasoning" | "plain" => &switch(value)?.to_string(),
        _ => value,
    };
    apply(session, name, &[value.to_string()])?;
    // `none` too: the configuration may have a limit of its own.
    session.settings.insert(name.to_string(), vec![value.to_string()]);
    let kept = session.keep(Change::Settings).map_err(|error| format!("not kept for --resume: {error:#}"));
    let done = match (name, value) {
        ("hide-reasoning", "true") => "thoughts are hidden".to_string(),
        ("hide-reasoning", _) => "thoughts are shown".to_string(),
        _ => format!("{name} is {}", value_of(session, name)),
    };
    kept.map(|()| done)
}

/// Puts what was asked for over the defaults of a model that was just loaded, in place of what was set before. Returns
/// what cannot be set.
pub fn apply_all(session: &mut Session) -> Vec<String> {
    session.options.max_tokens = None;
    session.options.stop.clear();
    session.render.reasoning_effort = ReasoningEffort::default();
    (session.reasoning, session.plain, session.overflow) = (Reasoning::Shown, false, Overflow::Stop);
    let mut problems = Vec::new();
    for (name, values) in session.all_settings() {
        // Flags that are no settings of the chat, such as --device, are not known here.
        if NAMES.contains(&name.as_str())
            && let Err(problem) = apply(session, &name, &values)
        {
            problems.push(format!("{name} stays {}: {problem}", value_of(session, &name)));
        }
    }
    problems
}

fn apply(session: &mut Session, name: &str, values: &[String]) -> Result<(), String> {
    let value = match (name, values) {
        ("stop", values) if values != ["none"] => {
            session.options.stop = values.to_vec();
            return Ok(());
        }
        (_, [value]) => value.as_str(),
        _ => return Err("it takes one value".to_string()),
    };
    let mut sampling = session.options.sampling.clone();
    match name {
        "temperature" => sampling.temperature = number(value)?,
        "top-k" => sampling.top_k = number(value)?,
        "top-p" => sampling.top_p = number(value)?,
        "min-p" => sampling.min_p = number(value)?,
        "repetition-penalty" => sampling.repetition_penalty = number(value)?,
        "frequency-penalty" => sampling.frequency_penalty = number(value)?,
        "presence-penalty" => sampling.presence_penalty = number(value)?,
        "seed" => sampling.seed = number(value)?,
        "max-tokens" if value == "none" => session.options.max_tokens = None,
        "max-tokens" => match number(value)? {
            0 => return Err("max-tokens is 1 or more, or none".to_string()),
            most => session.options.max_tokens = Some(most),
        },
        "stop" => session.options.stop.clear(),
        "reasoning" => {
            session.render.reasoning_effort =
                value.parse().map_err(|_| "reasoning is low, medium, high, show or hide".to_string())?;
        }
        "hide-reasoning" => session.reasoning = if switch(value)? { Reasoning::Hidden } else { Reasoning::Shown },
        "plain" => session.plain = switch(value)?,
        "overflow" => session.overflow = value.parse()?,
        other => return Err(format!("there is no setting {other}; /set shows those there are")),
    }
    if let Some(problem) = sampling.problem() {
        return Err(problem);
    }
    session.options.sampling = sampling;
    Ok(())
}

fn number<T: FromStr>(value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("'{value}' is not a number that fits here"))
}

fn switch(value: &str) -> Result<bool, String> {
    match value {
        "true" | "on" | "yes" => Ok(true),
        "false" | "off" | "no" => Ok(false),
        _ => Err(format!("'{value}' is neither on nor off")),
    }
}

/// What a setting is now.
pub fn value_of(session: &Session, name: &str) -> String {
    let sampling = &session.options.sampling;
    match name {
        "temperature" => sampling.temperature.to_string(),
        "top-k" => sampling.top_k.to_string(),
        "top-p" => sampling.top_p.to_string(),
        "min-p" => sampling.min_p.to_string(),
        "repetition-penalty" => sampling.repetition_penalty.to_string(),
        "frequency-penalty" => sampling.frequency_penalty.to_string(),
        "presence-penalty" => sampling.presence_penalty.to_string(),
        "seed" => sampling.seed.to_string(),
        "max-tokens" => session.options.max_tokens.map_or("none".to_string(), |max| max.to_string()),
        "stop" if session.options.stop.is_empty() => "none".to_string(),
        "stop" => format!("{:?}", session.options.stop).trim_matches(['[', ']']).to_string(),
        "reasoning" => session.render.reasoning_effort.to_string(),
        "hide-reasoning" => on_off(session.reasoning == Reasoning::Hidden),
        "plain" => on_off(session.plain),
        "overflow" => session.overflow.to_string(),
        _ => String::new(),
    }
}

fn on_off(on: bool) -> String {
    if on { "on" } else { "off" }.to_string()
}
