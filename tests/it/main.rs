//! White box: parts of the agent put together through the library, with real processes and sockets.

#[path = "../support/mod.rs"]
mod support;

mod bootstrap;
mod dry_run;
mod envoy;
mod shown;
