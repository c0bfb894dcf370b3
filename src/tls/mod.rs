//! Certificates, keys and the crypto crate.
//!
//! `provider.rs` is the only file that names the crypto crate's rustls provider.

pub mod cert;
pub mod client;
pub mod keys;
pub mod provider;
pub mod verify;
