//! `inferno health`: asks a server whether it is ready, for example as the health check of a container.

use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Deserialize;
use ureq::Agent;
use ureq::http::Uri;
use ureq::tls::TlsConfig;

use super::shared::seconds;
use crate::error::Error;
use crate::hub::is_loopback;
use crate::text::{excerpt, library_error};

/// The maximum size of an error response in bytes. The message of a larger response is not shown.
/// inferno's own error responses are much smaller.
const MAX_BODY_BYTES: u64 = 4 << 10;

/// Check whether a server is ready: exit code 0 if it is, 1 if it is not
#[derive(clap::Args)]
pub struct Args {
    /// URL of the server; by default, --host and --port select a server on this machine
    #[arg(long, value_name = "URL", conflicts_with_all = ["host", "port", "tls_cert"])]
    url: Option<String>,
    /// Address on which `inferno serve` listens
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,
    /// Port on which `inferno serve` listens
    #[arg(long, default_value_t = 8000, value_name = "PORT")]
    port: u16,
    /// Certificate file that `inferno serve` uses; with this flag, the check uses HTTPS, but does not read the file
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// Check only that the process works; succeeds even while the server is loading the model or shutting down
    #[arg(long)]
    live: bool,
    /// Time limit for the whole check, in seconds
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS", value_parser = seconds)]
    timeout: f64,
}

/// The part of an error response that says why the server is not ready.
#[derive(Deserialize)]
struct HealthError {
    error: HealthErrorDetail,
}

#[derive(Deserialize)]
struct HealthErrorDetail {
    message: String,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let server = match &args.url {
        Some(url) => base_url(url)?,
        None => local_url(&args.host, args.port, args.tls_cert.is_some()),
    };
    let url = format!("{server}/{}", if args.live { "live" } else { "health" });
    let agent: Agent = Agent::config_builder()
        .user_agent(concat!("inferno/", env!("CARGO_PKG_VERSION")))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(None)
        .timeout_global(Some(Duration::from_secs_f64(args.timeout)))
        // Do not verify the certificate of a server at a loopback address.
        // The certificate usually names only the public host, and the request contains no secret.
        .tls_config(TlsConfig::builder().disable_verification(is_loopback(&url)).build())
        .build()
        .into();
    let mut response = match agent.get(&url).call() {
        Ok(response) => response,
        Err(ureq::Error::Timeout(_)) => bail!("cannot reach {url}: no response in {} s", args.timeout),
        Err(error) => bail!("cannot reach {url}: {}", library_error(&error)),
    };
    let status = response.status();
    if status == 200 {
        writeln!(std::io::stdout(), "{server} is {}", if args.live { "alive" } else { "ready" })?;
        return Ok(ExitCode::SUCCESS);
    }
    let body = response.body_mut().with_config().limit(MAX_BODY_BYTES).read_to_vec().unwrap_or_default();
    let reason = serde_json::from_slice::<HealthError>(&body).map(|response| response.error.message);
    let reason = reason.map_or_else(|_| "the response has no error message".to_string(), |reason| excerpt(&reason));
    bail!("{server} is not {}: {reason} (status {})", if args.live { "alive" } else { "ready" }, status.as_u16())
}

/// Removes `/v1` and slashes from the end of `url`, because users may pass the base URL of an API client.
/// Fails if the URL starts with neither `http://` nor `https://`.
fn base_url(url: &str) -> Result<String> {
    let base = url.trim_end_matches('/');
    let base = base.strip_suffix("/v1").unwrap_or(base);
    let scheme = base.parse::<Uri>().ok().and_then(|uri| uri.scheme_str().map(str::to_string));
    match scheme.as_deref() {
        Some("http" | "https") => Ok(base.to_string()),
        _ => {
            Err(Error::usage(format!("invalid --url '{}': expected a URL such as http://127.0.0.1:8000", excerpt(url))))
        }
    }
}

/// Returns the URL at which this machine can reach a server that listens on `host` and `port`.
fn local_url(host: &str, port: u16, has_tls: bool) -> String {
    let scheme = if has_tls { "https" } else { "http" };
    match host.parse::<IpAddr>() {
        // An unspecified address, such as 0.0.0.0, makes the server listen on all addresses, including loopback.
        Ok(IpAddr::V4(address)) if address.is_unspecified() => format!("{scheme}://127.0.0.1:{port}"),
        Ok(IpAddr::V6(address)) if address.is_unspecified() => format!("{scheme}://[::1]:{port}"),
        Ok(IpAddr::V6(address)) => format!("{scheme}://[{address}]:{port}"),
        _ => format!("{scheme}://{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_lead_to_the_server() {
        for (host, url) in [
            ("127.0.0.1", "http://127.0.0.1:8000"),
            ("0.0.0.0", "http://127.0.0.1:8000"),
            ("::", "http://[::1]:8000"),
            ("fe80::1", "http://[fe80::1]:8000"),
            ("localhost", "http://localhost:8000"),
        ] {
            assert_eq!(local_url(host, 8000, false), url);
        }
        assert_eq!(local_url("0.0.0.0", 443, true), "https://127.0.0.1:443");
        for url in ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"] {
            assert_eq!(base_url(url).unwrap(), "http://a:1");
        }
        assert!(base_url("a:1").is_err() && base_url("ftp://a").is_err() && base_url("").is_err());
    }
}
