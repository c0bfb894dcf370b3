//! Header blocks of answers in HTTP/2: only names of the connection's own become others, however the bytes are cut.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &[u8])| pilot_agent::testing::net::fuzz::block(input.1, input.0.into()));
