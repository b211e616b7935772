//! `inferno play`: an interactive chat, or a single answer for a script.

use std::io::IsTerminal;
use std::num::NonZero;
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, Result};

use super::list::{self, Model};
use super::shared::defaults::ParsedCommandLine;
use super::shared::progress::{ProgressStyle, ProgressView};
use super::shared::sampling::SamplingArgs;
use super::shared::{LoadArgs, answer, note, playable, prompt, today, warn_about_token};
use crate::chat::{Message, ReasoningEffort};
use crate::conversation::{
    LoadedModel, ModelSource, Overflow, ReasoningVisibility, Recording, Session, SettingValues, require_chat_format,
};
use crate::engine::Engine;
use crate::error::Error;
use crate::hub::{Hub, Snapshot, Source, is_repo_name, parse_download_name};
use crate::language::Language;
use crate::repl;
use crate::terminal;
use crate::text;

/// Chat with a model, or get one answer with --prompt
#[derive(clap::Args)]
pub struct Args {
    /// Name or directory of a model; `demo` is built in [default: choose from a list]
    model: Option<String>,
    /// Answer this prompt and exit [default: piped standard input]
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// Append piped standard input to --prompt; not needed for a redirected file (`< notes.txt`)
    #[arg(long, requires = "prompt")]
    stdin: bool,
    /// Continue a saved conversation; without a name, the most recent one
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "", conflicts_with = "raw")]
    resume: Option<String>,
    /// System prompt; with --resume, it replaces the saved one
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// How much the model thinks before it answers: low, medium or high
    #[arg(long, default_value = "medium", value_name = "EFFORT")]
    reasoning: ReasoningEffort,
    /// Hide the model's reasoning
    #[arg(long)]
    hide_reasoning: bool,
    /// Show answers as the model wrote them, without formatting Markdown
    #[arg(long)]
    plain: bool,
    /// End an answer after this many tokens
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<NonZero<usize>>,
    /// End an answer at this text; can be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue the prompt as plain text, without a chat format
    #[arg(long)]
    raw: bool,
    /// Keep generating after the model's end-of-text token
    #[arg(long)]
    ignore_eos: bool,
    /// Print one JSON object: text, reasoning, tokens, finish_reason, usage, stats
    #[arg(long)]
    json: bool,
    /// Print one JSON object per line as the answer streams: start, reasoning, answer, tool_call, end
    #[arg(long, conflicts_with = "json")]
    jsonl: bool,
    /// When the context is full: stop, or drop-oldest to continue without the oldest messages
    #[arg(long, default_value = "stop", value_name = "WHAT")]
    overflow: Overflow,
    /// Give the same answer to the same request whether or not part of it is cached; slower
    #[arg(long, hide_short_help = true)]
    deterministic: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    load: LoadArgs,
    /// The flag values by source. Set after parsing.
    #[arg(skip)]
    pub origin: ValueOrigin,
}

/// The values of the flags, grouped by source.
#[derive(Default)]
pub struct ValueOrigin {
    /// Values from the command line, the environment or a resumed conversation.
    pub requested: SettingValues,
    /// Values from the configuration file. Requested values override them.
    pub configured: SettingValues,
    /// Messages about invalid settings in a resumed conversation.
    pub rejected: Vec<String>,
    /// Parses the command line again, once the model is known.
    pub reparse: Option<Box<Reparse>>,
}

/// A function that parses the command line again, with the configuration for the named model.
type Reparse = dyn Fn(&str) -> Result<Args>;

impl ValueOrigin {
    pub fn from_command_line(line: ParsedCommandLine) -> Self {
        Self { requested: line.requested, configured: line.configured, rejected: line.rejected, reparse: None }
    }
}

pub fn run(mut args: Args) -> Result<ExitCode> {
    let prompt = prompt::one_shot(args.prompt.as_deref(), args.stdin, args.raw, args.json || args.jsonl)?;
    if prompt.is_none() {
        terminal::guard();
    }
    for warning in &args.origin.rejected {
        terminal::print(warning);
    }
    let hub = Hub::from_env()?;
    let Some(snapshot) = select_model(&hub, &args, prompt.is_some())? else { return Ok(ExitCode::SUCCESS) };
    let typed_revision = args.model.as_deref().and_then(revision_in).filter(|_| snapshot.revision.is_some());
    let reparse = args.origin.reparse.take().context("internal error: the command line cannot be parsed again")?;
    let args = reparse(&snapshot.name)?;
    let models = Rc::new(HubModels { hub, raw: args.raw, reparse });
    let loaded = models.load(&snapshot)?;

    let mut session = new_session(&args, snapshot, loaded, models);
    if let Some(revision) = typed_revision {
        session.requested.insert("revision".to_string(), vec![revision.to_string()]);
    }
    match &args.resume {
        Some(name) => resume(&mut session, name, args.system.as_deref())?,
        None if prompt.is_none() && !args.raw => session.recording = Recording::FromFirstAnswer,
        None => {}
    }
    match prompt {
        Some(prompt) if args.json => answer::json(session, &prompt),
        Some(prompt) if args.jsonl => answer::json_lines(session, &prompt),
        Some(prompt) => answer::text(session, &prompt),
        None => repl::run(session),
    }
}

/// Finds or downloads the model named on the command line. If none is named, asks the user to choose one.
///
/// Returns `None` if the user quits.
fn select_model(hub: &Hub, args: &Args, is_one_shot: bool) -> Result<Option<Snapshot>> {
    match &args.model {
        Some(model) => find_or_download(hub, model, args.load.revision()).map(Some),
        None if is_one_shot => Err(Error::usage(
            "no model given: inferno play MODEL --prompt TEXT (`inferno list` shows the models on this machine)",
        )),
        None => choose(hub),
    }
}

/// Creates a session with the settings in `args`.
fn new_session(args: &Args, snapshot: Snapshot, loaded: LoadedModel, models: Rc<dyn ModelSource>) -> Session {
    let mut session = Session::new(snapshot, loaded, models, today());
    let settings = &mut session.settings;
    settings.max_tokens = args.max_tokens.map(NonZero::get);
    settings.stop = args.stop.clone();
    settings.reasoning_effort = args.reasoning;
    settings.reasoning = if args.hide_reasoning { ReasoningVisibility::Hidden } else { ReasoningVisibility::Shown };
    (settings.plain, settings.overflow) = (args.plain, args.overflow);
    (session.raw, session.ignore_eos) = (args.raw, args.ignore_eos);
    session.messages = args.system.as_ref().map(Message::system).into_iter().collect();
    session.requested = args.origin.requested.clone();
    session
}

/// The models on this machine. Loads each model with its own section of the configuration file.
struct HubModels {
    hub: Hub,
    raw: bool,
    reparse: Box<Reparse>,
}

impl ModelSource for HubModels {
    fn find(&self, name: &str) -> Result<Snapshot> {
        let snapshot = self.hub.find(name, None)?;
        // Report invalid settings of the new model now, while the old model is still loaded.
        let args = (self.reparse)(&snapshot.name)?;
        let revision = args.origin.configured.get("revision").and_then(|values| values.first());
        let has_revisions = matches!(snapshot.source, Source::Inferno | Source::HuggingFace);
        match revision.filter(|_| has_revisions && revision_in(name).is_none()) {
            Some(revision) => self.hub.find(name, Some(revision)),
            None => Ok(snapshot),
        }
    }

    fn load(&self, snapshot: &Snapshot) -> Result<LoadedModel> {
        self.hub.record_use(snapshot);
        let mut args = (self.reparse)(&snapshot.name)?;
        args.load.set_deterministic(args.deterministic);
        let raw = self.raw;
        let check = |language: &Language| if raw { Ok(()) } else { require_chat_format(language, &snapshot.name) };
        let engine = args.load.load_with_language_check(snapshot, &check)?;
        introduce(snapshot, &engine);
        let sampling = args.sampling.apply_to(engine.defaults())?;
        Ok(LoadedModel { sampling, engine, configured: args.origin.configured })
    }

    fn names(&self) -> Vec<String> {
        playable(&self.hub).into_iter().flatten().map(|snapshot| snapshot.name).collect()
    }
}

/// Resumes a saved conversation. If `system` is given, it replaces the system prompt.
fn resume(session: &mut Session, name: &str, system: Option<&str>) -> Result<()> {
    if let Some(damage) = session.resume(name)? {
        terminal::write_stderr(&format!("{}\n", text::printable(&damage)));
    }
    match system {
        Some(system) => session.replace_system(system),
        None => Ok(()),
    }
}

/// Returns the revision in `org/name@revision`.
fn revision_in(model: &str) -> Option<&str> {
    Some(model.split_once('@')?.1)
}

/// Finds a model. On a terminal, offers to download a missing one.
fn find_or_download(hub: &Hub, model: &str, revision: Option<&str>) -> Result<Snapshot> {
    let missing = match hub.find(model, revision) {
        Err(error) if matches!(error.downcast_ref(), Some(Error::ModelNotFound { .. })) => error,
        found => return found,
    };
    // Only a full `org/name` identifies a repository to download.
    let can_download = model.contains('/') && is_repo_name(model) && !hub.config().offline;
    let is_interactive = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !can_download || !is_interactive {
        return Err(missing);
    }
    let (name, revision, pick) = parse_download_name(model, revision)?;
    warn_about_token(hub);
    let bytes = hub.download_bytes(&name, revision.as_deref(), &pick)?;
    terminal::write_stderr(&format!("{model} is not downloaded; download {}? [Y/n] ", text::size(bytes)));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    if !line.ends_with('\n') || !matches!(line.trim().to_lowercase().as_str(), "" | "y" | "yes") {
        return Err(missing);
    }
    let show = ProgressView::new(ProgressStyle::new(false), "fetched");
    let result = hub.download(&name, revision.as_deref(), &pick, &show);
    show.finish();
    result?;
    hub.find(model, revision.as_deref())
}

/// Lists the models on this machine and asks the user to choose one. Returns `None` if the user quits.
fn choose(hub: &Hub) -> Result<Option<Snapshot>> {
    let snapshots = playable(hub)?;
    anyhow::ensure!(
        !snapshots.is_empty(),
        "no model is on this machine; to download one: inferno download openai/gpt-oss-20b"
    );
    let models = Model::read_all(hub, &snapshots);
    terminal::write_stderr(&list::table(&models));
    loop {
        terminal::write_stderr(&format!("which model? [1-{}] ", models.len()));
        let mut line = String::new();
        if std::io::stdin().read_line(&mut line)? == 0 || line.trim() == "q" {
            return Ok(None);
        }
        let line = line.trim();
        let number = line.parse::<usize>().ok().filter(|number| (1..=snapshots.len()).contains(number));
        let by_name = snapshots.iter().position(|snapshot| snapshot.name == line);
        match number.map(|number| number - 1).or(by_name) {
            Some(index) => return Ok(Some(snapshots[index].clone())),
            None => terminal::print(&format!("type a number from 1 to {}, a name, or q to quit", models.len())),
        }
    }
}

/// Prints a summary of the loaded model to stderr, if stderr is a terminal.
fn introduce(snapshot: &Snapshot, engine: &Engine) {
    let info = engine.info();
    // Show the executor and the attention kernel only for a GPU, because a CPU has only one of each.
    let executor = match info.device.compute_capability {
        Some(_) => format!(" · {}, {} attention", engine.executor(), info.attention),
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
    if let Some(line) = crate::hub::demo::notice(snapshot) {
        note(line);
    }
}
