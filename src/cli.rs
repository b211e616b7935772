//! Parses the command line, runs the subcommand, and turns errors into messages and exit codes.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::{
    bench, completions, doctor, download, health, list, perplexity, play, prune, receipt, remove, replay, serve,
    shared::defaults, show, tokenize, verify,
};
use crate::error::{exit_code, is_disk_full};
use crate::terminal;
use crate::text::{error_message, printable};

const AFTER_HELP: &str = "\
Without a GPU:   inferno play demo --device cpu
With a GPU:      inferno download openai/gpt-oss-20b
                 inferno play openai/gpt-oss-20b

Exit codes: 0 success, 1 failure, 2 usage error, 3 not found, 4 access restricted, 5 offline or network,
            6 verification failed, 7 no GPU, 8 out of memory, 9 unsupported model, 10 context full,
            11 disk full, 130 interrupted";

/// The version and the git commit of this binary.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("INFERNO_COMMIT"), ")");

/// Run open-weight language models on NVIDIA GPUs, in the terminal or as a server
#[derive(Parser)]
#[command(name = "inferno", version = VERSION, after_help = AFTER_HELP)]
struct Cli {
    /// Log to stderr; -vv logs more
    // `display_order` puts this flag after the subcommand's own flags in `--help`.
    #[arg(long, short, global = true, action = ArgAction::Count, display_order = 900)]
    #[allow(dead_code, reason = "`defaults::parse` reads this flag from clap's matches")]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Download(download::Args),
    List(list::Args),
    Verify(verify::Args),
    Remove(remove::Args),
    Prune(prune::Args),
    Show(show::Args),
    Doctor(doctor::Args),
    Play(Box<play::Args>),
    Serve(Box<serve::Args>),
    Health(health::Args),
    Replay(Box<replay::Args>),
    Receipt(receipt::Args),
    Bench(bench::Args),
    Perplexity(perplexity::Args),
    Tokenize(tokenize::Args),
    Completions(completions::Args),
}

/// Runs the command line of the current process and returns the exit code.
pub fn main() -> ExitCode {
    terminal::survive_file_size_limit();
    match parse().and_then(run) {
        Ok(code) => code,
        // The reader of the output closed the pipe, as in `| head`. That is not an error.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let error = if is_stdout_full(&error) { error.context("cannot write the output") } else { error };
            // Escape control characters, because messages may quote untrusted files. Ignore a closed stderr.
            let _ = writeln!(std::io::stderr(), "error: {}", printable(&error_message(&error)));
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Returns whether writing to stdout failed because the disk is full.
fn is_stdout_full(error: &anyhow::Error) -> bool {
    // A disk-full error without context is from stdout, because writes to files add a context.
    let outermost = error.chain().next().and_then(|cause| cause.downcast_ref());
    outermost.is_some_and(is_disk_full)
}

/// Parses the command line. If it is invalid, prints an error and exits.
///
/// The environment, a resumed conversation and the configuration file supply values for flags that were not typed.
fn parse() -> Result<Cli> {
    let line = defaults::parse(Cli::command(), None)?;
    let mut cli = to_cli(&line);
    if let Command::Play(args) = &mut cli.command {
        let saved = line.saved.clone();
        args.origin = play::ValueOrigin::from_command_line(line);
        args.origin.reparse = Some(Box::new(move |model| {
            let line =
                defaults::parse(Cli::command(), Some(&defaults::KnownModel { name: model, saved: saved.as_ref() }))?;
            let Command::Play(mut args) = to_cli(&line).command else {
                anyhow::bail!("internal error: the subcommand changed on re-parse")
            };
            args.origin = play::ValueOrigin::from_command_line(line);
            Ok(*args)
        }));
    }
    Ok(cli)
}

fn to_cli(line: &defaults::ParsedCommandLine) -> Cli {
    Cli::from_arg_matches(&line.matches).unwrap_or_else(|error| error.exit())
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Download(args) => download::run(args),
        Command::List(args) => list::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Remove(args) => remove::run(args),
        Command::Prune(args) => prune::run(args),
        Command::Show(args) => show::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Play(args) => play::run(*args),
        Command::Serve(args) => serve::run(*args),
        Command::Health(args) => health::run(args),
        Command::Replay(args) => replay::run(*args),
        Command::Receipt(args) => receipt::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Perplexity(args) => perplexity::run(args),
        Command::Tokenize(args) => tokenize::run(args),
        Command::Completions(args) => completions::run(args, Cli::command()),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
