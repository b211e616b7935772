//! The settings that `/set` shows and changes, by the names of the flags that they start as.

use std::str::FromStr;

use super::journal::Change;
use super::overflow::Overflow;
use super::session::{Reasoning, Session};
use crate::chat::ReasoningEffort;
use crate::engine::sampling::{SAMPLING_FIELDS, SamplingField};

/// Settings of the chat besides the sampling parameters.
const OTHER_NAMES: [&str; 6] = ["max-tokens", "stop", "reasoning", "hide-reasoning", "plain", "overflow"];

/// Returns the names of all settings, in the order in which `/set` shows them.
pub fn names() -> impl Iterator<Item = &'static str> {
    SAMPLING_FIELDS.iter().map(|field| field.flag).chain(OTHER_NAMES)
}

/// Returns whether `/set` knows this name.
pub fn is_setting(name: &str) -> bool {
    names().any(|known| known == name)
}

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
        if is_setting(&name)
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
    match name {
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
        _ => match SamplingField::find(name) {
            Some(field) => field
                .set(&mut session.options.sampling, value)
                .map_err(|expected| format!("cannot set {name} to '{value}': {expected}"))?,
            None => return Err(format!("there is no setting '{name}'; type /set to list the settings")),
        },
    }
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
    match name {
        "max-tokens" => session.options.max_tokens.map_or("none".to_string(), |max| max.to_string()),
        "stop" if session.options.stop.is_empty() => "none".to_string(),
        "stop" => format!("{:?}", session.options.stop).trim_matches(['[', ']']).to_string(),
        "reasoning" => session.render.reasoning_effort.to_string(),
        "hide-reasoning" => on_off(session.reasoning == Reasoning::Hidden),
        "plain" => on_off(session.plain),
        "overflow" => session.overflow.to_string(),
        _ => SamplingField::find(name).map_or_else(String::new, |field| field.get(&session.options.sampling)),
    }
}

fn on_off(on: bool) -> String {
    if on { "on" } else { "off" }.to_string()
}
