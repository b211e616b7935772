//! Connections: accepting, encrypting and closing them. Its modules are:
//!
//! - `listener`: accepts connections, and closes them when the server shuts down
//! - `tls`: reads the certificate and the private key
//! - `write_limit`: closes connections whose clients do not read

mod listener;
mod tls;
mod write_limit;

pub use listener::{bind, serve};
pub use tls::read_tls;
