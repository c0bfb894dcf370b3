//! Black box: starts the binary named by `AGENT_BIN` (default: ours) in a scratch working directory and speaks only
//! its public interfaces, so the same tests run against any other pilot-agent. One file per area; docs/TESTING.md.

#![allow(unreachable_pub, reason = "a test's modules are nobody's interface")]

#[path = "../support/mod.rs"]
mod support;

mod ads;
mod ads_faults;
mod anchors;
mod callers;
mod cli;
mod commands;
mod completion;
mod disks;
mod dns;
mod doors;
mod end_to_end;
mod examples;
mod exchange;
mod faults;
mod gateway;
mod heal;
mod health;
mod hot_restarts;
mod lifecycle;
mod memory;
mod mounted;
mod orphans;
mod outlive;
mod page;
mod policy;
mod readme;
mod rejections;
mod release;
mod replay;
mod sds;
mod secrecy;
mod startup;
mod status;
mod streams;
mod sts;
mod trouble;
mod turns;
mod upgrade;
mod vault;
mod vm;
mod wasm;
mod why;
