//! The process beside Envoy in every sidecar, gateway and VM of an Istio mesh.
//!
//! ```text
//! config  flags + env + files + pod info ─► config::load ─► Config ─► agent::bind ─► each part its own slice
//! certs   Envoy ─unix socket─► sds ─► secrets ─► ca  ─┐
//! mesh    Envoy ─unix socket─► xds ───────────────────┴─► istiod ─► tls ─► network
//! side    agent ─► bootstrap, envoy, status, dns, health, iptables (joined only by channels made in agent) ─► fetch
//! ```
//!
//! Modules in path order; an edge runs only downwards in this list, and `tests/architecture.rs`
//! enforces which. The library exists for our tests, benches and fuzzers; it is not an API.

#![deny(clippy::disallowed_types)]

pub mod agent;
pub mod base;
pub mod bootstrap;
pub mod ca;
pub mod cli;
pub mod config;
pub mod dns;
pub mod doctor;
pub mod envoy;
pub mod fetch;
pub mod gateway;
pub mod health;
pub mod iptables;
pub mod istiod;
pub mod net;
pub mod overview;
pub mod proto;
pub mod replay;
pub mod sds;
pub mod secrets;
pub mod serve;
pub mod status;
pub mod sts;
pub mod tls;
pub mod trouble;
pub mod vm;
pub mod wasm;
pub mod xds;
