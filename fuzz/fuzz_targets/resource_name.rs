//! Resource names: what parses prints back to the same text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::secrets::ResourceName;

fuzz_target!(|text: &str| {
    if let Ok(name) = text.parse::<ResourceName>() {
        assert_eq!(name.to_string(), text);
    }
});
