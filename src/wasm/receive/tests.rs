use std::io::Read;

use proptest::prelude::*;

use super::*;
use crate::base::sha256;
use crate::wasm::tar::tests::archive;

pub(in crate::wasm) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const MODULE: &[u8] = b"\0asm\x01\0\0\0content";

fn receive(bytes: &[u8], form: Form, limit: u64, piece: usize) -> Result<(Received, Vec<u8>), Error> {
    let dir = tempfile::tempdir().unwrap();
    let mut receiver = Receiver::new(dir.path(), limit, form)?;
    for piece in bytes.chunks(piece.max(1)) {
        receiver.push(&Bytes::copy_from_slice(piece))?;
    }
    let mut received = receiver.end()?;
    let mut content = Vec::new();
    received.file.file()?.reopen()?.read_to_end(&mut content)?;
    received.file.file()?.flush()?;
    Ok((received, content))
}

#[test]
fn whatever_a_module_is_packed_in_it_comes_out() {
    let tar = archive(&[("any-name.bin", MODULE), ("second", b"no")]);
    for bytes in [
        MODULE.to_vec(),
        gzip(MODULE),
        tar.clone(),
        gzip(&tar),
        gzip(&gzip(&tar)),
        archive(&[("x", &gzip(MODULE))]),
    ] {
        for piece in [1, 300, 1 << 20] {
            let (received, content) = receive(&bytes, Form::Any, 1 << 20, piece).unwrap();
            assert!(received.module && content == MODULE);
            assert_eq!(received.checksum, sha256::of(MODULE));
            assert_eq!(received.packed, sha256::of(&bytes));
        }
    }
}

#[test]
fn what_cannot_be_unpacked_is_no_module_and_known_by_its_own_checksum() {
    let mut cut = gzip(MODULE);
    cut.truncate(cut.len() - 3);
    let mut deep = MODULE.to_vec();
    for _ in 0..20 {
        deep = gzip(&deep);
    }
    for bytes in [cut, deep, [gzip(MODULE), b"tail".to_vec()].concat()] {
        let (received, _) = receive(&bytes, Form::Any, 1 << 20, 1 << 20).unwrap();
        assert!(!received.module && received.entry.is_err());
        assert_eq!(received.checksum, sha256::of(&bytes));
    }
    for bytes in [&b"junk"[..], b"", &MODULE[..5], b"\x1f"] {
        let (received, _) = receive(bytes, Form::Any, 100, 1).unwrap();
        assert!(!received.module);
        assert_eq!(received.checksum, sha256::of(bytes));
    }
}

#[test]
fn nothing_gets_longer_than_allowed() {
    let long = [MODULE, &vec![0; 1 << 20]].concat();
    for bytes in [long.clone(), gzip(&long)] {
        let result = receive(&bytes, Form::Any, 100_000, 4096);
        assert!(matches!(result, Err(Error::TooLong(100_000))));
    }
    assert!(receive(&long, Form::Any, long.len() as u64, 4096).unwrap().0.module);
    // What comes after the wanted entry, or before it, counts as well.
    let zeros = vec![0; 1 << 20];
    for (form, bytes) in [
        (Form::Any, archive(&[("m", MODULE), ("zeros", &zeros)])),
        (Form::Layer("plugin.wasm"), archive(&[("zeros", &zeros), ("plugin.wasm", MODULE)])),
    ] {
        let result = receive(&gzip(&bytes), form, 100_000, 4096);
        assert!(matches!(result, Err(Error::TooLong(100_000))));
    }
}

#[test]
fn layers_have_one_file_that_counts() {
    let form = Form::Layer("plugin.wasm");
    let layer = gzip(&archive(&[("other", b"no"), ("./plugin.wasm", MODULE)]));
    let (received, content) = receive(&layer, form, 1 << 20, 10).unwrap();
    assert!(received.module && received.entry == Ok(true) && content == MODULE);
    assert_eq!(received.packed, sha256::of(&layer));
    let tail = [&layer[..], b"tail"].concat();
    for piece in [1, 10, 4096] {
        let (received, content) = receive(&tail, form, 1 << 20, piece).unwrap();
        assert!(received.module && received.entry == Ok(true) && content == MODULE, "bytes behind it");
        assert_eq!(received.packed, sha256::of(&tail));
    }
    let without = receive(&gzip(&archive(&[("other", b"no")])), form, 1 << 20, 10).unwrap().0;
    assert_eq!((without.entry, without.module), (Ok(false), false));
    assert!(receive(MODULE, form, 1 << 20, 10).unwrap().0.entry.is_err(), "not packed");
    let (raw, content) = receive(&gzip(MODULE), Form::Plain, 1 << 20, 10).unwrap();
    assert!(!raw.module && content == gzip(MODULE), "taken as it is");
}

/// A loaded machine may take its time to remove a file.
pub(in crate::wasm) fn gone(dir: &Path) {
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while std::fs::read_dir(dir).unwrap().count() > 0 {
        assert!(std::time::Instant::now() < until, "a file is left over");
        std::thread::yield_now();
    }
}

#[test]
fn the_file_is_gone_with_the_download() {
    let dir = tempfile::tempdir().unwrap();
    let mut receiver = Receiver::new(dir.path(), 100, Form::Any).unwrap();
    receiver.push(&Bytes::from_static(MODULE)).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    drop(receiver);
    gone(dir.path());
}

proptest! {
    #[test]
    fn pieces_make_no_difference(tail in proptest::collection::vec(any::<u8>(), 0..600), kind in 0..4u8, piece in 1usize..700) {
        let module = [MODULE, &tail].concat();
        let bytes = match kind {
            0 => module.clone(),
            1 => gzip(&module),
            2 => archive(&[("m", &module)]),
            _ => tail.clone(),
        };
        let whole = receive(&bytes, Form::Any, 1 << 20, 1 << 20).unwrap();
        let pieces = receive(&bytes, Form::Any, 1 << 20, piece).unwrap();
        prop_assert_eq!((whole.0.checksum, whole.0.module, whole.1), (pieces.0.checksum, pieces.0.module, pieces.1));
    }
}
