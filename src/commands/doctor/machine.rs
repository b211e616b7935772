//! The checks of `inferno doctor` that need no GPU: the build, the cache, the disk, the hub and the models.

use super::finding::Finding;
use crate::commands::list::ListedModel;
use crate::device;
use crate::error::Error;
use crate::hub::{Hub, IncompleteModel, TokenStatus};
use crate::text::{one_line, size};

/// The free disk space, in bytes, below which `inferno doctor` warns. gpt-oss-20b needs 13.8 GB.
const ENOUGH_BYTES: u64 = 20_000_000_000;
/// The free disk space, in bytes, below which `inferno doctor` reports a failure. Few models are this small.
const LOW_BYTES: u64 = 100_000_000;

pub fn build() -> Finding {
    let kernels = match device::built_compute_capability() {
        Some((major, minor)) => format!("CUDA kernels for compute capability {major}.{minor}"),
        None => "without GPU support".to_string(),
    };
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("INFERNO_COMMIT"));
    Finding::pass("build", format!("inferno {version}, commit {commit}, {kernels}"))
}

pub fn check(hub: &Hub, findings: &mut Vec<Finding>) {
    findings.push(cache(hub));
    findings.extend(disk(hub));
    findings.push(reach(hub));
    models(hub, findings);
}

fn cache(hub: &Hub) -> Finding {
    let dir = hub.cache_dir().display();
    match hub.check_cache_is_writable() {
        Ok(()) => Finding::pass("cache", format!("{dir} is writable")),
        Err(error) => Finding::fail("cache", one_line(&error), "export INFERNO_CACHE=/path/to/a/writable/folder"),
    }
}

fn disk(hub: &Hub) -> Option<Finding> {
    let free_bytes = hub.free_bytes()?;
    let what = format!("{} free for models", size(free_bytes));
    let next = "export INFERNO_CACHE=/path/on/another/disk";
    Some(match free_bytes {
        ..LOW_BYTES => Finding::fail("disk", what, next),
        LOW_BYTES..ENOUGH_BYTES => Finding::warn("disk", format!("{what}: not enough for large models"), next),
        _ => Finding::pass("disk", what),
    })
}

fn reach(hub: &Hub) -> Finding {
    let endpoint = &hub.config().endpoint_for_display();
    match hub.check_endpoint() {
        Ok(TokenStatus::NoToken) => {
            Finding::pass("hub", format!("{endpoint} responds; no token is set, but gated models need one"))
        }
        Ok(TokenStatus::Accepted) => Finding::pass("hub", format!("{endpoint} responds and accepts the token")),
        Ok(TokenStatus::NotSupported) => {
            Finding::pass("hub", format!("{endpoint} responds, but does not say whether it accepts the token"))
        }
        Ok(TokenStatus::NotSent) => {
            let what = format!("{endpoint} responds; the access token is not sent, because http does not encrypt it");
            Finding::warn("hub", what, "export HF_ENDPOINT=https://...")
        }
        Ok(TokenStatus::Refused) => {
            let what = format!("{endpoint} rejects the token: it is invalid or has expired");
            Finding::warn("hub", what, "export HF_TOKEN=<a new token from huggingface.co/settings/tokens>")
        }
        Err(error) => match error.downcast_ref::<Error>() {
            Some(Error::Offline { .. }) => Finding::pass("hub", "not contacted: HF_HUB_OFFLINE is set"),
            Some(Error::Network { cause, .. }) => {
                Finding::warn("hub", format!("{endpoint} is unavailable: {cause}"), format!("curl -I {endpoint}"))
            }
            _ => Finding::warn("hub", one_line(&error), format!("curl -I {endpoint}")),
        },
    }
}

fn models(hub: &Hub, findings: &mut Vec<Finding>) {
    let snapshots = match hub.list() {
        Ok(snapshots) => snapshots,
        Err(error) => {
            findings.push(Finding::warn("models", one_line(&error), "inferno list"));
            return;
        }
    };
    let before = findings.len();
    for IncompleteModel { name, missing_file } in hub.incomplete() {
        let what = format!("{name} is incomplete: {missing_file} is missing");
        findings.push(Finding::warn("models", what, format!("inferno download {name}")));
    }
    for model in ListedModel::read_all(hub, &snapshots) {
        let problem = match (model.supported, model.parameters) {
            (false, _) => format!("is not supported: {}", model.family.as_deref().unwrap_or("unknown family")),
            (true, None) => "has weights that cannot be read".to_string(),
            _ => continue,
        };
        let at = model.revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default();
        let next = format!("inferno show {}{at}", model.name);
        findings.push(Finding::warn("models", format!("{} {problem}", model.name), next));
    }
    if findings.len() == before {
        let what = match snapshots.len() {
            0 => "only the demo is available: inferno play demo --device cpu".to_string(),
            1 => "1 model, complete and supported".to_string(),
            count => format!("{count} models, all complete and supported"),
        };
        findings.push(Finding::pass("models", what));
    }
}
