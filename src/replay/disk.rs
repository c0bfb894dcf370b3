//! The store as a file: written whole, and read whole or not at all. Pure, and safe on any bytes.
//!
//! ```text
//! magic, then: owner, time, mode, types (url, version, blocks, names), then: SHA-256 of all before it
//! ```
//!
//! The sum is looked at before anything else, so half a file, or one with a bit that has changed, is no file. What it
//! is for stands in it word for word: a configuration of another node, another account or another Envoy is not used.
//! Secrets are never in a file, whatever way they came; in memory that one program leaves to the next they are.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256, SHA256_OUTPUT_LEN, digest};
use bytes::Buf;

use super::blocks::{Blocks, number, size};
use super::set::Set;
use super::{Mode, Store};

const MAGIC: &[u8] = b"pilot-agent last good configuration 1\n";
/// What ends the names of types that hold keys.
const SECRET: &str = ".Secret";

/// Why a file is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not whole, or not ours.
    #[error("it is damaged, or was never written to its end")]
    Damaged,
    /// Of somebody else.
    #[error("it belongs to another proxy: {0}")]
    Foreign(String),
    /// Too old.
    #[error("it is {0} s old, and XDS_REPLAY_MAX_AGE allows {1} s")]
    Old(u64, u64),
    /// Of a moment to come.
    #[error("it was written {0} s after the time of this machine's clock, so nobody knows how old it is")]
    Ahead(u64),
    /// Too large for the bound.
    #[error("it is larger than XDS_REPLAY_MAX_BYTES allows")]
    Large,
}

/// What is written, and the sum of it.
struct Summed<W> {
    out: W,
    sum: Context,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// As [`write_to`], without secrets, in memory: for tests and fuzz targets.
///
/// # Errors
/// When a block cannot be compressed.
#[cfg(debug_assertions)]
pub fn write(store: &Store, owner: &str, now: u64) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    write_to(&mut out, store, owner, now, false)?;
    Ok(out)
}

/// Writes the store, which is good at `now` (seconds since 1970), for `owner`, piece by piece; with secrets that came over
/// ADS if `secrets` says so: for memory only.
///
/// # Errors
/// When a block cannot be compressed, and those of `out`.
pub(crate) fn write_to(
    out: &mut impl Write,
    store: &Store,
    owner: &str,
    now: u64,
    secrets: bool,
) -> io::Result<()> {
    let mut out = Summed { out, sum: Context::new(&SHA256) };
    out.write_all(MAGIC)?;
    text(&mut out, owner)?;
    out.write_all(&now.to_be_bytes())?;
    out.write_all(&[match store.mode {
        None => 0,
        Some(Mode::Sotw) => 1,
        Some(Mode::Delta) => 2,
    }])?;
    let types: Vec<_> = store.types.iter().filter(|(of, _)| secrets || !of.ends_with(SECRET)).collect();
    number(&mut out, size(types.len()))?;
    for (type_url, set) in types {
        text(&mut out, type_url)?;
        text(&mut out, &set.version)?;
        set.blocks.write(&mut out)?;
        number(&mut out, size(set.names.len()))?;
        for (name, place) in &set.names {
            text(&mut out, name)?;
            place.write(&mut out)?;
        }
    }
    let Summed { out, sum } = out;
    out.write_all(sum.finish().as_ref())
}

/// Reads a store, and when it was good: of at most `most` compressed bytes that was written for `owner` and is good for so many seconds.
///
/// # Errors
/// When any of that does not hold.
pub fn read(bytes: &[u8], owner: &str, now: u64, max_age: u64, most: usize) -> Result<(Store, u64), Refused> {
    let body = bytes.len().checked_sub(SHA256_OUTPUT_LEN).ok_or(Refused::Damaged)?;
    let (body, sum) = bytes.split_at(body);
    if digest(&SHA256, body).as_ref() != sum {
        return Err(Refused::Damaged);
    }
    parse(body, owner, now, max_age, most)
}

/// What comes after the sum was found right; apart, so that a fuzzer reaches it.
///
/// # Errors
/// As [`read`].
pub fn parse(body: &[u8], owner: &str, now: u64, max_age: u64, most: usize) -> Result<(Store, u64), Refused> {
    let mut rest = body.strip_prefix(MAGIC).ok_or(Refused::Damaged)?;
    let written_for = take_text(&mut rest)?;
    if written_for != owner {
        return Err(Refused::Foreign(written_for));
    }
    let at = rest.try_get_u64().map_err(damaged)?;
    // A clock that was ahead makes a file from the future, of which nobody knows how old it is.
    let age = now.checked_sub(at).ok_or(Refused::Ahead(at.saturating_sub(now)))?;
    if age > max_age {
        return Err(Refused::Old(age, max_age));
    }
    let mut store = Store::new(most);
    store.mode = match rest.try_get_u8().map_err(damaged)? {
        0 => None,
        1 => Some(Mode::Sotw),
        2 => Some(Mode::Delta),
        _ => return Err(Refused::Damaged),
    };
    for _ in 0..rest.try_get_u32().map_err(damaged)? {
        let type_url = take_text(&mut rest)?;
        let version = take_text(&mut rest)?;
        let blocks = Blocks::read_from(&mut rest).ok_or(Refused::Damaged)?;
        let mut names = BTreeMap::new();
        for _ in 0..rest.try_get_u32().map_err(damaged)? {
            let name = take_text(&mut rest)?.into_boxed_str();
            let place = blocks.place_from(&mut rest).ok_or(Refused::Damaged)?;
            names.insert(name, place);
        }
        store.types.insert(type_url, Arc::new(Set { version, names, blocks }));
    }
    if rest.has_remaining() {
        return Err(Refused::Damaged);
    }
    if store.held() > most {
        return Err(Refused::Large);
    }
    Ok((store, at))
}

fn damaged(_: bytes::TryGetError) -> Refused {
    Refused::Damaged
}

// Everything counted is bounded far below: the store's own bound is checked when it is filled.
fn text(out: &mut impl Write, text: &str) -> io::Result<()> {
    number(out, size(text.len()))?;
    out.write_all(text.as_bytes())
}

fn take_text(rest: &mut &[u8]) -> Result<String, Refused> {
    let length = rest.try_get_u32().map_err(damaged)? as usize;
    let (text, more) = rest.split_at_checked(length).ok_or(Refused::Damaged)?;
    *rest = more;
    std::str::from_utf8(text).map(str::to_owned).map_err(|_| Refused::Damaged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::read::{self, Request, Response};
    use crate::replay::{CLUSTER, LISTENER};
    use bytes::Bytes;

    const DAY: u64 = 86_400;

    // A delta resource with this name and so many bytes.
    fn resource(name: &str, size: usize) -> Bytes {
        let mut out = vec![0x0a, 1, b'1', 0x1a, u8::try_from(name.len()).unwrap()];
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(&[0x12, 0xff, 0xff, 0x03]);
        out.truncate(out.len() - 4);
        let body: Vec<u8> = (0..size).map(|n| (n * 31 % 251) as u8).collect();
        out.push(0x12);
        prost::encoding::encode_varint(body.len() as u64, &mut out);
        out.extend_from_slice(&body);
        out.into()
    }

    fn filled() -> Store {
        let mut store = Store::new(1 << 20);
        for of in [CLUSTER, LISTENER, "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"]
        {
            let request = Request { type_url: of.to_owned(), ..Request::default() };
            store.request(1, Mode::Delta, &read::write_request(Mode::Delta, &request));
            let resources =
                (0..20).map(|n| (format!("r{n}"), resource(&format!("r{n}"), 3000 + n))).collect();
            let nonce = "n".to_owned();
            let response =
                Response { type_url: of.to_owned(), nonce: nonce.clone(), resources, ..Response::default() };
            store.response(1, Mode::Delta, &read::write_response(&response));
            let ack = Request { nonce, ..request };
            store.request(1, Mode::Delta, &read::write_request(Mode::Delta, &ack));
        }
        assert!(store.is_whole());
        store
    }

    fn all(store: &Store, of: &str) -> Vec<(String, Bytes)> {
        let names: Vec<&str> = store.names(of).collect();
        store.resources(of, names.into_iter()).unwrap()
    }

    #[test]
    fn what_is_written_is_read_again_but_for_secrets() {
        let store = filled();
        let file = write(&store, "me", 1000).unwrap();
        let (again, at) = read(&file, "me", 1000 + DAY, DAY, 1 << 20).unwrap();
        assert_eq!(at, 1000);
        for of in [CLUSTER, LISTENER] {
            assert_eq!(all(&again, of), all(&store, of));
            assert_eq!(all(&again, of).len(), 20);
        }
        assert!(again.is_whole() && again.mode() == Some(Mode::Delta));
        assert_eq!(again.raw().1, 40);
        assert!(!file.windows(7).any(|w| w == b".Secret"));
    }

    #[test]
    fn of_another_too_old_or_too_large() {
        let file = write(&filled(), "me", 1000).unwrap();
        let read = |owner, now, most| read(&file, owner, now, DAY, most).map(|_| ());
        assert_eq!(read("you", 1000, 1 << 20), Err(Refused::Foreign("me".to_owned())));
        assert_eq!(read("me", 1001 + DAY, 1 << 20), Err(Refused::Old(DAY + 1, DAY)));
        assert_eq!(read("me", 999, 1 << 20), Err(Refused::Ahead(1)), "from the future");
        assert_eq!(read("me", 1000, 100), Err(Refused::Large));
    }

    #[test]
    fn no_flipped_bit_and_no_torn_end_is_taken() {
        use rand::{Rng, SeedableRng};
        let file = write(&filled(), "me", 1000).unwrap();
        let mut rng = rand::rngs::StdRng::seed_from_u64(7);
        for _ in 0..10_000 {
            let mut bad = file.clone();
            let (at, bit) = (rng.random_range(0..bad.len()), rng.random_range(0..8));
            bad[at] ^= 1 << bit;
            assert_eq!(
                read(&bad, "me", 1000, DAY, 1 << 20).map(|_| ()),
                Err(Refused::Damaged),
                "{at}, {bit}"
            );
        }
        for _ in 0..500 {
            let end = rng.random_range(0..file.len());
            assert_eq!(
                read(&file[..end], "me", 1000, DAY, 1 << 20).map(|_| ()),
                Err(Refused::Damaged),
                "{end}"
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_refused_without_harm(cut in 0usize..4000, at in 0usize..4000, with: u8) {
            let mut body = write(&filled(), "me", 1000).unwrap();
            body.truncate(body.len() - SHA256_OUTPUT_LEN);
            let (cut, at) = (cut % body.len(), at % body.len());
            body[at] = with;
            if let Ok((store, _)) = parse(&body, "me", 1000, DAY, 1 << 20) {
                // What passes for a store can be read or says why not.
                let names: Vec<&str> = store.names(CLUSTER).collect();
                let _ = store.resources(CLUSTER, names.into_iter());
            }
            let _ = parse(&body[..cut], "me", 1000, DAY, 1 << 20);
        }
    }
}
