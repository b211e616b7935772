//! Checks whether a hub responds, and whether it accepts the access token.

use std::time::Duration;

use anyhow::Result;
use ureq::http::{StatusCode, header};

use super::{agent, bypass_proxy_if_local};
use crate::error::Error;
use crate::hub::config::HubConfig;
use crate::hub::limits::Limits;
use crate::text::library_error;

/// The time limit for connecting in [`check_endpoint`].
const CHECK_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time limit for receiving the response headers in [`check_endpoint`].
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether a hub accepts the access token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenStatus {
    /// No access token is set.
    NoToken,
    Accepted,
    Refused,
    /// The endpoint's response does not show whether it accepts the token. Some mirrors cannot check tokens.
    NotSupported,
    /// An access token is set but not sent, because the connection to the endpoint is not encrypted.
    NotSent,
}

/// Asks the endpoint whether it accepts the access token. If no token is sent, only checks that the endpoint responds.
/// Does not follow redirects.
///
/// Fails if the request fails or exceeds a time limit, or if the status is a server error.
pub(in crate::hub) fn check_endpoint(config: &HubConfig) -> Result<TokenStatus> {
    let unreachable =
        |cause: String| Error::Network { endpoint: config.endpoint_for_display(), cause, is_temporary: true };
    let token = config.sent_token();
    let path = if token.is_some() { "/api/whoami-v2" } else { "/api/models?limit=1" };
    let limits = Limits {
        connect_timeout: CHECK_CONNECT_TIMEOUT,
        response_timeout: CHECK_TIMEOUT,
        stall_timeout: CHECK_TIMEOUT,
        ..config.limits.clone()
    };
    let url = format!("{}{path}", config.endpoint);
    let mut request = bypass_proxy_if_local(agent(&limits).get(&url), &url);
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let response = request.call().map_err(|error| unreachable(library_error(&error)))?;
    match (response.status(), token.is_some()) {
        (status, _) if status.is_server_error() => Err(unreachable(format!("HTTP {status}")).into()),
        (_, false) if config.token.is_some() => Ok(TokenStatus::NotSent),
        (_, false) => Ok(TokenStatus::NoToken),
        (StatusCode::UNAUTHORIZED, true) => Ok(TokenStatus::Refused),
        (status, true) if status.is_success() => Ok(TokenStatus::Accepted),
        _ => Ok(TokenStatus::NotSupported),
    }
}
