//! The name table that istiod sends: refused as a whole, or each of its names is looked for and shown.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| pilot_agent::testing::dns::fuzz::names(body));
