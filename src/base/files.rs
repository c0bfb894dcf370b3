//! Says when a file may have changed, whatever way it was changed.
//!
//! Folders are watched, not files: the one that holds the file, and the one that holds each symbolic
//! link on the way to it. So a rename over the file, an in-place write, Kubernetes' `..data` swap, a
//! link pointed elsewhere at any height, and deletion followed by re-creation are all seen, the second
//! and the hundredth time too. A missing folder is waited for in the deepest one that exists.
//!
//! A report means "look", never "it changed": the owner compares contents. The owner also looks on a
//! slow timer and calls [`Watcher::refresh`] then, as a net under file systems that report nothing.
//!
//! All watchers of an agent share one list of the kernel's ([`Watches`]): a user may have 128 of them, on a whole node.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

mod watches;

use watches::Member;
pub(crate) use watches::Watches;

/// Links followed on the way to one file before giving up, as in the kernel (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// Watches a set of paths.
#[derive(Debug)]
pub(crate) struct Watcher {
    paths: BTreeSet<PathBuf>,
    quiet: Duration,
    quiet_until: Option<Instant>,
    member: Member,
    failures: u64,
    blind: bool,
    /// Whether a folder above that is moved is news.
    above: bool,
}

impl Watcher {
    /// Watches nothing yet. Reports come `quiet` after the first of a burst of events.
    #[must_use]
    pub(crate) fn new(watches: &Watches, quiet: Duration) -> Self {
        let (paths, member) = (BTreeSet::new(), watches.join());
        Self { paths, quiet, quiet_until: None, member, failures: 0, blind: false, above: false }
    }

    /// Also watches whether a folder on the way is moved, at a watch for each: for few paths. Nothing else that happens in
    /// those is an event.
    #[must_use]
    pub(crate) fn with_above(mut self) -> Self {
        self.above = true;
        self
    }

    /// Watches exactly these paths from now on.
    pub(crate) fn set(&mut self, paths: BTreeSet<PathBuf>) {
        if paths != self.paths {
            self.paths = paths;
            self.refresh();
        }
    }

    /// Watches these paths too. What is watched already is not looked at again, so that thousands of paths that
    /// come one by one cost what they cost together.
    pub(crate) fn add(&mut self, paths: impl IntoIterator<Item = PathBuf>) {
        let mut ways = Ways::default();
        for path in paths {
            if !self.paths.contains(&path) {
                ways.trace(&path);
                self.paths.insert(path);
            }
        }
        self.member.also(ways.names);
        let failed = self.member.place(ways.folders);
        self.failures += failed;
        self.blind |= failed > 0;
    }

    /// Watches that could not be placed, since the start. The slow check covers what they miss.
    #[must_use]
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    /// Whether changes may go unreported: there is something to watch, and the last attempt could not place all of it.
    #[must_use]
    pub(crate) fn blind(&self) -> bool {
        self.blind
    }

    /// Follows the links anew and places what is missing. Call it before
    /// looking at the files on a timer.
    pub(crate) fn refresh(&mut self) {
        let mut ways = Ways::default();
        for path in &self.paths {
            ways.trace(path);
        }
        let above: BTreeSet<PathBuf> =
            ways.passed.into_iter().filter(|f| self.above && !ways.folders.contains(f)).collect();
        self.member.only(ways.names, &ways.folders, &above);
        self.member.place_above(above);
        let failed = self.member.place(ways.folders);
        self.failures += failed;
        self.blind = failed > 0;
    }

    /// Waits until something may have changed. Nothing is lost when the future is dropped.
    #[cfg(test)]
    pub(crate) async fn changed(&mut self) {
        self.news().await;
        self.refresh();
    }

    /// Waits until something may have changed, and does not touch the file system: the caller calls
    /// [`Watcher::refresh`] where it may. Nothing is lost when the future is dropped.
    pub(crate) async fn news(&mut self) {
        while self.quiet_until.is_none() {
            if self.member.take() {
                self.quiet_until = Some(Instant::now() + self.quiet);
            } else if let Err(error) = self.member.events().await {
                self.failures += 1;
                self.blind = true;
                tracing::debug!("files are polled from now on: {error}");
                // The next refresh tries anew.
                self.member.close();
            }
        }
        if let Some(until) = self.quiet_until {
            tokio::time::sleep_until(until).await;
        }
        self.quiet_until = None;
        // The rest of the burst.
        self.member.take();
    }
}

/// The ways from the root to some paths.
#[derive(Default)]
struct Ways {
    /// Folders to watch.
    folders: BTreeSet<PathBuf>,
    /// Names that matter.
    names: HashSet<PathBuf>,
    /// Folders on the way: thousands of files lie in few of them, and each is looked at once.
    passed: HashSet<PathBuf>,
}

impl Ways {
    /// Walks from the root to `path`, link by link.
    fn trace(&mut self, path: &Path) {
        let Ok(absolute) = std::path::absolute(path) else { return };
        let mut rest: VecDeque<OsString> = parts(&absolute);
        let mut at = PathBuf::from("/");
        let mut links = 0;
        while let Some(part) = rest.pop_front() {
            if part == ".." {
                at.pop();
                continue;
            }
            let next = at.join(&part);
            if !rest.is_empty() && self.passed.contains(&next) {
                at = next;
                continue;
            }
            self.names.insert(next.clone());
            match std::fs::symlink_metadata(&next) {
                Ok(meta) if meta.file_type().is_symlink() && links < MAX_LINKS => {
                    links += 1;
                    self.folders.insert(at.clone());
                    let Ok(target) = std::fs::read_link(&next) else { return };
                    if target.is_absolute() {
                        at = PathBuf::from("/");
                    }
                    for part in parts(&target).into_iter().rev() {
                        rest.push_front(part);
                    }
                }
                Ok(_) if rest.is_empty() => {
                    self.folders.insert(at.clone());
                }
                Ok(meta) if meta.is_dir() => {
                    self.passed.insert(next.clone());
                    at = next;
                }
                // A file in a folder's place, or one link too many: until somebody changes that, the way ends here.
                Ok(_) => {
                    self.folders.insert(at.clone());
                    return;
                }
                Err(_) => {
                    self.folders.insert(at.clone());
                    return;
                }
            }
        }
    }
}

fn parts(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter_map(|c| match c {
            Component::Normal(part) => Some(part.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests;
