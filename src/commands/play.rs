//! `inferno play`: one answer for a script, or a chat for a person.

use std::io::{IsTerminal, Read, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};

use super::list::{self, Model};
use super::progress::{Listener, Show};
use super::{LoadArgs, SamplingArgs, note, playable, today};
use crate::chat::{Channel, Message, ReasoningEffort, RenderOptions};
use crate::engine::{Engine, FinishReason, GenerateOptions, SamplingParams, Summary};
use crate::error::Error;
use crate::hub::{Hub, Snapshot, is_repository, to_download};
use crate::repl::{self, Reasoning, Session, style};

/// Chat with a model, or get one answer with --prompt
#[derive(clap::Args)]
pub struct Args {
    /// Name or directory of a model; `demo` is built in [default: choose from a list]
    model: Option<String>,
    /// Answer this and exit; without it, piped standard input is the prompt
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// Instructions for the model
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// How much the model thinks before it answers: low, medium or high
    #[arg(long, default_value = "medium", value_name = "EFFORT")]
    reasoning: ReasoningEffort,
    /// Do not show what the model thinks
    #[arg(long)]
    hide_reasoning: bool,
    /// End an answer after this many tokens
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<usize>,
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
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let prompt = one_shot_prompt(&args)?;
    if let Some(problem) = args.sampling.over(&SamplingParams::greedy()).problem() {
        return Err(usage(problem));
    }
    let hub = Hub::from_env()?;
    let snapshot = match &args.model {
        Some(model) => find_or_fetch(&hub, model, args.load.revision())?,
        None if prompt.is_none() => match choose(&hub)? {
            Some(snapshot) => snapshot,
            None => return Ok(ExitCode::SUCCESS),
        },
        None => {
            return Err(usage("name a model: inferno play MODEL --prompt TEXT (`inferno list` shows what is here)"));
        }
    };
    hub.note_use(&snapshot);
    let engine = args.load.load(&snapshot)?;
    introduce(&snapshot, &engine);

    let mut options = GenerateOptions::new(args.sampling.over(engine.defaults()));
    options.max_tokens = args.max_tokens;
    options.stop = args.stop;
    options.ignore_eos = args.ignore_eos;
    let cancel = Arc::new(AtomicBool::new(false));
    options.cancel = Some(cancel.clone());
    let session = Session {
        engine,
        options,
        render: RenderOptions {
            tools: Vec::new(),
            reasoning_effort: args.reasoning,
            date: today(),
            add_generation_prompt: true,
        },
        messages: args.system.map(Message::system).into_iter().collect(),
        reasoning: if args.hide_reasoning { Reasoning::Hidden } else { Reasoning::Shown },
        raw: args.raw,
        turns: 0,
    };
    match prompt {
        Some(prompt) if args.json => answer_json(session, &snapshot, &prompt),
        Some(prompt) => answer(session, &prompt),
        None => repl::run(session, cancel),
    }
}

/// The prompt of a one-shot call: `--prompt`, or else standard input if it is piped. With `--prompt` the pipe is left
/// alone: a script's standard input may never end.
fn one_shot_prompt(args: &Args) -> Result<Option<String>> {
    let none = || usage("there is no prompt: give --prompt TEXT, or pipe one in");
    match &args.prompt {
        Some(prompt) if prompt.is_empty() => return Err(none()),
        Some(prompt) => return Ok(Some(prompt.clone())),
        None if std::io::stdin().is_terminal() && args.json => return Err(none()),
        None if std::io::stdin().is_terminal() => return Ok(None),
        None => {}
    }
    let mut piped = String::new();
    std::io::stdin().read_to_string(&mut piped).context("standard input is not UTF-8 text")?;
    // A text to continue is taken to the letter; after a question, the line end that `echo` adds means nothing.
    let piped = if args.raw { piped.as_str() } else { piped.trim_end_matches(['\n', '\r']) };
    if piped.is_empty() { Err(none()) } else { Ok(Some(piped.to_string())) }
}

fn usage(problem: impl Into<String>) -> anyhow::Error {
    Error::Usage(problem.into()).into()
}

/// Finds a model. One that is not here is fetched if there is somebody to say yes to that.
fn find_or_fetch(hub: &Hub, model: &str, revision: Option<&str>) -> Result<Snapshot> {
    let missing = match hub.find(model, revision) {
        Err(error) if matches!(error.downcast_ref(), Some(Error::ModelNotFound { .. })) => error,
        found => return found,
    };
    // A part of a name does not say whose model it is.
    let can_fetch = model.contains('/') && is_repository(model) && !hub.settings().offline;
    let somebody = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !can_fetch || !somebody {
        return Err(missing);
    }
    let (name, revision, pick) = to_download(model, revision)?;
    let bytes = hub.download_bytes(&name, revision.as_deref(), &pick)?;
    eprint!("{model} is not here; download {}? [Y/n] ", list::size(bytes));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    if !line.ends_with('\n') || !matches!(line.trim().to_lowercase().as_str(), "" | "y" | "yes") {
        return Err(missing);
    }
    let show = Show::new(Listener::new(false), "fetched");
    let fetched = hub.download(&name, revision.as_deref(), &pick, &show);
    show.finish();
    fetched?;
    hub.find(model, revision.as_deref())
}

/// Lists what is on disk and asks which.
fn choose(hub: &Hub) -> Result<Option<Snapshot>> {
    let snapshots = playable(hub)?;
    anyhow::ensure!(!snapshots.is_empty(), "there is no model here; fetch one: inferno download openai/gpt-oss-20b");
    let models: Vec<Model> = snapshots.iter().map(|snapshot| Model::read(hub, snapshot)).collect();
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
        info.quantisation.as_deref().unwrap_or("unquantised"),
        list::count(info.parameters),
        list::size(info.weight_bytes),
        list::size(info.cache_bytes),
        info.load.total_s,
    ));
    if let Some(line) = crate::hub::demo::notice(snapshot) {
        note(line);
    }
}

/// The answer alone on stdout; reasoning and the stats line on stderr, for a person who looks on.
fn answer(mut session: Session, prompt: &str) -> Result<ExitCode> {
    repl::stop_on_ctrl_c(&session.options)?;
    let watched = std::io::stderr().is_terminal();
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
    let (to_terminal, colour) = (std::io::stdout().is_terminal(), style::stderr_colour());
    let show_reasoning = watched && session.reasoning == Reasoning::Shown;
    let (mut thinking, mut ended_line) = (false, true);
    let turn = session.turn(prompt, &mut |delta| {
        match delta.channel {
            Channel::Reasoning if show_reasoning => {
                thinking = true;
                write!(err, "{}", style::dim(&style::printable(&delta.text), colour))?;
                err.flush()?;
            }
            Channel::Answer => {
                if std::mem::take(&mut thinking) {
                    write!(err, "\n\n")?;
                }
                ended_line = delta.text.ends_with('\n');
                if to_terminal {
                    out.write_all(style::printable(&delta.text).as_bytes())?;
                } else {
                    out.write_all(delta.text.as_bytes())?;
                }
                out.flush()?;
            }
            _ => {}
        }
        Ok(())
    })?;
    if !ended_line {
        writeln!(out)?;
    }
    out.flush()?;
    if turn.text.is_empty() && turn.summary.finish_reason == FinishReason::Length {
        writeln!(err, "warning: all {} tokens went into thinking; raise --max-tokens", turn.summary.completion_tokens)?;
    }
    drop(err);
    note(&style::stats(&turn.summary));
    Ok(exit_code(&turn.summary))
}

fn answer_json(mut session: Session, snapshot: &Snapshot, prompt: &str) -> Result<ExitCode> {
    repl::stop_on_ctrl_c(&session.options)?;
    let load_s = session.engine.info().load.total_s;
    let seed = session.options.sampling.seed;
    let turn = session.turn(prompt, &mut |_| Ok(()))?;
    let Summary { finish_reason, prompt_tokens, completion_tokens, ttft_s, tok_per_s, .. } = turn.summary;
    let tool_calls: Vec<_> = turn.summary.tool_calls.iter().map(serde_json::to_value).collect::<Result<_, _>>()?;
    let mut object = serde_json::json!({
        "text": turn.text,
        "reasoning": turn.reasoning,
        "tokens": turn.tokens,
        "finish_reason": finish_reason,
        "usage": { "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens },
        "stats": { "ttft_s": ttft_s, "tok_per_s": tok_per_s, "load_s": load_s },
        "model": snapshot.name,
        "seed": seed,
    });
    if !tool_calls.is_empty() {
        object["tool_calls"] = tool_calls.into();
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "{object}")?;
    out.flush()?;
    Ok(exit_code(&turn.summary))
}

fn exit_code(summary: &Summary) -> ExitCode {
    match summary.finish_reason {
        FinishReason::Interrupted => ExitCode::from(130),
        _ => ExitCode::SUCCESS,
    }
}
