//! Reads the metadata that `inferno show` needs, from local files or from the hub.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};

use crate::files;
use crate::hub::{self, Hub, HubModel, Snapshot};
use crate::models;
use crate::snapshot::gguf as gguf_files;
use crate::weights::gguf::GgufCheckpoint;
use crate::weights::{Checkpoint, Inventory, TensorTable};

/// The maximum number of bytes to read from a README for its front matter, or from a license file for its title.
const HEAD_BYTES: u64 = 16 << 10;

/// A model on this machine or on the hub, with the metadata that `inferno show` needs.
pub struct ShownModel {
    pub name: String,
    pub revision: Option<String>,
    /// The local path. `None` for a model on the hub.
    pub path: Option<PathBuf>,
    /// Where the model is, as a phrase such as `a directory`.
    pub location: &'static str,
    pub metadata: ModelMetadata,
    /// The names of the model's files, and their sizes in bytes if known.
    /// A local GGUF model has one entry, with the total size of its shards.
    pub files: Vec<(String, Option<u64>)>,
}

/// A model's config, chat template, license and tensor list.
pub struct ModelMetadata {
    pub config: Result<Value>,
    /// The content of tokenizer_config.json or, for GGUF, a JSON object with the chat template.
    /// Null if the file is missing or invalid.
    pub tokenizer_config: Value,
    /// The name of the file or GGUF key that `tokenizer_config` was read from.
    pub tokenizer_config_name: &'static str,
    pub license: Option<String>,
    pub inventory: Result<Inventory>,
}

impl ModelMetadata {
    /// Reads all metadata from a GGUF file. If `file` is an error, the error becomes part of the metadata.
    fn from_gguf(file: Result<GgufCheckpoint>) -> Self {
        let tokenizer_config_name = "tokenizer.chat_template";
        let file = match file {
            Ok(file) => file,
            Err(error) => {
                let (config, tokenizer_config) = (Err(anyhow!("{error:#}")), Value::Null);
                return Self { config, tokenizer_config, tokenizer_config_name, license: None, inventory: Err(error) };
            }
        };
        let metadata = file.metadata();
        let text = |key: &str| metadata.string(key).ok().flatten().map(str::trim).filter(|text| !text.is_empty());
        let license = match text("general.license") {
            None | Some("other") => text("general.license.name").or(text("general.license")),
            license => license,
        };
        let config = file.config();
        let table = tensor_table(&config);
        Self {
            config,
            tokenizer_config: json!({"chat_template": file.chat_template(None).ok().flatten()}),
            tokenizer_config_name,
            license: license.map(|license| license.chars().take(80).collect()),
            inventory: Checkpoint::from_gguf(file)
                .map(|checkpoint| Inventory::from_checkpoint(&checkpoint, table, None)),
        }
    }

    /// Sets the license, unless the metadata already has one.
    fn or_license(self, license: Option<String>) -> Self {
        Self { license: self.license.or(license), ..self }
    }
}

/// Reads the headers of a model's GGUF files on the hub.
///
/// The outer error means that a request to the hub failed. The inner error means that a file is invalid.
fn remote_gguf(hub: &Hub, model: &HubModel) -> Result<Result<GgufCheckpoint>> {
    let failure = Cell::new(None);
    let read = |name: &str, bytes| {
        hub.read_range(model, name, bytes).map_err(|error| {
            let message = anyhow!("{error:#}");
            failure.set(Some(error));
            message
        })
    };
    let file = GgufCheckpoint::open_remote(&model.gguf, &read);
    failure.into_inner().map_or(Ok(file), Err)
}

impl ShownModel {
    /// Reads the metadata of a model on this machine.
    /// Never fails: an error in the config or the weights becomes part of the metadata.
    pub fn local(snapshot: &Snapshot) -> Self {
        let gguf = gguf_files::find(&snapshot.path).ok().flatten();
        // A GGUF model needs no other files. Only README.md is also read from its directory, for the license.
        let dir = match &gguf {
            Some(file) => file.parent().unwrap_or(&snapshot.path),
            None => &snapshot.path,
        };
        let files = match &gguf {
            Some(file) => vec![(file_name(file), Some(gguf_files::total_bytes(file)))],
            None => files(dir),
        };
        let readme = head(&dir.join("README.md")).and_then(|readme| front_matter_license(&readme));
        let title = |name: &str| head(&dir.join(name)).and_then(|text| license_title(&text, name));
        // The demo's weights are part of this crate and have its license.
        let built_in_license = snapshot.is_demo().then(|| env!("CARGO_PKG_LICENSE").to_string());
        let metadata = match &gguf {
            Some(file) => ModelMetadata::from_gguf(GgufCheckpoint::open(file)),
            None => {
                let config = json(dir, "config.json", files::MAX_CONFIG_BYTES);
                let table = tensor_table(&config);
                ModelMetadata {
                    config,
                    tokenizer_config: json(dir, "tokenizer_config.json", files::MAX_TOKENIZER_CONFIG_BYTES)
                        .unwrap_or_default(),
                    tokenizer_config_name: "tokenizer_config.json",
                    license: built_in_license,
                    inventory: Checkpoint::open(&snapshot.path)
                        .map(|checkpoint| Inventory::from_checkpoint(&checkpoint, table, None)),
                }
            }
        };
        Self {
            name: snapshot.name.clone(),
            revision: snapshot.revision.clone(),
            path: Some(snapshot.path.clone()),
            location: match snapshot.source {
                hub::SnapshotSource::Inferno => "inferno's cache",
                hub::SnapshotSource::HuggingFace => "the shared Hugging Face cache",
                hub::SnapshotSource::Directory if gguf.is_some() => "a GGUF file",
                hub::SnapshotSource::Directory => "a directory",
                hub::SnapshotSource::BuiltIn => "built into inferno",
            },
            metadata: metadata.or_license(readme.or_else(|| license_file(&files).and_then(title))),
            files,
        }
    }

    /// Reads the metadata of a model on the hub. Fails if a request fails.
    /// An error in the config or the weights becomes part of the metadata.
    pub fn remote(hub: &Hub, model: HubModel) -> Result<Self> {
        let text = |name: &str| model.texts.get(name).map(|bytes| String::from_utf8_lossy(bytes));
        let readme = text("README.md").and_then(|readme| front_matter_license(&readme));
        let license = readme.or_else(|| license_file(&model.files).map(str::to_string));
        let metadata = if model.gguf.is_empty() {
            let config = match text("config.json") {
                Some(text) => files::parse_json(text.as_bytes()).context("cannot read config.json"),
                None => Err(anyhow!("the repository has no config.json")),
            };
            let table = tensor_table(&config);
            let tokenizer_config =
                text("tokenizer_config.json").and_then(|text| files::parse_json(text.as_bytes()).ok());
            ModelMetadata {
                config,
                tokenizer_config: tokenizer_config.unwrap_or_default(),
                tokenizer_config_name: "tokenizer_config.json",
                license: None,
                inventory: inventory(&model, table),
            }
        } else {
            ModelMetadata::from_gguf(remote_gguf(hub, &model)?)
        };
        let gguf = model.gguf.into_iter().map(|(name, bytes)| (name, Some(bytes)));
        Ok(Self {
            name: model.name,
            revision: Some(model.commit),
            path: None,
            location: "on the hub",
            files: if gguf.len() == 0 { model.files } else { gguf.collect() },
            metadata: metadata.or_license(license),
        })
    }

    pub fn has(&self, name: &str) -> bool {
        self.files.iter().any(|(file, _)| file == name)
    }
}

/// Returns the tensor table of the model family in `config`.
/// If `config` is an error or names no supported family, returns the table of the usual tensor names.
fn tensor_table(config: &Result<Value>) -> TensorTable {
    models::tensor_table(config.as_ref().unwrap_or(&Value::Null))
}

fn inventory(model: &HubModel, table: TensorTable) -> Result<Inventory> {
    let mut inventory = Inventory::new(table);
    for header in &model.headers {
        inventory.add_header(&header.file, &header.json, header.data_bytes)?;
    }
    if !inventory.is_empty() {
        return Ok(inventory);
    }
    Err(anyhow!("the repository has neither safetensors weights (model.safetensors or a shard index) nor GGUF files"))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn json(dir: &Path, name: &str, limit: u64) -> Result<Value> {
    files::read_json(&dir.join(name), limit)
}

/// Lists the files in a directory, sorted by name. Skips subdirectories.
fn files(dir: &Path) -> Vec<(String, Option<u64>)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let file = |entry: std::fs::DirEntry| {
        // The files of a cached model are symlinks to blobs.
        // `fs::metadata` follows symlinks, but `DirEntry::metadata` does not.
        let data = std::fs::metadata(entry.path()).ok().filter(|data| data.is_file())?;
        Some((entry.file_name().to_string_lossy().into_owned(), Some(data.len())))
    };
    let mut files: Vec<_> = entries.filter_map(file).collect();
    files.sort();
    files
}

/// Reads the first [`HEAD_BYTES`] of a file. Returns `None` if the file cannot be read.
fn head(path: &Path) -> Option<String> {
    Some(String::from_utf8_lossy(&files::read_head(path, HEAD_BYTES).ok()?).into_owned())
}

fn license_file(files: &[(String, Option<u64>)]) -> Option<&str> {
    let is_license = |name: &str| ["license", "licence"].iter().any(|word| name.to_lowercase().starts_with(word));
    files.iter().map(|(name, _)| name.as_str()).find(|name| is_license(name))
}

/// Returns the title of a license and the name of its file, as in `Apache License (LICENSE)`.
/// The title is the first 60 characters of the first nonblank line. Returns `None` if all lines are blank.
fn license_title(text: &str, file: &str) -> Option<String> {
    let title = text
        .lines()
        .map(|line| line.trim_matches(|c: char| c.is_whitespace() || c == '#'))
        .find(|line| !line.is_empty())?;
    Some(format!("{} ({file})", title.chars().take(60).collect::<String>()))
}

/// Returns the license in the front matter of a README, or `None` if the front matter states no license.
/// If `license` is missing or `other`, prefers `license_name`.
fn front_matter_license(readme: &str) -> Option<String> {
    let mut lines = readme.trim_start_matches('\u{feff}').lines();
    if lines.next()?.trim_end() != "---" {
        return None;
    }
    let front: Vec<&str> = lines.take_while(|line| line.trim_end() != "---").collect();
    let field = |name: &str| {
        let value = front.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let value = value.trim().trim_matches(['"', '\'']);
        (!value.is_empty()).then(|| value.chars().take(80).collect::<String>())
    };
    match field("license").as_deref() {
        None | Some("other") => field("license_name").or_else(|| field("license")),
        Some(license) => Some(license.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn license_is_read_from_front_matter_or_title() {
        let license = |text: &str| front_matter_license(text);
        assert_eq!(license("---\nlicense: apache-2.0\ntags:\n- x\n---\n# Model").as_deref(), Some("apache-2.0"));
        assert_eq!(license("---\r\nlicense: 'mit'\r\n---\r\n").as_deref(), Some("mit"));
        assert_eq!(license("---\nlicense: other\nlicense_name: qwen\n---\n").as_deref(), Some("qwen"));
        assert_eq!(license("---\nlicense: other\n---\n").as_deref(), Some("other"));
        assert_eq!(license("# Model\nlicense: mit"), None);
        assert_eq!(license("---\ntags: x\n---\nlicense: mit"), None);
        assert_eq!(license(""), None);
        let british = [("LICENCE.md".to_string(), None)];
        assert_eq!(license_file(&british), Some("LICENCE.md"));
        let title = license_title("\n   Apache License\n  Version 2.0", "LICENSE");
        assert_eq!(title.as_deref(), Some("Apache License (LICENSE)"));
    }
}
