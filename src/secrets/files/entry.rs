//! One resource: what is known of it, and what is wrong with it.

use std::time::Duration;

use tokio::time::Instant;

use super::look::{Found, Stamp, Wanted};
use super::read::{Loaded, Source, Unreadable};
use super::{PATIENCE, Reply, is_configured};
use crate::base::disk::Looks;
use crate::secrets::ResourceName;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) source: Source,
    pub(super) looks: Looks<Found>,
    pub(super) loaded: Option<Loaded>,
    /// What `loaded` takes of [`super::MAX_LOADED`].
    pub(super) size: usize,
    /// Hash of the bytes that `loaded` was made of.
    pub(super) hash: u64,
    /// Hash of bytes that look cut off, and since when they do; taken as they are if they stay.
    pub(super) unfinished: Option<(u64, Instant)>,
    /// Of files that could not be read, and whether they could not twice: a change right after the first may not show.
    pub(super) bad: Option<Stamp>,
    pub(super) bad_again: bool,
    pub(super) trouble: Option<Trouble>,
    pub(super) waiting: Vec<(Instant, Reply)>,
    pub(super) followed: Instant,
}

#[derive(Debug)]
pub(super) struct Trouble {
    pub(super) since: Instant,
    /// Since when there is nothing to be read, of a configured one.
    pub(super) gone: Option<Instant>,
    pub(super) report: Instant,
    pub(super) next: Instant,
    pub(super) tries: u32,
    pub(super) reason: String,
    pub(super) reported: bool,
    /// Told early: nothing was ever read.
    pub(super) suspected: bool,
    /// Also that it is gone, which is told whatever was told before.
    pub(super) reported_gone: bool,
}

impl Entry {
    /// Nothing is known of it yet.
    pub(super) fn new(source: Source, now: Instant) -> Self {
        Self {
            source,
            looks: Looks::default(),
            loaded: None,
            size: 0,
            hash: 0,
            unfinished: None,
            bad: None,
            bad_again: false,
            trouble: None,
            waiting: Vec::new(),
            followed: now,
        }
    }

    pub(super) fn wanted(&self, name: &ResourceName) -> Wanted {
        let known = self.loaded.is_some().then_some(self.hash);
        let bad = self.bad.clone().filter(|_| self.bad_again);
        Wanted { source: self.source.clone(), known, size: self.size, bounded: !is_configured(name), bad }
    }

    // What is wrong, with files of this stamp.
    pub(super) fn wrong(&mut self, error: &Unreadable, stamp: Option<Stamp>) -> String {
        match (error, &self.trouble) {
            (Unreadable::Still, Some(trouble)) => return trouble.reason.clone(),
            // What they hold is of no use, and stays so.
            (Unreadable::Pair { .. } | Unreadable::Roots { .. } | Unreadable::TooLong(_), _) => {
                self.bad_again = stamp.is_some() && self.bad == stamp;
                self.bad = stamp;
            }
            // Another time there is room, a descriptor, or a disk that answers.
            _ => self.bad = None,
        }
        error.to_string()
    }
}

impl Trouble {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            gone: None,
            report: now + PATIENCE,
            next: now,
            tries: 0,
            reason: String::new(),
            reported: false,
            suspected: false,
            reported_gone: false,
        }
    }

    pub(super) fn is_told(&self) -> bool {
        if self.gone.is_some() { self.reported_gone } else { self.reported }
    }

    // Once reported, changes and the slow check are what brings news.
    pub(super) fn wake(&self) -> Instant {
        if self.is_told() {
            self.since + Duration::from_secs(365 * 86_400)
        } else {
            self.next.min(self.report)
        }
    }
}
