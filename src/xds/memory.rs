//! The last good configuration on the relay's side: messages are gathered beside the stream and put into the
//! [`Store`] by a task of its own, so that no push waits for a compressor.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use prometheus::{IntCounterVec, IntGaugeVec};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tonic::{Code, Status};

use super::protocol::Protocol;
use crate::base::clock::Clock;
use crate::base::error::chain;
use crate::base::heap::Passing;
use crate::base::lane::Lane;
use crate::base::place::{self, Mode as FileMode};
use crate::base::seldom::Seldom;
use crate::base::tasks::Stop;
use crate::replay::{Mode, StandIn, Store, disk};
use crate::trouble::{Kind, Report, Reporter};

/// Noting, reading and writing come one after the other; the second place is for one that a disk holds up.
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

/// The file that outlives the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Where it is: in `XDS_REPLAY_DIR`.
    pub file: PathBuf,
    /// For how long it is good without a word of istiod's (`XDS_REPLAY_MAX_AGE`, 24 h).
    pub max_age: Duration,
}

/// After a change the file is written so much later, that a burst of pushes is written once.
const SETTLE: Duration = Duration::from_secs(2);
/// While istiod is there, the file is told so as often as its age allows mistakes of a twenty-fourth.
const CONFIRM: u32 = 24;
/// How long a stream waits for what was before it, a slow disk included.
const CATCH_UP: Duration = Duration::from_secs(2);

/// The store, and the way to it.
pub(super) struct Memory {
    config: Config,
    store: Mutex<Store>,
    // Unbounded, but not in bytes: see `queued`.
    events: mpsc::UnboundedSender<Event>,
    inbox: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
    queued: AtomicUsize,
    streams: AtomicU64,
    // Istiod's last word was a refusal: what it does not give, memory does not give either.
    refused: AtomicBool,
    // Istiod's stream lives, and when that was so last, in seconds since 1970; 0: never.
    live: AtomicBool,
    good: AtomicU64,
    owner: OnceLock<Arc<str>>,
    passing: Arc<Passing>,
    clock: Arc<dyn Clock>,
    trouble: Mutex<Reporter>,
    disk_trouble: Mutex<Reporter>,
    meters: Meters,
}

struct Meters {
    serving: IntGaugeVec,
    streams: IntCounterVec,
    bytes: IntGaugeVec,
    resources: IntGaugeVec,
}

enum Event {
    Request(u64, Mode, Bytes),
    Response(u64, Mode, Bytes),
    Lost,
    Flush(oneshot::Sender<()>),
}

impl Event {
    fn length(&self) -> usize {
        match self {
            Self::Request(_, _, message) | Self::Response(_, _, message) => message.len(),
            Self::Lost | Self::Flush(_) => 0,
        }
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
    pub(super) fn new(config: Config, parts: &super::Parts, passing: Arc<Passing>) -> Self {
        let (metrics, trouble) = (&parts.metrics, parts.trouble.sibling());
        let (events, inbox) = mpsc::unbounded_channel();
        let gauge = |name, help, labels: &[&str]| metrics.gauge(name, help, labels);
        Self {
            store: Mutex::new(Store::new(config.most)),
            config,
            events,
            inbox: Mutex::new(Some(inbox)),
            queued: AtomicUsize::new(0),
            streams: AtomicU64::new(0),
            refused: AtomicBool::new(false),
            live: AtomicBool::new(false),
            good: AtomicU64::new(0),
            owner: OnceLock::new(),
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

    pub(super) fn after(&self) -> Duration {
        self.config.after
    }

    /// A request that goes to istiod in attempt `id`.
    pub(super) fn request(&self, id: u64, protocol: Protocol, message: Bytes) {
        self.put(message.len(), Event::Request(id, protocol.mode(), message));
    }

    pub(super) fn response(&self, id: u64, protocol: Protocol, message: Bytes) {
        self.put(message.len(), Event::Response(id, protocol.mode(), message));
    }

    /// Largest message that is gathered to be noted, in bytes, before it is compressed. As much as all of it may take
    /// afterwards; more where that is little.
    pub(super) fn largest(&self) -> u64 {
        self.config.most.max(LARGEST).min(self.config.most.saturating_mul(4)) as u64
    }

    /// A message above [`Self::largest`] went by: nothing is whole without it.
    pub(super) fn too_large(&self, length: u64) {
        if let Some(more) = TOO_LARGE.may() {
            let most = self.largest();
            tracing::warn!(target: "xdsproxy", "a message of {length} bytes is more than XDS_REPLAY notes, {most} \
                bytes, so what was noted is dropped; raise XDS_REPLAY_MAX_BYTES{more}");
        }
        let _ = self.events.send(Event::Lost);
    }

    fn put(&self, length: usize, event: Event) {
        // What is kept compressed has this bound; what waits to be is four times the size at most.
        if self.queued.fetch_add(length, Relaxed) + length > self.config.most.saturating_mul(4) {
            self.queued.fetch_sub(length, Relaxed);
            let _ = self.events.send(Event::Lost);
            return;
        }
        let _ = self.events.send(event);
    }

    /// Puts into the store what the streams bring, and the store into its file, until `stop`. `owner` is who the
    /// configuration is for.
    pub(super) async fn keep(self: Arc<Self>, owner: String, stop: Stop) {
        let inbox = self.inbox.lock().expect("no panic holds this lock").take();
        let Some(mut inbox) = inbox else { return };
        let owner: Arc<str> = owner.into();
        let _ = self.owner.set(owner.clone());
        let confirm = self.config.disk.as_ref().map(|disk| disk.max_age / CONFIRM);
        let (mut saved, mut due) = (self.load(&owner).await, None);
        loop {
            let mut events = Vec::new();
            let save = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => {
                    // What the streams have brought until their end; a successor is given it.
                    while let Ok(event) = inbox.try_recv() {
                        events.push(event);
                    }
                    self.apply(std::mem::take(&mut events));
                    if due.is_some() {
                        self.save(&owner).await;
                    }
                    return;
                }
                () = save => {
                    saved = self.save(&owner).await;
                    due = confirm.map(|pause| Instant::now() + pause);
                    continue;
                }
                n = inbox.recv_many(&mut events, 256) => if n == 0 { return },
            }
            let gathered = events.iter().map(Event::length).sum();
            if confirm.is_some() {
                let changed = self.store.lock().is_ok_and(|store| store.changes() != saved);
                let soon = Instant::now() + SETTLE;
                // The first change of a burst decides.
                if changed && due.is_none_or(|at| at > soon) {
                    due = Some(soon);
                }
            }
            let memory = self.clone();
            if WORK.run(move || memory.apply(events)).await.is_err() {
                // What was under way may be half done.
                let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
                store.lost();
                self.store.clear_poison();
            }
            // What was gathered beside the stream is free now that it is compressed.
            self.passing.more(gathered);
        }
    }

    // Reads the file, if there is a good one; gives how often the store has changed.
    async fn load(self: &Arc<Self>, owner: &Arc<str>) -> u64 {
        if self.take_over(owner) {
            return 0;
        }
        let Some(Disk { file, max_age }) = self.config.disk.clone() else { return 0 };
        let (memory, owner, shown) = (self.clone(), owner.clone(), file.display().to_string());
        let read = WORK.run(move || {
            let bytes = match std::fs::read(&file) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                bytes => bytes.map_err(|e| e.to_string())?,
            };
            let now = unix(memory.clock.now());
            let read = disk::read(&bytes, &owner, now, max_age.as_secs(), memory.config.most);
            read.map(Some).map_err(|refused| refused.to_string())
        });
        match read.await {
            Ok(Ok(Some((store, at)))) => {
                let (_, resources) = store.raw();
                tracing::info!(target: "xdsproxy",
                    "the last good configuration of {resources} resources was read from {shown}");
                self.good.store(at, Relaxed);
                *self.store.lock().unwrap_or_else(PoisonError::into_inner) = store;
            }
            Ok(Ok(None)) | Err(_) => {}
            Ok(Err(why)) => {
                tracing::warn!(target: "xdsproxy", "the last good configuration in {shown} is not used: {why}");
            }
        }
        0
    }

    // What the program before us in this process held; nothing of it is old.
    fn take_over(&self, owner: &str) -> bool {
        let Some(bytes) = &self.config.left else { return false };
        match disk::read(bytes, owner, unix(self.clock.now()), u64::MAX, self.config.most) {
            Ok((store, at)) => {
                tracing::info!(target: "xdsproxy",
                    "the last good configuration of {} resources was handed over", store.raw().1);
                self.good.store(at, Relaxed);
                *self.store.lock().unwrap_or_else(PoisonError::into_inner) = store;
                true
            }
            Err(why) => {
                tracing::warn!(target: "xdsproxy", "the last good configuration was not handed over: {why}");
                false
            }
        }
    }

    /// What a successor in this process needs; `None`: nothing is known that would be of use.
    pub(super) fn kept(&self) -> Option<Vec<u8>> {
        let owner = self.owner.get()?;
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        if !store.is_whole() {
            return None;
        }
        let good = if self.live.load(Relaxed) { unix(self.clock.now()) } else { self.good.load(Relaxed) };
        disk::write_with(&mut store, owner, good, true).ok()
    }

    // Writes the file, if istiod has ever stood behind what is in the store; gives how often that has changed.
    async fn save(self: &Arc<Self>, owner: &Arc<str>) -> u64 {
        let Some(Disk { file, .. }) = self.config.disk.clone() else { return 0 };
        let (memory, owner) = (self.clone(), owner.clone());
        let written = WORK.run(move || {
            if memory.live.load(Relaxed) {
                memory.good.store(unix(memory.clock.now()), Relaxed);
            }
            let good = memory.good.load(Relaxed);
            let mut store = memory.store.lock().unwrap_or_else(PoisonError::into_inner);
            let changes = store.changes();
            if good == 0 || !store.is_whole() {
                return (changes, Ok(()));
            }
            let bytes = disk::write(&mut store, &owner, good);
            drop(store);
            let put =
                |bytes: Vec<u8>| place::put(&file, &bytes, FileMode::Exact(0o600)).map_err(|e| chain(&e));
            (changes, bytes.map_err(|e| e.to_string()).and_then(put))
        });
        let Ok((changes, result)) = written.await else { return 0 };
        let trouble = self.disk_trouble.lock().expect("no panic holds this lock");
        match result {
            Ok(()) => trouble.end(),
            Err(why) => trouble.report(Report::new(Kind::ReplayNotWritten, why)),
        }
        changes
    }

    /// For how long what is kept may still be used; `None`: no end is in sight.
    pub(super) fn left(&self) -> Option<Duration> {
        let max_age = self.config.disk.as_ref().filter(|_| !self.live.load(Relaxed))?.max_age;
        let age = unix(self.clock.now()).saturating_sub(self.good.load(Relaxed));
        Some(max_age.saturating_sub(Duration::from_secs(age)))
    }

    /// Istiod's stream is over.
    pub(super) fn ended(&self) {
        if self.live.swap(false, Relaxed) {
            self.good.store(unix(self.clock.now()), Relaxed);
        }
    }

    fn apply(&self, events: Vec<Event>) {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let mut flushed = Vec::new();
        for event in events {
            match event {
                Event::Request(id, mode, message) => {
                    self.queued.fetch_sub(message.len(), Relaxed);
                    store.request(id, mode, &message);
                }
                Event::Response(id, mode, message) => {
                    self.queued.fetch_sub(message.len(), Relaxed);
                    store.response(id, mode, &message);
                }
                Event::Lost => store.lost(),
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
        for done in flushed {
            // Who asked may have gone.
            let _ = done.send(());
        }
    }

    /// Whether a stream of this form could be answered, everything before it taken into account.
    pub(super) async fn can_serve(&self, protocol: Protocol) -> bool {
        if self.refused.load(Relaxed) {
            return false;
        }
        let (done, flushed) = oneshot::channel();
        let caught_up = async { self.events.send(Event::Flush(done)).is_ok() && flushed.await.is_ok() };
        if tokio::time::timeout(CATCH_UP, caught_up).await != Ok(true) || self.left() == Some(Duration::ZERO)
        {
            return false;
        }
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        store.is_whole() && store.mode() == Some(protocol.mode())
    }

    /// Whether there is anything to stand in with.
    pub(super) fn is_whole(&self) -> bool {
        !self.refused.load(Relaxed)
            && self.left() != Some(Duration::ZERO)
            && self.store.lock().unwrap_or_else(PoisonError::into_inner).is_whole()
    }

    /// The next answer of the stand-in.
    pub(super) fn answer(&self, envoy: &mut StandIn) -> std::io::Result<Option<Bytes>> {
        envoy.answer(&self.store.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Istiod has answered on a stream.
    pub(super) fn answered(&self) {
        self.refused.store(false, Relaxed);
        self.live.store(true, Relaxed);
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

    /// Envoy is answered from memory from now on.
    pub(super) fn serve(self: &Arc<Self>, address: &str) -> Serving {
        let resources = {
            let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
            store.raw().1
        };
        let since = crate::trouble::rfc3339(self.clock.now());
        let text = format!(
            "Envoy is served from memory since {since} ({resources} resources), because {address} cannot be reached"
        );
        let trouble = self.trouble.lock().expect("no panic holds this lock").sibling();
        trouble.report(Report::new(Kind::ServingFromMemory, text));
        self.meters.serving.with_label_values(&NONE).inc();
        Serving { memory: self.clone(), trouble, result: "ended" }
    }
}

/// A stream that is answered from memory.
pub(super) struct Serving {
    memory: Arc<Memory>,
    trouble: Reporter,
    result: &'static str,
}

impl Serving {
    /// Istiod has it now.
    pub(super) fn handed_over(mut self) {
        self.result = "handed over";
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.trouble.end();
        self.memory.meters.serving.with_label_values(&NONE).dec();
        self.memory.meters.streams.with_label_values(&[self.result]).inc();
    }
}

fn unix(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
