//! `inferno receipt`: verifies a signed receipt without network access.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::error::Error;
use crate::files;
use crate::server::{PublicKey, Receipt};
use crate::text::{escaped_json, quote};

/// The maximum size of a receipt in bytes.
/// Receipts are far smaller: they consist mainly of one hash for each model file, prompt and answer.
const MAX_RECEIPT: u64 = 4 << 20;

/// The maximum size of a record in bytes. The limit keeps a mistyped path from loading a huge file into memory.
const MAX_RECORD: u64 = 256 << 20;

/// Verify a signed receipt of `inferno serve` and print it: exit code 0 if it is valid, 6 if it is invalid
#[derive(clap::Args)]
pub struct Args {
    /// File with the response of `GET /v1/receipts/ID`
    #[arg(value_name = "FILE")]
    receipt: PathBuf,
    /// Public key of the server: a file with the response of `GET /v1/receipts/key`, or the value of its field `x`
    #[arg(long, value_name = "FILE|KEY", allow_hyphen_values = true)]
    key: String,
    /// Also check that the receipt belongs to the record in this file (see `inferno replay`)
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let key = PublicKey::read(&args.key).map_err(|error| Error::usage(format!("{error:#}")))?;
    let signed = files::read_input_text(&args.receipt, MAX_RECEIPT)?;
    let path = args.receipt.display();
    let receipt = Receipt::verify(signed.trim_end(), &key).map_err(|error| Error::Verification {
        what: format!("the receipt in {path} is not valid: {error:#}"),
        hint: "check that the key is from the server that signed the receipt: GET /v1/receipts/key".to_string(),
    })?;
    if let Some(record) = &args.record
        && !receipt.matches_record(&files::read_input(record, MAX_RECORD)?)
    {
        return Err(Error::Verification {
            what: format!("the receipt in {path} does not belong to the record in {}", record.display()),
            hint: format!("the receipt belongs to the unchanged record of request {}", quote(&receipt.id)),
        }
        .into());
    }
    let json = serde_json::to_string_pretty(&receipt).context("cannot print the receipt")?;
    writeln!(std::io::stdout(), "{}", escaped_json(&json))?;
    Ok(ExitCode::SUCCESS)
}
