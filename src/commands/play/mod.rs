//! `inferno play`: an interactive chat, or a single answer for a script.

mod args;
mod choice;
mod local;
mod remote;

use std::num::NonZero;
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, Result};

use super::shared::{answer, prompt};
use crate::chat::today;
use crate::conversation::{LoadedModel, ModelId, ModelSource, ReasoningVisibility, Session};
use crate::repl;
use crate::terminal;
use crate::text;
use args::Selected;

pub use args::{Args, ValueOrigin};

pub fn run(mut args: Args) -> Result<ExitCode> {
    let prompt = prompt::one_shot(args.prompt.as_deref(), args.stdin, args.raw, args.json || args.jsonl)?;
    if prompt.is_none() {
        terminal::guard();
    }
    for warning in &args.origin.rejected {
        terminal::print(warning);
    }
    let selected = match &args.url {
        Some(url) => remote::select(url, &args, prompt.is_some())?,
        None => local::select(&args, prompt.is_some())?,
    };
    let Some(Selected { model, typed_revision, source }) = selected else { return Ok(ExitCode::SUCCESS) };
    let reparse = args.origin.reparse.take().context("internal error: the command line cannot be parsed again")?;
    let args = reparse(model.name())?;
    let models = source(reparse);
    let loaded = models.load(&model)?;

    let mut requested = args.origin.requested.clone();
    if let Some(revision) = typed_revision {
        requested.insert("revision".to_string(), vec![revision]);
    }
    let mut session = new_session(&args, model, loaded, models).with_requested(requested);
    match &args.resume {
        Some(name) => resume(&mut session, name, args.system.as_deref())?,
        None if prompt.is_none() && !args.raw => session.record_from_first_answer(),
        None => {}
    }
    match prompt {
        Some(prompt) if args.json => answer::json(session, &prompt),
        Some(prompt) if args.jsonl => answer::json_lines(session, &prompt),
        Some(prompt) => answer::text(session, &prompt),
        None => repl::run(session),
    }
}

/// Creates a session with the settings in `args`.
fn new_session(args: &Args, model: ModelId, loaded: LoadedModel, models: Rc<dyn ModelSource>) -> Session {
    let mut session = Session::new(model, loaded, models, today()).with_system(args.system.as_deref());
    let settings = &mut session.settings;
    settings.max_tokens = args.max_tokens.map(NonZero::get);
    settings.stop = args.stop.clone();
    settings.reasoning_effort = args.reasoning;
    settings.reasoning = if args.hide_reasoning { ReasoningVisibility::Hidden } else { ReasoningVisibility::Shown };
    (settings.plain, settings.overflow) = (args.plain, args.overflow);
    (session.raw, session.ignore_eos) = (args.raw, args.ignore_eos);
    session
}

/// Resumes a saved conversation. Prints a warning if it is damaged. If `system` is given, replaces its system prompt.
fn resume(session: &mut Session, name: &str, system: Option<&str>) -> Result<()> {
    if let Some(damage) = session.resume(name)? {
        terminal::write_stderr(&format!("{}\n", text::printable(&damage)));
    }
    match system {
        Some(system) => session.replace_system(system),
        None => Ok(()),
    }
}
