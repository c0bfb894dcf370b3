use proptest::prelude::*;

use super::*;

/// One entry as a POSIX archive has it.
pub(in crate::wasm) fn entry(name: &str, kind: u8, content: &[u8]) -> Vec<u8> {
    let mut header = vec![0u8; BLOCK];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(b"0000644");
    header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    sign(&mut header);
    header.extend_from_slice(content);
    header.resize(header.len().next_multiple_of(BLOCK), 0);
    header
}

fn sign(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u64 = header[..BLOCK].iter().map(|b| u64::from(*b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// Entries and the archive's end.
pub(in crate::wasm) fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut all: Vec<u8> = entries.iter().flat_map(|(name, content)| entry(name, b'0', content)).collect();
    all.resize(all.len() + 2 * BLOCK, 0);
    all
}

fn read(pick: Pick, archive: &[u8], piece: usize) -> Result<Option<Vec<u8>>, Error> {
    let mut tar = Tar::new(pick);
    let mut out = Vec::new();
    for piece in archive.chunks(piece.max(1)) {
        tar.push(piece, &mut |content: &[u8]| -> Result<(), Error> {
            out.extend_from_slice(content);
            Ok(())
        })?;
    }
    tar.end().map(|found| found.then_some(out))
}

const PLUGIN: Pick = Pick::Named("plugin.wasm");

#[test]
fn the_wanted_entry_is_found_by_its_base_name() {
    let made =
        archive(&[("a/", b""), ("other", b"no"), ("./x/plugin.wasm", b"yes"), ("plugin.wasm", b"late")]);
    assert_eq!(read(PLUGIN, &made, 7).unwrap().unwrap(), b"yes");
    assert_eq!(read(Pick::First, &archive(&[("one", b"1"), ("two", b"2")]), 512).unwrap().unwrap(), b"1");
    assert_eq!(read(PLUGIN, &archive(&[("plugin.wasm.txt", b"")]), 512).unwrap(), None);
    assert_eq!(read(PLUGIN, &archive(&[]), 512).unwrap(), None);
    assert_eq!(read(PLUGIN, &archive(&[("plugin.wasm", b"")]), 512).unwrap().unwrap(), b"");
}

#[test]
fn long_names_come_before_their_entry() {
    let end = vec![0; 2 * BLOCK];
    let gnu =
        [entry("././@LongLink", b'L', b"deep/plugin.wasm\0"), entry("deep/plu", b'0', b"yes"), end.clone()];
    assert_eq!(read(PLUGIN, &gnu.concat(), 100).unwrap().unwrap(), b"yes");
    let record = b"20 path=/plugin.wasm\n";
    let wrong = [entry("x", b'x', record), entry("short", b'0', b"yes"), end.clone()].concat();
    assert_eq!(read(PLUGIN, &wrong, 100), Err(Error::Damaged), "a record's length counts itself");
    let pax = [entry("x", b'x', b"21 path=/plugin.wasm\n"), entry("short", b'0', b"yes"), end].concat();
    assert_eq!(read(PLUGIN, &pax, 100).unwrap().unwrap(), b"yes");
}

#[test]
fn damage_is_noticed() {
    let good = archive(&[("plugin.wasm", b"yes")]);
    let mut bad = good.clone();
    bad[0] ^= 1;
    assert_eq!(read(PLUGIN, &bad, 512), Err(Error::Damaged));
    assert_eq!(read(PLUGIN, &good[..514], 512), Err(Error::Short));
    assert_eq!(read(PLUGIN, &good[..300], 512), Err(Error::Short));
    assert_eq!(read(PLUGIN, &good[..515], 512).unwrap().unwrap(), b"yes", "what follows is not needed");
    let mut huge = entry("x", b'L', b"");
    huge[124..135].copy_from_slice(b"77777777777");
    sign(&mut huge);
    assert_eq!(read(PLUGIN, &huge, 512), Err(Error::Long));
    let mut long = entry("x", b'L', &[b'n'; 70_000]);
    long.extend(archive(&[("plugin.wasm", b"yes")]));
    assert_eq!(read(PLUGIN, &long, 512), Err(Error::Long), "it is held as long as the archive comes");
}

proptest! {
    #[test]
    fn pieces_make_no_difference(
        before in proptest::collection::vec(any::<u8>(), 0..1500),
        wanted in proptest::collection::vec(any::<u8>(), 0..1500),
        piece in 1usize..2000,
    ) {
        let made = archive(&[("before", &before), ("d/plugin.wasm", &wanted), ("after", &before)]);
        prop_assert_eq!(read(PLUGIN, &made, piece), Ok(Some(wanted)));
    }

    #[test]
    fn any_bytes_are_read_or_refused(raw in proptest::collection::vec(any::<u8>(), 0..2000), piece in 1usize..700) {
        let whole = read(Pick::First, &raw, raw.len());
        prop_assert_eq!(read(Pick::First, &raw, piece), whole);
    }
}
