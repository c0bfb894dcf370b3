//! One look at a resource's files, on a thread of its own.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::MAX_LOADED;
use super::read::{LARGE, Read, Source, Unreadable, read};

/// What a look is after.
pub(super) struct Wanted {
    pub(super) source: Source,
    /// The hash of what is loaded, and what that takes.
    pub(super) known: Option<u64>,
    pub(super) size: usize,
    pub(super) bounded: bool,
    /// Files that are known to be of no use.
    pub(super) bad: Option<Stamp>,
}

/// What a look brings.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) read: Result<Read, Unreadable>,
    /// Whether there is anything to be read at all.
    pub(super) usable: bool,
    /// Of the files before they were read.
    pub(super) stamp: Option<Stamp>,
}

impl Wanted {
    /// Reads it; what does not fit into `room` beside those before it is not brought.
    pub(super) fn look(&self, room: &mut usize) -> Found {
        let stamp = stamp(&self.source);
        if stamp.is_some() && stamp == self.bad {
            return Found { read: Err(Unreadable::Still), usable: self.source.usable(), stamp };
        }
        let mut found = read(&self.source, self.known, self.bounded);
        if let Ok(Read::New { loaded, .. }) = &found
            && self.bounded
        {
            match (*room + self.size).checked_sub(loaded.size()) {
                Some(left) => *room = left,
                None => found = Err(Unreadable::TooMuch(MAX_LOADED)),
            }
        }
        Found { usable: found.is_ok() || self.source.usable(), read: found, stamp }
    }
}

/// What tells large files from what stood there before: place, length, and when they were changed. Small ones have none:
/// to read them costs as little.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stamp(Vec<([u64; 3], [i64; 4])>);

fn stamp(source: &Source) -> Option<Stamp> {
    let files = source.paths().into_iter().map(std::fs::metadata).collect::<io::Result<Vec<_>>>().ok()?;
    let length = files.iter().map(Metadata::len).fold(0, u64::saturating_add);
    let told = |file: &Metadata| {
        let place = [file.dev(), file.ino(), file.len()];
        (place, [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()])
    };
    (length > LARGE).then(|| Stamp(files.iter().map(told).collect()))
}
