//! Accepts, encrypts and closes connections. The modules are:
//!
//! - `listener`: accepts connections, and closes them when the server shuts down
//! - `limit`: limits the number of open connections
//! - `parse_error`: adds a body to hyper's own error responses
//! - `tls`: reads the certificate and the private key
//! - `write_limit`: closes connections whose clients read too slowly

mod limit;
mod listener;
mod parse_error;
mod tls;
mod write_limit;

pub use listener::{bind, serve};
pub use tls::read_tls;
