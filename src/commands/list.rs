//! `inferno list`: shows the models on this machine.

use std::cmp::Reverse;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use jiff::Timestamp;
use rayon::prelude::*;
use serde::Serialize;

use crate::hub::{Hub, Snapshot};
use crate::models;
use crate::snapshot::gguf;
use crate::text::{escaped_json, excerpt, home_relative, parameter_count, printable, short_commit, size};
use crate::weights::WeightsSummary;
use crate::weights::gguf::GgufCheckpoint;

/// Show the models on this machine
#[derive(clap::Args)]
pub struct Args {
    /// Sort by name, size (largest first), params (largest first) or used (most recent first)
    #[arg(long, default_value = "name", value_name = "COLUMN")]
    sort: Sort,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Sort {
    Name,
    Size,
    Params,
    Used,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    let mut models = ListedModel::read_all(&hub, &super::shared::playable(&hub)?);
    match args.sort {
        // The models are already sorted by name, with the demo last.
        Sort::Name => {}
        Sort::Size => models.sort_by_key(|model| Reverse(model.size_bytes)),
        Sort::Params => models.sort_by_key(|model| Reverse(model.parameters)),
        Sort::Used => models.sort_by_key(|model| Reverse(model.last_used)),
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", escaped_json(&serde_json::to_string_pretty(&models)?))?;
    } else {
        write!(out, "{}", table(&models))?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// The information that `inferno list` shows about a model.
///
/// An optional field is `None` if its value is unknown. A model with unreadable files is listed too.
#[derive(Serialize)]
pub struct ListedModel {
    pub name: String,
    pub revision: Option<String>,
    /// The model family. For an unsupported model, the type or architecture that its config.json or GGUF file names.
    pub family: Option<String>,
    pub supported: bool,
    pub quantization: Option<String>,
    pub parameters: Option<u64>,
    pub size_bytes: u64,
    /// The time when inferno last used the model. `None` if it has no valid record of a use.
    #[serde(serialize_with = "serialize_time")]
    pub last_used: Option<Timestamp>,
    pub path: String,
}

impl ListedModel {
    /// Reads all models in parallel, because reading a model's headers is slow.
    pub fn read_all(hub: &Hub, snapshots: &[Snapshot]) -> Vec<Self> {
        snapshots.par_iter().map(|snapshot| Self::read(hub, snapshot)).collect()
    }

    fn read(hub: &Hub, snapshot: &Snapshot) -> Self {
        let path = &snapshot.path;
        let (config, declared, weights) = match gguf::find(path).ok().flatten() {
            // Parse the GGUF header only once, because it includes the vocabulary and can be several megabytes long.
            Some(file) => match GgufCheckpoint::open(&file) {
                Ok(file) => {
                    let declared = file.architecture().ok().map(str::to_string);
                    (models::gguf_config(&file).ok(), declared, Some(WeightsSummary::from_gguf(&file)))
                }
                Err(_) => (None, None, None),
            },
            None => {
                let config = models::read_config(path).ok();
                let declared = if config.is_none() { models::declared_model_type(path) } else { None };
                let weights = WeightsSummary::from_safetensors(path)
                    .ok()
                    .filter(|weights| config.is_some() || !weights.is_packed);
                (config, declared, weights)
            }
        };
        let quantization = config.as_ref().and_then(|config| config.quantization.clone());
        Self {
            name: snapshot.name.clone(),
            revision: snapshot.revision.clone(),
            supported: config.is_some(),
            family: config.map(|config| config.family.model_type.into()).or(declared),
            parameters: weights.as_ref().map(|weights| weights.parameters),
            quantization: quantization.or(weights.and_then(|weights| weights.main_dtype)),
            size_bytes: folder_bytes(path),
            last_used: hub.last_used(snapshot).and_then(|time| Timestamp::try_from(time).ok()),
            path: path.display().to_string(),
        }
    }
}

fn serialize_time<S: serde::Serializer>(
    time: &Option<Timestamp>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    time.map(|time| time.to_string()).serialize(serializer)
}

fn folder_bytes(path: &Path) -> u64 {
    if path.is_file() {
        return gguf::total_bytes(path);
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    // Use `fs::metadata`, because it follows symlinks: most files of a cached model are symlinks to blobs.
    entries.filter_map(|entry| std::fs::metadata(entry.path()).ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}

/// Formats the models as a table, numbered from 1.
pub fn table(models: &[ListedModel]) -> String {
    let header = ["", "NAME", "REVISION", "FAMILY", "QUANT", "PARAMS", "SIZE", "USED", "PATH"].map(String::from);
    let mut rows = vec![header];
    for (index, model) in models.iter().enumerate() {
        let family = model.family.as_deref().map_or("?".into(), excerpt);
        rows.push([
            (index + 1).to_string(),
            model.name.clone(),
            model.revision.as_ref().map_or("-".into(), |revision| short_commit(revision)),
            if model.supported { family } else { format!("{family} (unsupported)") },
            model.quantization.as_deref().map_or("-".into(), excerpt),
            model.parameters.map_or("-".into(), parameter_count),
            size(model.size_bytes),
            model.last_used.map_or("-".into(), ago),
            home_relative(&model.path),
        ]);
    }
    let columns = rows[0].len();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &[String; 9]| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
        // Family and quantization come from downloaded files and may contain control characters.
        format!("{}\n", printable(cells.join("  ").trim_end()))
    };
    rows.iter().map(line).collect()
}

/// Formats a past time as `now`, `5 min ago`, `3 h ago`, `1 day ago` or `12 days ago`.
fn ago(time: Timestamp) -> String {
    match Timestamp::now().duration_since(time).as_secs() {
        ..60 => "now".to_string(),
        seconds @ 60..3600 => format!("{} min ago", seconds / 60),
        seconds @ 3600..86400 => format!("{} h ago", seconds / 3600),
        seconds @ 86400..172_800 => format!("{} day ago", seconds / 86400),
        seconds => format!("{} days ago", seconds / 86400),
    }
}
