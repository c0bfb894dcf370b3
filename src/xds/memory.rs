//! The last good configuration on the relay's side: messages are gathered beside the stream and put into the
//! [`Store`] by a task of its own, so that no push waits for a compressor.
//!
//! The store belongs to threads ([`Lane`]): one that compresses holds it for as long as that takes. Those who read it
//! for long, for a file or an answer, take a copy that shares everything with it, and let go. The relay's own thread
//! asks the [`Glance`] that each change leaves.

mod file;
mod serving;

use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::Fuse;
use prometheus::{IntCounterVec, IntGaugeVec};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::{Code, Status};

use self::file::File;
pub(super) use self::serving::Serving;
use super::protocol::Protocol;
use crate::base::clock::Clock;
use crate::base::heap::Passing;
use crate::base::lane::Lane;
use crate::base::seldom::Seldom;
use crate::base::tasks::{Stop, guarded};
use crate::replay::{Mode, Store, disk};
use crate::trouble::{Kind, Report, Reporter};

/// Noting waits for no disk.
static WORK: Lane = Lane::new("last good configuration", 2);
const NONE: [&str; 0] = [];

/// Istiod can cause these.
static TOO_LARGE: Seldom = Seldom::new(6);
/// What one message may have before it is compressed, where less than that is kept: a few times what it may have then.
const LARGEST: usize = 16 << 20;

/// What is kept, and when it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// How long istiod is waited for when Envoy opens a stream (`XDS_REPLAY_AFTER`, 1 s); a connection that fails
    /// before ends the wait.
    pub after: Duration,
    /// Compressed bytes at most (`XDS_REPLAY_MAX_BYTES`, 64 MiB).
    pub most: usize,
    /// Also in a file (`XDS_REPLAY=disk`).
    pub disk: Option<Disk>,
    /// What the program before us in this process has left, in the form of the file.
    pub left: Option<Bytes>,
}

impl Config {
    // Names and versions stand beside what is compressed.
    fn largest_file(&self) -> u64 {
        self.most.max(LARGEST).saturating_mul(2) as u64
    }
}

/// The file that outlives the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Where it is: in `XDS_REPLAY_DIR`.
    pub file: PathBuf,
    /// For how long it is good without a word of istiod's (`XDS_REPLAY_MAX_AGE`, 24 h).
    pub max_age: Duration,
}

/// How long the last writing may take: less than the agent's stop gives the relay (3 s).
const LAST: Duration = Duration::from_secs(2);
/// How often the age is looked at while Envoy is served: the clock may be set, and goes on while a machine sleeps.
const LOOK: Duration = Duration::from_secs(60);
/// The store, and the way to it.
pub(super) struct Memory {
    config: Config,
    // Of the program before us, until it is read.
    inherited: Mutex<Option<Bytes>>,
    store: Mutex<Store>,
    // Locked for moments only.
    glance: Mutex<Glance>,
    // It has changed.
    news: watch::Sender<()>,
    // Unbounded, but not in bytes: see `queued`.
    events: mpsc::UnboundedSender<Event>,
    inbox: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
    queued: Arc<AtomicUsize>,
    streams: AtomicU64,
    // The attempt that istiod serves and what it brings is noted of; 0: there is none.
    feeder: AtomicU64,
    // Istiod's last word was a refusal: what it does not give, memory does not give either.
    refused: AtomicBool,
    // Streams on which istiod has answered and that live, and when there was one last, in seconds since 1970; 0: never.
    live: AtomicUsize,
    good: AtomicU64,
    owner: OnceLock<Arc<str>>,
    // How often the store had changed when the file was written last.
    saved: AtomicU64,
    passing: Arc<Passing>,
    clock: Arc<dyn Clock>,
    trouble: Mutex<Reporter>,
    disk_trouble: Mutex<Reporter>,
    meters: Meters,
}

/// What the store was after its last change.
#[derive(Debug, Clone, Copy, Default)]
struct Glance {
    whole: bool,
    mode: Option<Mode>,
    resources: usize,
    changes: u64,
}

struct Meters {
    serving: IntGaugeVec,
    streams: IntCounterVec,
    bytes: IntGaugeVec,
    resources: IntGaugeVec,
}

enum Event {
    Request(u64, Mode, Waiting),
    Response(u64, Mode, Waiting),
    Lost(u64),
    Flush(oneshot::Sender<()>),
}

impl Event {
    fn length(&self) -> usize {
        match self {
            Self::Request(_, _, waiting) | Self::Response(_, _, waiting) => waiting.message.len(),
            Self::Lost(_) | Self::Flush(_) => 0,
        }
    }
}

/// A message that counts as queued until it is dropped, noted or not: a thread may end before it comes to it.
struct Waiting {
    message: Bytes,
    queued: Arc<AtomicUsize>,
}

impl Waiting {
    fn new(message: Bytes, queued: &Arc<AtomicUsize>) -> Self {
        queued.fetch_add(message.len(), Relaxed);
        Self { message, queued: queued.clone() }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.queued.fetch_sub(self.message.len(), Relaxed);
    }
}

impl Protocol {
    pub(super) fn mode(self) -> Mode {
        match self {
            Self::Sotw => Mode::Sotw,
            Self::Delta => Mode::Delta,
        }
    }
}

impl Memory {
    pub(super) fn new(mut config: Config, parts: &super::Parts, passing: Arc<Passing>) -> Self {
        let (metrics, trouble) = (&parts.metrics, parts.trouble.sibling());
        let (events, inbox) = mpsc::unbounded_channel();
        let gauge = |name, help, labels: &[&str]| metrics.gauge(name, help, labels);
        Self {
            store: Mutex::new(Store::new(config.most)),
            glance: Mutex::default(),
            news: watch::Sender::default(),
            inherited: Mutex::new(config.left.take()),
            config,
            events,
            inbox: Mutex::new(Some(inbox)),
            queued: Arc::default(),
            streams: AtomicU64::new(0),
            feeder: AtomicU64::new(0),
            refused: AtomicBool::new(false),
            live: AtomicUsize::new(0),
            good: AtomicU64::new(0),
            owner: OnceLock::new(),
            saved: AtomicU64::new(0),
            passing,
            clock: parts.clock.clone(),
            disk_trouble: Mutex::new(trouble.sibling()),
            trouble: Mutex::new(trouble),
            meters: Meters {
                serving: gauge("xds_replay_serving", "Envoy's streams that are answered from memory", &[]),
                streams: metrics.counter(
                    "xds_replay_streams",
                    "Envoy's streams that were answered from memory, by how that ended",
                    &["result"],
                ),
                bytes: gauge(
                    "xds_replay_bytes",
                    "The last good configuration: its own size, and the memory it takes",
                    &["of"],
                ),
                resources: gauge("xds_replay_resources", "Resources of the last good configuration", &[]),
            },
        }
    }

    /// A number for an attempt at istiod, higher than any before.
    pub(super) fn next_stream(&self) -> u64 {
        self.streams.fetch_add(1, Relaxed) + 1
    }

    /// Of what attempt `id` brings from now on, until [`Self::over`], all is noted.
    pub(super) fn feeds(&self, id: u64) {
        self.feeder.fetch_max(id, Relaxed);
    }

    /// The attempt is over, whether it was noted or not.
    pub(super) fn over(&self, id: u64) {
        let _ = self.feeder.compare_exchange(id, 0, Relaxed, Relaxed);
    }

    /// Whether nothing of what istiod brings on any stream is noted.
    pub(super) fn is_unfed(&self) -> bool {
        self.feeder.load(Relaxed) == 0
    }

    pub(super) fn after(&self) -> Duration {
        self.config.after
    }

    /// A request that goes to istiod in attempt `id`.
    pub(super) fn request(&self, id: u64, protocol: Protocol, message: Bytes) {
        self.put(id, message, |message| Event::Request(id, protocol.mode(), message));
    }

    pub(super) fn response(&self, id: u64, protocol: Protocol, message: Bytes) {
        self.put(id, message, |message| Event::Response(id, protocol.mode(), message));
    }

    /// Largest message that is gathered to be noted, in bytes, before it is compressed. As much as all of it may take
    /// afterwards; more where that is little.
    pub(super) fn largest(&self) -> u64 {
        self.config.most.max(LARGEST).min(self.config.most.saturating_mul(4)) as u64
    }

    /// A message above [`Self::largest`] went by in attempt `id`: nothing is whole without it.
    pub(super) fn too_large(&self, id: u64, length: u64) {
        if let Some(more) = TOO_LARGE.may() {
            let most = self.largest();
            tracing::warn!(target: "xdsproxy", "a message of {length} bytes is more than XDS_REPLAY notes, {most} \
                bytes, so what was noted is dropped; raise XDS_REPLAY_MAX_BYTES{more}");
        }
        let _ = self.events.send(Event::Lost(id));
    }

    fn put(&self, id: u64, message: Bytes, event: impl FnOnce(Waiting) -> Event) {
        let waiting = Waiting::new(message, &self.queued);
        // What is kept compressed has this bound; what waits to be is four times the size at most.
        let fits = self.queued.load(Relaxed) <= self.config.most.saturating_mul(4);
        let _ = self.events.send(if fits { event(waiting) } else { Event::Lost(id) });
    }

    /// Puts into the store what the streams bring, and the store into its file, until `stop`. `owner` is who the
    /// configuration is for.
    pub(super) async fn keep(self: Arc<Self>, owner: String, stop: Stop) {
        let inbox = self.inbox.lock().expect("no panic holds this lock").take();
        let Some(mut inbox) = inbox else { return };
        let owner: Arc<str> = owner.into();
        let _ = self.owner.set(owner.clone());
        let later = tokio::select! {
            () = stop.cancelled() => return,
            later = self.load(&owner) => later,
        };
        let mut again = pin!(self.load_at(later, &owner).fuse());
        let mut file = File::new(self.clone(), owner.clone());
        file.changed();
        loop {
            let mut events = Vec::new();
            tokio::select! {
                () = stop.cancelled() => {
                    // What the streams have brought until their end; a successor is given it.
                    while let Ok(event) = inbox.try_recv() {
                        events.push(event);
                    }
                    let last = async {
                        self.note(events).await;
                        file.changed();
                        file.close().await;
                    };
                    let _ = tokio::time::timeout(LAST, last).await;
                    return;
                }
                () = file.written() => continue,
                () = &mut again => continue,
                n = inbox.recv_many(&mut events, 256) => if n == 0 { return },
            }
            let gathered = events.iter().map(Event::length).sum();
            if !events.iter().all(|event| matches!(event, Event::Flush(_))) {
                // Istiod is there: what it brings is newer, also where it is too large to be noted.
                again.set(Fuse::terminated());
            }
            self.note(events).await;
            file.changed();
            // What was gathered beside the stream is free now that it is compressed.
            self.passing.more(gathered);
        }
    }

    // Where the system gives no thread it is done here: what is good must not be given up for that.
    async fn note(self: &Arc<Self>, events: Vec<Event>) {
        if events.is_empty() {
            return;
        }
        let left = Arc::new(Mutex::new(Some(events)));
        let take =
            |left: &Mutex<Option<Vec<Event>>>| left.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (memory, theirs) = (self.clone(), left.clone());
        let work = move || take(&theirs).map(|events| memory.apply(events));
        let here = |events| guarded("last good configuration", || self.apply(events)).is_ok();
        if WORK.run(work).await.is_err() && !take(&left).is_some_and(here) {
            // What was under way may be half done.
            let mut store = self.store();
            store.lost(self.streams.load(Relaxed));
            self.store.clear_poison();
            self.show(&store);
        }
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // The store has changed.
    fn show(&self, store: &Store) {
        let (_, resources) = store.raw();
        let (whole, mode, changes) = (store.is_whole(), store.mode(), store.changes());
        *self.glance.lock().expect("no panic holds this lock") = Glance { whole, mode, resources, changes };
        let _ = self.news.send(());
    }

    fn glance(&self) -> Glance {
        *self.glance.lock().expect("no panic holds this lock")
    }

    // What was read is what there is.
    fn begin_with(&self, store: Store, good: u64) {
        self.good.store(good, Relaxed);
        let mut empty = self.store();
        *empty = store;
        self.show(&empty);
    }

    // What the program before us in this process held; nothing of it is old.
    async fn take_over(&self, owner: &Arc<str>) -> bool {
        let inherited = self.inherited.lock().expect("no panic holds this lock").take();
        let Some(bytes) = inherited else { return false };
        let (owner, most) = (owner.clone(), self.config.most);
        let read = WORK.run(move || {
            // Whatever the clock has been set to since.
            let read = disk::read(&bytes, &owner, u64::MAX, u64::MAX, most);
            read.map_err(|refused| refused.to_string())
        });
        match read.await.unwrap_or_else(|error| Err(error.to_string())) {
            Ok((store, at)) => {
                tracing::info!(target: "xdsproxy",
                    "the last good configuration of {} resources was handed over", store.raw().1);
                self.begin_with(store, at);
                // What the file has is not known.
                self.saved.store(u64::MAX, Relaxed);
                true
            }
            Err(why) => {
                tracing::warn!(target: "xdsproxy", "the last good configuration was not handed over: {why}");
                false
            }
        }
    }

    /// What a successor in this process needs; `None`: nothing is known that would be of use. Waits for what is being noted
    /// and writes all of it here: for an agent that has stopped everything else.
    pub(super) fn kept(&self) -> Option<Vec<u8>> {
        let owner = self.owner.get()?;
        let store = self.whole()?;
        let good = if self.live.load(Relaxed) > 0 { unix(self.clock.now()) } else { self.good.load(Relaxed) };
        let mut out = Vec::with_capacity(store.held());
        disk::write_to(&mut out, &store, owner, good, true).ok()?;
        Some(out)
    }

    // What there is, to be read in peace, where Envoy could serve with it.
    fn whole(&self) -> Option<Store> {
        let store = self.store();
        store.is_whole().then(|| store.shared())
    }

    /// For how long what is kept may still be used; `None`: no end is in sight.
    pub(super) fn left(&self) -> Option<Duration> {
        let max_age = self.config.disk.as_ref().filter(|_| self.live.load(Relaxed) == 0)?.max_age;
        let age = unix(self.clock.now()).saturating_sub(self.good.load(Relaxed));
        Some(max_age.saturating_sub(Duration::from_secs(age)))
    }

    /// Waits until what is kept may not be used any more. Where it has no age nobody wakes up for it.
    pub(super) async fn too_old(&self) {
        let Some(Disk { max_age, .. }) = &self.config.disk else { return std::future::pending().await };
        loop {
            let left = self.left().unwrap_or(*max_age);
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(LOOK)).await;
        }
    }

    /// A stream on which istiod has answered is over; once for each [`Self::answered`].
    pub(super) fn ended(&self) {
        self.good.store(unix(self.clock.now()), Relaxed);
        self.live.fetch_sub(1, Relaxed);
    }

    fn apply(&self, events: Vec<Event>) {
        let mut store = self.store();
        let mut flushed = Vec::new();
        for event in events {
            match event {
                Event::Request(id, mode, waiting) => {
                    if !store.request(id, mode, &waiting.message)
                        && let Some(more) = TOO_LARGE.may()
                    {
                        tracing::warn!(target: "xdsproxy", "Envoy names more resources than XDS_REPLAY notes, so what \
                            was noted is dropped; raise XDS_REPLAY_MAX_BYTES{more}");
                    }
                }
                Event::Response(id, mode, waiting) => {
                    if !store.response(id, mode, &waiting.message)
                        && let Some(more) = TOO_LARGE.may()
                    {
                        tracing::warn!(target: "xdsproxy", "istiod sends more than XDS_REPLAY notes before Envoy answers, \
                            so what was noted is dropped; raise XDS_REPLAY_MAX_BYTES{more}");
                    }
                }
                Event::Lost(id) => store.lost(id),
                Event::Flush(done) => flushed.push(done),
            }
        }
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let (raw, resources) = store.raw();
        self.meters.bytes.with_label_values(&["config"]).set(number(raw));
        self.meters.bytes.with_label_values(&["memory"]).set(number(store.held()));
        self.meters.resources.with_label_values(&NONE).set(number(resources));
        let trouble = self.trouble.lock().expect("no panic holds this lock");
        if !store.is_overflowed() {
            trouble.end_if(|kind| kind == Kind::ReplayTooLarge);
        } else if trouble.kind().is_none() {
            let text = format!(
                "the configuration takes more than {} bytes compressed (XDS_REPLAY_MAX_BYTES), so none of it is kept",
                self.config.most
            );
            trouble.report(Report::new(Kind::ReplayTooLarge, text));
        }
        self.show(&store);
        for done in flushed {
            // Who asked may have gone.
            let _ = done.send(());
        }
    }

    /// Istiod has answered on a stream, which lives until [`Self::ended`].
    pub(super) fn answered(&self) {
        self.refused.store(false, Relaxed);
        self.live.fetch_add(1, Relaxed);
        self.good.store(unix(self.clock.now()), Relaxed);
    }

    /// How an attempt ended; gives whether memory may stand in after it.
    pub(super) fn judge(&self, status: &Status) -> bool {
        let refused = matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied);
        if refused {
            self.refused.store(true, Relaxed);
        }
        !refused && !self.refused.load(Relaxed)
    }
}

fn unix(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests;
