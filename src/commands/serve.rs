//! `inferno serve`: an HTTP server with OpenAI's and Anthropic's APIs and parts of ollama's.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};

use super::shared::logging::LogFormat;
use super::shared::{LoadArgs, api_keys, log_writer, note, seconds};
use crate::engine::Engine;
use crate::error::Error;
use crate::hub::{self, Hub, Snapshot, demo};
use crate::runner::MAX_SEQUENCES;
use crate::server::{self, ReceiptKey, RecordOptions, ServerOptions, ServerState, Timeouts};
use crate::terminal;
use crate::text::printable;

/// The maximum number of threads that serve connections. The engine does not run on these threads.
const MAX_THREADS: usize = 4;

/// The largest value of `--max-sequences`, and its default.
const SEQUENCE_LIMIT: u16 = MAX_SEQUENCES as u16;
const _: () = assert!(MAX_SEQUENCES == 256, "the help of --max-sequences and docs/tuning.md say 256");

/// The number of file descriptors that `--max-connections` must leave free: an estimate for model files, for records,
/// and for connections above the limit, on which the server still answers health checks.
#[cfg(unix)]
const OTHER_FILES: usize = 256;

/// The time limit for the threads of the Tokio runtime to finish when the program exits.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Serve a model over HTTP with OpenAI's and Anthropic's APIs and parts of ollama's
#[derive(clap::Args)]
pub struct Args {
    /// Name, directory or GGUF file of a model; `demo` is built in
    model: String,
    /// Address to listen on; without --no-auth, clients need an API key on any address other than localhost
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,
    /// Port to listen on; 0 selects a free port
    #[arg(long, default_value_t = 8000, value_name = "PORT")]
    port: u16,
    /// API key that clients must send, or @FILE with one key per line; can be repeated
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// Accept requests from other machines without an API key
    #[arg(long, conflicts_with = "api_key")]
    no_auth: bool,
    /// PEM file with the certificate chain of the server; enables HTTPS
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the private key of the certificate
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Origin of web pages that may use the server, such as `https://app.example`, or `*`; can be repeated
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Maximum number of answers to generate at once, up to 256; up to --queue further answers wait
    #[arg(
        long,
        default_value_t = SEQUENCE_LIMIT,
        value_name = "N",
        value_parser = clap::value_parser!(u16).range(1..=i64::from(SEQUENCE_LIMIT))
    )]
    max_sequences: u16,
    /// Maximum number of answers that may wait to start; further requests are rejected with status 429
    #[arg(long, default_value_t = 512, value_name = "N")]
    queue: usize,
    /// Maximum number of open connections; 64 more serve only health checks and /metrics, and reject other requests
    /// with status 503
    #[arg(long, default_value_t = 16384, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,
    /// Seconds after SIGTERM or Ctrl-C during which the server still accepts requests, while /health answers 503
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    drain_delay: u64,
    /// Seconds that running and waiting requests may take to finish after --drain-delay
    #[arg(long, default_value_t = 150, value_name = "SECONDS")]
    drain_timeout: u64,
    /// Format of the log on stderr, which has one line per request
    #[arg(long, default_value = "text", value_name = "FORMAT", env = "INFERNO_LOG_FORMAT", hide_env = true)]
    log_format: LogFormat,
    /// Also publish metrics under the names of another inference server
    #[arg(long, value_name = "SERVER")]
    metrics_compat: Option<MetricsCompat>,
    /// Write a record of each request, including its prompt and answer, to this folder for `inferno replay`
    #[arg(long, value_name = "FOLDER")]
    record: Option<PathBuf>,
    /// Memory for records of recent requests, in MiB; 0 keeps no records in memory
    #[arg(long, default_value_t = 16, value_name = "MIB", hide_short_help = true)]
    record_memory: usize,
    /// PEM file with the private key that signs receipts of requests; created if it does not exist
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    receipt_key: Option<PathBuf>,
    /// Compute each answer independently of other requests; slower
    #[arg(long)]
    deterministic: bool,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// The inference server whose metric names are published in addition to inferno's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum MetricsCompat {
    Vllm,
}

/// The time limits of connections and requests, and the interval of keep-alive messages.
#[derive(clap::Args)]
struct LimitArgs {
    /// Maximum seconds for a TLS handshake, for the headers of a request, and for an idle connection
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS", hide_short_help = true, value_parser = seconds)]
    header_timeout: f64,
    /// Seconds to receive the body of a request
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS", hide_short_help = true, value_parser = seconds)]
    body_timeout: f64,
    /// Seconds that a request may wait before it starts
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", hide_short_help = true, value_parser = seconds)]
    queue_timeout: f64,
    /// Seconds within which a client must read the next 4 KiB of a response, or the rest if it is shorter
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS", hide_short_help = true, value_parser = seconds)]
    write_timeout: f64,
    /// Seconds between keep-alive messages while a stream has no events
    #[arg(long, default_value_t = 15.0, value_name = "SECONDS", hide_short_help = true, value_parser = seconds)]
    ping_interval: f64,
}

pub fn run(mut args: Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    let snapshot = hub.find(&args.model, args.load.revision())?;
    let mut options = options(&args, &snapshot)?;
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get().min(MAX_THREADS));
    let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    let runtime = runtime.context("cannot start the threads of the server")?;
    let listener = runtime.block_on(server::bind(&args.host, args.port));
    let listener =
        listener.map_err(|error| anyhow!("{error:#}\n  to listen on another address or port, use --host or --port"))?;
    let address = listener.local_addr().context("cannot read the address of the server")?;
    if options.api_keys.is_empty() && !args.no_auth && !address.ip().is_loopback() {
        let key = server::new_api_key()?;
        terminal::write_stderr(&format!("API key for this run: {key}\n"));
        options.api_keys.push(key);
    }
    let has_key = !options.api_keys.is_empty();
    let server = ServerState::new(options)?;
    let serving = start(&runtime, &server, listener);

    // From here on, the server answers health checks while the model loads.
    hub.record_use(&snapshot);
    let engine = load(&mut args, &snapshot, &server)?;
    announce(&format!("{scheme}://{address}"), &snapshot, has_key);
    let served = runtime.block_on(serving).context("the server stopped unexpectedly")?;
    match served {
        Ok(()) => drop(engine),
        // The engine or a device has failed. Do not free device memory, because that could block or fail.
        Err(_) => std::mem::forget(engine),
    }
    server.finish_records();
    runtime.shutdown_timeout(END_TIMEOUT);
    log_writer::flush();
    served.map(|()| ExitCode::SUCCESS)
}

/// Returns the options of the server. Reads the files with API keys, the TLS files and the receipt key.
/// Creates the receipt key if it is missing, and raises the limit on open files.
fn options(args: &Args, snapshot: &Snapshot) -> Result<ServerOptions> {
    let limits = &args.limits;
    Ok(ServerOptions {
        model: snapshot.name.clone(),
        api_keys: read_api_keys(args)?,
        cors_origins: args.cors_origin.clone(),
        no_auth: args.no_auth,
        max_sequences: args.max_sequences.into(),
        max_waiting: args.queue,
        timeouts: Timeouts {
            header: Duration::from_secs_f64(limits.header_timeout),
            body: Duration::from_secs_f64(limits.body_timeout),
            queue: Duration::from_secs_f64(limits.queue_timeout),
            write: Duration::from_secs_f64(limits.write_timeout),
            ping: Duration::from_secs_f64(limits.ping_interval),
            drain_delay: Duration::from_secs(args.drain_delay),
            drain: Duration::from_secs(args.drain_timeout),
        },
        tls: match (&args.tls_cert, &args.tls_key) {
            (Some(certificate), Some(key)) => Some(server::read_tls(certificate, key)?),
            (None, None) => None,
            _ => {
                return Err(Error::usage(
                    "cannot use TLS: --tls-cert and --tls-key must both be set; set the missing one",
                ));
            }
        },
        record: RecordOptions {
            memory_bytes: args.record_memory.saturating_mul(1 << 20),
            folder: args.record.clone(),
            revision: snapshot.revision.clone(),
            receipt_key: args.receipt_key.as_deref().map(ReceiptKey::read_or_create).transpose()?.map(Arc::new),
        },
        max_connections: allow_connections(args.max_connections as usize),
        has_vllm_metrics: args.metrics_compat == Some(MetricsCompat::Vllm),
    })
}

/// Returns the API keys from --api-key, or else from INFERNO_API_KEY or the configuration file.
/// Fails if a key is invalid or a file cannot be read, or if there are keys and --no-auth is set.
fn read_api_keys(args: &Args) -> Result<Vec<String>> {
    let keys = api_keys::read(&args.api_key)?;
    if args.no_auth && !keys.is_empty() {
        return Err(Error::usage(
            "cannot use --no-auth together with an API key: omit one of them; the environment (INFERNO_NO_AUTH, \
             INFERNO_API_KEY) and the configuration file can also set them",
        ));
    }
    Ok(keys)
}

/// Loads the model and passes it to the server. With --receipt-key, hashes the files of the model at the same time.
fn load(args: &mut Args, snapshot: &Snapshot, server: &ServerState) -> Result<Engine> {
    args.load.set_deterministic(args.deterministic);
    args.load.plan_for_many(Some(args.max_sequences.into()));
    args.load.warm_up();
    let path = snapshot.path.clone();
    let hashes = args.receipt_key.as_ref().map(|_| std::thread::spawn(move || hub::file_hashes(&path)));
    let engine = args.load.load(snapshot)?;
    if let Some(hashes) = hashes {
        let hashes = hashes.join().map_err(|_| anyhow!("cannot hash the files of the model: a thread panicked"))?;
        server.set_model_files(hashes?);
    }
    server.set_engine(engine.handle());
    Ok(engine)
}

/// Serves connections in the background until a signal arrives and all requests have ended or been canceled,
/// or until the engine fails. If the signal arrives while the model is loading, exits the process.
fn start(runtime: &Runtime, server: &Arc<ServerState>, listener: TcpListener) -> tokio::task::JoinHandle<Result<()>> {
    let server = server.clone();
    runtime.spawn(async move {
        let shutdown = async {
            signal().await;
            // A second signal ends the program immediately.
            tokio::spawn(async {
                signal().await;
                std::process::exit(130);
            });
        };
        let served = server::serve(server.clone(), listener, shutdown).await;
        if server.engine().is_none() {
            // Exit here, because the main thread is still loading the model, and loading cannot be interrupted.
            std::process::exit(0);
        }
        served
    })
}

/// Waits for Ctrl-C or SIGTERM.
#[cfg(unix)]
async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return std::future::pending().await;
    };
    let received = |context: &mut std::task::Context<'_>| {
        let is_received = interrupt.poll_recv(context).is_ready() || terminate.poll_recv(context).is_ready();
        if is_received { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    };
    std::future::poll_fn(received).await;
}

/// Waits for Ctrl-C.
#[cfg(not(unix))]
async fn signal() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

/// Prints the URL and an example command. Ignores a closed standard output, because the server works without it.
fn announce(url: &str, snapshot: &Snapshot, has_key: bool) {
    let key = if has_key { " -H \"Authorization: Bearer $INFERNO_API_KEY\"" } else { "" };
    let text = format!(
        "{} is ready at {url}/v1\n\
         try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \
         -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is the KV cache?\"}}]}}'\n",
        printable(&snapshot.name)
    );
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if let Some(line) = demo::serve_notice(snapshot) {
        note(line);
    }
}

/// Raises the limit on open files as far as possible, because each connection is an open file.
/// Returns `wanted`, or fewer connections if the limit does not allow as many.
fn allow_connections(wanted: usize) -> usize {
    #[cfg(unix)]
    {
        use nix::sys::resource::{Resource, getrlimit, setrlimit};
        let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return wanted };
        let files = if setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() { hard } else { soft };
        let room = usize::try_from(files).unwrap_or(usize::MAX).saturating_sub(OTHER_FILES).max(1);
        if room < wanted {
            tracing::warn!(
                "--max-connections is lowered to {room}, because at most {files} files can be open (ulimit -n)"
            );
        }
        room.min(wanted)
    }
    #[cfg(not(unix))]
    wanted
}
