//! The command line: which verb, and what a failure says and returns.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{bench, doctor, download, list, perplexity, play, prune, remove, show, tokenize, verify};
use crate::error::Error;
use crate::repl::style::printable;

const AFTER_HELP: &str = "\
Try it without a GPU:   inferno play demo --device cpu
With one:               inferno download openai/gpt-oss-20b
                        inferno play openai/gpt-oss-20b

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 access restricted, 5 offline or network,
            6 verification failed, 7 no GPU, 8 out of memory, 9 unsupported model, 10 context full,
            11 disk full, 130 interrupted";

/// Runs open-weight language models on an NVIDIA GPU, in the terminal.
#[derive(Parser)]
#[command(name = "inferno", version, after_help = AFTER_HELP)]
struct Cli {
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
    Bench(bench::Args),
    Perplexity(perplexity::Args),
    Tokenize(tokenize::Args),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let run = match Cli::parse().command {
        Command::Download(args) => download::run(args),
        Command::List(args) => list::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Remove(args) => remove::run(args),
        Command::Prune(args) => prune::run(args),
        Command::Show(args) => show::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Play(args) => play::run(*args),
        Command::Bench(args) => bench::run(args),
        Command::Perplexity(args) => perplexity::run(args),
        Command::Tokenize(args) => tokenize::run(args),
    };
    match run {
        Ok(code) => code,
        // Whoever read our output has had enough (`| head`): not a failure of ours.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Messages quote files that anyone may have written. And a closed stderr is no reason to panic.
            let _ = writeln!(std::io::stderr(), "error: {}", printable(&format!("{error:#}")));
            ExitCode::from(error.downcast_ref::<Error>().map_or(1, Error::exit_code))
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
