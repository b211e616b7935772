//! Finds, downloads and loads models for `inferno play` without `--url`.

use std::io::IsTerminal;
use std::rc::Rc;

use anyhow::{Context, Result, bail};

use super::args::{Args, Reparse, Selected};
use super::choice::choose;
use crate::commands::list::{self, ListedModel};
use crate::commands::shared::progress::{Operation, ProgressStyle, ProgressView};
use crate::commands::shared::{note, playable, warn_about_token};
use crate::conversation::{LoadedModel, LocalModel, ModelId, ModelSource, require_chat_format};
use crate::engine::Engine;
use crate::error::Error;
use crate::hub::{DownloadName, FileFilter, Hub, Snapshot, SnapshotSource, demo, is_repo_name};
use crate::language::Language;
use crate::sandbox;
use crate::terminal;
use crate::text;

/// Finds or downloads the model that `args` names.
///
/// If no model is named, fails for a one-shot answer, and otherwise asks the user to choose a model.
/// Returns `None` if the user quits.
pub fn select(args: &Args, is_one_shot: bool) -> Result<Option<Selected>> {
    let hub = Hub::from_env()?;
    let snapshot = match &args.model {
        Some(model) => find_or_download(&hub, model, args.load.revision())?,
        None if is_one_shot => {
            return Err(Error::usage(
                "no model given: inferno play MODEL --prompt TEXT (`inferno list` shows the models on this machine)",
            ));
        }
        None => match choose_snapshot(&hub)? {
            Some(snapshot) => snapshot,
            None => return Ok(None),
        },
    };
    let typed_revision = args.model.as_deref().and_then(revision_in).filter(|_| snapshot.revision.is_some());
    let (typed_revision, raw) = (typed_revision.map(str::to_string), args.raw);
    let source = Box::new(move |reparse| Rc::new(HubModels { hub, raw, reparse }) as Rc<dyn ModelSource>);
    Ok(Some(Selected { model: ModelId::Local(snapshot), typed_revision, source }))
}

/// The models on this machine. Loading a model applies the configuration file's settings for that model.
struct HubModels {
    hub: Hub,
    raw: bool,
    reparse: Box<Reparse>,
}

impl HubModels {
    /// Finds a model by its name or by a unique part of its name.
    /// If the name has no `@revision` and the model is in a cache, uses the revision in the configuration file, if any.
    fn find_snapshot(&self, name: &str) -> Result<Snapshot> {
        let snapshot = self.hub.find(name, None)?;
        // Parse the new model's settings now, to report invalid settings while the old model is still loaded.
        let args = (self.reparse)(&snapshot.name)?;
        let revision = args.origin.configured.get("revision").and_then(|values| values.first());
        let has_revisions = matches!(snapshot.source, SnapshotSource::Inferno | SnapshotSource::HuggingFace);
        match revision.filter(|_| has_revisions && revision_in(name).is_none()) {
            Some(revision) => self.hub.find(name, Some(revision)),
            None => Ok(snapshot),
        }
    }
}

impl ModelSource for HubModels {
    fn find(&self, name: &str) -> Result<ModelId> {
        let snapshot = self.find_snapshot(name)?;
        if !self.raw {
            require_chat_format(&sandbox::load_language(&snapshot.path)?, &snapshot.name)?;
        }
        Ok(ModelId::Local(snapshot))
    }

    fn load(&self, model: &ModelId) -> Result<LoadedModel> {
        let ModelId::Local(snapshot) = model else { bail!("cannot load {}: it is not on this machine", model.name()) };
        self.hub.record_use(snapshot);
        let mut args = (self.reparse)(&snapshot.name)?;
        args.load.set_deterministic(args.deterministic);
        let raw = self.raw;
        let check = |language: &Language| if raw { Ok(()) } else { require_chat_format(language, &snapshot.name) };
        let engine = args.load.load_with_language_check(snapshot, &check)?;
        introduce(snapshot, &engine);
        let sampling = args.sampling.apply_to(engine.defaults())?;
        Ok(LoadedModel { sampling, backend: Box::new(LocalModel(engine)), configured: args.origin.configured })
    }

    fn names(&self) -> Vec<String> {
        playable(&self.hub).into_iter().flatten().map(|snapshot| snapshot.name).collect()
    }
}

/// Returns the revision in `org/name@revision`, or `None` if no revision was typed.
fn revision_in(model: &str) -> Option<&str> {
    Some(model.split_once('@')?.1)
}

/// Finds a model, or offers to download it if `model` is a full `org/name`, the user is at a terminal and offline mode
/// is off. Fails if the model is neither found nor downloaded.
fn find_or_download(hub: &Hub, model: &str, revision: Option<&str>) -> Result<Snapshot> {
    let missing = match hub.find(model, revision) {
        Err(error) if matches!(error.downcast_ref(), Some(Error::ModelNotFound { .. })) => error,
        found => return found,
    };
    // Offer no download for a name without an organization, because it may be only a part of a name.
    let can_download = model.contains('/') && is_repo_name(model) && !hub.config().offline;
    let is_interactive = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !can_download || !is_interactive {
        return Err(missing);
    }
    let DownloadName { repo, revision, tag } = DownloadName::parse(model, revision)?;
    let filter = FileFilter { tag, ..FileFilter::default() };
    warn_about_token(hub);
    let bytes = hub.download_bytes(&repo, revision.as_deref(), &filter)?;
    terminal::write_stderr(&format!("{model} is not downloaded; download {}? [Y/n] ", text::size(bytes)));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    if !line.ends_with('\n') || !matches!(line.trim().to_lowercase().as_str(), "" | "y" | "yes") {
        return Err(missing);
    }
    let show = ProgressView::new(ProgressStyle::detect(), Operation::Download);
    let result = hub.download(&repo, revision.as_deref(), &filter, &show);
    show.finish();
    result?;
    hub.find(model, revision.as_deref())
}

/// Lists the models on this machine and asks the user to choose one. Returns `None` if the user quits.
/// Fails if no model is on this machine and the demo cannot be written to the cache.
fn choose_snapshot(hub: &Hub) -> Result<Option<Snapshot>> {
    let mut snapshots = playable(hub)?;
    if snapshots.is_empty() {
        snapshots.push(hub.find(demo::NAME, None).context("no model is on this machine")?);
    }
    terminal::write_stderr(&list::table(&ListedModel::read_all(hub, &snapshots)));
    let names: Vec<&str> = snapshots.iter().map(|snapshot| snapshot.name.as_str()).collect();
    Ok(choose(&names)?.map(|index| snapshots[index].clone()))
}

/// Prints a summary of the loaded model to stderr, if stderr is a terminal.
fn introduce(snapshot: &Snapshot, engine: &Engine) {
    let info = engine.info();
    // On a CPU, do not show the execution mode and the attention kernel: they are always `eager` and `portable`.
    let executor = match info.device.compute_capability {
        Some(_) => format!(" · {}, {} attention", engine.execution_mode(), info.attention),
        None => String::new(),
    };
    let sequences = match info.cache_sequences {
        0 | 1 => String::new(),
        count => format!(" for {count} × {} tokens", info.context),
    };
    note(&format!(
        "{} · {} {}, {} parameters · weights {}, cache {}{sequences}{executor} · loaded in {:.2} s",
        snapshot.name,
        info.family,
        info.quantization.as_deref().unwrap_or("unquantized"),
        text::parameter_count(info.parameters),
        text::size(info.weight_bytes),
        text::size(info.cache_bytes),
        info.load.total_s,
    ));
    if let Some(line) = crate::hub::demo::play_notice(snapshot) {
        note(line);
    }
}
