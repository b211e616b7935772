//! The settings that `/set` shows and changes, named like the flags of `inferno play`.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::overflow::Overflow;
use crate::chat::ReasoningEffort;
use crate::engine::SamplingParams;
use crate::engine::sampling::{SAMPLING_FIELDS, SamplingField};

/// Values by flag name, such as `temperature`. A repeatable flag can have several values.
pub type SettingValues = BTreeMap<String, Vec<String>>;

/// The names of the chat settings that are not sampling parameters.
const OTHER_NAMES: [&str; 6] = ["max-tokens", "stop", "reasoning", "hide-reasoning", "plain", "overflow"];

/// Returns the names of all settings in display order.
pub fn names() -> impl Iterator<Item = &'static str> {
    SAMPLING_FIELDS.iter().map(|field| field.flag).chain(OTHER_NAMES)
}

/// Returns whether `name` is a setting that `/set` can change, unlike a flag such as `device`.
pub fn is_setting(name: &str) -> bool {
    names().any(|known| known == name)
}

/// Returns whether a server applies its own default for the setting `name` if the user does not set it.
pub fn has_server_default(name: &str) -> bool {
    name == "reasoning" || SamplingField::find(name).is_some()
}

/// Whether the model's reasoning is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningVisibility {
    Shown,
    Hidden,
}

/// The current values of all settings that `/set` can change.
#[derive(Clone, Debug)]
pub struct ChatSettings {
    pub sampling: SamplingParams,
    /// The maximum number of tokens in one answer.
    /// With `None`, a model in this process can fill the context, and a server applies its own limit.
    pub max_tokens: Option<usize>,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    pub reasoning_effort: ReasoningEffort,
    pub reasoning: ReasoningVisibility,
    /// Whether to show answers as written, without Markdown formatting.
    pub plain: bool,
    pub overflow: Overflow,
}

impl ChatSettings {
    /// Returns the default settings with the given sampling parameters.
    pub fn new(sampling: SamplingParams) -> Self {
        Self {
            sampling,
            max_tokens: None,
            stop: Vec::new(),
            reasoning_effort: ReasoningEffort::default(),
            reasoning: ReasoningVisibility::Shown,
            plain: false,
            overflow: Overflow::Stop,
        }
    }

    /// Returns the value of a setting as text, or an empty string if the name is unknown.
    pub fn get(&self, name: &str) -> String {
        match name {
            "max-tokens" => self.max_tokens.map_or("none".to_string(), |limit| limit.to_string()),
            "stop" if self.stop.is_empty() => "none".to_string(),
            "stop" => format!("{:?}", self.stop).trim_matches(['[', ']']).to_string(),
            "reasoning" => self.reasoning_effort.to_string(),
            "hide-reasoning" => on_or_off(self.reasoning == ReasoningVisibility::Hidden),
            "plain" => on_or_off(self.plain),
            "overflow" => self.overflow.to_string(),
            _ => SamplingField::find(name).map_or_else(String::new, |field| field.get(&self.sampling)),
        }
    }

    /// Changes a setting. Returns an error and changes nothing if the name is unknown, or if a value or the number of
    /// values is invalid.
    pub fn set(&mut self, name: &str, values: &[String]) -> Result<(), String> {
        let value = match (name, values) {
            ("stop", values) if values != ["none"] => {
                self.stop = values.to_vec();
                return Ok(());
            }
            (_, [value]) => value.as_str(),
            _ => return Err(format!("cannot set {name}: it takes one value, not {}", values.len())),
        };
        match name {
            "max-tokens" if value == "none" => self.max_tokens = None,
            "max-tokens" => match parse(name, value, "a positive integer or none")? {
                0 => return Err("cannot set max-tokens to '0': expected a positive integer or none".to_string()),
                limit => self.max_tokens = Some(limit),
            },
            "stop" => self.stop.clear(),
            "reasoning" => self.reasoning_effort = parse(name, value, "low, medium, high, show or hide")?,
            "hide-reasoning" if parse_switch(name, value)? => self.reasoning = ReasoningVisibility::Hidden,
            "hide-reasoning" => self.reasoning = ReasoningVisibility::Shown,
            "plain" => self.plain = parse_switch(name, value)?,
            "overflow" => self.overflow = parse(name, value, "stop or drop-oldest")?,
            _ => match SamplingField::find(name) {
                Some(field) => field
                    .set(&mut self.sampling, value)
                    .map_err(|expected| format!("cannot set {name} to '{value}': {expected}"))?,
                None => return Err(format!("unknown setting '{name}'; type /set to list the settings")),
            },
        }
        Ok(())
    }
}

/// Converts the arguments of `/set NAME VALUE` to a flag name and its value.
///
/// `reasoning show` and `reasoning hide` set `hide-reasoning`. The value of a boolean flag becomes `true` or `false`.
/// Fails if the value of a boolean flag is invalid.
pub fn normalize<'a>(name: &'a str, value: &str) -> Result<(&'a str, String), String> {
    Ok(match (name, value) {
        ("reasoning", "show") => ("hide-reasoning", "false".to_string()),
        ("reasoning", "hide") => ("hide-reasoning", "true".to_string()),
        ("hide-reasoning" | "plain", value) => (name, parse_switch(name, value)?.to_string()),
        (name, value) => (name, value.to_string()),
    })
}

fn parse<T: FromStr>(name: &str, value: &str, expected: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("cannot set {name} to '{value}': expected {expected}"))
}

fn parse_switch(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "true" | "on" | "yes" | "1" => Ok(true),
        "false" | "off" | "no" | "0" => Ok(false),
        _ => Err(format!("cannot set {name} to '{value}': expected on or off")),
    }
}

fn on_or_off(is_on: bool) -> String {
    if is_on { "on" } else { "off" }.to_string()
}
