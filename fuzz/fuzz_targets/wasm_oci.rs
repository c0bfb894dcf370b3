//! What a registry sends and what names an image: manifests, challenges, credentials, references.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pilot_agent::testing::wasm::fuzz::read(bytes));
