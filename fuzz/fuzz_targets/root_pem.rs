//! Root files as operators leave them: whatever the bytes, no panic, and no more roots than blocks.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::tls::client;

fuzz_target!(|pem: &[u8]| {
    let begins = pem.windows(10).filter(|w| w == b"-----BEGIN").count();
    assert!(client::roots_of(pem).len() <= begins);
});
