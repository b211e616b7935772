//! Flag values from sources other than the command line.
//!
//! The first source that sets a flag wins:
//!
//! 1. the command line
//! 2. the environment, such as `INFERNO_TEMPERATURE`
//! 3. the resumed conversation
//! 4. the configuration file's section for this model
//! 5. the configuration file's settings for all models
//! 6. the flag's own default
//!
//! Values from sources 2 to 5 become clap defaults. Then clap parses the command line again.
//! The code that uses a flag therefore does not depend on the source of the value.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::LazyLock;

use anyhow::Result;
use clap::builder::BoolishValueParser;
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};
use toml::{Table, Value};

use super::logging::{self, LogFormat};
use crate::conversation::{SavedConversation, SettingValues, is_setting, journal};
use crate::engine::sampling::SAMPLING_FIELDS;
use crate::error::Error;
use crate::files;
use crate::hub::Hub;

/// The flags about the model that `play` and `serve` also read from sources other than the command line.
const MODEL_FLAGS: [&str; 10] =
    ["attention", "chunk", "context", "deterministic", "device", "dtype", "eager", "quantize", "revision", "split"];

/// The flags of `play` that this module also reads from sources other than the command line, sorted by name.
static PLAY_FLAGS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let own = ["hide-reasoning", "max-tokens", "overflow", "plain", "reasoning", "stop", "system", "url"];
    let sampling: Vec<&str> = SAMPLING_FIELDS.iter().map(|field| field.flag).collect();
    sorted(&[&MODEL_FLAGS, &own, &sampling])
});

/// The flags of `serve` that this module also reads from sources other than the command line, sorted by name.
static SERVE_FLAGS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let own = [
        "api-key",
        "cors-origin",
        "drain-delay",
        "drain-timeout",
        "gpu-memory",
        "host",
        "max-connections",
        "max-sequences",
        "no-auth",
        "port",
        "queue",
        "tls-cert",
        "tls-key",
    ];
    sorted(&[&MODEL_FLAGS, &own])
});

/// The keys of the configuration file that set a flag, sorted by name. The only other key is `models`.
static CONFIGURATION_KEYS: LazyLock<Vec<&str>> = LazyLock::new(|| sorted(&[&PLAY_FLAGS, &SERVE_FLAGS]));

/// Flags that cannot be set in the environment, because Kubernetes sets `INFERNO_PORT` to a URL
/// if a service is named `inferno`.
const NOT_IN_ENVIRONMENT: [&str; 1] = ["port"];

/// The flags of `health` that this module also reads from sources other than the command line.
/// `serve` reads them from the same sources, so that `health` checks the address at which `serve` listens.
const HEALTH_FLAGS: [&str; 3] = ["host", "port", "tls-cert"];

/// The flags of `bench`, `perplexity` and `replay` that this module also reads from sources other than the command
/// line.
const DEVICE_FLAGS: [&str; 2] = ["device", "split"];

/// The parsed command line, with values from the environment, the resumed conversation and the configuration file.
pub struct ParsedCommandLine {
    pub matches: ArgMatches,
    /// Whether the user named the model on the command line.
    pub is_model_typed: bool,
    /// Values of flags from the command line, the environment or a resumed conversation.
    pub requested: SettingValues,
    /// Values of flags from the configuration file.
    pub configured: SettingValues,
    /// The resumed conversation. `None` without `--resume`.
    pub saved: Option<SavedConversation>,
    /// Messages about invalid settings in the resumed conversation.
    pub rejected: Vec<String>,
}

impl ParsedCommandLine {
    /// Creates the result for a command line without values from other sources.
    fn new(matches: ArgMatches) -> Self {
        Self {
            matches,
            is_model_typed: false,
            requested: SettingValues::new(),
            configured: SettingValues::new(),
            saved: None,
            rejected: Vec::new(),
        }
    }
}

/// The selected model and the resumed conversation. `play` passes them to [`parse`] when it parses the flags again.
pub struct KnownModel<'a> {
    /// The full name of the model.
    pub name: &'a str,
    pub saved: Option<&'a SavedConversation>,
}

/// Parses the command line. Fills in flags from the environment, the resumed conversation and the configuration file.
///
/// If the command line is invalid, prints an error and exits, as clap does.
/// Fails if the environment or the configuration file is invalid, or if the conversation cannot be read.
pub fn parse(command: Command, known: Option<&KnownModel>) -> Result<ParsedCommandLine> {
    let args: Vec<OsString> = std::env::args_os().collect();
    let matches = command.clone().try_get_matches_from(&args).unwrap_or_else(|error| error.exit());
    if known.is_none() {
        // Start logging now, so that the path of the configuration file is logged too.
        start_logging(&matches);
    }
    let Some((subcommand, arguments)) = matches.subcommand() else { return Ok(ParsedCommandLine::new(matches)) };
    let flags = flags_of(subcommand);
    if flags.is_empty() {
        return Ok(ParsedCommandLine::new(matches));
    }
    let parser = Parser { command: with_switch_values(command, subcommand, flags), subcommand, args: &args };

    let typed_model = arguments.try_get_one::<String>("model").ok().flatten();
    let is_model_typed = typed_model.is_some();
    let saved = saved_conversation(arguments, known)?;
    let saved_model = saved.as_ref().map(|saved| &saved.model);
    let model = known.map(|known| known.name).or(typed_model.or(saved_model).map(String::as_str));

    let mut configured = configured_values(model, arguments, flags, &parser)?;
    let (mut requested, mut rejected) = (SettingValues::new(), Vec::new());
    if let Some(saved) = &saved {
        (requested, rejected) = resumed_values(saved, flags, &parser);
        match typed_model {
            // If the user named a model, keep only the conversation's chat settings and device.
            // The other settings, such as the revision, belong to the conversation's own model.
            Some(_) => requested.retain(|flag, _| flag == "device" || is_setting(flag)),
            None => drop(requested.insert("model".to_string(), vec![saved.model.clone()])),
        }
        // The configuration file does not replace the conversation's system prompt,
        // and does not set limits or stop strings that the user removed with `/set`.
        configured.remove("system");
        configured.retain(|flag, _| !requested.get(flag).is_some_and(|values| is_removed_limit(flag, values)));
    }
    // `MODEL@REV` on the command line also sets the revision, and therefore overrides a revision from other sources.
    let is_typed_in_model = |flag: &str| flag == "revision" && typed_model.is_some_and(|model| model.contains('@'));
    requested.retain(|flag, _| !is_typed_in_model(flag));
    configured.retain(|flag, _| !is_typed_in_model(flag));

    let is_overridden = |flag: &str| is_on_command_line(arguments, flag) || is_typed_in_model(flag);
    requested.extend(environment_values(flags, &parser, &is_overridden)?);

    let matches = parser.parse_with_values(&configured, &requested)?.unwrap_or(matches);
    requested.extend(typed_values(&matches, flags));
    // The model and the system prompt are parts of the conversation, not settings.
    for flag in ["system", "model"] {
        requested.remove(flag);
        configured.remove(flag);
    }
    Ok(ParsedCommandLine { matches, is_model_typed, requested, configured, saved, rejected })
}

/// Starts logging with the number of `-v` flags and, for `serve`, the format from --log-format or INFERNO_LOG_FORMAT.
fn start_logging(matches: &ArgMatches) {
    let format = match matches.subcommand() {
        Some(("serve", arguments)) => arguments.get_one::<LogFormat>("log_format").copied(),
        _ => None,
    };
    logging::start(matches.get_count("verbose"), format);
}

/// Returns the conversation that `--resume` selects (without a name, the most recent one).
/// Returns `None` without `--resume`.
/// Takes the conversation from `known` if it is set, and otherwise reads the conversation's file.
fn saved_conversation(arguments: &ArgMatches, known: Option<&KnownModel>) -> Result<Option<SavedConversation>> {
    if let Some(known) = known {
        // Do not read the conversation again, because its file may have been renamed since the first parse.
        return Ok(known.saved.cloned());
    }
    let name = arguments.try_get_one::<String>("resume").ok().flatten();
    name.map(|name| journal::read_saved(Some(name))).transpose()
}

/// Reads the values of `flags` from the configuration file. The section for `model` overrides the settings for all
/// models. Fails if the file or one of these values is invalid.
fn configured_values(
    model: Option<&str>,
    arguments: &ArgMatches,
    flags: &[&str],
    parser: &Parser,
) -> Result<SettingValues> {
    let (mut values, path) = read_configuration(model, arguments)?;
    // Drop the flags of other subcommands, which the configuration file may contain.
    values.retain(|flag, _| flags.contains(&flag.as_str()));
    for (flag, values) in &values {
        parser.check(flag, values).map_err(|reason| Error::usage(format!("{path}: {reason}")))?;
    }
    Ok(values)
}

/// Reads the values of `flags` from environment variables such as `INFERNO_TOP_P`.
/// Skips empty variables, the flags in [`NOT_IN_ENVIRONMENT`], and flags for which `is_overridden` returns true.
/// Fails if a value is invalid.
fn environment_values(flags: &[&str], parser: &Parser, is_overridden: &dyn Fn(&str) -> bool) -> Result<SettingValues> {
    let mut settings = SettingValues::new();
    for flag in flags.iter().filter(|flag| !is_overridden(flag) && !NOT_IN_ENVIRONMENT.contains(flag)) {
        let variable = format!("INFERNO_{}", id(flag).to_uppercase());
        let Some(value) = std::env::var_os(&variable).filter(|value| !value.is_empty()) else { continue };
        let value = value.into_string().map_err(|_| Error::usage(format!("{variable} is not valid UTF-8")))?;
        let values = vec![value];
        parser.check(flag, &values).map_err(|reason| Error::usage(format!("{variable}: {reason}")))?;
        settings.insert(flag.to_string(), values);
    }
    Ok(settings)
}

/// Returns the values of the `flags` that were typed on the command line.
fn typed_values(matches: &ArgMatches, flags: &[&str]) -> SettingValues {
    let mut settings = SettingValues::new();
    let Some((_, arguments)) = matches.subcommand() else { return settings };
    for flag in flags.iter().filter(|flag| is_on_command_line(arguments, flag)) {
        let values = arguments.get_raw(&id(flag)).into_iter().flatten();
        settings.insert(flag.to_string(), values.map(|value| value.to_string_lossy().into_owned()).collect());
    }
    settings
}

/// Returns whether `values` remove the limit or the stop strings that this flag sets, as in `/set max-tokens none`.
fn is_removed_limit(flag: &str, values: &[String]) -> bool {
    matches!(flag, "max-tokens" | "stop") && values == ["none"]
}

/// Returns the valid settings of a conversation, and a message about each invalid setting.
///
/// Tolerates invalid settings, because the conversation may be damaged or from another version of inferno.
fn resumed_values(saved: &SavedConversation, flags: &[&str], parser: &Parser) -> (SettingValues, Vec<String>) {
    let (mut fitting, mut rejected) = (SettingValues::new(), Vec::new());
    for (flag, values) in &saved.settings {
        let result = if !flags.contains(&flag.as_str()) {
            Err(format!("unknown setting '{flag}'"))
        } else if is_removed_limit(flag, values) {
            Ok(())
        } else {
            parser.check(flag, values)
        };
        match result {
            Ok(()) => drop(fitting.insert(flag.clone(), values.clone())),
            Err(reason) => rejected.push(format!("ignored a setting saved in the conversation: {reason}")),
        }
    }
    (fitting, rejected)
}

/// The command line and its clap definition. Parses the command line again with other default values.
struct Parser<'a> {
    command: Command,
    subcommand: &'a str,
    args: &'a [OsString],
}

impl Parser<'_> {
    /// Parses the command line with `configured` values, overridden by `requested` values, as clap defaults.
    /// Returns `None` if there are no such values.
    fn parse_with_values(&self, configured: &SettingValues, requested: &SettingValues) -> Result<Option<ArgMatches>> {
        let mut defaults: SettingValues = configured.clone().into_iter().chain(requested.clone()).collect();
        defaults.retain(|flag, values| !is_removed_limit(flag, values));
        if defaults.is_empty() {
            return Ok(None);
        }
        let command = defaults
            .iter()
            .fold(self.command.clone(), |command, (flag, values)| with_default(command, self.subcommand, flag, values));
        let matches = command.try_get_matches_from(self.args).map_err(|error| Error::usage(first_line(&error)))?;
        Ok(Some(matches))
    }

    /// Fails if a flag does not accept `values`.
    fn check(&self, flag: &str, values: &[String]) -> Result<(), String> {
        let arg = self.command.find_subcommand(self.subcommand);
        let arg = arg.and_then(|command| command.get_arguments().find(|arg| arg.get_id() == &id(flag)));
        let is_repeatable = arg.is_some_and(|arg| matches!(arg.get_action(), ArgAction::Append));
        if !is_repeatable && values.len() != 1 {
            return Err(format!("'{flag}' takes one value, not {}", values.len()));
        }
        // The command line is valid without `values`, so any error is about this flag.
        let command = with_default(self.command.clone(), self.subcommand, flag, values);
        command.try_get_matches_from(self.args).map(|_| ()).map_err(|error| first_line(&error))
    }
}

/// Lets the environment, the conversation and the configuration file set a switch to true or false.
/// A switch is a flag that takes no value on the command line.
fn with_switch_values(command: Command, subcommand: &str, flags: &[&str]) -> Command {
    command.mut_subcommand(subcommand, |command| {
        flags.iter().fold(command, |command, flag| {
            command.mut_arg(id(flag), |arg| match arg.get_action() {
                ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
                _ => arg,
            })
        })
    })
}

/// Returns the command with new default values for a flag of a subcommand.
fn with_default(command: Command, subcommand: &str, flag: &str, values: &[String]) -> Command {
    let values = values.to_vec();
    command.mut_subcommand(subcommand, |command| command.mut_arg(id(flag), |arg| arg.default_values(values)))
}

fn is_on_command_line(arguments: &ArgMatches, flag: &str) -> bool {
    arguments.value_source(&id(flag)) == Some(ValueSource::CommandLine)
}

fn first_line(error: &clap::Error) -> String {
    let message = error.to_string();
    message.trim_start_matches("error: ").lines().next().unwrap_or_default().to_string()
}

/// Returns the flags of a subcommand that this module also reads from sources other than the command line.
fn flags_of(subcommand: &str) -> &'static [&'static str] {
    match subcommand {
        "play" => &PLAY_FLAGS,
        "serve" => &SERVE_FLAGS,
        "health" => &HEALTH_FLAGS,
        "bench" | "perplexity" | "replay" => &DEVICE_FLAGS,
        _ => &[],
    }
}

/// Combines lists of flags into one list, sorted by name and without duplicates.
fn sorted<'f>(lists: &[&[&'f str]]) -> Vec<&'f str> {
    let mut flags = lists.concat();
    flags.sort_unstable();
    flags.dedup();
    flags
}

/// Returns clap's id for a flag: the name of the flag with underscores.
fn id(flag: &str) -> String {
    flag.replace('-', "_")
}

/// Reads the configuration file. Returns its settings for all models, overridden by those for `model`, and its path.
/// Returns no settings if the file does not exist. Fails if the file is invalid.
fn read_configuration(model: Option<&str>, arguments: &ArgMatches) -> Result<(SettingValues, String)> {
    let Some(path) = configuration_path() else { return Ok((SettingValues::new(), String::new())) };
    let shown_path = path.display().to_string();
    let invalid = |reason: String| Error::usage(format!("{shown_path}: {reason}"));
    let text = match files::read_text_if_present(&path, files::MAX_CONFIGURATION_BYTES) {
        Ok(Some(text)) => text,
        Ok(None) => return Ok((SettingValues::new(), shown_path)),
        Err(error) => return Err(Error::usage(format!("{error:#}"))),
    };
    tracing::info!(path = shown_path, "configuration");
    let mut table: Table = text.parse().map_err(|error: toml::de::Error| invalid(error.to_string()))?;
    let models = table.remove("models");
    let mut settings = SettingValues::new();
    read_table(&table, "", &mut settings).map_err(invalid)?;
    if let Some(models) = models {
        let Value::Table(models) = models else { return Err(invalid("'models' must be a table".to_string())) };
        let model = model.map(|model| full_name(model, arguments));
        for (name, table) in &models {
            let section = format!(" in [models.{name:?}]");
            let Value::Table(table) = table else {
                return Err(invalid(format!("'{name}' in [models] must be a table")));
            };
            // Read the sections for other models too, to report unknown keys and values of the wrong type.
            let mut model_settings = SettingValues::new();
            read_table(table, &section, &mut model_settings).map_err(invalid)?;
            if model.as_ref().is_some_and(|model| is_name_of(name, model)) {
                settings.extend(model_settings);
            }
        }
    }
    Ok((settings, shown_path))
}

/// Returns the full name of the model that `model` names in full or in part. Returns `model` if no model is found.
fn full_name(model: &str, arguments: &ArgMatches) -> String {
    let revision = arguments.try_get_one::<String>("revision").ok().flatten();
    let found = Hub::from_env().and_then(|hub| hub.find(model, revision.map(String::as_str)));
    found.map_or_else(|_| model.to_string(), |snapshot| snapshot.name)
}

/// Returns whether a configuration section applies to a model. A section is named after a model, repository or path.
fn is_name_of(section: &str, model: &str) -> bool {
    let is_repository = model.split_once(':').is_some_and(|(repository, _)| repository == section);
    let path = |name: &str| std::fs::canonicalize(name).ok();
    section == model || is_repository || (path(section).is_some() && path(section) == path(model))
}

/// Returns `$INFERNO_CONFIG`, or `inferno/config.toml` in the XDG configuration directory.
/// Returns `None` if INFERNO_CONFIG is not set and the XDG configuration directory is unknown.
fn configuration_path() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("INFERNO_CONFIG").filter(|path| !path.is_empty()) {
        return Some(PathBuf::from(path));
    }
    let folder = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = folder.or_else(|| Some(std::env::home_dir()?.join(".config")))?;
    Some(folder.join("inferno/config.toml"))
}

/// Adds the values of a table to `settings`. Fails if a key is unknown or a value has the wrong type.
/// `section` names the table in error messages. It is empty for the settings for all models.
fn read_table(table: &Table, section: &str, settings: &mut SettingValues) -> Result<(), String> {
    for (key, value) in table {
        if !CONFIGURATION_KEYS.contains(&key.as_str()) {
            return Err(format!("unknown key '{key}'{section}\n  known keys: {}", CONFIGURATION_KEYS.join(", ")));
        }
        let values = match value {
            Value::Array(values) => values.iter().map(scalar).collect(),
            value => scalar(value).map(|value| vec![value]),
        };
        let values = values
            .ok_or_else(|| format!("'{key}'{section} must be a string, a number, a boolean, or an array of these"))?;
        settings.insert(key.clone(), values);
    }
    Ok(())
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(on) => Some(on.to_string()),
        _ => None,
    }
}
