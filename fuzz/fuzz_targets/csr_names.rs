//! Identities as settings compose them: any text gives names of well-formed DER.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::ca::csr;

fuzz_target!(|host: &str| {
    let der = csr::general_names(host);
    assert_eq!(der[0], 0x30);
    let (length, header) = match der[1] {
        short @ 0..0x80 => (usize::from(short), 2),
        long => {
            let digits = usize::from(long & 0x7f);
            (der[2..2 + digits].iter().fold(0, |n, d| n << 8 | usize::from(*d)), 2 + digits)
        }
    };
    assert_eq!(der.len(), header + length);
});
