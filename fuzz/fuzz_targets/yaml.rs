//! The agent's own YAML: what was read is read again from its JSON as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::config::yaml;

fuzz_target!(|text: &str| {
    if let Ok(value) = yaml::to_json(text) {
        assert_eq!(yaml::to_json(&value.to_string()), Ok(value));
    }
});
