//! Heads on the status port: no bytes make a path that leaves its tree, and the refusals stay refusals.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pilot_agent::testing::serve::fuzz::head(bytes));
