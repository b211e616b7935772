//! The environment, read once: where models lie, which hub, which token.
//!
//! Names and precedence are those of `huggingface_hub` (docs, "Environment variables"), so that a machine set up for
//! Python needs nothing more.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};

use super::Limits;
use crate::error::Error;

/// Where models lie and how the hub is reached.
#[derive(Clone)]
pub struct Settings {
    /// inferno's own models; the only directory that is written to.
    pub cache: PathBuf,
    /// The cache shared with Python's tools; read only.
    pub shared_cache: PathBuf,
    /// `https://huggingface.co` or a mirror, without a slash at the end.
    pub endpoint: String,
    /// Sent to the endpoint's host and no other.
    pub token: Option<String>,
    /// Never open a connection.
    pub offline: bool,
    pub limits: Limits,
}

impl Settings {
    /// Reads the process's environment.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| match std::env::var_os(name) {
            // The password database knows a home that the environment does not.
            None if name == "HOME" => std::env::home_dir().map(PathBuf::into_os_string),
            value => value,
        })
    }

    /// Reads an environment given as a function; an empty variable counts as unset.
    pub fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let var = |name: &str| var(name).filter(|value| !value.is_empty());
        let text = |name: &str| var(name).map(|value| value.to_string_lossy().trim().to_string());
        let on = |name: &str| {
            text(name).is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
        };
        let home = var("HOME").map(PathBuf::from);
        let path = |name: &str| var(name).map(|value| expand_home(Path::new(&value), home.as_deref()));

        let user_cache = path("XDG_CACHE_HOME").or_else(|| home.as_ref().map(|home| home.join(".cache")));
        let below_user_cache = |below: &str| {
            let base = user_cache.as_ref().ok_or_else(|| {
                anyhow!(
                    "no directory for models: neither HOME nor XDG_CACHE_HOME is set\n  set INFERNO_CACHE and HF_HOME"
                )
            })?;
            anyhow::Ok(base.join(below))
        };
        let cache = path("INFERNO_CACHE").map_or_else(|| below_user_cache("inferno/models"), Ok)?;
        let hf_home = path("HF_HOME").map_or_else(|| below_user_cache("huggingface"), Ok)?;
        let shared_cache =
            path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| hf_home.join("hub"));

        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        let endpoint = endpoint.trim_end_matches('/').to_string();
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            return Err(Error::usage(format!("HF_ENDPOINT is {endpoint:?}; it must start with https:// (or http://)")));
        }

        let token = if on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            None
        } else {
            text("HF_TOKEN").or_else(|| {
                let file = path("HF_TOKEN_PATH").unwrap_or_else(|| hf_home.join("token"));
                fs::read_to_string(file).ok().map(|token| token.trim().to_string())
            })
        };
        let token = token.filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            bail!(
                "the Hugging Face token holds spaces or control characters\n  check HF_TOKEN or the file it comes from"
            );
        }
        let standard = Limits::default();
        let seconds = |name: &str, standard: Duration| match text(name).map(|text| text.parse::<f64>()) {
            None => Ok(standard),
            Some(Ok(seconds)) if (0.001..1e6).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
            Some(_) => Err(Error::usage(format!("{name} must be a number of seconds"))),
        };
        let answer = seconds("HF_HUB_ETAG_TIMEOUT", standard.answer)?;
        let stall = seconds("HF_HUB_DOWNLOAD_TIMEOUT", standard.stall)?;
        let limits = Limits { answer, stall, ..standard };
        Ok(Self { cache, shared_cache, endpoint, token, offline: on("HF_HUB_OFFLINE"), limits })
    }
}

impl Settings {
    /// The endpoint as people may see it: without a password in it.
    pub fn shown_endpoint(&self) -> String {
        match self.endpoint.split_once("://") {
            Some((scheme, rest)) => {
                let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
                format!("{scheme}://{}{path}", host.rsplit('@').next().unwrap_or(host))
            }
            None => self.endpoint.clone(),
        }
    }
}

/// `~/x` as Python's `expanduser` reads it: shells do not expand it inside quotes or service files.
fn expand_home(path: &Path, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path.to_path_buf(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(vars: &[(&str, &str)]) -> Settings {
        Settings::from_vars(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())).unwrap()
    }

    #[test]
    fn caches() {
        let shared = |vars: &[(&str, &str)]| {
            let vars = [&[("HOME", "/nonexistent/h")], vars].concat();
            settings(&vars).shared_cache.display().to_string()
        };
        assert_eq!(shared(&[]), "/nonexistent/h/.cache/huggingface/hub");
        assert_eq!(shared(&[("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(shared(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/hf")]), "/nonexistent/h/hf/hub");
        assert_eq!(shared(&[("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/old");
        assert_eq!(shared(&[("HF_HUB_CACHE", "/new"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/new");
        let own = |vars| settings(vars).cache.display().to_string();
        assert_eq!(own(&[("HOME", "/nonexistent/h")]), "/nonexistent/h/.cache/inferno/models");
        assert_eq!(own(&[("HOME", "/nonexistent/h"), ("XDG_CACHE_HOME", "/x")]), "/x/inferno/models");
        assert_eq!(own(&[("HOME", "/nonexistent/h"), ("INFERNO_CACHE", "/models")]), "/models");
        assert!(Settings::from_vars(|_| None).is_err());
    }

    #[test]
    fn token_and_switches() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        fs::write(dir.path().join("other"), "hf_other\n").unwrap();
        let other = dir.path().join("other");
        let base = [("HOME", home), ("HF_HOME", home)];
        let token = |vars: &[(&str, &str)]| settings(&[&base, vars].concat()).token;
        assert_eq!(token(&[]).as_deref(), Some("hf_file"));
        assert_eq!(token(&[("HF_TOKEN_PATH", other.to_str().unwrap())]).as_deref(), Some("hf_other"));
        assert_eq!(token(&[("HF_TOKEN", "hf_env")]).as_deref(), Some("hf_env"));
        assert_eq!(token(&[("HF_TOKEN", "")]).as_deref(), Some("hf_file"));
        assert_eq!(token(&[("HF_TOKEN", "hf_env"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);

        let offline = |value| settings(&[&base[..], &[("HF_HUB_OFFLINE", value)]].concat()).offline;
        assert!(offline("1") && offline("true") && offline("On") && offline("YES"));
        assert!(!offline("0") && !offline("") && !offline("no"));
        let stall = |value| settings(&[&base[..], &[("HF_HUB_DOWNLOAD_TIMEOUT", value)]].concat()).limits.stall;
        assert_eq!((stall("2.5"), stall("")), (Duration::from_millis(2500), Limits::default().stall));
        let endpoint = |value| settings(&[&base[..], &[("HF_ENDPOINT", value)]].concat());
        assert_eq!(endpoint("https://hf-mirror.com/").endpoint, "https://hf-mirror.com");
        assert_eq!(endpoint("https://me:key@hub.example/a@b").shown_endpoint(), "https://hub.example/a@b");
        let broken = Settings::from_vars(|name| match name {
            "HOME" => Some(home.into()),
            "HF_TOKEN" => Some("hf_a\nhf_b".into()),
            _ => None,
        });
        assert!(!format!("{:?}", broken.err().unwrap()).contains("hf_a"));
    }
}
