//! The project's own scripts against bad input: each ends with one clear line and leaves nothing half-made.
//! Nothing here uses the network; the interpreter's `venv` is the only thing that is.

#![allow(unreachable_pub, reason = "a test's modules are nobody's interface")]

#[path = "../support/mod.rs"]
mod support;

mod copied;
mod fetching;
mod machine;
mod makefile;
mod packages;
mod rehearsal;
mod releasing;
mod reports;
