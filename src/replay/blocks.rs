//! Bytes of resources, compressed in blocks: one by one they would hardly get smaller, all at once each change would
//! cost the whole.

use std::collections::BTreeMap;
use std::io::{self, Write};

use bytes::{Buf, Bytes};

/// Bytes that are gathered before they are compressed together.
const BLOCK: usize = 256 * 1024;
/// At the end of a response a block of at least this is compressed; a smaller one waits for more.
const LEAST: usize = 32 * 1024;
/// A block in a file that says it is larger is none: one resource may be large, but not that large.
const MOST: usize = 256 << 20;
/// Of zstd: the fastest of the usual levels. Configuration repeats itself so much that more gains little.
const LEVEL: i32 = 1;

/// Where a resource is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    block: u32,
    at: u32,
    len: u32,
}

impl Place {
    pub(super) fn block(self) -> u32 {
        self.block
    }

    pub(super) fn write(self, out: &mut impl Write) -> io::Result<()> {
        [self.block, self.at, self.len].into_iter().try_for_each(|n| number(out, n))
    }
}

#[derive(Debug, Clone)]
struct Block {
    // Shared by all copies.
    packed: Bytes,
    raw: u32,
    dead: u32,
}

impl Block {
    // `None`: nothing in it is needed.
    fn of(raw: &[u8], dead: u32) -> io::Result<Option<Self>> {
        let length = u32::try_from(raw.len()).map_err(|_| io::Error::other("a block of 4 GB"))?;
        if dead >= length {
            return Ok(None);
        }
        // Of its own length, which is less than what was reserved for it.
        let packed = zstd::bulk::compress(raw, LEVEL)?.into_boxed_slice().into();
        Ok(Some(Self { packed, raw: length, dead }))
    }
}

/// The blocks of one type. A copy shares what is compressed.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocks {
    sealed: BTreeMap<u32, Block>,
    // Number of the block that is gathered.
    open: u32,
    gathered: Vec<u8>,
    gathered_dead: u32,
}

impl Blocks {
    /// Keeps these bytes.
    pub(super) fn put(&mut self, bytes: &[u8]) -> io::Result<Place> {
        let fit = |n: usize| u32::try_from(n).map_err(|_| io::Error::other("a resource of 4 GB"));
        let place = Place { block: self.open, at: fit(self.gathered.len())?, len: fit(bytes.len())? };
        self.gathered.extend_from_slice(bytes);
        if self.gathered.len() >= BLOCK {
            self.seal()?;
        }
        Ok(place)
    }

    /// They are not needed any more.
    pub(super) fn free(&mut self, place: Place) {
        if place.block == self.open {
            self.gathered_dead += place.len;
        } else if let Some(block) = self.sealed.get_mut(&place.block) {
            block.dead += place.len;
            if block.dead == block.raw {
                self.sealed.remove(&place.block);
            }
        }
    }

    fn seal(&mut self) -> io::Result<()> {
        let raw = std::mem::take(&mut self.gathered);
        let dead = std::mem::take(&mut self.gathered_dead);
        if let Some(block) = Block::of(&raw, dead)? {
            self.sealed.insert(self.open, block);
        }
        self.open += 1;
        Ok(())
    }

    /// A response has ended.
    pub(super) fn settle(&mut self) -> io::Result<()> {
        if self.gathered.len() >= LEAST { self.seal() } else { Ok(()) }
    }

    /// Whether more is dead, or in small pieces, than is worth keeping so.
    pub(super) fn is_wasteful(&self) -> bool {
        let (raw, dead) = self
            .sealed
            .values()
            .fold((0_usize, 0_usize), |(raw, dead), b| (raw + b.raw as usize, dead + b.dead as usize));
        dead > (raw - dead) + BLOCK || self.sealed.len() > 8 + 4 * raw / BLOCK
    }

    /// Bytes that are held, compressed, and bytes that they were.
    pub(super) fn sizes(&self) -> (usize, usize) {
        let packed: usize = self.sealed.values().map(|b| b.packed.len()).sum();
        let raw: usize = self.sealed.values().map(|b| (b.raw - b.dead) as usize).sum();
        let open = self.gathered.len();
        (packed + open, raw + open - self.gathered_dead as usize)
    }

    /// All of it, for a file, where what is gathered is a block as well.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let last = Block::of(&self.gathered, self.gathered_dead)?;
        number(out, size(self.sealed.len() + usize::from(last.is_some())))?;
        for (at, block) in self.sealed.iter().chain(last.iter().map(|block| (&self.open, block))) {
            for n in [*at, block.raw, block.dead, size(block.packed.len())] {
                number(out, n)?;
            }
            out.write_all(&block.packed)?;
        }
        Ok(())
    }

    /// From a file; `None`: it cannot be.
    pub(super) fn read_from(rest: &mut &[u8]) -> Option<Self> {
        let mut out = Self::default();
        for _ in 0..rest.try_get_u32().ok()? {
            let number = rest.try_get_u32().ok()?;
            let (raw, dead) = (rest.try_get_u32().ok()?, rest.try_get_u32().ok()?);
            let length = rest.try_get_u32().ok()? as usize;
            let (packed, more) = rest.split_at_checked(length)?;
            *rest = more;
            if dead > raw || raw as usize > MOST {
                return None;
            }
            out.open = out.open.max(number.checked_add(1)?);
            out.sealed.insert(number, Block { packed: Bytes::copy_from_slice(packed), raw, dead });
        }
        Some(out)
    }

    /// A place from a file, which must be in a block.
    pub(super) fn place_from(&self, rest: &mut &[u8]) -> Option<Place> {
        let mut next = || rest.try_get_u32().ok();
        let place = Place { block: next()?, at: next()?, len: next()? };
        let block = self.sealed.get(&place.block)?;
        (place.at.checked_add(place.len)? <= block.raw).then_some(place)
    }

    /// Whether all that is compressed there is here, and the same memory.
    #[cfg(test)]
    pub(super) fn shares(&self, other: &Self) -> bool {
        let same = |(at, block): (&u32, &Block)| {
            self.sealed.get(at).is_some_and(|mine| mine.packed.as_ptr() == block.packed.as_ptr())
        };
        !other.sealed.is_empty() && other.sealed.iter().all(same)
    }

    /// The bytes at each of these places, in the same order. Each block is unpacked once.
    pub(super) fn read(&self, places: &[Place]) -> io::Result<Vec<Bytes>> {
        let mut unpacked: BTreeMap<u32, Bytes> = BTreeMap::new();
        let gone = || io::Error::other("a block is not there");
        places
            .iter()
            .map(|place| {
                let (at, end) = (place.at as usize, place.at as usize + place.len as usize);
                if place.block == self.open {
                    return self.gathered.get(at..end).map(Bytes::copy_from_slice).ok_or_else(gone);
                }
                let block = match unpacked.get(&place.block) {
                    Some(block) => block.clone(),
                    None => {
                        let sealed = self.sealed.get(&place.block).ok_or_else(gone)?;
                        let raw = Bytes::from(zstd::bulk::decompress(&sealed.packed, sealed.raw as usize)?);
                        unpacked.insert(place.block, raw.clone());
                        raw
                    }
                };
                if end > block.len() { Err(gone()) } else { Ok(block.slice(at..end)) }
            })
            .collect()
    }
}

pub(super) fn number(out: &mut impl Write, n: u32) -> io::Result<()> {
    out.write_all(&n.to_be_bytes())
}

pub(super) fn size(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
