//! Lists and watch events of a gateway's secrets: served whole or not at all.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pilot_agent::testing::gateway::fuzz::answer(bytes));
