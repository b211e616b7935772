//! Reads the certificates that a client trusts.

use std::path::Path;

use anyhow::Result;
use ureq::tls::{Certificate, PemItem, RootCerts, parse_pem};

use crate::error::Error;
use crate::files;
use crate::text::library_error;

/// The maximum size of a file with certificates, in bytes.
const MAX_CERTIFICATE_BYTES: u64 = 4 << 20;

/// Reads the certificates in a PEM file. Skips other PEM items, such as private keys.
pub fn read_certificates(path: &Path) -> Result<RootCerts> {
    let problem = |cause: String| Error::usage(format!("cannot use the certificates in {}: {cause}", path.display()));
    let pem = files::read(path, MAX_CERTIFICATE_BYTES).map_err(|error| problem(format!("{error:#}")))?;
    let mut certificates: Vec<Certificate<'static>> = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| problem(library_error(&error)))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        Err(problem("the file contains no certificate in PEM format".to_string()))
    } else {
        Ok(RootCerts::from(certificates))
    }
}
