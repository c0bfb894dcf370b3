//! Bodies of the token service: however they are cut, they say the same.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|pieces: Vec<Vec<u8>>| {
    let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
    pilot_agent::testing::sts::fuzz::form(&pieces);
});
