//! The last good configuration from a file, past its checksum: any bytes are a store that can be read and written
//! again, or are refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::replay::{Mode, StandIn, disk};

fuzz_target!(|data: &[u8]| {
    let magic = b"pilot-agent last good configuration 1\n\x00\x00\x00\x02me";
    let body = [&magic[..], data].concat();
    let Ok((store, _)) = disk::parse(&body, "me", u64::MAX / 2, u64::MAX, 1 << 20) else { return };
    for mode in [Mode::Delta, Mode::Sotw] {
        let mut envoy = StandIn::new(mode, "memory-".to_owned());
        let cds = b"type.googleapis.com/envoy.config.cluster.v3.Cluster";
        let tag = if mode == Mode::Delta { 0x12 } else { 0x22 };
        let request = [&[tag, cds.len() as u8][..], cds].concat();
        let _ = envoy.request(&request.into());
        let _ = envoy.answer(&store);
        let _ = envoy.hand_over();
    }
    if let Ok(again) = disk::write(&store, "me", 7) {
        disk::read(&again, "me", 7, 1, usize::MAX).expect("what was written is read");
    }
});
