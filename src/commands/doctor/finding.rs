//! The findings of `inferno doctor`: the results of its checks, and what to do next.

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum FindingStatus {
    Pass,
    /// inferno works, but something is missing, unavailable or slower than it could be.
    Warn,
    /// Something that inferno needs is missing or does not work, such as disk space or the GPU.
    Fail,
}

/// A result of an `inferno doctor` check. One check can have several results.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub status: FindingStatus,
    pub name: &'static str,
    pub what: String,
    /// What the user should do next, usually a command. `None` if the check passed.
    pub next: Option<String>,
}

impl Finding {
    pub fn pass(name: &'static str, what: impl Into<String>) -> Self {
        Self { status: FindingStatus::Pass, name, what: what.into(), next: None }
    }

    pub fn warn(name: &'static str, what: impl Into<String>, next: impl Into<String>) -> Self {
        Self { status: FindingStatus::Warn, name, what: what.into(), next: Some(next.into()) }
    }

    pub fn fail(name: &'static str, what: impl Into<String>, next: impl Into<String>) -> Self {
        Self { status: FindingStatus::Fail, ..Self::warn(name, what, next) }
    }
}
