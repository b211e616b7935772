//! API keys, and protection against requests from web pages of other sites.

use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderValue};
use ring::digest::{Digest, SHA256, digest};

use super::error::ApiError;
use crate::server::options::ServerOptions;
use crate::server::page;
use crate::server::tenant::Tenant;

/// The routes that need no API key, in addition to the files of the chat page.
const OPEN_PATHS: [&str; 2] = ["/health", "/live"];

/// The header in which clients of Anthropic's API send the API key.
const API_KEY: &str = "x-api-key";

/// The rules that decide whether a request has access.
pub struct Access {
    /// The SHA-256 hashes of the API keys. Unlike the time to compare keys, the time to compare hashes reveals no key.
    keys: Vec<Digest>,
    /// The origins, in addition to local ones, whose web pages may send requests to a server without API keys.
    /// `*` allows every origin.
    origins: Vec<String>,
    /// Whether the server's own chat page has access under any host name.
    allows_any_host: bool,
}

impl Access {
    /// Creates the access rules. Without API keys, all clients have access, except web pages
    /// whose origin is neither local nor allowed. With `--no-auth`, the server's own chat page also has access.
    pub fn new(options: &ServerOptions) -> Self {
        let keys = options.api_keys.iter().map(|key| digest(&SHA256, key.as_bytes())).collect();
        Self { keys, origins: options.cors_origins.clone(), allows_any_host: options.no_auth }
    }

    /// Returns the tenant that a request belongs to. Fails if the request has no access.
    pub fn check(&self, path: &str, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        if OPEN_PATHS.contains(&path) || page::is_page(path) {
            return Ok(Tenant::default());
        }
        if self.keys.is_empty() {
            return self.check_origin(headers.get(ORIGIN), headers.get(HOST)).map(|()| Tenant::default());
        }
        let key = match (headers.get(AUTHORIZATION), headers.get(API_KEY)) {
            (Some(header), _) => {
                let key = header.to_str().ok().and_then(|header| header.split_once(' '));
                key.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim())
            }
            (None, Some(header)) => header.to_str().ok(),
            (None, None) => {
                return Err(ApiError::unauthorized("no API key: send one in the header 'Authorization: Bearer KEY'"));
            }
        };
        let hash = digest(&SHA256, key.unwrap_or_default().as_bytes());
        match self.keys.iter().position(|known| key.is_some() && known.as_ref() == hash.as_ref()) {
            Some(index) => Ok(Tenant::new(index)),
            None => Err(ApiError::unauthorized("wrong API key: send a valid key in 'Authorization: Bearer KEY'")),
        }
    }

    /// Rejects a request from a web page, which has the header `Origin`, unless the origin is local or allowed.
    /// With `allows_any_host`, also accepts the origin of the server's own chat page.
    /// Without this check, any web page that a user opens could send requests to a server without API keys.
    fn check_origin(&self, origin: Option<&HeaderValue>, target: Option<&HeaderValue>) -> Result<(), ApiError> {
        let Some(origin) = origin else { return Ok(()) };
        let origin = origin.to_str().unwrap_or_default();
        let is_allowed = self.origins.iter().any(|allowed| allowed == "*" || allowed == origin);
        let host = origin.split_once("://").map_or("", |(_, host)| host);
        let is_own = self.allows_any_host && target.is_some_and(|target| target == host);
        let host = match host.strip_prefix('[') {
            Some(ipv6) => ipv6.split(']').next().unwrap_or_default(),
            None => host.split(':').next().unwrap_or_default(),
        };
        let is_local = matches!(host, "localhost" | "127.0.0.1" | "::1");
        if is_allowed || is_local || is_own {
            Ok(())
        } else {
            Err(ApiError::forbidden("web pages of this origin have no access: allow the origin with --cors-origin"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(keys: &[&str], origins: &[&str], allows_any_host: bool) -> Access {
        let owned = |list: &[&str]| list.iter().map(|text| text.to_string()).collect();
        Access {
            keys: keys.iter().map(|key| digest(&SHA256, key.as_bytes())).collect(),
            origins: owned(origins),
            allows_any_host,
        }
    }

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(axum::http::HeaderName::from_static(name), value.parse().unwrap())])
    }

    #[test]
    fn only_the_right_key_has_access() {
        let access = access(&["one", "two"], &[], false);
        for (value, is_right) in
            [("Bearer one", true), ("bearer two", true), ("Bearer three", false), ("one", false), ("Bearer ", false)]
        {
            assert_eq!(access.check("/v1/models", &headers("authorization", value)).is_ok(), is_right, "{value}");
        }
        for (value, is_right) in [("two", true), ("three", false), ("Bearer one", false), ("", false)] {
            assert_eq!(access.check("/v1/messages", &headers("x-api-key", value)).is_ok(), is_right, "{value}");
        }
        // A wrong bearer key is rejected, even if the `x-api-key` header has a valid key.
        let mut both = headers("authorization", "Bearer three");
        both.insert(API_KEY, "one".parse().unwrap());
        assert!(access.check("/v1/models", &both).is_err());
        assert!(access.check("/v1/models", &HeaderMap::new()).is_err());
        assert!(access.check("/health", &HeaderMap::new()).is_ok());
    }

    #[test]
    fn foreign_web_pages_have_no_access_without_a_key() {
        let access = access(&[], &["https://app.example"], false);
        for (origin, is_allowed) in [
            ("http://localhost:3000", true),
            ("http://[::1]:80", true),
            ("https://app.example", true),
            ("https://evil.example", false),
            ("http://localhost.evil.example", false),
            ("null", false),
        ] {
            assert_eq!(access.check("/v1/models", &headers("origin", origin)).is_ok(), is_allowed, "{origin}");
        }
        assert!(access.check("/v1/models", &HeaderMap::new()).is_ok());
    }

    #[test]
    fn an_open_server_accepts_its_own_page() {
        let mut own = headers("origin", "http://gpu.example:8000");
        own.insert(HOST, "gpu.example:8000".parse().unwrap());
        let mut other = headers("origin", "http://evil.example");
        other.insert(HOST, "gpu.example:8000".parse().unwrap());
        let is_accepted =
            |allows_any_host, headers| access(&[], &[], allows_any_host).check("/v1/models", headers).is_ok();
        assert_eq!(
            [is_accepted(true, &own), is_accepted(true, &other), is_accepted(false, &own)],
            [true, false, false]
        );
    }
}
