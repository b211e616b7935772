//! Requests to a hub, and what its refusals mean.
//!
//! ureq alone, without the hf-hub crate: hf-hub 0.5 repeats the token to the host a download is redirected to, joins
//! the server's etag and commit to paths unchecked, appends when a server ignores its Range, and hides the
//! `x-error-code` header that tells a gated repository from a missing one.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use ureq::http::{Response, StatusCode, header};
use ureq::typestate::WithoutBody;
use ureq::{Agent, Body, RequestBuilder};

use super::select::RemoteFile;
use super::{Settings, names};
use crate::Error;

/// A repository's file list with tens of thousands of entries stays below this.
const MAX_LISTING_BYTES: u64 = 64 << 20;

/// One repository on a hub.
pub(super) struct Remote<'a> {
    agent: Agent,
    settings: &'a Settings,
    repo: &'a str,
    revision: &'a str,
}

/// How long a server is waited for.
struct Patience {
    connect_s: u64,
    answer_s: u64,
}

fn agent(settings: &Settings, patience: Patience) -> Agent {
    let answer = Some(Duration::from_secs(patience.answer_s));
    let mut config = Agent::config_builder()
        .user_agent(concat!("inferno/", env!("CARGO_PKG_VERSION")))
        // Lengths and ranges must count the file's own bytes.
        .accept_encoding("identity")
        // A refusal is read, not only counted.
        .http_status_as_error(false)
        // Large files are redirected to another host, which must not see the token.
        .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
        .timeout_connect(Some(Duration::from_secs(patience.connect_s)))
        .timeout_recv_response(answer)
        .timeout_per_read(answer);
    if is_loopback(&settings.endpoint) {
        config = config.proxy(None);
    }
    config.build().into()
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
    let unreachable = |cause: String| Error::Network { endpoint: settings.endpoint.clone(), cause };
    let path = if settings.token.is_some() { "/api/whoami-v2" } else { "/api/models?limit=1" };
    let mut request = agent(settings, Patience { connect_s: 5, answer_s: 10 })
        .get(format!("{}{path}", settings.endpoint))
        .config()
        .max_redirects(0)
        .max_redirects_will_error(false)
        .build();
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
    pub fn new(settings: &'a Settings, repo: &'a str, revision: &'a str) -> Self {
        let patience = Patience { connect_s: 20, answer_s: 60 };
        Self { agent: agent(settings, patience), settings, repo, revision }
    }

    /// The commit that the revision stands for, and its files. Refuses names that could lead outside the cache.
    pub fn listing(&self) -> Result<Listing> {
        let revision = names::url_segment(self.revision);
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.settings.endpoint, self.repo);
        let mut response = self.call(self.authorized(self.agent.get(&url)))?;
        if !response.status().is_success() {
            return Err(self.refusal(response, None));
        }
        let body = response.body_mut().with_config().limit(MAX_LISTING_BYTES).read_to_vec();
        let body = body.map_err(|error| self.unreachable(error.to_string()))?;
        let info: Info = serde_json::from_slice(&body).with_context(|| {
            format!(
                "{} did not answer as a model hub does (a login page, or a wrong HF_ENDPOINT?)",
                self.settings.endpoint
            )
        })?;
        info.check(self.repo)
    }

    /// Asks for the size and etag of one file, for hubs whose listing does not tell.
    pub fn head(&self, commit: &str, name: &str) -> Result<RemoteFile> {
        const MAX_REDIRECTS: usize = 5;
        let mut url = self.file_url(commit, name);
        for _ in 0..MAX_REDIRECTS {
            // Redirects by hand: the first answer to name the file's hash counts, not that of the storage behind it.
            let request = self.agent.head(&url).config().max_redirects(0).max_redirects_will_error(false).build();
            let response = self.call(self.authorized(request))?;
            let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            let linked = text("x-linked-etag");
            if response.status().is_redirection() && linked.is_none() {
                match text("location").and_then(|to| self.same_host(to)) {
                    Some(next) => url = next,
                    None => bail!("the hub sends {name} to another host without saying what it is"),
                }
                continue;
            }
            if !response.status().is_success() && !response.status().is_redirection() {
                return Err(self.refusal(response, Some(name)));
            }
            let etag = linked.or(text("etag")).unwrap_or_default();
            let etag = etag.trim_start_matches("W/").trim_matches('"');
            // Of a redirect, content-length would be the length of its own empty body.
            let length = if response.status().is_redirection() { None } else { text("content-length") };
            let bytes = text("x-linked-size").or(length).and_then(|bytes| bytes.parse().ok());
            let (true, Some(bytes)) = (names::is_etag(etag), bytes) else {
                bail!("the hub does not say how long {name} is or what it is (etag {etag:?})");
            };
            return Ok(RemoteFile { name: name.to_string(), bytes: Some(bytes), etag: Some(etag.to_string()) });
        }
        Err(self.unreachable(format!("more than {MAX_REDIRECTS} redirects for {name}")))
    }

    /// Starts to fetch one file from byte `start` on; the status says whether the server went along.
    pub fn get(&self, commit: &str, name: &str, start: u64) -> Result<Response<Body>> {
        let mut request = self.authorized(self.agent.get(self.file_url(commit, name)));
        if start > 0 {
            request = request.header(header::RANGE, format!("bytes={start}-"));
        }
        self.call(request)
    }

    /// Starts to fetch the bytes `first..end` of one file. A server that does no ranges sends all of it (status 200): who
    /// reads on takes no more of the body than was asked for.
    pub fn get_part(&self, commit: &str, name: &str, first: u64, end: u64) -> Result<Response<Body>> {
        let request = self.authorized(self.agent.get(self.file_url(commit, name)));
        self.call(request.header(header::RANGE, format!("bytes={first}-{}", end.saturating_sub(1))))
    }

    /// The error for an answer that is no success; of `file`, or of the repository as a whole.
    pub fn refusal(&self, mut response: Response<Body>, file: Option<&str>) -> anyhow::Error {
        let status = response.status();
        let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let (code, message) = (text("x-error-code").to_string(), text("x-error-message").to_string());
        let (repo, endpoint) = (self.repo.to_string(), self.settings.endpoint.clone());
        let gated = Error::Gated { repo: repo.clone(), endpoint: endpoint.clone() };
        let no_repository = Error::RepositoryNotFound { repo: repo.clone(), endpoint: endpoint.clone() };
        let no_revision = Error::RevisionNotFound { repo: repo.clone(), revision: self.revision.to_string() };
        match (status, code.as_str()) {
            (_, "GatedRepo") => gated.into(),
            (_, "RepoNotFound") => no_repository.into(),
            (_, "RevisionNotFound") => no_revision.into(),
            // The repository was just listed, so its files are what is kept back.
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) if file.is_some() => gated.into(),
            (StatusCode::UNAUTHORIZED, _) if self.settings.token.is_some() && message.contains("nvalid") => {
                anyhow::Error::new(gated).context("the hub does not accept this token: it is wrong or has expired")
            }
            // The hub does not tell a stranger whether a private repository exists.
            (StatusCode::UNAUTHORIZED, _) => no_repository.into(),
            (StatusCode::FORBIDDEN, _) => gated.into(),
            (StatusCode::NOT_FOUND, _) => match file {
                Some(file) => anyhow::anyhow!("the hub lists {file} in '{repo}' but does not have it"),
                // Mirrors without error codes say it in the body.
                None => match response.body_mut().with_config().limit(1 << 16).read_to_string() {
                    Ok(body) if body.to_lowercase().contains("rev") => no_revision.into(),
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

    pub fn unreachable(&self, cause: String) -> anyhow::Error {
        Error::Network { endpoint: self.settings.endpoint.clone(), cause }.into()
    }

    fn file_url(&self, commit: &str, name: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.settings.endpoint, self.repo, names::url_path(name))
    }

    fn authorized(&self, request: RequestBuilder<WithoutBody>) -> RequestBuilder<WithoutBody> {
        match &self.settings.token {
            Some(token) => request.header(header::AUTHORIZATION, format!("Bearer {token}")),
            None => request,
        }
    }

    fn call(&self, request: RequestBuilder<WithoutBody>) -> Result<Response<Body>> {
        request.call().map_err(|error| self.unreachable(error.to_string()))
    }

    /// The address that a redirect leads to, if it is still on the endpoint's own host.
    fn same_host(&self, location: &str) -> Option<String> {
        let scheme = self.settings.endpoint.find("://")? + 3;
        let host = self.settings.endpoint[scheme..].find('/').map_or(self.settings.endpoint.len(), |end| scheme + end);
        let host = &self.settings.endpoint[..host];
        if location.starts_with('/') && !location.starts_with("//") {
            return Some(format!("{host}{location}"));
        }
        location.strip_prefix(host).is_some_and(|path| path.starts_with('/')).then(|| location.to_string())
    }
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
            if !names::is_safe_path(&sibling.rfilename) {
                bail!("the hub lists a file {:?} in '{repo}', which is outside it; refused", sibling.rfilename);
            }
            let large = sibling.lfs.unwrap_or(LargeFile { sha256: None, size: None });
            let etag = large.sha256.or(sibling.blob_id);
            if let Some(etag) = &etag
                && !names::is_etag(etag)
            {
                bail!("the hub gives {etag:?} as the hash of {}, which is none; refused", sibling.rfilename);
            }
            files.push(RemoteFile { name: sibling.rfilename, bytes: large.size.or(sibling.size), etag });
        }
        Ok(Listing { commit: self.sha, files })
    }
}

/// Whether the endpoint is on this machine, where a proxy for the world outside cannot help.
fn is_loopback(endpoint: &str) -> bool {
    let host = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    ["127.0.0.1", "localhost", "[::1]"]
        .iter()
        .any(|name| host.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '/'])))
}
