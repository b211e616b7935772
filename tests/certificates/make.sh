#!/usr/bin/env bash
# Writes the certificates and keys for the tests of TLS (tests/it/serve/tls.rs). Nobody trusts these certificates.
#
# localhost.pem       a certificate for `localhost`, valid for 100 years, signed by itself
# localhost-key.pem   its private key
# other-key.pem       a private key that belongs to no certificate
set -euo pipefail
cd "$(dirname "$0")"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 36500 -subj /CN=localhost \
  -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE \
  -keyout localhost-key.pem -out localhost.pem
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out other-key.pem
