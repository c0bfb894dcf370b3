//! A download on its way to the disk: unpacked while it arrives, hashed, bounded, beside its place.
//!
//! Never more than a piece of it is in memory. What arrives is looked into: a module is stored as it is,
//! gzip is unpacked, of a tar archive the first entry is taken, and what comes out is looked into again.
//! When something of that fails, the Go agent goes on with the bytes as they came, which then are no
//! module; here nothing needs to be stored for that, only their checksum is kept.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use aws_lc_rs::digest;
use bytes::Bytes;
use tempfile::NamedTempFile;

use super::tar::{self, Pick, Tar};
use crate::base::lane;
use crate::base::place::{self, Mode};
use crate::base::sha256;
use crate::fetch::{self, Gunzip};

/// What every module begins with.
pub(super) const MAGIC: &[u8] = b"\0asm";
/// Magic and version; nothing shorter is a module.
const SHORTEST: u64 = 8;
/// As much as is looked at to tell a tar archive.
const LOOK: usize = tar::MAGIC_AT + tar::MAGIC.len();
/// Packed so many times within each other at most; more is an attack.
const DEEPEST: u32 = 4;
/// What the name of a download's file begins with.
pub(super) const DOWNLOAD: &str = ".download";
/// A disk that works needs a millisecond.
const REMOVED: Duration = Duration::from_millis(100);
const GZIP: &[u8] = &[0x1f, 0x8b];

/// Why a download cannot be received.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The disk's word.
    #[error("cannot be stored")]
    Store(#[from] io::Error),
    /// Longer than allowed, packed or unpacked.
    #[error("longer than {0} bytes (ISTIO_WASM_MAX_BINARY_SIZE_BYTES)")]
    TooLong(u64),
}

/// Bytes that cannot be unpacked.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadArchive {
    #[error(transparent)]
    Tar(#[from] tar::Error),
    /// The decompressor's word, which has no parts.
    #[error("{0}")]
    Gzip(String),
    #[error("it is packed too often")]
    Nested,
}

impl BadArchive {
    fn gzip(error: &fetch::Error) -> Broken {
        Broken::Packed(Self::Gzip(error.to_string()))
    }
}

/// A file beside its place; gone when dropped. A disk that stands still keeps whoever gives a download up for [`REMOVED`]
/// only; as many threads wait for it as there were downloads.
pub(super) struct Beside(Option<NamedTempFile>);

impl Beside {
    pub(super) fn of(file: NamedTempFile) -> Self {
        Self(Some(file))
    }

    /// The file, which the caller puts in its place.
    pub(super) fn into_file(mut self) -> io::Result<NamedTempFile> {
        self.0.take().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(super) fn file(&mut self) -> io::Result<&mut NamedTempFile> {
        self.0.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            lane::briefly("removing a download", REMOVED, move || drop(file));
        }
    }
}

/// What came.
pub(super) struct Received {
    /// Beside its place.
    pub file: Beside,
    /// SHA-256 in hex: of what came out, or, where unpacking failed, of what came.
    pub checksum: String,
    /// SHA-256 in hex of what came.
    pub packed: String,
    /// Whether it can be a module at all.
    pub module: bool,
    /// Of an archive: whether the wanted entry was there, or why that cannot be told.
    pub entry: Result<bool, BadArchive>,
}

/// What is done to the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Looked into, as often as needed.
    Any,
    /// Taken as they are.
    Plain,
    /// A gzipped tar archive of which one file is wanted.
    Layer(&'static str),
}

enum Broken {
    /// Unpacking failed.
    Packed(BadArchive),
    Fatal(Error),
}

impl From<tar::Error> for Broken {
    fn from(error: tar::Error) -> Self {
        Self::Packed(error.into())
    }
}

enum Stage {
    Look(Vec<u8>),
    Plain,
    /// With how much has come out of it.
    Gzip(Box<Gunzip>, u64, Box<Stage>),
    Tar(Box<Tar>, Box<Stage>),
}

struct Sink {
    file: Beside,
    sum: digest::Context,
    head: Vec<u8>,
    length: u64,
    limit: u64,
}

impl Sink {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.length += bytes.len() as u64;
        if self.length > self.limit {
            return Err(Broken::Fatal(Error::TooLong(self.limit)));
        }
        if self.head.len() < MAGIC.len() {
            self.head.extend(bytes.iter().take(MAGIC.len() - self.head.len()));
        }
        self.sum.update(bytes);
        self.file.file().and_then(|file| file.write_all(bytes)).map_err(|e| Broken::Fatal(e.into()))
    }
}

/// Takes a download piece by piece.
pub(super) struct Receiver {
    stage: Stage,
    sink: Sink,
    packed: Option<digest::Context>,
    arrived: u64,
    broken: Option<BadArchive>,
}

fn new_sum() -> digest::Context {
    digest::Context::new(&digest::SHA256)
}

impl Receiver {
    /// A download that will end in `dir` and may have `limit` bytes.
    ///
    /// # Errors
    /// When no file can be made there.
    pub(super) fn new(dir: &Path, limit: u64, form: Form) -> io::Result<Self> {
        // Without its folder a module cannot be stored, but whether it could be had is still told: the
        // bytes go where any may be put.
        let place = |dir| place::beside(dir, DOWNLOAD, Mode::Masked(0o644));
        // Where that fails, too, it is its own folder that somebody has to repair.
        let file = place(dir).or_else(|why| place(Path::new("/tmp")).map_err(|_| why))?;
        let file = Beside::of(file);
        let (stage, packed) = match form {
            Form::Any => (Stage::Look(Vec::new()), Some(new_sum())),
            Form::Plain => (Stage::Plain, None),
            Form::Layer(name) => {
                let tar = Stage::Tar(Box::new(Tar::new(Pick::Named(name))), Box::new(Stage::Plain));
                (Stage::Gzip(Box::new(Gunzip::new()), 0, Box::new(tar)), Some(new_sum()))
            }
        };
        let sink = Sink { file, sum: new_sum(), head: Vec::new(), length: 0, limit };
        Ok(Self { stage, sink, packed, arrived: 0, broken: None })
    }

    /// The next piece.
    ///
    /// # Errors
    /// When it cannot be stored or is too long; damage is found out at the end.
    pub(super) fn push(&mut self, piece: &Bytes) -> Result<(), Error> {
        self.arrived += piece.len() as u64;
        if self.arrived > self.sink.limit {
            return Err(Error::TooLong(self.sink.limit));
        }
        if let Some(packed) = &mut self.packed {
            packed.update(piece);
        }
        if self.broken.is_some() {
            return Ok(());
        }
        let pushed = push(&mut self.stage, piece, &mut self.sink, 0);
        if matches!(self.stage, Stage::Plain) {
            // Not packed: both checksums are one.
            self.packed = None;
        }
        match pushed {
            Ok(()) => Ok(()),
            Err(Broken::Fatal(error)) => Err(error),
            Err(Broken::Packed(why)) => {
                self.broken = Some(why);
                Ok(())
            }
        }
    }

    /// Everything has come.
    ///
    /// # Errors
    /// When it cannot be stored or is too long.
    pub(super) fn end(mut self) -> Result<Received, Error> {
        let mut entry = Ok(true);
        if self.broken.is_none() {
            match end(&mut self.stage, &mut self.sink, 0) {
                Ok(found) => entry = Ok(found),
                Err(Broken::Fatal(error)) => return Err(error),
                Err(Broken::Packed(why)) => self.broken = Some(why),
            }
        }
        let unpacked = sha256::written(&self.sink.sum.finish());
        let packed = self.packed.map_or_else(|| unpacked.clone(), |sum| sha256::written(&sum.finish()));
        self.sink.file.file()?.flush()?;
        let module =
            self.broken.is_none() && self.sink.length >= SHORTEST && self.sink.head.starts_with(MAGIC);
        let checksum = if self.broken.is_some() { packed.clone() } else { unpacked };
        if let Some(why) = self.broken {
            entry = Err(why);
        }
        Ok(Received { file: self.sink.file, checksum, packed, module, entry })
    }
}

fn push(stage: &mut Stage, piece: &Bytes, sink: &mut Sink, depth: u32) -> Result<(), Broken> {
    match stage {
        Stage::Plain => sink.write(piece),
        Stage::Look(seen) => {
            seen.extend_from_slice(piece);
            if !decided(seen) {
                return Ok(());
            }
            let seen = Bytes::from(std::mem::take(seen));
            *stage = looked(&seen, depth)?;
            push(stage, &seen, sink, depth)
        }
        Stage::Gzip(_, _, next) if has_named(next) => Ok(()),
        Stage::Gzip(gunzip, unpacked, next) => {
            gunzip.feed(piece.clone());
            while let Some(out) = gunzip.piece().map_err(|e| BadArchive::gzip(&e))? {
                // Also what nobody keeps: a few bytes that unpack to zeros for ever would hold this thread.
                *unpacked += out.len() as u64;
                if *unpacked > sink.limit {
                    return Err(Broken::Fatal(Error::TooLong(sink.limit)));
                }
                push(next, &out, sink, depth + 1)?;
                if has_named(next) {
                    break;
                }
            }
            Ok(())
        }
        Stage::Tar(tar, next) => tar
            .push(piece, &mut |content: &[u8]| push(next, &Bytes::copy_from_slice(content), sink, depth + 1)),
    }
}

// What remains to be done at the end of the bytes; whether a wanted entry was there.
fn end(stage: &mut Stage, sink: &mut Sink, depth: u32) -> Result<bool, Broken> {
    match stage {
        Stage::Plain => Ok(true),
        Stage::Look(seen) => {
            let seen = Bytes::from(std::mem::take(seen));
            *stage = looked(&seen, depth)?;
            push(stage, &seen, sink, depth)?;
            end(stage, sink, depth)
        }
        Stage::Gzip(gunzip, _, next) => {
            if !has_named(next) {
                gunzip.end().map_err(|e| BadArchive::gzip(&e))?;
            }
            end(next, sink, depth + 1)
        }
        Stage::Tar(tar, next) => {
            let found = tar.end()?;
            Ok(end(next, sink, depth + 1)? && found)
        }
    }
}

// What is behind the file of a layer that is wanted may be anything, as for the Go agent; its digest covers it.
fn has_named(stage: &Stage) -> bool {
    matches!(stage, Stage::Tar(tar, _) if tar.has_named())
}

fn decided(seen: &[u8]) -> bool {
    seen.starts_with(MAGIC) || seen.starts_with(GZIP) || seen.len() >= LOOK
}

fn looked(seen: &[u8], depth: u32) -> Result<Stage, Broken> {
    let deeper = || {
        if depth < DEEPEST { Ok(()) } else { Err(Broken::Packed(BadArchive::Nested)) }
    };
    if seen.starts_with(MAGIC) {
        return Ok(Stage::Plain);
    }
    let next = Box::new(Stage::Look(Vec::new()));
    if seen.starts_with(GZIP) {
        deeper()?;
        return Ok(Stage::Gzip(Box::new(Gunzip::new()), 0, next));
    }
    if seen.len() >= LOOK && seen[tar::MAGIC_AT..].starts_with(tar::MAGIC) {
        deeper()?;
        return Ok(Stage::Tar(Box::new(Tar::new(Pick::First)), next));
    }
    Ok(Stage::Plain)
}

#[cfg(test)]
pub(super) mod tests;
