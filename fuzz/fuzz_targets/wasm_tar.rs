//! Archives in pieces: any bytes are read or refused, and where the pieces end makes no difference.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::wasm::tar::{Error, Pick, Tar};

fn read(pick: Pick, archive: &[u8], piece: usize) -> Result<(bool, Vec<u8>), Error> {
    let mut tar = Tar::new(pick);
    let mut out = Vec::new();
    for piece in archive.chunks(piece) {
        tar.push(piece, &mut |content: &[u8]| -> Result<(), Error> {
            out.extend_from_slice(content);
            Ok(())
        })?;
    }
    Ok((tar.end()?, out))
}

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, archive) = (usize::from(input.0) + 1, input.1);
    for pick in [Pick::First, Pick::Named("plugin.wasm")] {
        let whole = read(pick, archive, archive.len().max(1));
        assert_eq!(read(pick, archive, piece), whole);
        assert!(whole.is_err() || whole.unwrap().1.len() <= archive.len());
    }
});
