//! `inferno doctor`: checks this machine and says what to fix.

mod gpu;
mod machine;
#[cfg(feature = "cuda")]
mod step;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::hub::Hub;
use crate::text::{one_line, printable};
use gpu::SelfTest;

/// Check this machine: build, GPU, kernels, disk, hub and models
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum Status {
    Pass,
    /// Something does not work, or works worse than it could.
    Warn,
    /// inferno cannot run models on a GPU here.
    Fail,
}

/// The result of one check.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    status: Status,
    name: &'static str,
    what: String,
    /// The next command to type; `None` if there is nothing to do.
    next: Option<String>,
}

impl Finding {
    fn pass(name: &'static str, what: impl Into<String>) -> Self {
        Self { status: Status::Pass, name, what: what.into(), next: None }
    }

    fn warn(name: &'static str, what: impl Into<String>, next: impl Into<String>) -> Self {
        Self { status: Status::Warn, name, what: what.into(), next: Some(next.into()) }
    }

    fn fail(name: &'static str, what: impl Into<String>, next: impl Into<String>) -> Self {
        Self { status: Status::Fail, ..Self::warn(name, what, next) }
    }
}

#[derive(Serialize)]
struct Report {
    status: Status,
    findings: Vec<Finding>,
    /// The self-test of every kernel on every GPU.
    self_test: Vec<SelfTest>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let mut findings = vec![machine::build()];
    let mut self_test = Vec::new();
    gpu::check(&mut findings, &mut self_test);
    match Hub::from_env() {
        Ok(hub) => machine::check(&hub, &mut findings),
        Err(error) => findings.push(Finding::fail("settings", one_line(&error), "env | grep -E 'INFERNO|^HF_|HOME'")),
    }
    let status = findings.iter().map(|finding| finding.status).max().unwrap_or(Status::Pass);
    let report = Report { status, findings, self_test };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        // Model names come from untrusted folders, so they may contain control characters.
        write!(out, "{}", printable(&lines(&report)))?;
    }
    out.flush()?;
    Ok(if status == Status::Fail { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn lines(report: &Report) -> String {
    let line = |finding: &Finding| {
        let status = format!("{:?}", finding.status).to_uppercase();
        let next = finding.next.as_ref().map(|next| format!("{:18}next: {next}\n", "")).unwrap_or_default();
        format!("{status:6}{:12}{}\n{next}", finding.name, finding.what)
    };
    report.findings.iter().map(line).collect()
}
