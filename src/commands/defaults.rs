//! Where the value of a flag comes from: the command line, else the environment (`INFERNO_TEMPERATURE`), else the
//! conversation that is resumed, else the configuration file for this model, else for all, else its default.
//!
//! The lower ones become clap's own defaults and the command line is read once more, so that a flag need not know.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::LazyLock;

use anyhow::Result;
use clap::builder::BoolishValueParser;
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};
use toml::{Table, Value};

use crate::engine::sampling::SAMPLING_FIELDS;
use crate::error::Error;
use crate::hub::Hub;
use crate::repl;
use crate::repl::journal::{self, Saved, Settings};

/// The flags of `play`, besides the sampling flags, that the environment, the configuration file and a conversation set.
const OTHER_FLAGS: [&str; 15] = [
    "attention",
    "chunk",
    "context",
    "device",
    "dtype",
    "eager",
    "hide-reasoning",
    "max-tokens",
    "overflow",
    "plain",
    "quantize",
    "reasoning",
    "revision",
    "stop",
    "system",
];

/// All flags of `play` that the environment, the configuration file and a conversation set, sorted by name.
static PLAY_FLAGS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let sampling = SAMPLING_FIELDS.iter().map(|field| field.flag);
    let mut flags: Vec<&str> = OTHER_FLAGS.into_iter().chain(sampling).collect();
    flags.sort_unstable();
    flags
});

/// Those that are on or off. Elsewhere than on the command line they have a value.
const SWITCHES: [&str; 3] = ["eager", "hide-reasoning", "plain"];

/// Other verbs that run a model share this one.
const DEVICE: [&str; 1] = ["device"];

/// The command line, with what lies below it.
pub struct Line {
    pub matches: ArgMatches,
    /// Flags of `play` that were asked for: on the command line, in the environment, in a conversation that goes on.
    pub given: Settings,
    /// Those that the configuration has.
    pub configured: Settings,
    /// The conversation that goes on.
    pub saved: Option<Saved>,
    /// What of it makes no sense here.
    pub left_out: Vec<String>,
}

/// What is known by the time that the command line is read again.
pub struct Known<'a> {
    /// The whole name of the model.
    pub model: &'a str,
    pub saved: Option<&'a Saved>,
}

/// Reads the command line of this process. Ends the process, as clap does, where that cannot be understood.
pub fn read(command: Command, known: Option<&Known>) -> Result<Line> {
    let args: Vec<OsString> = std::env::args_os().collect();
    let matches = command.clone().try_get_matches_from(&args).unwrap_or_else(|error| error.exit());
    if known.is_none() {
        // The configuration is the first of the files that `-v` tells of.
        super::logging::start(matches.get_count("verbose"));
    }
    let mut line =
        Line { matches, given: Settings::new(), configured: Settings::new(), saved: None, left_out: Vec::new() };
    let Some((verb, of_verb)) = line.matches.subcommand() else { return Ok(line) };
    let flags = flags(verb);
    if flags.is_empty() {
        return Ok(line);
    }
    let command = command.mut_subcommand(verb, |command| {
        let switches = SWITCHES.into_iter().filter(|flag| flags.contains(flag));
        switches
            .fold(command, |command, flag| command.mut_arg(id(flag), |arg| arg.value_parser(BoolishValueParser::new())))
    });
    let typed = of_verb.get_one::<String>("model");
    let saved = match (of_verb.try_get_one::<String>("resume"), known) {
        // It may have another name by now.
        (_, Some(known)) => known.saved.cloned(),
        (Ok(Some(name)), None) => Some(journal::peek(Some(name))?),
        _ => None,
    };
    let model =
        known.map(|known| known.model).or(typed.or(saved.as_ref().map(|saved| &saved.model)).map(String::as_str));
    let (mut configured, path) = configured(model, of_verb)?;
    // Other verbs share the file.
    configured.retain(|flag, _| flags.contains(&flag.as_str()));
    let check = |flag: &str, values: &[String]| check(&command, verb, &args, flag, values);
    for (flag, values) in &configured {
        check(flag, values).map_err(|problem| Error::usage(format!("{path}: {problem}")))?;
    }
    if let Some(saved) = &saved {
        let (fitting, left_out) = of_conversation(saved, flags, &check);
        (line.given, line.left_out) = (fitting, left_out);
        match typed {
            // Of another model only what was set in the chat goes on, and where it runs.
            Some(_) => line.given.retain(|flag, _| flag == "device" || repl::is_setting(flag)),
            None => drop(line.given.insert("model".to_string(), vec![saved.model.clone()])),
        }
        // It has its own instructions, and may have taken a limit away.
        configured.remove("system");
        configured.retain(|flag, _| !line.given.get(flag).is_some_and(|values| is_none(flag, values)));
    }
    // What is typed wins over what lies below, also where it says the same in another way.
    let is_typed = |flag: &str| flag == "revision" && typed.is_some_and(|model| model.contains('@'));
    line.given.retain(|flag, _| !is_typed(flag));
    configured.retain(|flag, _| !is_typed(flag));
    for flag in flags {
        let variable = format!("INFERNO_{}", id(flag).to_uppercase());
        let Some(value) = std::env::var_os(&variable).filter(|value| !value.is_empty()) else { continue };
        if is_on_the_line(of_verb, flag) || is_typed(flag) {
            continue;
        }
        let values = vec![value.into_string().map_err(|_| Error::usage(format!("{variable} is not UTF-8 text")))?];
        check(flag, &values).map_err(|problem| Error::usage(format!("{variable}: {problem}")))?;
        line.given.insert(flag.to_string(), values);
    }
    let mut below: Settings = configured.clone().into_iter().chain(line.given.clone()).collect();
    below.retain(|flag, values| !is_none(flag, values));
    if !below.is_empty() {
        let command = below.into_iter().fold(command, |command, (flag, values)| with(command, verb, &flag, &values));
        let matches = command.try_get_matches_from(&args).map_err(|error| Error::usage(first_line(&error)))?;
        line.matches = matches;
    }
    if let Some((_, of_verb)) = line.matches.subcommand() {
        for flag in flags.iter().filter(|flag| is_on_the_line(of_verb, flag)) {
            let values = of_verb.get_raw(&id(flag)).into_iter().flatten();
            let values = values.map(|value| value.to_string_lossy().into_owned()).collect();
            line.given.insert(flag.to_string(), values);
        }
    }
    // These are part of the conversation, not of how it goes on.
    for no_setting in ["system", "model"] {
        line.given.remove(no_setting);
        configured.remove(no_setting);
    }
    (line.configured, line.saved) = (configured, saved);
    Ok(line)
}

/// Whether a conversation has taken a limit away, with `/set max-tokens none`.
fn is_none(flag: &str, values: &[String]) -> bool {
    matches!(flag, "max-tokens" | "stop") && values == ["none"]
}

type Check<'a> = dyn Fn(&str, &[String]) -> Result<(), String> + 'a;

/// The settings of a conversation that are understood here, and what is to be said of the others: a journal may be of
/// another version, or damaged, and is still worth going on with.
fn of_conversation(saved: &Saved, flags: &[&str], check: &Check) -> (Settings, Vec<String>) {
    let (mut fitting, mut left_out) = (Settings::new(), Vec::new());
    for (flag, values) in &saved.settings {
        let checked = match flags.contains(&flag.as_str()) {
            true if is_none(flag, values) => Ok(()),
            true => check(flag, values),
            false => Err(format!("there is no setting '{flag}'")),
        };
        match checked {
            Ok(()) => drop(fitting.insert(flag.clone(), values.clone())),
            Err(problem) => left_out.push(format!("left out of what the conversation had set: {problem}")),
        }
    }
    (fitting, left_out)
}

/// Whether a flag takes these values where it is not on the command line.
fn check(command: &Command, verb: &str, args: &[OsString], flag: &str, values: &[String]) -> Result<(), String> {
    let arg =
        command.find_subcommand(verb).and_then(|command| command.get_arguments().find(|arg| arg.get_id() == &id(flag)));
    let several = arg.is_some_and(|arg| matches!(arg.get_action(), ArgAction::Append));
    if !several && values.len() != 1 {
        return Err(format!("'{flag}' takes one value, not {}", values.len()));
    }
    // The same line without this default was right.
    let parsed = with(command.clone(), verb, flag, values).try_get_matches_from(args);
    parsed.map(|_| ()).map_err(|error| first_line(&error))
}

/// The command with other defaults for a flag.
fn with(command: Command, verb: &str, flag: &str, values: &[String]) -> Command {
    let values = values.to_vec();
    command.mut_subcommand(verb, |command| command.mut_arg(id(flag), |arg| arg.default_values(values)))
}

fn is_on_the_line(of_verb: &ArgMatches, flag: &str) -> bool {
    of_verb.value_source(&id(flag)) == Some(ValueSource::CommandLine)
}

fn first_line(error: &clap::Error) -> String {
    let problem = error.to_string();
    problem.trim_start_matches("error: ").lines().next().unwrap_or_default().to_string()
}

fn flags(verb: &str) -> &'static [&'static str] {
    match verb {
        "play" => &PLAY_FLAGS,
        "bench" | "perplexity" => &DEVICE,
        _ => &[],
    }
}

/// clap names a flag by the field that it fills.
fn id(flag: &str) -> String {
    flag.replace('-', "_")
}

/// What the configuration file says for a model, and where it stands.
fn configured(model: Option<&str>, of_verb: &ArgMatches) -> Result<(Settings, String)> {
    let Some(path) = path() else { return Ok((Settings::new(), String::new())) };
    let shown = path.display().to_string();
    let mistake = |problem: String| Error::usage(format!("{shown}: {problem}"));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok((Settings::new(), shown)),
        Err(error) => return Err(mistake(error.to_string())),
    };
    tracing::info!(path = shown, "configuration");
    let mut table: Table = text.parse().map_err(|error: toml::de::Error| mistake(error.to_string()))?;
    let models = table.remove("models");
    let mut settings = Settings::new();
    read_table(&table, "", &mut settings).map_err(mistake)?;
    if let Some(models) = models {
        let Value::Table(models) = models else { return Err(mistake("models is no table".to_string())) };
        let model = model.map(|model| whole_name(model, of_verb));
        for (name, of_model) in &models {
            let place = format!(" in [models.{name:?}]");
            let Value::Table(of_model) = of_model else {
                return Err(mistake(format!("{name}{place} is no table")));
            };
            // Mistakes are told even where they are for another model.
            let mut its_own = Settings::new();
            read_table(of_model, &place, &mut its_own).map_err(mistake)?;
            if model.as_ref().is_some_and(|model| means(name, model)) {
                settings.extend(its_own);
            }
        }
    }
    Ok((settings, shown))
}

/// A part of a model's name is enough on the command line.
fn whole_name(model: &str, of_verb: &ArgMatches) -> String {
    let revision = of_verb.try_get_one::<String>("revision").ok().flatten();
    let found = Hub::from_env().and_then(|hub| hub.find(model, revision.map(String::as_str)));
    found.map_or_else(|_| model.to_string(), |snapshot| snapshot.name)
}

/// Whether a name in the configuration is that of a model: of a repository, of one of its files, of a directory.
fn means(name: &str, model: &str) -> bool {
    let of_repository = model.split_once(':').is_some_and(|(repository, _)| repository == name);
    let place = |name: &str| std::fs::canonicalize(name).ok();
    name == model || of_repository || (place(name).is_some() && place(name) == place(model))
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

fn read_table(table: &Table, place: &str, settings: &mut Settings) -> Result<(), String> {
    for (key, value) in table {
        if !PLAY_FLAGS.contains(&key.as_str()) {
            return Err(format!("unknown key '{key}'{place}\n  known: {}", PLAY_FLAGS.join(", ")));
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
