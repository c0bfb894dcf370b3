//! Claims of a token nobody has verified: whatever the file holds, no panic, and what is kept is short.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::istiod::auth::claims;

fuzz_target!(|text: &str| {
    if let Some(claims) = claims::read(text) {
        assert!(claims.audiences.len() <= 8);
        assert!(claims.audiences.iter().all(|a| a.chars().count() <= 128));
    }
});
