//! Root files as operators leave them: whatever the bytes, no panic, and no roots where there is no block.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::tls::client;

fuzz_target!(|pem: &[u8]| {
    let begins = pem.windows(10).any(|w| w == b"-----BEGIN");
    assert!(begins || client::roots_of(pem).is_empty());
});
