//! Reads the TLS certificate and the private key of a server.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::files;
use crate::text::library_error;

/// The maximum size of a PEM file in bytes. Typical files are smaller than 10 KB.
const MAX_PEM_BYTES: u64 = 1 << 20;

/// Reads a certificate chain and its private key from PEM files. The server's own certificate must come first.
///
/// Fails if the key does not belong to the certificate.
pub fn read_tls(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>> {
    let chain_text = files::read_input_text(certificate, MAX_PEM_BYTES)?;
    let cannot = |what: &str, path: &Path| format!("cannot read the {what} in '{}'", path.display());
    let chain: Result<Vec<CertificateDer>, _> = CertificateDer::pem_slice_iter(chain_text.as_bytes()).collect();
    let chain = chain.map_err(|error| pem_error(&error)).with_context(|| cannot("certificate", certificate))?;
    if chain.is_empty() {
        bail!("{}: the file has no 'BEGIN CERTIFICATE'", cannot("certificate", certificate));
    }
    let key_text = files::read_input_text(key, MAX_PEM_BYTES)?;
    let private_key = PrivateKeyDer::from_pem_slice(key_text.as_bytes()).map_err(|error| pem_error(&error));
    let private_key = private_key.with_context(|| cannot("private key", key))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private_key));
    let mut config = config.map_err(|error| anyhow!(library_error(&error))).with_context(|| {
        format!("cannot use the certificate '{}' with the private key '{}'", certificate.display(), key.display())
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Returns why a PEM file cannot be read. Does not quote the file, because the file can contain a secret.
fn pem_error(error: &pem::Error) -> anyhow::Error {
    match error {
        pem::Error::NoItemsFound => anyhow!("the file has no 'BEGIN PRIVATE KEY'; encrypted keys are not supported"),
        _ => anyhow!("the file is not valid PEM"),
    }
}
