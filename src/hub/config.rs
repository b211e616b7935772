//! [`HubConfig`]: the cache directories and the connection settings, read from environment variables.
//!
//! Except for INFERNO_CACHE, the names and the precedence of the variables follow "Environment variables" in the
//! `huggingface_hub` docs. The variables therefore mean the same to inferno as to Hugging Face's Python tools.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use hf_hub::Cache as HuggingFaceCache;
use ureq::http::Uri;

use super::limits::Limits;
use crate::error::Error;
use crate::files;

/// The cache directories and the connection settings for the hub.
#[derive(Clone)]
pub struct HubConfig {
    /// The directory of inferno's own cache, to which models are downloaded.
    pub cache: PathBuf,
    /// The directory of the shared Hugging Face cache, to which inferno never writes.
    pub shared_cache: PathBuf,
    /// The URL of the hub, without a trailing slash: `https://huggingface.co` or a mirror.
    pub endpoint: String,
    /// The access token. `None` if no token is set. inferno sends the token only over https or to this machine.
    pub token: Option<String>,
    /// Whether HF_HUB_OFFLINE forbids requests to the hub.
    pub offline: bool,
    pub limits: Limits,
}

impl HubConfig {
    /// Reads the configuration from the environment of this process.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| match std::env::var_os(name) {
            // If HOME is not set, the home directory comes from the user database of the system.
            None if name == "HOME" => std::env::home_dir().map(PathBuf::into_os_string),
            value => value,
        })
    }

    /// Reads the configuration. `var` returns the value of an environment variable. Empty variables count as unset.
    /// Fails if a value or the stored token is invalid, or if no variable determines the cache directories.
    pub fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let vars = Variables { var: &|name| var(name).filter(|value| !value.is_empty()) };
        let hf_home = vars.path("HF_HOME").map_or_else(|| vars.below_user_cache("huggingface"), Ok)?;
        let cache = vars.path("INFERNO_CACHE").map_or_else(|| vars.below_user_cache("inferno/models"), Ok)?;
        let shared_cache = vars
            .path("HF_HUB_CACHE")
            .or_else(|| vars.path("HUGGINGFACE_HUB_CACHE"))
            .unwrap_or_else(|| hf_home.join("hub"));
        let defaults = Limits::default();
        let limits = Limits {
            response_timeout: vars.seconds("HF_HUB_ETAG_TIMEOUT", defaults.response_timeout)?,
            stall_timeout: vars.seconds("HF_HUB_DOWNLOAD_TIMEOUT", defaults.stall_timeout)?,
            ..defaults
        };
        Ok(Self {
            cache,
            shared_cache,
            endpoint: endpoint(&vars)?,
            token: token(&vars, &hf_home)?,
            offline: vars.is_on("HF_HUB_OFFLINE"),
            limits,
        })
    }

    /// Returns the token to send to the endpoint, or `None` if no token is set.
    /// Also returns `None` if the token would cross a network unencrypted.
    pub(super) fn sent_token(&self) -> Option<&str> {
        let is_safe = self.endpoint.starts_with("https://") || is_loopback(&self.endpoint);
        self.token.as_deref().filter(|_| is_safe)
    }

    /// Returns a warning if a token is set but not sent to the endpoint, otherwise `None`.
    pub fn token_warning(&self) -> Option<String> {
        (self.token.is_some() && self.sent_token().is_none()).then(|| {
            format!(
                "the access token is not sent to {}: http does not encrypt it; set HF_ENDPOINT to an https:// URL",
                self.endpoint_for_display()
            )
        })
    }

    /// Returns the endpoint without its user name and password, for messages.
    pub fn endpoint_for_display(&self) -> String {
        match self.endpoint.split_once("://") {
            Some((scheme, rest)) => {
                let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
                format!("{scheme}://{}{path}", host.rsplit('@').next().unwrap_or(host))
            }
            None => self.endpoint.clone(),
        }
    }
}

/// Returns whether the host of a URL is `localhost` or a loopback address.
pub fn is_loopback(url: &str) -> bool {
    let Some(host) = url.parse::<Uri>().ok().and_then(|url| url.host().map(str::to_lowercase)) else { return false };
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// Reads environment variables as paths, numbers and switches.
struct Variables<'a> {
    var: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.var)(name).map(|value| value.to_string_lossy().trim().to_string())
    }

    fn is_on(&self, name: &str) -> bool {
        self.text(name).is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
    }

    fn home(&self) -> Option<PathBuf> {
        (self.var)("HOME").map(PathBuf::from)
    }

    /// Reads a path from an environment variable. Returns `None` if the variable is not set.
    ///
    /// Expands `~` at the start of the path, because shells do not expand `~` inside quotes,
    /// and systemd does not expand `~` in the variables of a service.
    fn path(&self, name: &str) -> Option<PathBuf> {
        let path = PathBuf::from((self.var)(name)?);
        match (path.strip_prefix("~"), self.home()) {
            (Ok(rest), Some(home)) => Some(home.join(rest)),
            _ => Some(path),
        }
    }

    fn below_user_cache(&self, path: &str) -> Result<PathBuf> {
        let user_cache = self.path("XDG_CACHE_HOME").or_else(|| self.home().map(|home| home.join(".cache")));
        user_cache.map(|cache| cache.join(path)).ok_or_else(|| {
            anyhow!(
                "cannot choose a directory for models: neither HOME nor XDG_CACHE_HOME is set\n  set INFERNO_CACHE and HF_HOME"
            )
        })
    }

    fn seconds(&self, name: &str, default: Duration) -> Result<Duration> {
        match self.text(name).map(|text| text.parse::<f64>()) {
            None => Ok(default),
            Some(Ok(seconds)) if (0.001..=1e6).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
            Some(_) => {
                Err(Error::usage(format!("cannot use {name}: it must be a number of seconds from 0.001 to 1000000")))
            }
        }
    }
}

fn endpoint(vars: &Variables) -> Result<String> {
    let endpoint = vars.text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
    let endpoint = endpoint.trim_end_matches('/').to_string();
    if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
        return Err(Error::usage(format!(
            "cannot use HF_ENDPOINT {endpoint:?}: it must start with https:// or http://"
        )));
    }
    Ok(endpoint)
}

/// Reads the token from HF_TOKEN, or from the file in which `hf auth login` stores it.
/// Returns `None` if there is no token, or if HF_HUB_DISABLE_IMPLICIT_TOKEN is on.
/// Fails if the token is not printable ASCII without spaces.
fn token(vars: &Variables, hf_home: &Path) -> Result<Option<String>> {
    if vars.is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return Ok(None);
    }
    let stored = || {
        let default = || HuggingFaceCache::new(hf_home.join("hub")).token_path();
        let path = vars.path("HF_TOKEN_PATH").unwrap_or_else(default);
        files::read_input_text(&path, files::MAX_SINGLE_VALUE_BYTES).ok().map(|token| token.trim().to_string())
    };
    let token = vars.text("HF_TOKEN").or_else(stored).filter(|token| !token.is_empty());
    if token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
        bail!(
            "cannot use the Hugging Face token: it contains spaces, control characters or non-ASCII characters\n  check HF_TOKEN or the token file"
        );
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn config(vars: &[(&str, &str)]) -> HubConfig {
        HubConfig::from_vars(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())).unwrap()
    }

    #[test]
    fn cache_directories_follow_the_environment() {
        let shared = |vars: &[(&str, &str)]| {
            let vars = [&[("HOME", "/nonexistent/h")], vars].concat();
            config(&vars).shared_cache.display().to_string()
        };
        assert_eq!(shared(&[]), "/nonexistent/h/.cache/huggingface/hub");
        assert_eq!(shared(&[("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(shared(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/hf")]), "/nonexistent/h/hf/hub");
        assert_eq!(shared(&[("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/old");
        assert_eq!(shared(&[("HF_HUB_CACHE", "/new"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/new");
        let own = |vars| config(vars).cache.display().to_string();
        assert_eq!(own(&[("HOME", "/nonexistent/h")]), "/nonexistent/h/.cache/inferno/models");
        assert_eq!(own(&[("HOME", "/nonexistent/h"), ("XDG_CACHE_HOME", "/x")]), "/x/inferno/models");
        assert_eq!(own(&[("HOME", "/nonexistent/h"), ("INFERNO_CACHE", "/models")]), "/models");
        assert!(HubConfig::from_vars(|_| None).is_err());
    }

    #[test]
    fn token_comes_from_the_variable_or_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "hf_other\n").unwrap();
        let base = [("HOME", home), ("HF_HOME", home)];
        let token = |vars: &[(&str, &str)]| config(&[&base, vars].concat()).token;
        assert_eq!(token(&[]).as_deref(), Some("hf_file"));
        assert_eq!(token(&[("HF_TOKEN_PATH", other.to_str().unwrap())]).as_deref(), Some("hf_other"));
        assert_eq!(token(&[("HF_TOKEN", "hf_env")]).as_deref(), Some("hf_env"));
        assert_eq!(token(&[("HF_TOKEN", "")]).as_deref(), Some("hf_file"));
        assert_eq!(token(&[("HF_TOKEN", "hf_env"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        let broken = HubConfig::from_vars(|name| match name {
            "HOME" => Some(home.into()),
            "HF_TOKEN" => Some("hf_a\nhf_b".into()),
            _ => None,
        });
        assert!(!format!("{:?}", broken.err().unwrap()).contains("hf_a"), "the error shows the token");
    }

    #[test]
    fn token_is_not_sent_over_a_network_without_encryption() {
        let config = |endpoint| config(&[("HOME", "/nonexistent/h"), ("HF_TOKEN", "hf_a"), ("HF_ENDPOINT", endpoint)]);
        for safe in [
            "https://hub.example",
            "http://localhost:8080/x",
            "http://LOCALHOST",
            "http://127.0.0.1",
            "http://127.1.2.3:80",
            "http://[::1]:8080",
            "http://me@localhost",
        ] {
            assert_eq!((config(safe).sent_token(), config(safe).token_warning()), (Some("hf_a"), None), "{safe}");
        }
        for unsafe_endpoint in [
            "http://hub.example",
            "http://localhost.example",
            "http://127.0.0.1.example",
            "http://localhost@hub.example",
            "http://10.0.0.1",
            "http://0.0.0.0",
            "http://[::ffff:127.0.0.1]",
        ] {
            let config = config(unsafe_endpoint);
            assert_eq!(config.sent_token(), None, "{unsafe_endpoint}");
            assert!(
                config.token_warning().unwrap().starts_with("the access token is not sent to http://"),
                "{unsafe_endpoint}"
            );
        }
    }

    #[test]
    fn other_variables_are_read() {
        let base = [("HOME", "/nonexistent/h")];
        let offline = |value| config(&[&base[..], &[("HF_HUB_OFFLINE", value)]].concat()).offline;
        assert!(offline("1") && offline("true") && offline("On") && offline("YES"));
        assert!(!offline("0") && !offline("") && !offline("no"));
        let stall = |value| config(&[&base[..], &[("HF_HUB_DOWNLOAD_TIMEOUT", value)]].concat()).limits.stall_timeout;
        assert_eq!((stall("2.5"), stall("")), (Duration::from_millis(2500), Limits::default().stall_timeout));
        let endpoint = |value| config(&[&base[..], &[("HF_ENDPOINT", value)]].concat());
        assert_eq!(endpoint("https://hf-mirror.com/").endpoint, "https://hf-mirror.com");
        assert_eq!(endpoint("https://me:key@hub.example/a@b").endpoint_for_display(), "https://hub.example/a@b");
    }
}
