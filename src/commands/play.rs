//! `inferno play`: one answer for a script, or a chat for a person.

use std::io::IsTerminal;
use std::num::NonZero;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};

use super::defaults::Line;
use super::list::{self, Model};
use super::progress::{Listener, Show};
use super::sampling::SamplingArgs;
use super::{LoadArgs, answer, note, playable, prompt, today};
use crate::chat::{Message, ReasoningEffort, RenderOptions};
use crate::engine::Engine;
use crate::error::Error;
use crate::hub::{Hub, Snapshot, is_repo_name, parse_download_name};
use crate::language::Language;
use crate::repl::journal::Settings;
use crate::repl::{self, Keep, Loaded, Models, Overflow, Reasoning, Session};
use crate::text;

/// Chat with a model, or get one answer with --prompt
#[derive(clap::Args)]
pub struct Args {
    /// Name or directory of a model; `demo` is built in [default: choose from a list]
    model: Option<String>,
    /// Answer this and exit; without it, piped standard input is the prompt
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// Put all of standard input behind --prompt, whatever it is; a file (`< notes.txt`) goes there by itself
    #[arg(long, requires = "prompt")]
    stdin: bool,
    /// Go on with a conversation that was kept, the last one if no name is given
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "", conflicts_with = "raw")]
    resume: Option<String>,
    /// Instructions for the model; with --resume, in place of those it had
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// How much the model thinks before it answers: low, medium or high
    #[arg(long, default_value = "medium", value_name = "EFFORT")]
    reasoning: ReasoningEffort,
    /// Do not show what the model thinks
    #[arg(long)]
    hide_reasoning: bool,
    /// Show answers as they were written instead of laying out their Markdown
    #[arg(long)]
    plain: bool,
    /// End an answer after this many tokens
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<NonZero<usize>>,
    /// End an answer at this text; may be given again
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue the text of the prompt, without a chat format
    #[arg(long)]
    raw: bool,
    /// Go on after the model's own end of text
    #[arg(long)]
    ignore_eos: bool,
    /// Print one JSON object: text, reasoning, tokens, finish_reason, usage, stats
    #[arg(long)]
    json: bool,
    /// Print one JSON object a line as the answer comes: start, reasoning, answer, tool_call, end
    #[arg(long, conflicts_with = "json")]
    jsonl: bool,
    /// At the end of the context: stop, or drop-oldest to go on without the oldest messages
    #[arg(long, default_value = "stop", value_name = "WHAT")]
    overflow: Overflow,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    load: LoadArgs,
    /// What lies behind these values.
    #[arg(skip)]
    pub origin: Origin,
}

/// Where the values of flags come from.
#[derive(Default)]
pub struct Origin {
    /// What was asked for by flags, the environment or a resumed conversation.
    pub given: Settings,
    /// What the configuration has, below that.
    pub configured: Settings,
    /// What of the conversation was left out, and why.
    pub left_out: Vec<String>,
    /// Reads the command line for a model of this name, once that is known.
    pub reread: Option<Box<Reread>>,
}

type Reread = dyn Fn(&str) -> Result<Args>;

impl Origin {
    pub fn of(line: Line) -> Self {
        Self { given: line.given, configured: line.configured, left_out: line.left_out, reread: None }
    }
}

/// The flags with what the configuration has for this model.
fn flags_for(reread: &Reread, snapshot: &Snapshot) -> Result<Args> {
    reread(&snapshot.name)
}

pub fn run(mut args: Args) -> Result<ExitCode> {
    let prompt = prompt::one_shot(args.prompt.as_deref(), args.stdin, args.raw, args.json || args.jsonl)?;
    if prompt.is_none() {
        repl::guard_terminal();
    }
    for left_out in &args.origin.left_out {
        eprintln!("{}", text::printable(left_out));
    }
    let hub = Hub::from_env()?;
    let snapshot = match &args.model {
        Some(model) => find_or_fetch(&hub, model, args.load.revision())?,
        None if prompt.is_none() => match choose(&hub)? {
            Some(snapshot) => snapshot,
            None => return Ok(ExitCode::SUCCESS),
        },
        None => {
            return Err(Error::usage(
                "name a model: inferno play MODEL --prompt TEXT (`inferno list` shows what is here)",
            ));
        }
    };
    let typed_revision = args.model.as_deref().and_then(revision_in).filter(|_| snapshot.revision.is_some());
    let reread = args.origin.reread.take().context("the command line is not at hand")?;
    let args = flags_for(&*reread, &snapshot)?;
    let models = models(hub, args.raw, reread);
    let loaded = (models.load)(&snapshot)?;
    let render = RenderOptions {
        tools: Vec::new(),
        reasoning_effort: args.reasoning,
        date: today(),
        add_generation_prompt: true,
    };
    let mut session = Session::new(snapshot, loaded, render, models);
    session.options.max_tokens = args.max_tokens.map(NonZero::get);
    session.options.stop = args.stop.clone();
    session.options.ignore_eos = args.ignore_eos;
    let cancel = Arc::new(AtomicBool::new(false));
    session.options.cancel = Some(cancel.clone());
    session.messages = args.system.as_ref().map(Message::system).into_iter().collect();
    session.reasoning = if args.hide_reasoning { Reasoning::Hidden } else { Reasoning::Shown };
    (session.plain, session.raw, session.overflow) = (args.plain, args.raw, args.overflow);
    session.settings = args.origin.given.clone();
    if let Some(revision) = typed_revision {
        session.settings.insert("revision".to_string(), vec![revision.to_string()]);
    }
    match &args.resume {
        Some(name) => resume(&mut session, name, args.system.as_deref())?,
        None if prompt.is_none() && !args.raw => session.keep = Keep::New,
        None => {}
    }
    match prompt {
        Some(prompt) if args.json => answer::json(session, &prompt),
        Some(prompt) if args.jsonl => answer::json_lines(session, &prompt),
        Some(prompt) => answer::text(session, &prompt),
        None => repl::run(session, cancel),
    }
}

/// Where `/model` finds and loads others, as the first one was.
fn models(hub: Hub, raw: bool, reread: Box<Reread>) -> Models {
    let (hub, reread) = (Rc::new(hub), Rc::new(reread));
    let (finds, lists, rereads) = (hub.clone(), hub.clone(), reread.clone());
    Models {
        find: Box::new(move |name| {
            let snapshot = finds.find(name, None)?;
            // What is wrong with the flags for it is said while the one that is here still answers.
            let args = flags_for(&**rereads, &snapshot)?;
            let revision = args.origin.configured.get("revision").and_then(|values| values.first());
            match revision.filter(|_| snapshot.revision.is_some() && revision_in(name).is_none()) {
                Some(revision) => finds.find(name, Some(revision)),
                None => Ok(snapshot),
            }
        }),
        load: Box::new(move |snapshot| {
            hub.record_use(snapshot);
            let args = flags_for(&**reread, snapshot)?;
            let check = |language: &Language| if raw { Ok(()) } else { repl::must_chat(language, &snapshot.name) };
            let engine = args.load.load_speaking(snapshot, &check)?;
            introduce(snapshot, &engine);
            let sampling = args.sampling.apply_to(engine.defaults())?;
            Ok(Loaded { sampling, engine, configured: args.origin.configured })
        }),
        names: Box::new(move || playable(&lists).into_iter().flatten().map(|snapshot| snapshot.name).collect()),
    }
}

/// Goes on with a conversation. New instructions take the place of those it had.
fn resume(session: &mut Session, name: &str, system: Option<&str>) -> Result<()> {
    if let Some(damage) = session.resume(name)? {
        eprintln!("{}", text::printable(&damage));
    }
    match system {
        Some(system) => session.instruct(system),
        None => Ok(()),
    }
}

/// In `org/name@revision`.
fn revision_in(model: &str) -> Option<&str> {
    Some(model.split_once('@')?.1)
}

/// Finds a model. One that is not here is fetched if there is somebody to say yes to that.
fn find_or_fetch(hub: &Hub, model: &str, revision: Option<&str>) -> Result<Snapshot> {
    let missing = match hub.find(model, revision) {
        Err(error) if matches!(error.downcast_ref(), Some(Error::ModelNotFound { .. })) => error,
        found => return found,
    };
    // A part of a name does not say whose model it is.
    let can_fetch = model.contains('/') && is_repo_name(model) && !hub.config().offline;
    let somebody = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !can_fetch || !somebody {
        return Err(missing);
    }
    let (name, revision, filter) = parse_download_name(model, revision)?;
    let bytes = hub.download_bytes(&name, revision.as_deref(), &filter)?;
    eprint!("{model} is not here; download {}? [Y/n] ", text::size(bytes));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    if !line.ends_with('\n') || !matches!(line.trim().to_lowercase().as_str(), "" | "y" | "yes") {
        return Err(missing);
    }
    let show = Show::new(Listener::new(false), "fetched");
    let fetched = hub.download(&name, revision.as_deref(), &filter, &show);
    show.finish();
    fetched?;
    hub.find(model, revision.as_deref())
}

/// Lists what is on disk and asks which.
fn choose(hub: &Hub) -> Result<Option<Snapshot>> {
    let snapshots = playable(hub)?;
    anyhow::ensure!(!snapshots.is_empty(), "there is no model here; fetch one: inferno download openai/gpt-oss-20b");
    let models = Model::read_all(hub, &snapshots);
    eprint!("{}", list::table(&models));
    loop {
        eprint!("which? [1-{}] ", models.len());
        let mut line = String::new();
        if std::io::stdin().read_line(&mut line)? == 0 || line.trim() == "q" {
            return Ok(None);
        }
        let line = line.trim();
        let number = line.parse::<usize>().ok().filter(|number| (1..=snapshots.len()).contains(number));
        let by_name = snapshots.iter().position(|snapshot| snapshot.name == line);
        match number.map(|number| number - 1).or(by_name) {
            Some(index) => return Ok(Some(snapshots[index].clone())),
            None => eprintln!("a number from 1 to {}, a name, or q to leave", models.len()),
        }
    }
}

fn introduce(snapshot: &Snapshot, engine: &Engine) {
    let info = engine.info();
    // A CPU has but one way.
    let how = match info.device.compute_capability {
        Some(_) => format!(" · {}, {} attention", engine.executor(), info.attention),
        None => String::new(),
    };
    note(&format!(
        "{} · {} {}, {} parameters · weights {}, cache {}{how} · loaded in {:.2} s",
        snapshot.name,
        info.family,
        info.quantization.as_deref().unwrap_or("unquantized"),
        text::count(info.parameters),
        text::size(info.weight_bytes),
        text::size(info.cache_bytes),
        info.load.total_s,
    ));
    if let Some(line) = crate::hub::demo::notice(snapshot) {
        note(line);
    }
}
