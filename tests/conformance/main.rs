//! Black box: starts the binary named by `AGENT_BIN` (default: ours) in a scratch working directory and speaks only
//! its public interfaces, so the same tests run against any other pilot-agent. One file per area; docs/TESTING.md.

#[path = "../support/mod.rs"]
mod support;

mod ads;
mod ads_faults;
mod cli;
mod commands;
mod dns;
mod end_to_end;
mod faults;
mod heal;
mod health;
mod lifecycle;
mod mounted;
mod sds;
mod secrecy;
mod startup;
mod status;
mod trouble;
mod vm;
mod wasm;
