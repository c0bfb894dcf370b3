//! Certificates, keys, TLS clients, and the crypto library under them.
//!
//! `provider.rs` is the only file that names the crypto crate's rustls provider.

pub(crate) mod anchors;
pub(crate) mod cert;
pub(crate) mod chain;
pub(crate) mod client;
pub(crate) mod keys;
pub(crate) mod provider;
pub(crate) mod verify;
