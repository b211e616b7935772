//! Requests to a hub, and what its refusals mean.
//!
//! ureq alone, without the hf-hub crate: hf-hub 0.5 repeats the token to the host a download is redirected to, joins
//! the server's etag and commit to paths unchecked, appends when a server ignores its Range, and hides the
//! `x-error-code` header that tells a gated repository from a missing one.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Deserialize;
use ureq::http::{Response, StatusCode, header};
use ureq::typestate::WithoutBody;
use ureq::{Agent, Body, RequestBuilder};

use super::retry::{Retry, is_passing, retry_after};
use super::select::RemoteFile;
use super::{Limits, Progress, Settings, hash, names};
use crate::error::Error;
use crate::snapshot::is_safe_path;

/// A repository's file list with tens of thousands of entries stays below this.
const MAX_LISTING_BYTES: u64 = 64 << 20;

/// A petabyte: no file has more, and sums of what is told cannot overflow.
const MAX_FILE_BYTES: u64 = 1 << 50;

/// One repository on a hub.
pub(super) struct Remote<'a> {
    agent: Agent,
    settings: &'a Settings,
    repo: &'a str,
    revision: &'a str,
    /// Hears what is asked again.
    progress: &'a dyn Progress,
}

/// What a request is for, which decides how long it may take.
#[derive(Clone, Copy)]
enum Purpose {
    /// Something short: the answer as a whole has a limit.
    Question,
    /// Something of any length: only silence has one.
    Contents,
}

/// From the hub to a storage host is one.
const MAX_REDIRECTS: usize = 5;

fn agent(limits: &Limits) -> Agent {
    Agent::config_builder()
        .user_agent(concat!("inferno/", env!("CARGO_PKG_VERSION")))
        // Lengths and ranges must count the file's own bytes.
        .accept_encoding("identity")
        // A refusal is read, not only counted.
        .http_status_as_error(false)
        // Large files are redirected to another host, which must not see the token: `follow` sees to it.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .max_idle_connections_per_host(limits.connections)
        .timeout_connect(Some(limits.connect))
        .timeout_recv_response(Some(limits.answer))
        .timeout_per_read(Some(limits.stall))
        .build()
        .into()
}

/// What a hub that answers says of the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    WithoutToken,
    TokenAccepted,
    TokenRefused,
    /// Mirrors often know no tokens.
    TokenUnknown,
}

/// One short question to the endpoint, and to no other host.
pub(super) fn reach(settings: &Settings) -> Result<Reached> {
    let unreachable = |cause: String| Error::Network { endpoint: settings.shown_endpoint(), cause, passing: true };
    let path = if settings.token.is_some() { "/api/whoami-v2" } else { "/api/models?limit=1" };
    let (connect, answer) = (Duration::from_secs(5), Duration::from_secs(10));
    let limits = Limits { connect, answer, stall: answer, ..settings.limits.clone() };
    let url = format!("{}{path}", settings.endpoint);
    let mut request = directly_if_near(agent(&limits).get(&url), &url);
    if let Some(token) = &settings.token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let response = request.call().map_err(|error| unreachable(error.to_string()))?;
    match (response.status(), settings.token.is_some()) {
        (status, _) if status.is_server_error() => Err(unreachable(format!("it answered HTTP {status}")).into()),
        (_, false) => Ok(Reached::WithoutToken),
        (StatusCode::UNAUTHORIZED, true) => Ok(Reached::TokenRefused),
        (status, true) if status.is_success() => Ok(Reached::TokenAccepted),
        _ => Ok(Reached::TokenUnknown),
    }
}

/// What a revision consists of.
pub(super) struct Listing {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

impl<'a> Remote<'a> {
    pub fn new(settings: &'a Settings, repo: &'a str, revision: &'a str, progress: &'a dyn Progress) -> Self {
        Self { agent: agent(&settings.limits), settings, repo, revision, progress }
    }

    pub fn repo(&self) -> &str {
        self.repo
    }

    pub fn limits(&self) -> &Limits {
        &self.settings.limits
    }

    /// The commit that the revision stands for, and its files. Refuses names that could lead outside the cache.
    pub fn listing(&self) -> Result<Listing> {
        let revision = names::url_segment(self.revision);
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.settings.endpoint, self.repo);
        let mut response = self.patiently(self.repo, || {
            let mut response = self.follow(&url, None, Purpose::Question)?.response;
            // Read here, so that a body that breaks off is asked for again.
            if response.status().is_success() {
                let body = response.body_mut().with_config().limit(MAX_LISTING_BYTES).read_to_vec();
                *response.body_mut() = Body::builder().data(body.map_err(|error| self.unreachable(error.to_string()))?);
            }
            Ok(response)
        })?;
        if !response.status().is_success() {
            return Err(self.refusal(response, None));
        }
        let body = response.body_mut().with_config().limit(MAX_LISTING_BYTES).read_to_vec()?;
        let info: Info = serde_json::from_slice(&body).map_err(|error| {
            self.hopeless(format!(
                "its answer is not that of a model hub (a login page, or a wrong HF_ENDPOINT?): {error}"
            ))
        })?;
        let listing = info.check(self.repo)?;
        // Whoever names a commit wants that one.
        if names::is_commit(self.revision) && !listing.commit.eq_ignore_ascii_case(self.revision) {
            let what = format!(
                "the hub gives {} for the commit {} of '{}'; refused",
                listing.commit, self.revision, self.repo
            );
            return Err(Error::Verification { what, hint: "set HF_ENDPOINT to another hub".into() }.into());
        }
        Ok(listing)
    }

    /// Asks for the size and etag of one file, for hubs whose listing does not tell.
    pub fn head(&self, commit: &str, name: &str) -> Result<RemoteFile> {
        let mut url = self.file_url(commit, name);
        for _ in 0..MAX_REDIRECTS {
            // The first answer to name the file's hash counts, not that of the storage behind it.
            let ask = || self.call(self.prepared(self.agent.head(&url), &url, Purpose::Question, true));
            let response = self.patiently(name, ask)?;
            let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            let linked = text("x-linked-etag");
            if response.status().is_redirection() && linked.is_none() {
                match text("location").and_then(|to| self.resolve(&url, to)).filter(|to| self.is_endpoint(to)) {
                    Some(next) => url = next,
                    None => bail!("the hub sends {name} to another host without saying what it is"),
                }
                continue;
            }
            if !response.status().is_success() && !response.status().is_redirection() {
                return Err(self.refusal(response, Some(name)));
            }
            let etag = linked.or(text("etag")).unwrap_or_default();
            let etag = hash::bare(etag);
            // Of a redirect, content-length would be the length of its own empty body.
            let length = if response.status().is_redirection() { None } else { text("content-length") };
            let bytes = text("x-linked-size").or(length).and_then(|bytes| bytes.parse().ok());
            let bytes = bytes.filter(|bytes| *bytes <= MAX_FILE_BYTES);
            let (true, Some(bytes)) = (names::is_etag(etag), bytes) else {
                bail!("the hub does not say how long {name} is or what it is (etag {etag:?})");
            };
            return Ok(RemoteFile { name: name.to_string(), bytes: Some(bytes), etag: Some(etag.to_string()) });
        }
        Err(self.hopeless(format!("it redirects {name} more than {MAX_REDIRECTS} times")))
    }

    /// Starts to fetch one file, or these bytes of it; the status says whether the server went along.
    pub fn get(&self, commit: &str, name: &str, range: Option<Range<u64>>) -> Result<Answer> {
        let range = range.map(|range| format!("bytes={}-{}", range.start, range.end.saturating_sub(1)));
        self.follow(&self.file_url(commit, name), range.as_deref(), Purpose::Contents)
    }

    /// The same, asking again where that may help. A server that does no ranges sends all of it (status 200): who reads
    /// on takes no more of the body than was asked for.
    pub fn get_part(&self, commit: &str, name: &str, first: u64, end: u64) -> Result<Response<Body>> {
        self.patiently(name, || Ok(self.get(commit, name, Some(first..end))?.response))
    }

    /// Asks about `what` again, a few times, where there was no answer or one that may pass.
    fn patiently(&self, what: &str, ask: impl Fn() -> Result<Response<Body>>) -> Result<Response<Body>> {
        let limits = self.limits();
        let mut retry = Retry::new(limits, limits.question_tries);
        loop {
            let result = ask();
            let (cause, asked_for) = match &result {
                Ok(response) if is_passing(response.status()) => {
                    (format!("HTTP {}", response.status()), retry_after(response.headers()))
                }
                Err(error) => match error.downcast_ref() {
                    Some(Error::Network { cause, passing: true, .. }) => (cause.clone(), None),
                    _ => return result,
                },
                _ => return result,
            };
            let Some(wait) = retry.after_failure(asked_for) else { return result };
            self.retrying(what, &cause, wait);
            std::thread::sleep(wait);
        }
    }

    /// Tells that `what` is asked for again after `wait`.
    pub fn retrying(&self, what: &str, cause: &str, wait: Duration) {
        tracing::info!(what, cause, wait_ms = wait.as_millis() as u64, "asking again");
        self.progress.retrying(what, cause, wait);
    }

    /// A GET request, wherever it is redirected to. The token goes to the endpoint alone: no other host gets it, nor
    /// another port, nor a connection that is less secret.
    fn follow(&self, url: &str, range: Option<&str>, purpose: Purpose) -> Result<Answer> {
        let mut url = url.to_string();
        let mut elsewhere = false;
        for _ in 0..=MAX_REDIRECTS {
            // What another host sends back here has its own reasons: no token for that, either.
            elsewhere |= !self.is_endpoint(&url);
            let mut request = self.prepared(self.agent.get(&url), &url, purpose, !elsewhere);
            if let Some(range) = range {
                request = request.header(header::RANGE, range);
            }
            let response = self.call(request)?;
            let location = response.headers().get(header::LOCATION).and_then(|to| to.to_str().ok());
            match location.filter(|_| response.status().is_redirection()) {
                None => return Ok(Answer { response, elsewhere }),
                Some(to) => match self.resolve(&url, to) {
                    Some(next) => url = next,
                    None => {
                        // No more of it than that: what comes after may be a key.
                        let to = to.split(['?', '#']).next().unwrap_or_default();
                        return Err(self.hopeless(format!("it redirects to {to:?}, which is no address to follow")));
                    }
                },
            }
        }
        Err(self.hopeless(format!("it redirects more than {MAX_REDIRECTS} times")))
    }

    /// The error for an answer that is no success; of `file`, or of the repository as a whole.
    pub fn refusal(&self, mut response: Response<Body>, file: Option<&str>) -> anyhow::Error {
        let status = response.status();
        let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let code = text("x-error-code").to_string();
        let (repo, endpoint) = (self.repo.to_string(), self.settings.shown_endpoint());
        let gated = Error::Gated { repo: repo.clone(), endpoint: endpoint.clone() };
        let no_repository = Error::RepositoryNotFound { repo: repo.clone(), endpoint: endpoint.clone() };
        let no_revision = Error::RevisionNotFound { repo: repo.clone(), revision: self.revision.to_string() };
        match (status, code.as_str()) {
            (_, "GatedRepo") => gated.into(),
            (_, "RepoNotFound") => no_repository.into(),
            (_, "RevisionNotFound") => no_revision.into(),
            // The repository was just listed, so its files are what is kept back.
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) if file.is_some() => gated.into(),
            (StatusCode::UNAUTHORIZED, _) if self.settings.token.is_some() => {
                anyhow::Error::new(gated).context("the hub does not accept this token: it is wrong or has expired")
            }
            // The hub does not tell a stranger whether a private repository exists.
            (StatusCode::UNAUTHORIZED, _) => no_repository.into(),
            (StatusCode::FORBIDDEN, _) => gated.into(),
            (StatusCode::NOT_FOUND, _) => match file {
                Some(file) => anyhow::anyhow!("the hub lists {file} in '{repo}' but does not have it"),
                // Mirrors without error codes say it in the body.
                None => match response.body_mut().with_config().limit(1 << 16).read_to_string() {
                    Ok(body) if body.to_lowercase().contains("invalid rev") => no_revision.into(),
                    _ => no_repository.into(),
                },
            },
            (StatusCode::TOO_MANY_REQUESTS, _) => {
                let wait = match text("retry-after") {
                    "" => "later".to_string(),
                    seconds => format!("in {seconds} s"),
                };
                self.unreachable(format!("it has had too many requests (HTTP 429); try again {wait}"))
            }
            _ => self.unreachable(format!("it answered HTTP {status}")),
        }
    }

    /// The error for what may go better the next time.
    pub fn unreachable(&self, cause: String) -> anyhow::Error {
        Error::Network { endpoint: self.settings.shown_endpoint(), cause, passing: true }.into()
    }

    /// The error for what will be the same the next time.
    fn hopeless(&self, cause: String) -> anyhow::Error {
        Error::Network { endpoint: self.settings.shown_endpoint(), cause, passing: false }.into()
    }

    fn file_url(&self, commit: &str, name: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.settings.endpoint, self.repo, names::url_path(name))
    }

    /// A request to `url` with its limits, and `with_token` if it goes to the endpoint.
    fn prepared(
        &self,
        mut request: RequestBuilder<WithoutBody>,
        url: &str,
        purpose: Purpose,
        with_token: bool,
    ) -> RequestBuilder<WithoutBody> {
        if let Purpose::Question = purpose {
            let whole = self.limits().answer.saturating_mul(5);
            request = request.config().timeout_per_read(None).timeout_recv_body(Some(whole)).build();
        }
        request = directly_if_near(request, url);
        match &self.settings.token {
            Some(token) if with_token && self.is_endpoint(url) => {
                request.header(header::AUTHORIZATION, format!("Bearer {token}"))
            }
            _ => request,
        }
    }

    fn call(&self, request: RequestBuilder<WithoutBody>) -> Result<Response<Body>> {
        request.call().map_err(|error| self.unreachable(error.to_string()))
    }

    /// The address that a redirect from `url` leads to; none if it is not one, or would leave https.
    fn resolve(&self, url: &str, location: &str) -> Option<String> {
        let scheme = url.find("://")?;
        let next = if location.starts_with("//") {
            format!("{}:{location}", &url[..scheme])
        } else if location.starts_with('/') {
            let host = url[scheme + 3..].find('/').map_or(url.len(), |end| scheme + 3 + end);
            format!("{}{location}", &url[..host])
        } else {
            location.to_string()
        };
        let secret = next.starts_with("https://");
        (secret || next.starts_with("http://") && !url.starts_with("https://")).then_some(next)
    }

    /// Whether an address is on the endpoint's own host, with its scheme and port.
    fn is_endpoint(&self, url: &str) -> bool {
        let origin = |url: &str| {
            let url: ureq::http::Uri = url.parse().ok()?;
            let default = if url.scheme_str() == Some("https") { 443 } else { 80 };
            let port = url.port_u16().unwrap_or(default);
            Some((url.scheme_str()?.to_string(), url.host()?.to_lowercase(), port))
        };
        let endpoint = origin(&self.settings.endpoint);
        endpoint.is_some() && origin(url) == endpoint
    }
}

/// What a GET request came to.
pub(super) struct Answer {
    pub response: Response<Body>,
    /// Another host than the endpoint sent it.
    pub elsewhere: bool,
}

/// The hub's answer about a model, as far as it matters here.
#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Info {
    fn check(self, repo: &str) -> Result<Listing> {
        if !names::is_commit(&self.sha) {
            bail!("the hub gives {:?} as the commit of '{repo}', which is none; refused", self.sha);
        }
        let mut files = Vec::with_capacity(self.siblings.len());
        for sibling in self.siblings {
            if !is_safe_path(&sibling.rfilename) {
                bail!("the hub lists a file {:?} in '{repo}', which is outside it; refused", sibling.rfilename);
            }
            // Of a large file the blob id is that of a pointer to it, and says nothing about its contents.
            let (etag, bytes) = match sibling.lfs {
                Some(large) => (large.sha256, large.size.or(sibling.size)),
                None => (sibling.blob_id, sibling.size),
            };
            if bytes.is_some_and(|bytes| bytes > MAX_FILE_BYTES) {
                bail!("the hub says that {} has {bytes:?} bytes, which cannot be; refused", sibling.rfilename);
            }
            if let Some(etag) = &etag
                && !names::is_etag(etag)
            {
                bail!("the hub gives {etag:?} as the hash of {}, which is none; refused", sibling.rfilename);
            }
            files.push(RemoteFile { name: sibling.rfilename, bytes, etag });
        }
        let folders: BTreeSet<&str> =
            files.iter().flat_map(|file| file.name.match_indices('/').map(|(end, _)| &file.name[..end])).collect();
        if let Some(file) = files.iter().find(|file| folders.contains(file.name.as_str())) {
            bail!("the hub lists {:?} in '{repo}' as a file and as a folder; refused", file.name);
        }
        Ok(Listing { commit: self.sha, files })
    }
}

/// Past any proxy where the address is on this machine: one for the world outside cannot help.
fn directly_if_near(request: RequestBuilder<WithoutBody>, url: &str) -> RequestBuilder<WithoutBody> {
    let host = url.parse::<ureq::http::Uri>().ok().and_then(|url| url.host().map(str::to_lowercase));
    match host.as_deref() {
        Some("127.0.0.1" | "localhost" | "[::1]") => request.config().proxy(None).build(),
        _ => request,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_redirects_lead() {
        let settings = Settings::from_vars(|name| match name {
            "HOME" => Some("/nonexistent".into()),
            "HF_ENDPOINT" => Some("https://hub.example/sub".into()),
            _ => None,
        });
        let settings = settings.unwrap();
        let remote = Remote::new(&settings, "a/b", "main", &());
        let from = "https://hub.example/sub/a/b/resolve/x?y";
        let to = |location| remote.resolve(from, location);
        assert_eq!(to("/c?d").as_deref(), Some("https://hub.example/c?d"));
        assert_eq!(to("//cdn.example/c").as_deref(), Some("https://cdn.example/c"));
        assert_eq!(to("https://cdn.example/c").as_deref(), Some("https://cdn.example/c"));
        assert_eq!(to("http://hub.example/c"), None, "not out of https");
        assert_eq!(remote.resolve("http://a/b", "http://c/d").as_deref(), Some("http://c/d"));
        assert_eq!((to("ftp://cdn.example/c"), to("c"), to("")), (None, None, None));

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
