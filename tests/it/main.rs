//! White box: parts of the agent put together through the library, with real processes and sockets.

#![allow(unreachable_pub, reason = "a test's modules are nobody's interface")]

#[path = "../support/mod.rs"]
mod support;

mod bootstrap;
mod dry_run;
mod envoy;
mod guard;
mod panics;
mod shown;
