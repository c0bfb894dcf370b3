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
//! The kernel is asked through rustix. The crate `notify` is declined: it needs a thread for what the runtime does
//! anyway, and ends the process where the system gives it none. Nothing is opened before there is a path, since
//! most agents watch few files.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::future::pending;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// Links followed on the way to one file before giving up, as in the kernel (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// What changes a file, or the folder that it is in. Nobody is told of readers.
const CHANGES: WatchFlags = WatchFlags::ATTRIB
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// After these a folder of that name may be another one.
const REPLACES: ReadFlags = ReadFlags::CREATE
    .union(ReadFlags::DELETE)
    .union(ReadFlags::MOVED_FROM)
    .union(ReadFlags::MOVED_TO)
    .union(ReadFlags::DELETE_SELF)
    .union(ReadFlags::MOVE_SELF);

/// Watches a set of paths.
pub(crate) struct Watcher {
    paths: BTreeSet<PathBuf>,
    quiet: Duration,
    quiet_until: Option<Instant>,
    /// Every component of every watched path: an event elsewhere is not ours.
    names: HashSet<PathBuf>,
    /// Folders that may be others than those that are watched.
    lost: Vec<PathBuf>,
    kernel: Option<Kernel>,
    failures: u64,
}

/// The kernel's list of watches, and what they are of.
struct Kernel {
    list: Arc<OwnedFd>,
    // Made where it is waited for: the rest may happen beside the runtime.
    ready: Option<AsyncFd<Arc<OwnedFd>>>,
    folders: BTreeMap<PathBuf, i32>,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let folders: Vec<_> = self.kernel.iter().flat_map(|kernel| kernel.folders.keys()).collect();
        f.debug_struct("Watcher")
            .field("paths", &self.paths)
            .field("folders", &folders)
            .finish_non_exhaustive()
    }
}

impl Watcher {
    /// Watches nothing yet. Reports come `quiet` after the first of a burst of events.
    #[must_use]
    pub(crate) fn new(quiet: Duration) -> Self {
        Self {
            paths: BTreeSet::new(),
            quiet,
            quiet_until: None,
            names: HashSet::new(),
            lost: Vec::new(),
            kernel: None,
            failures: 0,
        }
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
        let mut folders = BTreeSet::new();
        for path in paths {
            if !self.paths.contains(&path) {
                trace(&path, &mut folders, &mut self.names);
                self.paths.insert(path);
            }
        }
        self.place(folders);
    }

    /// Watches that could not be placed, since the start. The slow check covers what they miss.
    #[must_use]
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    /// Follows the links anew and places what is missing. Call it before
    /// looking at the files on a timer.
    pub(crate) fn refresh(&mut self) {
        let mut folders = BTreeSet::new();
        let mut names = HashSet::new();
        for path in &self.paths {
            trace(path, &mut folders, &mut names);
        }
        self.names = names;
        let lost = std::mem::take(&mut self.lost);
        if self.paths.is_empty() {
            self.kernel = None;
            return;
        }
        if let Some(kernel) = &mut self.kernel {
            let gone = kernel.folders.keys().filter(|f| lost.contains(f) || !folders.contains(*f));
            for folder in gone.cloned().collect::<Vec<_>>() {
                kernel.leave(&folder);
            }
        }
        self.place(folders);
    }

    /// Watches these folders; those that are watched already stay as they are.
    fn place(&mut self, folders: BTreeSet<PathBuf>) {
        if folders.is_empty() {
            return;
        }
        let mut kernel = match self.kernel.take().map_or_else(Kernel::new, Ok) {
            Ok(kernel) => kernel,
            Err(error) => {
                self.failures += 1;
                tracing::debug!("files are not watched, only looked at from time to time: {error}");
                return;
            }
        };
        for folder in folders {
            if let Err(error) = kernel.watch(&folder) {
                self.failures += 1;
                tracing::debug!("cannot watch the folder {}: {error}", folder.display());
            }
        }
        self.kernel = Some(kernel);
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
            let Some(kernel) = &mut self.kernel else { return pending().await };
            if let Err(error) = kernel.events().await {
                self.failures += 1;
                tracing::debug!("files are only looked at from time to time: {error}");
                // The next refresh tries anew.
                self.kernel = None;
            } else if self.take() {
                self.quiet_until = Some(Instant::now() + self.quiet);
            }
        }
        if let Some(until) = self.quiet_until {
            tokio::time::sleep_until(until).await;
        }
        self.quiet_until = None;
        // The rest of the burst.
        self.take();
    }

    /// Takes the events that are there; tells whether one is about our paths.
    fn take(&mut self) -> bool {
        let Some(kernel) = &mut self.kernel else { return false };
        let list = Arc::clone(&kernel.list);
        // Room for a few events with the longest names.
        let mut space = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&*list, &mut space);
        let mut matters = false;
        loop {
            let event = match events.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                // Mostly: there are no more.
                Err(_) => return matters,
            };
            let what = event.events();
            if what.contains(ReadFlags::QUEUE_OVERFLOW) {
                // Names no file: look at all.
                matters = true;
            }
            let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
            for (folder, _) in kernel.folders.iter().filter(|(_, watch)| **watch == event.wd()) {
                let path = name.map_or_else(|| folder.clone(), |name| folder.join(name));
                if !self.names.contains(&path) {
                    continue;
                }
                matters = true;
                if what.intersects(REPLACES) {
                    self.lost.push(path);
                }
            }
            if what.contains(ReadFlags::IGNORED) {
                // The watch has died with its folder.
                kernel.folders.retain(|_, watch| *watch != event.wd());
            }
        }
    }
}

impl Kernel {
    fn new() -> io::Result<Self> {
        let list = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        Ok(Self { list: Arc::new(list), ready: None, folders: BTreeMap::new() })
    }

    fn watch(&mut self, folder: &Path) -> io::Result<()> {
        if !self.folders.contains_key(folder) {
            let watch = inotify::add_watch(&*self.list, folder, CHANGES)?;
            self.folders.insert(folder.to_owned(), watch);
        }
        Ok(())
    }

    fn leave(&mut self, folder: &Path) {
        // One folder under two names has one watch.
        if let Some(watch) = self.folders.remove(folder)
            && !self.folders.values().any(|other| *other == watch)
        {
            let _ = inotify::remove_watch(&*self.list, watch);
        }
    }

    /// Waits for events.
    async fn events(&mut self) -> io::Result<()> {
        #[expect(deprecated, reason = "its unsafe successor is for descriptors that somebody else may close")]
        let ready = match self.ready.take() {
            Some(ready) => ready,
            None => AsyncFd::with_interest(Arc::clone(&self.list), Interest::READABLE)?,
        };
        self.ready.insert(ready).readable().await?.clear_ready();
        Ok(())
    }
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
