//! Converts unsuccessful responses of a hub to errors.

use ureq::Body;
use ureq::http::{Response, StatusCode};

use super::Remote;
use super::retry::retry_after;
use crate::error::Error;
use crate::text::quote;

/// The maximum number of bytes to read from the body of an error response.
const MAX_ERROR_BYTES: u64 = 64 << 10;

impl Remote<'_> {
    /// Returns the error for an unsuccessful response. `file` is the requested file, or `None` for a listing.
    pub fn refusal(&self, mut response: Response<Body>, file: Option<&str>) -> anyhow::Error {
        let status = response.status();
        let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let code = text("x-error-code").to_string();
        let (repo, endpoint) = (self.repo.to_string(), self.config.endpoint_for_display());
        let gated = Error::Gated { repo: repo.clone(), endpoint: endpoint.clone() };
        let no_repository = Error::RepositoryNotFound { repo: repo.clone(), endpoint: endpoint.clone() };
        let no_revision = Error::RevisionNotFound { repo: repo.clone(), revision: self.revision.to_string() };
        match (status, code.as_str()) {
            (_, "GatedRepo") => gated.into(),
            (_, "RepoNotFound") => no_repository.into(),
            (_, "RevisionNotFound") => no_revision.into(),
            // The list of files was readable, so the repository exists and only access to its files is restricted.
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) if file.is_some() => gated.into(),
            (StatusCode::UNAUTHORIZED, _) if self.config.sent_token().is_some() => {
                anyhow::Error::new(gated).context("the hub rejects the token: it is invalid or has expired")
            }
            // Without a token, the hub does not reveal whether a private repository exists.
            (StatusCode::UNAUTHORIZED, _) => no_repository.into(),
            (StatusCode::FORBIDDEN, _) => gated.into(),
            (StatusCode::NOT_FOUND, _) => match file {
                Some(file) => anyhow::anyhow!("the hub lists {} in '{repo}' but does not have it", quote(file)),
                // Some mirrors send no `x-error-code`, and state the cause in the body.
                None => match self.read_body(&mut response.body_mut().as_reader(), MAX_ERROR_BYTES) {
                    Ok(body) if String::from_utf8_lossy(&body).to_lowercase().contains("invalid rev") => {
                        no_revision.into()
                    }
                    _ => no_repository.into(),
                },
            },
            (StatusCode::TOO_MANY_REQUESTS, _) => {
                let wait = match retry_after(response.headers()) {
                    None => "later".to_string(),
                    Some(wait) => format!("in {} s", wait.as_secs()),
                };
                self.temporary_error(format!("too many requests (HTTP 429); try again {wait}"))
            }
            _ => self.temporary_error(format!("HTTP {status}")),
        }
    }
}
