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
//! The notify crate runs one thread; it is started with the first path and not before, since most
//! agents watch no file.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::watch;
use tokio::time::Instant;

/// Links followed on the way to one file before giving up, as in the kernel (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// Watches a set of paths.
pub struct Watcher {
    paths: BTreeSet<PathBuf>,
    quiet: Duration,
    quiet_until: Option<Instant>,
    folders: BTreeSet<PathBuf>,
    shared: Arc<Mutex<Shared>>,
    news: watch::Sender<u64>,
    seen: watch::Receiver<u64>,
    backend: Option<RecommendedWatcher>,
    failures: u64,
}

#[derive(Default)]
struct Shared {
    /// Every component of every watched path: an event elsewhere is not ours.
    names: HashSet<PathBuf>,
    /// Folders whose watch died with them.
    lost: Vec<PathBuf>,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("paths", &self.paths).field("folders", &self.folders).finish()
    }
}

impl Watcher {
    /// Watches nothing yet. Reports come `quiet` after the first of a burst of events.
    #[must_use]
    pub fn new(quiet: Duration) -> Self {
        let (news, seen) = watch::channel(0);
        Self {
            paths: BTreeSet::new(),
            quiet,
            quiet_until: None,
            folders: BTreeSet::new(),
            shared: Arc::default(),
            news,
            seen,
            backend: None,
            failures: 0,
        }
    }

    /// Watches exactly these paths from now on.
    pub fn set(&mut self, paths: BTreeSet<PathBuf>) {
        if paths != self.paths {
            self.paths = paths;
            self.refresh();
        }
    }

    /// Watches that could not be placed, since the start. The slow check covers what they miss.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// Follows the links anew and places what is missing. Called by [`Watcher::changed`]; call it before
    /// looking at the files on a timer.
    pub fn refresh(&mut self) {
        let mut folders = BTreeSet::new();
        let mut names = HashSet::new();
        for path in &self.paths {
            trace(path, &mut folders, &mut names);
        }
        let lost = {
            let mut shared = self.shared.lock().expect("no panic holds this lock");
            shared.names = names;
            std::mem::take(&mut shared.lost)
        };
        if self.paths.is_empty() {
            self.folders.clear();
            self.backend = None;
            return;
        }
        if self.backend.is_none() {
            let (shared, news) = (self.shared.clone(), self.news.clone());
            match notify::recommended_watcher(move |event| on_event(&shared, &news, event)) {
                Ok(backend) => self.backend = Some(backend),
                Err(error) => {
                    self.failures += 1;
                    tracing::debug!("files are not watched, only looked at from time to time: {error}");
                    return;
                }
            }
        }
        let Some(backend) = &mut self.backend else { return };
        for folder in lost {
            if self.folders.remove(&folder) {
                let _ = backend.unwatch(&folder);
            }
        }
        for gone in self.folders.difference(&folders) {
            let _ = backend.unwatch(gone);
        }
        self.folders.retain(|f| folders.contains(f));
        for folder in folders.difference(&self.folders.clone()) {
            match backend.watch(folder, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    self.folders.insert(folder.clone());
                }
                Err(error) => {
                    self.failures += 1;
                    tracing::debug!("cannot watch the folder {}: {error}", folder.display());
                }
            }
        }
    }

    /// Waits until something may have changed. Nothing is lost when the future is dropped.
    pub async fn changed(&mut self) {
        self.news().await;
        self.refresh();
    }

    /// As [`Watcher::changed`], and does not touch the file system: the caller calls [`Watcher::refresh`] where
    /// it may.
    pub async fn news(&mut self) {
        if self.quiet_until.is_none() {
            // The sender lives in self, so this waits for ever at worst.
            let _ = self.seen.changed().await;
            self.quiet_until = Some(Instant::now() + self.quiet);
        }
        if let Some(until) = self.quiet_until {
            tokio::time::sleep_until(until).await;
        }
        self.quiet_until = None;
        self.seen.mark_unchanged();
    }
}

fn on_event(shared: &Mutex<Shared>, news: &watch::Sender<u64>, event: notify::Result<Event>) {
    let matters = match event {
        // A queue overflow names no file; look at all.
        Err(_) => true,
        Ok(event) if event.need_rescan() => true,
        Ok(event) => {
            let telling = match event.kind {
                EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
                EventKind::Access(_) => false,
                _ => true,
            };
            telling && note(shared, &event)
        }
    };
    if matters {
        news.send_modify(|n| *n += 1);
    }
}

fn note(shared: &Mutex<Shared>, event: &Event) -> bool {
    let Ok(mut shared) = shared.lock() else { return true };
    let ours: Vec<_> = event.paths.iter().filter(|p| shared.names.contains(*p)).cloned().collect();
    let matters = !ours.is_empty();
    if matches!(
        event.kind,
        EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)) | EventKind::Create(_)
    ) {
        // If one of these was a watched folder, its watch went with it.
        shared.lost.extend(ours);
    }
    matters
}

/// Walks from the root to `path`, link by link, collecting folders to watch and names that matter.
fn trace(path: &Path, folders: &mut BTreeSet<PathBuf>, names: &mut HashSet<PathBuf>) {
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
        names.insert(next.clone());
        match std::fs::symlink_metadata(&next) {
            Ok(meta) if meta.file_type().is_symlink() && links < MAX_LINKS => {
                links += 1;
                folders.insert(at.clone());
                let Ok(target) = std::fs::read_link(&next) else { return };
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                for part in parts(&target).into_iter().rev() {
                    rest.push_front(part);
                }
            }
            Ok(_) if rest.is_empty() => {
                folders.insert(at.clone());
            }
            Ok(_) => at = next,
            Err(_) => {
                folders.insert(at.clone());
                return;
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
