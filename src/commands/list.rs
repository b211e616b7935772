//! `inferno list`

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::hub::{Hub, Snapshot, gguf};
use crate::models;
use crate::repl::style::printable;
use crate::weights::Checkpoint;

/// Show the models on this machine
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let models: Vec<Model> = super::playable(&Hub::from_env()?)?.iter().map(Model::read).collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&models)?)?;
    } else {
        write!(out, "{}", table(&models))?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// What is known of a model without loading it. What cannot be read is left out, not an error: one broken model must
/// not hide the others.
#[derive(Serialize)]
pub struct Model {
    pub name: String,
    pub revision: Option<String>,
    /// `unsupported` models are listed too, with the family their config names.
    pub family: Option<String>,
    pub supported: bool,
    pub quantisation: Option<String>,
    pub parameters: Option<u64>,
    pub size_bytes: u64,
    pub path: String,
}

impl Model {
    pub fn read(snapshot: &Snapshot) -> Self {
        let config = models::read_config(&snapshot.path);
        let checkpoint = Checkpoint::open(&snapshot.path).ok();
        let dtype = checkpoint.as_ref().and_then(Checkpoint::main_dtype);
        let quantisation = config.as_ref().ok().and_then(|config| config.quantisation.clone()).or(dtype);
        Self {
            name: snapshot.name.clone(),
            revision: snapshot.revision.clone(),
            supported: config.is_ok(),
            family: config.map_or_else(|_| models::declared_type(&snapshot.path), |c| Some(c.family.model_type.into())),
            quantisation,
            parameters: checkpoint.map(|checkpoint| checkpoint.parameters()),
            size_bytes: folder_bytes(&snapshot.path),
            path: snapshot.path.display().to_string(),
        }
    }
}

fn folder_bytes(path: &Path) -> u64 {
    if path.is_file() {
        return gguf::bytes(path);
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    // `metadata` follows links: the files of a snapshot are links to blobs.
    entries.filter_map(|entry| std::fs::metadata(entry.path()).ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}

/// The models as a table, numbered from 1.
pub fn table(models: &[Model]) -> String {
    let header = ["", "NAME", "REVISION", "FAMILY", "QUANT", "PARAMS", "SIZE", "PATH"].map(String::from);
    let mut rows = vec![header];
    for (index, model) in models.iter().enumerate() {
        let family = model.family.clone().unwrap_or_else(|| "?".into());
        rows.push([
            (index + 1).to_string(),
            model.name.clone(),
            model.revision.as_ref().map_or("-".into(), |revision| revision.chars().take(7).collect()),
            if model.supported { family } else { format!("{family} (unsupported)") },
            model.quantisation.clone().unwrap_or_else(|| "-".into()),
            model.parameters.map_or("-".into(), count),
            size(model.size_bytes),
            home_relative(&model.path),
        ]);
    }
    let columns = rows[0].len();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &[String; 8]| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
        // Family and quantisation come from a downloaded file.
        format!("{}\n", printable(cells.join("  ").trim_end()))
    };
    rows.iter().map(line).collect()
}

/// 20.9B, 137M, 5.1M
pub fn count(parameters: u64) -> String {
    let (value, unit) = match parameters {
        0..1_000_000 => (parameters as f64 / 1e3, "K"),
        1_000_000..1_000_000_000 => (parameters as f64 / 1e6, "M"),
        _ => (parameters as f64 / 1e9, "B"),
    };
    if value < 100.0 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// 13.8 GB, 7.6 MB
pub fn size(bytes: u64) -> String {
    if bytes >= 1_000_000_000 {
        format!("{:.1} GB", bytes as f64 / 1e9)
    } else {
        format!("{:.1} MB", bytes as f64 / 1e6)
    }
}

/// `~/x` for what lies below the home.
pub fn home_relative(path: &str) -> String {
    let home = std::env::var("HOME").unwrap_or_default();
    match path.strip_prefix(&home) {
        Some(rest) if !home.is_empty() && rest.starts_with('/') => format!("~{rest}"),
        _ => path.to_string(),
    }
}
