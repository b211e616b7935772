//! One integration binary: every test file is a module of it, so the crate links once.

mod chat;
