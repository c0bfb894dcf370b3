//! One list of the kernel's watches for all watchers of an agent.
//!
//! A user may have 128 such lists (`fs.inotify.max_user_instances`), and all agents of a node are one user: so an agent
//! has one, opened when there is something to watch. Whoever waits reads for everybody; each member is told of what
//! concerns it. A folder that several members need is watched once.
//!
//! The kernel is asked through rustix. The crate `notify` is declined: it needs a thread for what the runtime does
//! anyway, and ends the process where the system gives it none.
//!
//! Placing a watch walks a path, which may take as long as the file system likes: the lock is not held meanwhile. When
//! an event came before its folder was on the list, the member that has placed the watch is told that there is news.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsStr;
use std::future::pending;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

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

/// What makes it another folder than its path leads to. What happens in it is no event.
const MOVES: WatchFlags = WatchFlags::MOVE_SELF.union(WatchFlags::ONLYDIR).union(WatchFlags::MASK_ADD);

/// After these a folder of that name may be another one.
const REPLACES: ReadFlags = ReadFlags::CREATE
    .union(ReadFlags::DELETE)
    .union(ReadFlags::MOVED_FROM)
    .union(ReadFlags::MOVED_TO)
    .union(ReadFlags::DELETE_SELF)
    .union(ReadFlags::MOVE_SELF);

/// What the system may have no more of, as it is told.
const LISTS: &str = "fs.inotify.max_user_instances, or the limit of open files";
const PLACES: &str = "fs.inotify.max_user_watches";

/// The list. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watches(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    kernel: Option<Kernel>,
    members: BTreeMap<u64, Interests>,
    next: u64,
    /// What was told to be reached.
    reached: BTreeSet<&'static str>,
}

impl State {
    /// The kernel has no more for this user: told once, since everything is looked at as well.
    fn reached(&mut self, limit: &'static str, error: &io::Error) {
        if self.reached.insert(limit) {
            tracing::warn!(
                "files are only looked at from time to time, as the system watches no more of them for this user: {error}; \
                 raise {limit}; until then a changed file, or a removed socket, is noticed late"
            );
        }
    }

    fn listed(&mut self) {
        if self.reached.remove(LISTS) {
            tracing::info!("files are watched again");
        }
    }
}

/// The kernel's list, and what its watches are of.
#[derive(Debug)]
struct Kernel {
    list: Arc<OwnedFd>,
    // Made where it is waited for: the rest may happen beside the runtime.
    ready: Option<Arc<AsyncFd<Arc<OwnedFd>>>>,
    folders: BTreeMap<PathBuf, Folder>,
    /// Events of watches that are not on the list, or not yet.
    strays: u64,
}

#[derive(Debug)]
struct Folder {
    watch: i32,
    /// What happens in it is told, too.
    whole: bool,
    users: BTreeSet<u64>,
}

/// What one member is told of.
#[derive(Debug, Default)]
struct Interests {
    /// Every component of every watched path: an event elsewhere is not its.
    names: HashSet<PathBuf>,
    /// Folders that may be others than those that are watched.
    lost: BTreeSet<PathBuf>,
    news: bool,
    told: Arc<Notify>,
}

impl Interests {
    fn tell(&mut self) {
        self.news = true;
        self.told.notify_one();
    }
}

impl Watches {
    /// A member that is interested in nothing yet.
    pub(super) fn join(&self) -> Member {
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        let told = Arc::new(Notify::new());
        state.members.insert(id, Interests { told: told.clone(), ..Interests::default() });
        Member { watches: self.clone(), id, told }
    }

    /// Watched folders, and how many members need each.
    #[cfg(test)]
    pub(super) fn folders(&self) -> impl Iterator<Item = (PathBuf, usize)> {
        let state = self.lock();
        let folders = state.kernel.iter().flat_map(|kernel| &kernel.folders);
        folders.map(|(path, folder)| (path.clone(), folder.users.len())).collect::<Vec<_>>().into_iter()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A member; it leaves when it is dropped.
#[derive(Debug)]
pub(super) struct Member {
    watches: Watches,
    id: u64,
    told: Arc<Notify>,
}

impl Member {
    /// Is told of these too.
    pub(super) fn also(&self, names: HashSet<PathBuf>) {
        if let Some(interests) = self.watches.lock().members.get_mut(&self.id) {
            interests.names.extend(names);
        }
    }

    /// Is told of these from now on, and leaves other folders than these, and those that may be others now. `above` are
    /// those of which only moves are of interest.
    pub(super) fn only(
        &self,
        names: HashSet<PathBuf>,
        folders: &BTreeSet<PathBuf>,
        above: &BTreeSet<PathBuf>,
    ) {
        let mut state = self.watches.lock();
        let state = &mut *state;
        let Some(interests) = state.members.get_mut(&self.id) else { return };
        interests.names = names;
        let lost = std::mem::take(&mut interests.lost);
        let Some(kernel) = &mut state.kernel else { return };
        // With a folder all below it are others.
        let is_lost = |folder: &Path| folder.ancestors().any(|above| lost.contains(above));
        kernel.leave(self.id, |path, folder| {
            is_lost(path) || !(folders.contains(path) || above.contains(path) && !folder.whole)
        });
        // Who needs nothing keeps no descriptor.
        state.kernel.take_if(|kernel| kernel.folders.is_empty() && folders.is_empty());
    }

    /// Watches these folders; those that are watched already stay as they are. Gives how many could not be.
    pub(super) fn place(&self, folders: BTreeSet<PathBuf>) -> u64 {
        self.add(folders, CHANGES)
    }

    /// Watches whether these folders are moved, and nothing in them. Whether each could be is nobody's concern: all that is
    /// seen so is found by a look, too.
    pub(super) fn place_above(&self, folders: BTreeSet<PathBuf>) {
        self.add(folders, MOVES);
    }

    fn add(&self, mut folders: BTreeSet<PathBuf>, what: WatchFlags) -> u64 {
        if folders.is_empty() {
            return 0;
        }
        let (list, strays) = {
            let mut state = self.watches.lock();
            // The ends of watches that were left are no news.
            state.read();
            let kernel = match state.kernel.take().map_or_else(Kernel::new, Ok) {
                Ok(kernel) => {
                    state.listed();
                    state.kernel.insert(kernel)
                }
                Err(error) => {
                    state.reached(LISTS, &error);
                    return 1;
                }
            };
            folders.retain(|f| {
                let known = kernel.folders.get(f).filter(|folder| folder.users.contains(&self.id));
                known.is_none_or(|folder| what == CHANGES && !folder.whole)
            });
            (kernel.list.clone(), kernel.strays)
        };
        let (mut placed, mut failed) = (Vec::new(), 0);
        for folder in folders {
            match inotify::add_watch(&*list, &folder, what) {
                Ok(watch) => {
                    let mut state = self.watches.lock();
                    let kernel = state.kernel.as_mut().filter(|kernel| Arc::ptr_eq(&kernel.list, &list));
                    // Else it was closed meanwhile, of which everybody is told.
                    if let Some(kernel) = kernel {
                        kernel.enter(&folder, watch, what == CHANGES, self.id);
                        placed.push(folder);
                    }
                }
                Err(error) => {
                    failed += 1;
                    if error == Errno::NOSPC {
                        self.watches.lock().reached(PLACES, &error.into());
                    }
                    tracing::debug!("cannot watch the folder {}: {error}", folder.display());
                }
            }
        }
        let mut state = self.watches.lock();
        let state = &mut *state;
        state.read();
        if state.kernel.as_ref().is_some_and(|kernel| kernel.strays != strays)
            && let Some(interests) = state.members.get_mut(&self.id)
        {
            interests.lost.extend(placed);
            interests.tell();
        }
        failed
    }

    /// Whether there is news; there is none any more then.
    pub(super) fn take(&self) -> bool {
        let mut state = self.watches.lock();
        state.read();
        state.members.get_mut(&self.id).is_some_and(|interests| std::mem::take(&mut interests.news))
    }

    /// Waits until there may be some.
    ///
    /// # Errors
    /// When the list is of no use any more.
    pub(super) async fn events(&self) -> io::Result<()> {
        let ready = {
            let mut state = self.watches.lock();
            let uses = |kernel: &&mut Kernel| kernel.folders.values().any(|f| f.users.contains(&self.id));
            state.kernel.as_mut().filter(uses).map(Kernel::ready).transpose()?
        };
        let readable = async {
            match &ready {
                Some(ready) => ready.readable().await.map(|mut guard| guard.clear_ready()),
                None => pending().await,
            }
        };
        tokio::select! {
            () = self.told.notified() => Ok(()),
            readable = readable => readable,
        }
    }

    /// Gives up the list; everybody is told.
    pub(super) fn close(&self) {
        let mut state = self.watches.lock();
        state.kernel = None;
        state.members.values_mut().for_each(Interests::tell);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut state = self.watches.lock();
        state.members.remove(&self.id);
        if let Some(kernel) = &mut state.kernel {
            kernel.leave(self.id, |_, _| true);
        }
        state.kernel.take_if(|kernel| kernel.folders.is_empty());
    }
}

impl State {
    /// Takes the events that are there, and tells those whom they concern.
    fn read(&mut self) {
        let Some(kernel) = &mut self.kernel else { return };
        let list = Arc::clone(&kernel.list);
        // Room for a few events with the longest names.
        let mut space = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&*list, &mut space);
        loop {
            let event = match events.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                // Mostly: there are no more.
                Err(_) => return,
            };
            let what = event.events();
            if what.contains(ReadFlags::QUEUE_OVERFLOW) {
                // Names no file: look at all.
                self.members.values_mut().for_each(Interests::tell);
            }
            if kernel.folders.values().all(|folder| folder.watch != event.wd()) {
                kernel.strays += 1;
                continue;
            }
            let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
            for (folder, _) in kernel.folders.iter().filter(|(_, folder)| folder.watch == event.wd()) {
                let path = name.map_or_else(|| folder.clone(), |name| folder.join(name));
                for member in self.members.values_mut().filter(|member| member.names.contains(&path)) {
                    member.tell();
                    if what.intersects(REPLACES) {
                        member.lost.insert(path.clone());
                    }
                }
            }
            if what.contains(ReadFlags::IGNORED) {
                // The watch has died: with its folder, or because a member has left while another came.
                for (_, folder) in kernel.folders.extract_if(.., |_, folder| folder.watch == event.wd()) {
                    for user in folder.users {
                        self.members.get_mut(&user).into_iter().for_each(Interests::tell);
                    }
                }
            }
        }
    }
}

impl Kernel {
    fn new() -> io::Result<Self> {
        let list = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        Ok(Self { list: Arc::new(list), ready: None, folders: BTreeMap::new(), strays: 0 })
    }

    /// A watch was placed: another one than the folder had, if it is another folder now.
    fn enter(&mut self, path: &Path, watch: i32, whole: bool, user: u64) {
        let new = || Folder { watch, whole, users: BTreeSet::new() };
        let folder = self.folders.entry(path.to_owned()).or_insert_with(new);
        folder.users.insert(user);
        let old = std::mem::replace(&mut folder.watch, watch);
        folder.whole = whole || (folder.whole && old == watch);
        if old != watch {
            self.end(old);
        }
    }

    fn leave(&mut self, user: u64, which: impl Fn(&Path, &Folder) -> bool) {
        let mut ended = Vec::new();
        self.folders.retain(|path, folder| {
            if which(path, folder) && folder.users.remove(&user) && folder.users.is_empty() {
                ended.push(folder.watch);
            }
            !folder.users.is_empty()
        });
        ended.into_iter().for_each(|watch| self.end(watch));
    }

    // One folder under two names has one watch.
    fn end(&self, watch: i32) {
        if !self.folders.values().any(|other| other.watch == watch) {
            let _ = inotify::remove_watch(&*self.list, watch);
        }
    }

    fn ready(&mut self) -> io::Result<Arc<AsyncFd<Arc<OwnedFd>>>> {
        if let Some(ready) = &self.ready {
            return Ok(ready.clone());
        }
        #[expect(deprecated, reason = "its unsafe successor is for descriptors that somebody else may close")]
        let ready = Arc::new(AsyncFd::with_interest(Arc::clone(&self.list), Interest::READABLE)?);
        Ok(self.ready.insert(ready).clone())
    }
}
