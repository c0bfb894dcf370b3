//! Secrets that lie in files, kept by name and kept fresh.
//!
//! A file is published when its content changed and is whole: a chain only with the key that belongs to
//! it, roots only when at least one certificate is readable. Until then the last good content stays,
//! and the file is read again, first after `FILE_DEBOUNCE_DURATION`, for 10 s; then the trouble is
//! reported once (and once more where a configured file is gone then), and the file is looked at whenever it changes and
//! every 10 s. Only the certificate
//! file decides for a pair: a new key alone is half of a change. Where it stays alone, that is reported of the configured
//! pair, with which the agent could not start again.
//!
//! A file system that does not answer holds up nothing here (`disk`): it is one more reason why a file
//! cannot be read at the moment. A gateway follows thousands of pairs, so what is looked at together is read together,
//! [`AT_ONCE`] on one thread; where that takes too long, each is read on a thread of its own, which tells the one that
//! hangs from the others.

mod entry;
mod look;
mod read;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Error, Fetched, ResourceName};
use crate::base::backoff::{Jitter, Policy};
use crate::base::disk::{Looks, Watching};
use crate::base::files::Watches;
use crate::base::heap;
use entry::{Entry, Trouble};
use look::Found;
use read::Read;

pub(super) use read::{Loaded, Source, Unreadable, bytes, half};

/// How long an unreadable file is read again before that is reported; the Go agent's bound.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// How long a configured file may be missing (somebody removes and writes it anew) before that is reported:
/// the Go agent would turn to the CA at once.
const MISSING: Duration = Duration::from_secs(2);

/// Pace of the check under the watcher, for file systems that report nothing.
const SLOW_CHECK: Duration = Duration::from_secs(10);

/// A burst of events is answered once. Long enough for a file written in a few pieces, far below what
/// anybody waits for.
const QUIET: Duration = Duration::from_millis(25);

/// A file resource nobody follows is forgotten after this long.
const IDLE: Duration = Duration::from_secs(300);

/// Resources whose file system does not answer, before no other is looked at: each holds a thread.
const MAX_STUCK: usize = 8;

/// Resources that are read on one thread: of small files this many take a few milliseconds.
const AT_ONCE: usize = 32;

/// More than a gateway with a pair of files for each of 5,000 listeners; a client that asks for more is at fault.
const MAX_RESOURCES: usize = 8192;

/// What their names take together, in bytes: 96 for each. A name is held some twenty times (entry, paths, watches,
/// overview, trouble).
const MAX_NAMES: usize = 768 << 10;

/// Whoever has asked for a resource follows it after so long.
const ASKED: Duration = Duration::from_secs(1);

/// Names that take more than this together, in bytes, are a crowd: those that nobody follows and nothing was ever read of are
/// forgotten with the next slow check, not after [`IDLE`].
const CROWD: usize = MAX_NAMES / 8;

/// What a name takes, times its bytes; see [`MAX_NAMES`].
const HELD_TIMES: usize = 20;

/// What they hold together, in bytes: 5,000 pairs of an RSA key with a chain of two certificates (6 kB) are 30 MB.
const MAX_LOADED: usize = 32 << 20;

/// The operating system's bundle: the first of the usual places that exists.
#[must_use]
pub(crate) fn system_bundle() -> Option<PathBuf> {
    const PLACES: &[&str] = &[
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/ca-bundle.pem",
        "/etc/pki/tls/cacert.pem",
        "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
        "/etc/ssl/cert.pem",
        "/usr/local/etc/ssl/cert.pem",
        "/etc/ssl/certs/ca-certificates",
    ];
    PLACES.iter().map(PathBuf::from).find(|p| p.exists())
}

/// What a look at the files brought.
#[derive(Debug)]
pub(super) enum Event {
    /// New content.
    Loaded(ResourceName, Loaded),
    /// What was reported is over, and the content is what is known.
    Mended(ResourceName),
    /// There has been no usable content from the start, for [`MISSING`], or there is none for another reason than was told:
    /// whoever waits goes on waiting.
    Suspect { name: ResourceName, error: Arc<Error> },
    /// The content has been unusable for [`PATIENCE`]; `gone`: there is no file to be read.
    Troubled { name: ResourceName, error: Arc<Error>, gone: bool },
}

pub(super) type Reply = oneshot::Sender<Result<Fetched, Arc<Error>>>;

/// Adds one who waits. Before there is need of more room, those who are gone are forgotten: whoever asks and leaves, again
/// and again, fills none.
pub(super) fn hold_back<T>(waiting: &mut Vec<T>, one: T, is_gone: impl Fn(&T) -> bool) {
    if waiting.len() == waiting.capacity() {
        waiting.retain(|other| !is_gone(other));
        // So the next look comes after as many as there are.
        waiting.reserve(waiting.len().max(8));
    }
    waiting.push(one);
}

/// Of which group they are, and what was found for each.
type Together = (u64, Vec<Found>);

/// Names with what is wrong with each (empty: nothing), always as of now.
pub(crate) type Overview = Arc<Mutex<BTreeMap<String, String>>>;

/// All file resources in use.
///
/// A gateway may follow thousands, and asks for them one after the other: what a request costs must not grow with
/// how many there are. So what has nothing to wait for is never gone through but by the slow check.
#[derive(Debug)]
pub(super) struct Store {
    entries: BTreeMap<ResourceName, Entry>,
    /// What their names take, in bytes.
    names: usize,
    /// What is loaded of them takes, in bytes, but for the configured ones.
    held: usize,
    /// Those with trouble or with somebody waiting.
    unsettled: BTreeSet<ResourceName>,
    /// Those whose file system does not answer.
    stuck: BTreeSet<ResourceName>,
    /// Those that are read together, and how many groups there were.
    together: Looks<Together>,
    groups: u64,
    overview: Overview,
    watching: Watching,
    watched: BTreeSet<PathBuf>,
    /// To be watched before what lies there is read.
    unwatched: Vec<PathBuf>,
    counted: u64,
    retry: Policy,
    /// After this long what looks cut off has stayed so; no retry comes sooner.
    stays: Duration,
    slow: Instant,
}

impl Store {
    pub(super) fn new(debounce: Duration, watches: &Watches) -> Self {
        // A debounce of 0 would be a busy loop.
        let first = debounce.clamp(Duration::from_millis(10), PATIENCE);
        let retry = Policy::new(first, PATIENCE, 1.5, Jitter::PlusMinus(0.5)).expect("bounds are in order");
        Self {
            entries: BTreeMap::new(),
            names: 0,
            held: 0,
            unsettled: BTreeSet::new(),
            stuck: BTreeSet::new(),
            together: Looks::default(),
            groups: 0,
            overview: Overview::default(),
            watching: Watching::new(watches, QUIET),
            watched: BTreeSet::new(),
            unwatched: Vec::new(),
            counted: 0,
            retry,
            stays: first / 2,
            slow: Instant::now() + SLOW_CHECK,
        }
    }

    pub(super) fn holds(&self, name: &ResourceName) -> bool {
        self.entries.contains_key(name)
    }

    pub(super) fn loaded(&self, name: &ResourceName) -> Option<&Loaded> {
        self.entries.get(name)?.loaded.as_ref()
    }

    /// For whoever shows it.
    pub(super) fn overview(&self) -> Overview {
        Arc::clone(&self.overview)
    }

    // Called after whatever changes an entry, or takes it away.
    fn settle(&mut self, name: &ResourceName) {
        let mut overview = self.overview.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = self.entries.get(name) else {
            overview.remove(&name.to_string());
            self.unsettled.remove(name);
            self.stuck.remove(name);
            return;
        };
        let wrong = entry.trouble.as_ref().map(|t| t.reason.clone()).unwrap_or_default();
        overview.insert(name.to_string(), wrong);
        if entry.trouble.is_none() && entry.waiting.is_empty() {
            self.unsettled.remove(name);
        } else {
            self.unsettled.insert(name.clone());
        }
        if entry.looks.stuck() {
            self.stuck.insert(name.clone());
        } else {
            self.stuck.remove(name);
        }
    }

    fn unsettled(&self) -> impl Iterator<Item = (&ResourceName, &Entry)> {
        self.unsettled.iter().filter_map(|name| Some((name, self.entries.get(name)?)))
    }

    /// Follows a resource from now on; [`Store::look_at`] comes next.
    pub(super) fn follow(&mut self, name: &ResourceName, source: Source) -> Result<(), Error> {
        let now = Instant::now();
        if let Some(entry) = self.entries.get_mut(name).filter(|entry| entry.source == source) {
            entry.followed = now;
            return Ok(());
        }
        if self.entries.len() >= MAX_RESOURCES {
            return Err(Error::TooMany(MAX_RESOURCES));
        }
        let length = if self.holds(name) { 0 } else { name.to_string().len() };
        if self.names + length > MAX_NAMES {
            return Err(Error::TooLong(MAX_NAMES));
        }
        self.names += length;
        // Another source took this one's place: its own watches go with the next slow check.
        self.unwatched.extend(source.paths());
        if let Some(other) = self.entries.insert(name.clone(), Entry::new(source, now)) {
            self.held -= other.size;
        }
        Ok(())
    }

    /// Holds a reply back until the resource is read, at most [`PATIENCE`].
    pub(super) fn wait(&mut self, name: &ResourceName, reply: Reply) {
        if let Some(entry) = self.entries.get_mut(name) {
            let one = (Instant::now() + PATIENCE, reply);
            hold_back(&mut entry.waiting, one, |(_, reply)| reply.is_closed());
            self.unsettled.insert(name.clone());
        }
    }

    pub(super) fn take_waiting(&mut self, name: &ResourceName) -> Vec<Reply> {
        let waiting = self.entries.get_mut(name).map(|e| std::mem::take(&mut e.waiting)).unwrap_or_default();
        if !waiting.is_empty() {
            self.settle(name);
        }
        waiting.into_iter().map(|(_, reply)| reply).collect()
    }

    pub(super) async fn forget(&mut self, name: &ResourceName) {
        if let Some(entry) = self.entries.remove(name) {
            self.names -= name.to_string().len();
            self.held -= entry.size;
        }
        self.settle(name);
        self.watch().await;
    }

    /// Waits for the watcher.
    pub(super) async fn changed(&mut self) {
        self.watching.news().await;
    }

    /// Failures to place a watch since the last call.
    pub(super) fn new_watch_failures(&mut self) -> u64 {
        let all = self.watching.failures();
        let new = all - self.counted;
        self.counted = all;
        new
    }

    /// Looks at every file.
    pub(super) async fn look_all(&mut self) -> Vec<Event> {
        if self.entries.is_empty() {
            return Vec::new();
        }
        self.watching.refresh().await;
        let now = Instant::now();
        let names: Vec<_> = self.entries.keys().cloned().collect();
        self.look_each(&names, now).await
    }

    /// Looks at these, each named once.
    pub(super) async fn look_at(&mut self, names: &[ResourceName]) -> Vec<Event> {
        // Watched first, then read: a change in between is seen.
        self.watch_more().await;
        self.look_each(names, Instant::now()).await
    }

    /// What time brings: further tries, reports, refused waiters, the slow check.
    pub(super) async fn tick(
        &mut self,
        now: Instant,
        followers: impl Fn(&ResourceName) -> usize,
    ) -> (Vec<Event>, u32) {
        if now >= self.slow {
            self.slow = now + SLOW_CHECK;
            let is_crowd = self.names > CROWD;
            let idle = |entry: &Entry| if is_crowd && entry.loaded.is_none() { SLOW_CHECK } else { IDLE };
            self.forget_idle(now, idle, followers).await;
            return (self.look_all().await, self.refuse(now));
        }
        let due: Vec<_> = self
            .unsettled()
            .filter(|(_, e)| e.trouble.as_ref().is_some_and(|t| t.wake() <= now))
            .map(|(n, _)| n.clone())
            .collect();
        (self.look_each(&due, now).await, self.refuse(now))
    }

    /// Memory is short: nothing stays that nobody follows.
    pub(super) async fn shed(&mut self, followers: impl Fn(&ResourceName) -> usize) {
        self.forget_idle(Instant::now(), |_| ASKED, followers).await;
    }

    // Those that nobody has followed for as long as `idle` says.
    async fn forget_idle(
        &mut self,
        now: Instant,
        idle: impl Fn(&Entry) -> Duration,
        followers: impl Fn(&ResourceName) -> usize,
    ) {
        let before = self.names;
        let left = self.entries.extract_if(.., |name, entry| {
            let is_followed = followers(name) > 0 || !entry.waiting.is_empty();
            if is_followed {
                entry.followed = now;
            }
            !is_configured(name) && !is_followed && now.duration_since(entry.followed) >= idle(entry)
        });
        for (name, entry) in left.collect::<Vec<_>>() {
            self.names -= name.to_string().len();
            self.held -= entry.size;
            self.settle(&name);
        }
        self.watch().await;
        heap::freed((before - self.names) * HELD_TIMES);
    }

    async fn look_each(&mut self, names: &[ResourceName], now: Instant) -> Vec<Event> {
        let mut events = Vec::new();
        for group in names.chunks(AT_ONCE) {
            // What hangs is asked for by itself.
            let (stuck, group): (Vec<_>, Vec<_>) = group.iter().partition(|name| self.stuck.contains(name));
            let mut found = self.read_together(&group).await.into_iter().flatten();
            for name in group.into_iter().chain(stuck) {
                let found = match found.next() {
                    Some(found) => Some(found),
                    None => self.read_alone(name).await,
                };
                let event = self.take(name, now, found);
                self.settle(name);
                events.extend(event);
            }
        }
        events
    }

    /// The next moment [`Store::tick`] has something to do.
    pub(super) fn wake(&self) -> Option<Instant> {
        let troubles = self.unsettled().filter_map(|(_, e)| e.trouble.as_ref()).map(Trouble::wake);
        let waiting = self.unsettled().flat_map(|(_, e)| e.waiting.iter().map(|(until, _)| *until));
        let slow = (!self.entries.is_empty()).then_some(self.slow);
        troubles.chain(waiting).chain(slow).min()
    }

    fn refuse(&mut self, now: Instant) -> u32 {
        let mut refused = 0;
        for name in self.unsettled.clone() {
            let Some(entry) = self.entries.get_mut(&name) else { continue };
            if entry.waiting.iter().all(|(until, _)| *until > now) {
                continue;
            }
            let reason = entry.trouble.as_ref().map_or("no answer", |t| t.reason.as_str());
            let error = Arc::new(failure(&name, reason));
            for (until, reply) in std::mem::take(&mut entry.waiting) {
                if until > now {
                    entry.waiting.push((until, reply));
                } else {
                    refused += 1;
                    let _ = reply.send(Err(error.clone()));
                }
            }
            self.settle(&name);
        }
        refused
    }

    // Exactly what the entries need.
    async fn watch(&mut self) {
        let paths: BTreeSet<PathBuf> = self.entries.values().flat_map(|entry| entry.source.paths()).collect();
        if paths == self.watched {
            return;
        }
        if self.watching.set(paths.clone()).await {
            self.watched = paths;
        }
    }

    // What more entries need. Where the watcher is not at hand, the slow check places it.
    async fn watch_more(&mut self) {
        let mut new = std::mem::take(&mut self.unwatched);
        new.retain(|path| !self.watched.contains(path));
        if new.is_empty() {
            return;
        }
        if self.watching.add(new.clone()).await {
            self.watched.extend(new);
        }
    }

    // What there is of each, in this order; nothing when one of them takes too long, or another group still does.
    async fn read_together(&mut self, names: &[&ResourceName]) -> Option<Vec<Found>> {
        if names.len() < 2 {
            return None;
        }
        let mut wanted = Vec::with_capacity(names.len());
        for name in names {
            wanted.push(self.entries.get(*name)?.wanted(name));
        }
        self.groups += 1;
        let (group, mut room) = (self.groups, MAX_LOADED.saturating_sub(self.held));
        let look = move || (group, wanted.iter().map(|wanted| wanted.look(&mut room)).collect());
        // It may be an earlier group's that comes late.
        self.together.run(look).await.filter(|(of, _)| *of == group).map(|(_, found)| found)
    }

    async fn read_alone(&mut self, name: &ResourceName) -> Option<Found> {
        let stuck = self.stuck.len();
        let entry = self.entries.get_mut(name)?;
        if stuck >= MAX_STUCK && !entry.looks.stuck() {
            return None;
        }
        let (wanted, mut room) = (entry.wanted(name), MAX_LOADED.saturating_sub(self.held));
        entry.looks.run(move || wanted.look(&mut room)).await
    }

    // Nothing found: the file system does not answer.
    fn take(&mut self, name: &ResourceName, now: Instant, found: Option<Found>) -> Option<Event> {
        let entry = self.entries.get_mut(name)?;
        let silent = found.is_none();
        let nothing = || Found { read: Err(Unreadable::Silent), usable: true, stamp: None };
        let Found { read, usable, stamp } = found.unwrap_or_else(nothing);
        if read.is_ok() {
            entry.bad = None;
        }
        let reason = match read {
            Ok(Read::Same) => {
                entry.unfinished = None;
                let told = entry.trouble.take().is_some_and(|t| t.reported);
                return told.then(|| Event::Mended(name.clone()));
            }
            // What was looked for beside it may have come late and taken the room.
            Ok(Read::New { ref loaded, .. })
                if !is_configured(name) && self.held - entry.size + loaded.size() > MAX_LOADED =>
            {
                Unreadable::TooMuch(MAX_LOADED).to_string()
            }
            Ok(Read::New { loaded, hash, whole }) => {
                let unfinished = entry.unfinished.filter(|(seen, _)| *seen == hash);
                // However often somebody asks meanwhile, whoever writes it has that time.
                if whole || unfinished.is_some_and(|(_, since)| now >= since + self.stays) {
                    entry.unfinished = None;
                    entry.trouble = None;
                    entry.hash = hash;
                    self.held -= entry.size;
                    entry.size = if is_configured(name) { 0 } else { loaded.size() };
                    self.held += entry.size;
                    entry.loaded = Some(loaded.clone());
                    return Some(Event::Loaded(name.clone(), loaded));
                }
                entry.unfinished = unfinished.or(Some((hash, now)));
                "the file ends in the middle of a certificate".to_owned()
            }
            Err(error) => {
                // Half a file that comes after none is another one, which whoever writes it has just begun.
                if !matches!(error, Unreadable::Silent) {
                    entry.unfinished = None;
                }
                entry.wrong(&error, stamp)
            }
        };
        let retry = self.retry;
        // A disk that is slow may be well.
        let early = is_configured(name) && entry.loaded.is_none() && !silent;
        let trouble = entry.trouble.get_or_insert_with(|| Trouble::new(now));
        let is_new = trouble.reason != reason;
        if is_new {
            tracing::debug!(target: "cache", "{name} cannot be loaded yet: {reason}");
            trouble.reason = reason;
        }
        if trouble.next <= now {
            trouble.next = now + retry.delay(trouble.tries);
            trouble.tries += 1;
        }
        let gone = is_configured(name) && !usable;
        trouble.gone = gone.then(|| trouble.gone.unwrap_or(now));
        trouble.report = trouble.gone.map_or(trouble.since + PATIENCE, |since| since + MISSING);
        if !trouble.is_told() && now >= trouble.report {
            trouble.reported = true;
            trouble.reported_gone |= gone;
            let error = Arc::new(failure(name, &trouble.reason));
            return Some(Event::Troubled { name: name.clone(), error, gone });
        }
        let is_known = trouble.is_told() || trouble.suspected;
        let is_late = early && !gone && now >= trouble.since + MISSING;
        if (is_known && is_new) || (!is_known && is_late) {
            trouble.suspected |= is_late;
            let error = Arc::new(failure(name, &trouble.reason));
            return Some(Event::Suspect { name: name.clone(), error });
        }
        None
    }
}

/// The configured ones are the mesh's, and no client's: they are neither bounded nor forgotten.
fn is_configured(name: &ResourceName) -> bool {
    matches!(name, ResourceName::Default | ResourceName::RootCa)
}

fn failure(name: &ResourceName, reason: &str) -> Error {
    Error::File { name: name.to_string(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests;
