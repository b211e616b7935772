//! `inferno doctor`: checks this machine and suggests fixes.

#[cfg(feature = "cuda")]
mod decode_graph;
mod finding;
mod gpu;
#[cfg(feature = "cuda")]
mod links;
mod machine;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::hub::Hub;
use crate::text::{escaped_json, one_line, printable};
use finding::{Finding, FindingStatus};
use gpu::SelfTest;

/// Check that inferno works on this machine, and suggest fixes
#[derive(clap::Args)]
#[command(after_help = CHECKS)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The last line of `--help`: what the command checks.
const CHECKS: &str = "Checks: build, driver, GPUs, kernels, links between GPUs, settings, cache, disk, hub, models";

#[derive(Serialize)]
struct DoctorReport {
    status: FindingStatus,
    findings: Vec<Finding>,
    /// The results of the kernel self-test on each GPU.
    self_test: Vec<SelfTest>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let mut findings = vec![machine::build()];
    let mut self_test = Vec::new();
    gpu::check(&mut findings, &mut self_test);
    #[cfg(feature = "cuda")]
    findings.extend(links::check());
    match Hub::from_env() {
        Ok(hub) => machine::check(&hub, &mut findings),
        Err(error) => findings.push(Finding::fail("settings", one_line(&error), "env | grep -E 'INFERNO|^HF_|HOME'")),
    }
    let status = findings.iter().map(|finding| finding.status).max().unwrap_or(FindingStatus::Pass);
    let report = DoctorReport { status, findings, self_test };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", escaped_json(&serde_json::to_string_pretty(&report)?))?;
    } else {
        // Model names come from untrusted directories and may contain control characters.
        write!(out, "{}", printable(&lines(&report)))?;
    }
    out.flush()?;
    Ok(if status == FindingStatus::Fail { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn lines(report: &DoctorReport) -> String {
    let line = |finding: &Finding| {
        let status = format!("{:?}", finding.status).to_uppercase();
        let next = finding.next.as_ref().map(|next| format!("{:18}next: {next}\n", "")).unwrap_or_default();
        format!("{status:6}{:12}{}\n{next}", finding.name, finding.what)
    };
    report.findings.iter().map(line).collect()
}
