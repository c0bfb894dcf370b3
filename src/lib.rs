//! The process beside Envoy in every sidecar, gateway and VM of an Istio mesh.
//!
//! ```text
//! config  flags + env + files + pod info ─► config::load ─► Config ─► agent::run ─► each part its own slice
//! certs   Envoy ─unix socket─► sds ─► secrets ─► ca  ─┐
//! mesh    Envoy ─unix socket─► xds ───────────────────┴─► istiod ─► tls ─► network
//! side    agent ─► bootstrap, envoy, status, dns, health, iptables (joined only by channels made in agent) ─► fetch
//! ```
//!
//! Edges run one way: `tests/architecture.rs` lists which module may use which. Nothing here is an API: the program
//! calls `main`, and our tests, benches and fuzzers see what `testing` names, which is not in release builds.

#![deny(clippy::disallowed_types)]
// What only `testing` shows is reachable in debug builds, where the lint speaks.
#![cfg_attr(not(debug_assertions), allow(unreachable_pub))]

mod agent;
mod base;
mod bootstrap;
mod ca;
mod cli;
mod config;
mod dns;
mod doctor;
mod envoy;
mod fetch;
mod gateway;
mod health;
mod iptables;
mod istiod;
mod net;
mod overview;
mod proto;
mod replay;
mod sds;
mod secrets;
mod serve;
mod status;
mod sts;
mod tls;
mod trouble;
mod vm;
mod wasm;
mod xds;

#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod testing;

pub use cli::main;
