//! The sampling flags, built from the table of sampling parameters.

use anyhow::Result;
use clap::{Arg, ArgMatches, Command, FromArgMatches};

use crate::engine::SamplingParams;
use crate::engine::sampling::{SAMPLING_FIELDS, SamplingField};
use crate::error::Error;

/// The sampling parameters set by flags, the environment, a resumed conversation or the configuration file.
pub struct SamplingArgs {
    values: Vec<(&'static SamplingField, String)>,
}

impl SamplingArgs {
    /// Returns `defaults`, overridden by the values in `self`. If `self` sets no seed, the seed is new for each call.
    pub fn apply_to(&self, defaults: &SamplingParams) -> Result<SamplingParams> {
        let mut params = SamplingParams { seed: fresh_seed(), ..defaults.clone() };
        for (field, value) in &self.values {
            field.set(&mut params, value).map_err(|expected| {
                Error::usage(format!("invalid value '{value}' for '--{}': {expected}", field.flag))
            })?;
        }
        Ok(params)
    }
}

impl clap::Args for SamplingArgs {
    fn augment_args(command: Command) -> Command {
        command.args(SAMPLING_FIELDS.iter().map(arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SamplingArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let value = |field: &'static SamplingField| Some((field, matches.get_one::<String>(field.name)?.clone()));
        Ok(Self { values: SAMPLING_FIELDS.iter().filter_map(value).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns the clap argument for one sampling parameter.
fn arg(field: &'static SamplingField) -> Arg {
    let check = |text: &str| field.set(&mut SamplingParams::greedy(), text).map(|()| text.to_string());
    Arg::new(field.name)
        .long(field.flag)
        .value_name(field.value_name)
        .help(field.help)
        .allow_negative_numbers(true)
        .value_parser(move |text: &str| check(text))
}

/// Returns a seed that differs between runs and is short enough to retype.
fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_micros() as u64) % 1_000_000_007
}
