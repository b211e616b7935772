//! Parses the URL of a server, and returns the URLs of its routes.

use std::fmt;
use std::net::IpAddr;

use ureq::http::Uri;

/// The URL of a server's API, such as `http://127.0.0.1:8000/v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerUrl(String);

impl ServerUrl {
    /// Parses an HTTP or HTTPS URL. Adds `/v1` if the URL has no path.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim().trim_end_matches('/');
        let problem = |expected: &str| Err(format!("cannot use the URL {}: {expected}", crate::text::quote(text)));
        let Ok(uri) = text.parse::<Uri>() else { return problem("expected a URL such as http://127.0.0.1:8000") };
        let Some(authority) = uri.authority().filter(|_| matches!(uri.scheme_str(), Some("http" | "https"))) else {
            return problem("a URL must start with http:// or https://");
        };
        if authority.as_str().contains('@') {
            return problem("a URL must not contain a user name or a password; use --api-key");
        }
        if uri.query().is_some() {
            return problem("a URL must not contain a query");
        }
        // `Uri` drops a fragment, so it would hide the route that is appended to the URL.
        if text.contains('#') {
            return problem("a URL must not contain a fragment");
        }
        let path = if matches!(uri.path(), "" | "/") { "/v1" } else { "" };
        Ok(Self(format!("{text}{path}")))
    }

    /// Returns the URL of a route of OpenAI's API, such as `/models`.
    pub fn route(&self, route: &str) -> String {
        format!("{}{route}", self.0)
    }

    /// Returns whether the connection uses TLS.
    pub fn is_encrypted(&self) -> bool {
        self.0.parse::<Uri>().is_ok_and(|url| url.scheme_str() == Some("https"))
    }

    /// Returns whether the host is `localhost` or a loopback address.
    pub fn is_local(&self) -> bool {
        let host = self.0.parse::<Uri>().ok().and_then(|url| url.host().map(str::to_lowercase)).unwrap_or_default();
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host).parse::<IpAddr>();
        host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }

    /// Returns the URL of a route that is not under `/v1`, such as `/tokenize`.
    pub fn root_route(&self, route: &str) -> String {
        format!("{}{route}", self.0.strip_suffix("/v1").unwrap_or(&self.0))
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_without_a_path_get_the_version() {
        for (text, api, root) in [
            ("http://host:8000", "http://host:8000/v1/models", "http://host:8000/tokenize"),
            ("http://host:8000/", "http://host:8000/v1/models", "http://host:8000/tokenize"),
            (" http://host:8000/v1/ ", "http://host:8000/v1/models", "http://host:8000/tokenize"),
            ("https://host/openai/v1", "https://host/openai/v1/models", "https://host/openai/tokenize"),
            ("https://host/api", "https://host/api/models", "https://host/api/tokenize"),
            ("http://[::1]:80", "http://[::1]:80/v1/models", "http://[::1]:80/tokenize"),
        ] {
            let url = ServerUrl::parse(text).unwrap();
            assert_eq!((url.route("/models").as_str(), url.root_route("/tokenize").as_str()), (api, root), "{text}");
        }
        for (url, is_local) in [
            ("http://127.0.0.1:8000", true),
            ("http://[::1]:80", true),
            ("http://LOCALHOST/x", true),
            ("http://localhost.example", false),
            ("http://10.0.0.1", false),
        ] {
            assert_eq!(ServerUrl::parse(url).unwrap().is_local(), is_local, "{url}");
        }
        for wrong in [
            "",
            "host",
            "host:8000",
            "ftp://host",
            "http://",
            "http://a:b@host",
            "http://host/?key=1",
            "http://host/#x",
            "a b",
        ] {
            assert!(ServerUrl::parse(wrong).is_err(), "{wrong}");
        }
    }
}
