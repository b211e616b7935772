//! Sends HTTP requests to a hub, and converts unsuccessful responses to errors.
//!
//! - `listing`: the files of a repository on a hub
//! - `body`, `refusal`: read the bodies of responses, and convert unsuccessful responses to errors
//! - `retry`: decides whether and when to retry a request
//! - `endpoint`: checks whether a hub responds, and whether it accepts the access token
//!
//! This module uses the `ureq` crate instead of `hf-hub`, to control where the token is sent, and how redirects,
//! ranges and errors are handled.
//!
//! This module resolves relative redirects itself, because the `url` crate would add many dependencies.

mod body;
pub(in crate::hub) mod endpoint;
pub(in crate::hub) mod listing;
mod refusal;
pub(in crate::hub) mod retry;

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ureq::http::{Response, Uri, header};
use ureq::typestate::WithoutBody;
use ureq::{Agent, Body, RequestBuilder};

use crate::error::Error;
use crate::hub::config::{HubConfig, is_loopback};
use crate::hub::limits::Limits;
use crate::hub::progress::Progress;
use crate::hub::{hash, names};
use crate::text::{library_error, quote};
use listing::{Listing, MAX_FILE_BYTES, RemoteFile};
use retry::{Retry, is_temporary, retry_after};

/// The maximum size of a list of files, in bytes. Even a list of tens of thousands of files is smaller.
const MAX_LISTING_BYTES: u64 = 64 << 20;

/// The maximum number of redirects. For a large file, the hub usually redirects once, to a storage host.
const MAX_REDIRECTS: usize = 5;

/// A client for one revision of a repository on a hub.
pub(super) struct Remote<'a> {
    agent: Agent,
    config: &'a HubConfig,
    repo: &'a str,
    revision: &'a str,
    /// Receives an event before each retry.
    progress: &'a dyn Progress,
}

/// The purpose of a request, which determines its timeouts.
#[derive(Clone, Copy)]
enum Purpose {
    /// A HEAD request, or a request whose response is read into memory. The time for the whole body is limited.
    Metadata,
    /// A request for a file or a range of a file to write to disk. The time for the whole body is not limited.
    Contents,
}

/// The response to a GET request, after all redirects.
pub(super) struct HubResponse {
    pub response: Response<Body>,
    /// Whether a redirect led to a URL with a scheme, host or port other than the endpoint's.
    pub is_from_other_host: bool,
}

/// Returns an HTTP client with the timeouts in `limits`.
pub(super) fn agent(limits: &Limits) -> Agent {
    Agent::config_builder()
        .user_agent(concat!("inferno/", env!("CARGO_PKG_VERSION")))
        // Request uncompressed responses, because lengths and ranges must count the bytes of the file.
        .accept_encoding("identity")
        // Return unsuccessful responses as `Ok`, because callers read their headers and bodies.
        .http_status_as_error(false)
        // Disable redirects in ureq. `follow` and `head` handle redirects, and never send the token to other hosts.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .max_idle_connections_per_host(limits.connections)
        .timeout_connect(Some(limits.connect_timeout))
        .timeout_recv_response(Some(limits.response_timeout))
        .timeout_per_read(Some(limits.stall_timeout))
        .build()
        .into()
}

impl<'a> Remote<'a> {
    pub fn new(config: &'a HubConfig, repo: &'a str, revision: &'a str, progress: &'a dyn Progress) -> Self {
        Self { agent: agent(&config.limits), config, repo, revision, progress }
    }

    pub fn repo(&self) -> &str {
        self.repo
    }

    pub fn limits(&self) -> &Limits {
        &self.config.limits
    }

    /// Fetches the commit of the revision and the list of its files, with retries.
    /// Fails if the request fails, the response is invalid, or the revision is a commit and the hub sends another.
    pub fn listing(&self) -> Result<Listing> {
        let revision = names::encode_segment(self.revision);
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.config.endpoint, self.repo);
        let mut response = self.with_retries(self.repo, || {
            let mut response = self.follow(&url, None, Purpose::Metadata)?.response;
            // Read the body inside the retried function, so that a truncated body causes a retry.
            if response.status().is_success() {
                let body = self.read_body(&mut response.body_mut().as_reader(), MAX_LISTING_BYTES + 1)?;
                if body.len() as u64 > MAX_LISTING_BYTES {
                    let limit = MAX_LISTING_BYTES >> 20;
                    return Err(self.permanent_error(format!("the list of files is larger than {limit} MiB")));
                }
                *response.body_mut() = Body::builder().data(body);
            }
            Ok(response)
        })?;
        if !response.status().is_success() {
            return Err(self.refusal(response, None));
        }
        let body = response.body_mut().with_config().limit(MAX_LISTING_BYTES + 1).read_to_vec()?;
        let listing =
            Listing::parse(self.repo, &body).map_err(|error| match error.downcast::<serde_json::Error>() {
                Ok(error) => self.permanent_error(format!(
                    "the response is not from a model hub (a login page, or a wrong HF_ENDPOINT?): {}",
                    library_error(&error)
                )),
                Err(error) => error,
            })?;
        if names::is_commit(self.revision) && !listing.commit.eq_ignore_ascii_case(self.revision) {
            let what = format!(
                "the hub sent commit {} of '{}' instead of commit {}",
                listing.commit, self.repo, self.revision
            );
            return Err(Error::Verification { what, hint: "set HF_ENDPOINT to another hub".into() }.into());
        }
        Ok(listing)
    }

    /// Fetches the size and the etag of one file. Used if the listing lacks the size or the etag.
    /// Fails if the hub does not send a valid size and a valid etag.
    pub fn head(&self, commit: &str, name: &str) -> Result<RemoteFile> {
        let mut url = self.file_url(commit, name);
        for _ in 0..=MAX_REDIRECTS {
            let request = || {
                let request = self.prepare(self.agent.head(&url), &url, Purpose::Metadata);
                self.call(self.add_token(request, &url))
            };
            let response = self.with_retries(name, request)?;
            let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            let linked_etag = text("x-linked-etag");
            // Do not follow a redirect with `x-linked-etag`, the file's hash: the storage host may not send the hash.
            if response.status().is_redirection() && linked_etag.is_none() {
                match text("location").and_then(|to| self.resolve(&url, to)).filter(|to| self.is_endpoint(to)) {
                    Some(next) => url = next,
                    None => {
                        bail!(
                            "cannot get the hash of {}: the hub redirects to another host without sending the hash",
                            quote(name)
                        )
                    }
                }
                continue;
            }
            if !response.status().is_success() && !response.status().is_redirection() {
                return Err(self.refusal(response, Some(name)));
            }
            let etag = hash::bare_etag(linked_etag.or(text("etag")).unwrap_or_default());
            // Ignore the content-length of a redirect, which is the length of the redirect's body, not of the file.
            let length = if response.status().is_redirection() { None } else { text("content-length") };
            let bytes = text("x-linked-size").or(length).and_then(|bytes| bytes.parse().ok());
            let bytes = bytes.filter(|bytes| *bytes <= MAX_FILE_BYTES);
            if !names::is_etag(etag) {
                bail!("the hub sent no valid etag for {}: {}", quote(name), quote(etag));
            }
            let Some(bytes) = bytes else { bail!("the hub sent no valid size for {}", quote(name)) };
            return Ok(RemoteFile { name: name.to_string(), bytes: Some(bytes), etag: Some(etag.to_string()) });
        }
        Err(self.permanent_error(format!("the hub redirects {} more than {MAX_REDIRECTS} times", quote(name))))
    }

    /// Requests a file or a range of its bytes, without retries. Status 206 means that the server honored the range.
    pub fn get(&self, commit: &str, name: &str, range: Option<Range<u64>>) -> Result<HubResponse> {
        self.follow(&self.file_url(commit, name), range.map(range_header).as_deref(), Purpose::Contents)
    }

    /// Requests a byte range of a file, with retries and with the timeouts of [`Purpose::Metadata`].
    ///
    /// The caller must limit how much it reads: a server that ignores ranges sends the whole file with status 200.
    pub fn get_range(&self, commit: &str, name: &str, range: Range<u64>) -> Result<Response<Body>> {
        let (url, range) = (self.file_url(commit, name), range_header(range));
        self.with_retries(name, || Ok(self.follow(&url, Some(&range), Purpose::Metadata)?.response))
    }

    /// Sends a request, and retries it after temporary failures. `name` is the file or repository, for messages.
    ///
    /// Stops retrying if [`Retry`] gives up, or once the attempts have taken twice the response timeout in total, not
    /// counting the waits between them.
    fn with_retries(&self, name: &str, send: impl Fn() -> Result<Response<Body>>) -> Result<Response<Body>> {
        let limits = self.limits();
        let mut retry = Retry::new(limits, limits.max_metadata_failures);
        let mut time_left = limits.response_timeout.saturating_mul(2);
        loop {
            let start = Instant::now();
            let result = send();
            time_left = time_left.saturating_sub(start.elapsed());
            if time_left.is_zero() {
                return result;
            }
            let (cause, retry_after) = match &result {
                Ok(response) if is_temporary(response.status()) => {
                    (format!("HTTP {}", response.status()), retry_after(response.headers()))
                }
                Err(error) => match error.downcast_ref() {
                    Some(Error::Network { cause, is_temporary: true, .. }) => (cause.clone(), None),
                    _ => return result,
                },
                _ => return result,
            };
            let Some(wait) = retry.wait_after_failure(retry_after) else { return result };
            self.report_retry(name, &cause, wait);
            std::thread::sleep(wait);
        }
    }

    /// Logs and reports that the request for `name` will be sent again after `wait`.
    pub fn report_retry(&self, name: &str, cause: &str, wait: Duration) {
        tracing::info!(name, cause, wait_ms = wait.as_millis() as u64, "retrying a request");
        self.progress.retrying(name, cause, wait);
    }

    /// Sends a GET request and follows redirects.
    ///
    /// Sends the token only to URLs with the endpoint's scheme, host and port.
    /// After a redirect to any other URL, sends no token, even if a later redirect leads back to the endpoint.
    /// [`HubConfig::sent_token`] decides whether the endpoint may receive the token.
    /// Fails after more than [`MAX_REDIRECTS`] redirects, or if [`resolve`](Self::resolve) rejects a redirect.
    fn follow(&self, url: &str, range: Option<&str>, purpose: Purpose) -> Result<HubResponse> {
        let mut url = url.to_string();
        let mut is_from_other_host = false;
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.prepare(self.agent.get(&url), &url, purpose);
            // Do not send the token if another host redirects back to the endpoint: the other host chose the URL.
            is_from_other_host |= !self.is_endpoint(&url);
            if !is_from_other_host {
                request = self.add_token(request, &url);
            }
            if let Some(range) = range {
                request = request.header(header::RANGE, range);
            }
            let response = self.call(request)?;
            let location = response.headers().get(header::LOCATION).and_then(|to| to.to_str().ok());
            match location.filter(|_| response.status().is_redirection()) {
                None => return Ok(HubResponse { response, is_from_other_host }),
                Some(to) => match self.resolve(&url, to) {
                    Some(next) => url = next,
                    None => {
                        // Do not show the query of the URL, because it may contain a signature that grants access.
                        let to = quote(to.split(['?', '#']).next().unwrap_or_default());
                        return Err(self.permanent_error(format!(
                            "the hub redirects to {to}, which is not a valid web address, or is not encrypted"
                        )));
                    }
                },
            }
        }
        Err(self.permanent_error(format!("the hub redirects more than {MAX_REDIRECTS} times")))
    }

    /// Returns a network error after which a retry may succeed.
    pub fn temporary_error(&self, cause: String) -> anyhow::Error {
        Error::Network { endpoint: self.config.endpoint_for_display(), cause, is_temporary: true }.into()
    }

    /// Returns a network error after which the request is not retried.
    fn permanent_error(&self, cause: String) -> anyhow::Error {
        Error::Network { endpoint: self.config.endpoint_for_display(), cause, is_temporary: false }.into()
    }

    fn file_url(&self, commit: &str, name: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.config.endpoint, self.repo, names::encode_path(name))
    }

    /// Adds the timeouts for `purpose`. Disables the proxy if `url` is on this machine.
    fn prepare(
        &self,
        mut request: RequestBuilder<WithoutBody>,
        url: &str,
        purpose: Purpose,
    ) -> RequestBuilder<WithoutBody> {
        if let Purpose::Metadata = purpose {
            let timeout = self.limits().response_timeout;
            // `read_body` checks the time only when bytes of the body arrive. A server can keep the connection active
            // without sending such bytes, so `total` also limits the time for the body.
            let total = timeout.saturating_mul(5);
            request = request.config().timeout_per_read(Some(timeout)).timeout_recv_body(Some(total)).build();
        }
        bypass_proxy_if_local(request, url)
    }

    /// Adds the token if `url` is on the endpoint and the endpoint may receive the token.
    fn add_token(&self, request: RequestBuilder<WithoutBody>, url: &str) -> RequestBuilder<WithoutBody> {
        match self.config.sent_token() {
            Some(token) if self.is_endpoint(url) => request.header(header::AUTHORIZATION, format!("Bearer {token}")),
            _ => request,
        }
    }

    fn call(&self, request: RequestBuilder<WithoutBody>) -> Result<Response<Body>> {
        request.call().map_err(|error| self.temporary_error(library_error(&error)))
    }

    /// Returns the URL to which `location` redirects from `url`.
    /// `location` is an http or https URL, `//host/path` without a scheme, or a path that starts with `/`.
    ///
    /// Returns `None` for any other form of `location`, and for redirects from https to http.
    fn resolve(&self, url: &str, location: &str) -> Option<String> {
        let scheme_end = url.find("://")?;
        let next = if location.starts_with("//") {
            format!("{}:{location}", &url[..scheme_end])
        } else if location.starts_with('/') {
            let host_start = scheme_end + 3;
            let host_end = url[host_start..].find('/').map_or(url.len(), |end| host_start + end);
            format!("{}{location}", &url[..host_end])
        } else {
            location.to_string()
        };
        let is_https = next.starts_with("https://");
        (is_https || next.starts_with("http://") && !url.starts_with("https://")).then_some(next)
    }

    /// Returns whether a URL has the scheme, host and port of the endpoint.
    fn is_endpoint(&self, url: &str) -> bool {
        let origin = |url: &str| {
            let url: Uri = url.parse().ok()?;
            let default_port = if url.scheme_str() == Some("https") { 443 } else { 80 };
            let port = url.port_u16().unwrap_or(default_port);
            Some((url.scheme_str()?.to_string(), url.host()?.to_lowercase(), port))
        };
        let endpoint = origin(&self.config.endpoint);
        endpoint.is_some() && origin(url) == endpoint
    }
}

fn range_header(range: Range<u64>) -> String {
    format!("bytes={}-{}", range.start, range.end.saturating_sub(1))
}

/// Disables the proxy for loopback URLs. A proxy on another machine would connect to its own loopback address.
pub(super) fn bypass_proxy_if_local(request: RequestBuilder<WithoutBody>, url: &str) -> RequestBuilder<WithoutBody> {
    if is_loopback(url) { request.config().proxy(None).build() } else { request }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> HubConfig {
        let config = HubConfig::from_vars(|name| match name {
            "HOME" => Some("/nonexistent".into()),
            "HF_ENDPOINT" => Some("https://hub.example/sub".into()),
            _ => None,
        });
        config.unwrap()
    }

    #[test]
    fn redirects_stay_on_https() {
        let config = config();
        let remote = Remote::new(&config, "a/b", "main", &());
        let from = "https://hub.example/sub/a/b/resolve/x?y";
        let to = |location| remote.resolve(from, location);
        assert_eq!(to("/c?d").as_deref(), Some("https://hub.example/c?d"));
        assert_eq!(to("//cdn.example/c").as_deref(), Some("https://cdn.example/c"));
        assert_eq!(to("https://cdn.example/c").as_deref(), Some("https://cdn.example/c"));
        assert_eq!(to("http://hub.example/c"), None, "a redirect from https to http was accepted");
        assert_eq!(remote.resolve("http://a/b", "http://c/d").as_deref(), Some("http://c/d"));
        assert_eq!((to("ftp://cdn.example/c"), to("c"), to("")), (None, None, None));
    }

    #[test]
    fn endpoint_is_compared_by_scheme_host_and_port() {
        let config = config();
        let remote = Remote::new(&config, "a/b", "main", &());
        for own in ["https://hub.example/c", "https://HUB.example:443/", "https://x@hub.example/c"] {
            assert!(remote.is_endpoint(own), "{own}");
        }
        for other in [
            "http://hub.example/c",
            "https://hub.example:8443/",
            "https://hub.example.evil/",
            "https://hub.example@evil.example/",
            "https://cdn.hub.example/",
            "nonsense",
        ] {
            assert!(!remote.is_endpoint(other), "{other}");
        }
    }
}
