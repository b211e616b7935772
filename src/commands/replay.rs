//! `inferno replay`: recomputes the answers to a recorded request and compares their tokens with the record.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::shared::{LoadArgs, api_keys, note};
use crate::client::{Connection, ServerUrl};
use crate::engine::{Divergence, EngineHandle, EngineRecord, GenerationRecord, ReplayedToken};
use crate::error::Error;
use crate::files;
use crate::hub::{Hub, Snapshot};
use crate::text::{printable, quote};

/// The maximum size of a record in bytes. The limit keeps a mistyped path from loading a huge file into memory.
const MAX_RECORD: u64 = 256 << 20;

/// Recompute the answers to a recorded request: exit code 0 if all tokens are equal, 1 if any differ
#[derive(clap::Args)]
pub struct Args {
    /// Record file from `inferno serve --record`, or the id (`x-request-id`) of a request to a running server
    #[arg(value_name = "FILE|ID")]
    record: String,
    /// URL of the server that has the record, if an id is given
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    url: String,
    /// API key for the server, or @FILE [default: INFERNO_API_KEY]
    #[arg(long, value_name = "KEY", env = "INFERNO_API_KEY", hide_env = true)]
    api_key: Option<String>,
    /// PEM file with the certificates to trust, such as the server's own certificate
    #[arg(long, value_name = "FILE", env = "SSL_CERT_FILE", hide_env = true)]
    ca_cert: Option<PathBuf>,
    /// Name, directory or GGUF file of the model, if it differs from the model in the record
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(mut args: Args) -> Result<ExitCode> {
    let record = read(&args)?;
    record.check_version()?;
    let hub = Hub::from_env()?;
    let snapshot = find(&hub, &args, &record)?;
    args.load.set_deterministic(record.engine.deterministic);
    args.load.set_default_sizes(record.engine.context, record.engine.chunk);
    let engine = args.load.load(&snapshot)?;
    let mut differences = record.engine.differences(&EngineRecord::new(engine.info()));
    if snapshot.revision != record.revision {
        let name = |revision: &Option<String>| revision.clone().unwrap_or_else(|| "none".to_string());
        differences.push(format!(
            "model revision: {} in the record, {} now",
            name(&record.revision),
            name(&snapshot.revision)
        ));
    }
    for difference in &differences {
        note(&printable(&format!("difference in {difference}")));
    }
    let is_equal = replay(&record, &engine)?;
    let is_independent = record.requests.iter().all(|request| request.request.deterministic);
    if !is_equal && !record.engine.deterministic && !is_independent {
        note("the request was not deterministic: its tokens can depend on other requests that ran at the same time");
    }
    Ok(if is_equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads the record from a file, or else from the server. Fails without asking the server if a `.json` file is missing.
fn read(args: &Args) -> Result<GenerationRecord> {
    let path = Path::new(&args.record);
    if path.is_file() {
        return files::read_json(path, MAX_RECORD);
    }
    if args.record.ends_with(".json") {
        return Err(Error::usage(format!("cannot read {}: there is no such file", quote(&args.record))));
    }
    let url = ServerUrl::parse(&args.url).map_err(Error::usage)?;
    let key = api_keys::read(args.api_key.as_slice())?.into_iter().next();
    let connection = Connection::new(url, key, args.ca_cert.as_deref())?;
    let json = connection.get(&format!("/records/{}", utf8_percent_encode(&args.record, NON_ALPHANUMERIC)))?;
    serde_json::from_value(json).context("cannot read the record: the response is not a record of `inferno serve`")
}

/// Finds the model of a record, at the recorded commit if this commit is on this machine.
/// Ignores the recorded commit for the demo, and if --model or --revision is given.
fn find(hub: &Hub, args: &Args, record: &GenerationRecord) -> Result<Snapshot> {
    let (model, revision) = (args.model.as_deref().unwrap_or(&record.model), args.load.revision());
    let found = hub.find(model, revision)?;
    let has_choice = args.model.is_some() || revision.is_some() || found.is_demo();
    match (&record.revision, &found.revision) {
        (Some(recorded), Some(other)) if recorded != other && !has_choice => {
            Ok(hub.find(model, Some(recorded)).unwrap_or(found))
        }
        _ => Ok(found),
    }
}

/// Recomputes the recorded answers, and prints one line for each answer. Returns whether all tokens are equal.
fn replay(record: &GenerationRecord, engine: &EngineHandle) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    if let Some(error) = &record.error {
        writeln!(out, "the recorded request failed: {}", printable(error))?;
    }
    let (mut is_equal, mut number) = (true, 0);
    for request in &record.requests {
        for (index, answer) in request.answers.iter().enumerate() {
            number += 1;
            let tokens = answer.tokens.len();
            let found = match tokens {
                0 => None,
                _ => engine.replay(&request.request, index, answer)?,
            };
            let end = printable(&answer.finish);
            match found {
                None if tokens == 0 => writeln!(out, "answer {number}: the record has no tokens (finish: {end})")?,
                None => writeln!(out, "answer {number}: {tokens} of {tokens} tokens are equal (finish: {end})")?,
                Some(Divergence { index, expected, got }) => {
                    is_equal = false;
                    let got = got.map_or_else(|| "the end".to_string(), |got| shown(got, engine));
                    let expected = shown(expected, engine);
                    writeln!(
                        out,
                        "answer {number}: token {} of {tokens} differs: expected {expected}, got {got}",
                        index + 1
                    )?;
                }
            }
        }
    }
    out.flush()?;
    Ok(is_equal)
}

/// Formats a token: its id, its text and its log probability if known.
fn shown(token: ReplayedToken, engine: &EngineHandle) -> String {
    let bytes = engine.tokenizer().table().bytes(token.id);
    let text = quote(&String::from_utf8_lossy(&bytes));
    match token.logprob {
        Some(logprob) => format!("{} {text} (log probability {logprob:.4})", token.id),
        None => format!("{} {text}", token.id),
    }
}
