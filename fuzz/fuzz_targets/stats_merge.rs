//! An exposition in any pieces comes out as it would in one, without a line that ends it too early.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::status::stats::Lines;

fn pass(pieces: &[&[u8]], strip: bool) -> Vec<u8> {
    let mut lines = Lines::new(strip);
    let mut out = Vec::new();
    for piece in pieces {
        lines.feed(piece, |bytes| out.extend_from_slice(bytes));
    }
    out.extend(lines.end().unwrap_or_default());
    out
}

fuzz_target!(|input: (Vec<Vec<u8>>, bool)| {
    let (pieces, strip) = input;
    let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
    let whole = pieces.concat();
    let out = pass(&pieces, strip);
    assert_eq!(out, pass(&[&whole], strip));
    if strip {
        assert!(out.split(|b| *b == b'\n').all(|line| line.trim_ascii_end() != b"# EOF"));
    } else {
        assert_eq!(out, whole);
    }
});
