//! Where the value of a flag comes from: the command line, else the environment (`INFERNO_TEMPERATURE`), else the
//! conversation that is resumed, else the configuration file for this model, else for all, else its default.
//!
//! The lower ones become clap's own defaults and the command line is read once more, so that a flag need not know.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use toml::{Table, Value};

use crate::error::Error;
use crate::repl::journal::{self, Settings};

/// Flags of `play` that the environment and the configuration can set, and that a conversation remembers.
const FLAGS: [&str; 22] = [
    "attention",
    "chunk",
    "context",
    "device",
    "dtype",
    "eager",
    "frequency-penalty",
    "hide-reasoning",
    "max-tokens",
    "min-p",
    "overflow",
    "plain",
    "presence-penalty",
    "quantize",
    "reasoning",
    "repetition-penalty",
    "seed",
    "stop",
    "system",
    "temperature",
    "top-k",
    "top-p",
];

/// Other verbs that run a model share this one.
const DEVICE: [&str; 1] = ["device"];

/// Reads the command line of this process. Ends it, as clap does, where that cannot be understood.
pub fn matches(command: Command) -> Result<ArgMatches> {
    let args: Vec<OsString> = std::env::args_os().collect();
    let command = with_environment(command);
    let matches = command.clone().try_get_matches_from(&args).unwrap_or_else(|error| error.exit());
    // The configuration is the first of the files that `-v` tells of.
    super::logging::start(matches.get_count("verbose"));
    let Some((verb, of_verb)) = matches.subcommand() else { return Ok(matches) };
    let flags = flags(verb);
    if flags.is_empty() {
        return Ok(matches);
    }
    let mut model = of_verb.get_one::<String>("model").cloned();
    let resumed = match of_verb.try_get_one::<String>("resume") {
        Ok(Some(name)) => Some(journal::peek(Some(name))?),
        _ => None,
    };
    if let Some(saved) = &resumed {
        model.get_or_insert_with(|| saved.model.clone());
    }
    let (mut defaults, origin) = configured(model.as_deref())?;
    if let Some(saved) = resumed {
        defaults.extend(saved.settings);
        defaults.insert("model".to_string(), vec![saved.model]);
    }
    if defaults.is_empty() {
        return Ok(matches);
    }
    let command = command.mut_subcommand(verb, |command| {
        defaults.into_iter().fold(command, |command, (flag, values)| {
            // Other verbs share the file, and a journal may be of another version.
            let known = flag == "model" || flags.contains(&flag.as_str());
            if known { command.mut_arg(id(&flag), |arg| arg.default_values(values)) } else { command }
        })
    });
    command.try_get_matches_from(&args).map_err(|error| {
        // The same line without these defaults was right.
        let problem = error.to_string();
        let problem = problem.trim_start_matches("error: ").lines().next().unwrap_or_default().to_string();
        Error::Usage(format!("{origin}: {problem}")).into()
    })
}

/// The flags of `play` that were set, by whatever: those that differ from what `command` has by itself, and those that
/// were given although they do not.
pub fn given(matches: &ArgMatches, command: Command) -> Settings {
    let unset = command.try_get_matches_from(["inferno", "play"]);
    let unset = unset.ok().and_then(|mut unset| unset.remove_subcommand()).map(|(_, of_play)| of_play);
    let raw = |matches: &ArgMatches, flag: &str| -> Option<Vec<String>> {
        Some(matches.get_raw(&id(flag))?.map(|value| value.to_string_lossy().into_owned()).collect())
    };
    let mut given = Settings::new();
    for flag in FLAGS {
        let asked = matches.value_source(&id(flag)).is_some_and(|source| source != ValueSource::DefaultValue);
        match raw(matches, flag) {
            Some(values) if asked || unset.as_ref().and_then(|unset| raw(unset, flag)).as_ref() != Some(&values) => {
                given.insert(flag.to_string(), values);
            }
            _ => {}
        }
    }
    given.remove("system");
    given
}

fn flags(verb: &str) -> &'static [&'static str] {
    match verb {
        "play" => &FLAGS,
        "bench" | "perplexity" => &DEVICE,
        _ => &[],
    }
}

/// clap names a flag by the field that it fills.
fn id(flag: &str) -> String {
    flag.replace('-', "_")
}

fn with_environment(command: Command) -> Command {
    ["play", "bench", "perplexity"].into_iter().fold(command, |command, verb| {
        command.mut_subcommand(verb, |command| {
            flags(verb).iter().fold(command, |command, flag| {
                let variable = format!("INFERNO_{}", id(flag).to_uppercase());
                command.mut_arg(id(flag), |arg| arg.env(variable).hide_env(true))
            })
        })
    })
}

/// What the configuration file says for a model, and where it stands.
fn configured(model: Option<&str>) -> Result<(Settings, String)> {
    let Some(path) = path() else { return Ok((Settings::new(), String::new())) };
    let shown = path.display().to_string();
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok((Settings::new(), shown)),
        Err(error) => return Err(error).with_context(|| format!("cannot read {shown}")),
    };
    tracing::info!(path = shown, "configuration");
    let usage = |problem: String| Error::Usage(format!("{shown}: {problem}"));
    let mut table: Table = text.parse().map_err(|error: toml::de::Error| usage(error.to_string()))?;
    let models = table.remove("models");
    let mut settings = Settings::new();
    read(&table, "", &mut settings).map_err(usage)?;
    if let Some(models) = models {
        let Value::Table(models) = models else { return Err(usage("models is no table".to_string()).into()) };
        for (name, of_model) in &models {
            let place = format!(" in [models.{name:?}]");
            let Value::Table(of_model) = of_model else {
                return Err(usage(format!("{name}{place} is no table")).into());
            };
            // Mistakes are told even where they are for another model.
            let mut its_own = Settings::new();
            read(of_model, &place, &mut its_own).map_err(usage)?;
            if model == Some(name.as_str()) {
                settings.extend(its_own);
            }
        }
    }
    Ok((settings, shown))
}

/// `$INFERNO_CONFIG`, or `inferno/config.toml` in the XDG directory.
fn path() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("INFERNO_CONFIG").filter(|path| !path.is_empty()) {
        return Some(PathBuf::from(path));
    }
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let config = config.or_else(|| Some(std::env::home_dir()?.join(".config")))?;
    Some(config.join("inferno/config.toml"))
}

fn read(table: &Table, place: &str, settings: &mut Settings) -> Result<(), String> {
    for (key, value) in table {
        if !FLAGS.contains(&key.as_str()) {
            return Err(format!("unknown key '{key}'{place}\n  known: {}", FLAGS.join(", ")));
        }
        let values = match value {
            Value::Array(values) => values.iter().map(scalar).collect(),
            value => scalar(value).map(|value| vec![value]),
        };
        let values = values.ok_or_else(|| format!("'{key}'{place} is neither a text nor a number"))?;
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
