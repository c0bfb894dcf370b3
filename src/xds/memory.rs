//! The last good configuration on the relay's side: messages are gathered beside the stream and put into the
//! [`Store`] by a task of its own, so that no push waits for a compressor.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use prometheus::{IntCounterVec, IntGaugeVec};
use tokio::sync::{mpsc, oneshot};
use tonic::{Code, Status};

use super::frames::HEADER;
use super::protocol::Protocol;
use crate::base::metrics::Metrics;
use crate::base::tasks::Stop;
use crate::replay::{Mode, StandIn, Store};
use crate::trouble::{Kind, Report, Reporter};

const NONE: [&str; 0] = [];

/// What is kept, and when it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// How long istiod is waited for when Envoy opens a stream (`XDS_REPLAY_AFTER`, 1 s); a connection that fails
    /// before ends the wait.
    pub after: Duration,
    /// Compressed bytes at most (`XDS_REPLAY_MAX_BYTES`, 64 MiB).
    pub most: usize,
}

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
    trouble: Mutex<Reporter>,
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

impl Protocol {
    pub(super) fn mode(self) -> Mode {
        match self {
            Self::Sotw => Mode::Sotw,
            Self::Delta => Mode::Delta,
        }
    }
}

impl Memory {
    pub(super) fn new(config: Config, metrics: &Metrics, trouble: Reporter) -> Self {
        let (events, inbox) = mpsc::unbounded_channel();
        let gauge = |name, help, labels: &[&str]| metrics.gauge(name, help, labels);
        Self {
            config,
            store: Mutex::new(Store::new(config.most)),
            events,
            inbox: Mutex::new(Some(inbox)),
            queued: AtomicUsize::new(0),
            streams: AtomicU64::new(0),
            refused: AtomicBool::new(false),
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

    fn response(&self, id: u64, protocol: Protocol, message: Bytes) {
        self.put(message.len(), Event::Response(id, protocol.mode(), message));
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

    /// Puts into the store what the streams bring, until `stop`.
    pub(super) async fn keep(self: Arc<Self>, stop: Stop) {
        let inbox = self.inbox.lock().expect("no panic holds this lock").take();
        let Some(mut inbox) = inbox else { return };
        loop {
            let mut events = Vec::new();
            tokio::select! {
                () = stop.cancelled() => return,
                n = inbox.recv_many(&mut events, 256) => if n == 0 { return },
            }
            let memory = self.clone();
            if tokio::task::spawn_blocking(move || memory.apply(events)).await.is_err() {
                // What was under way may be half done.
                let mut store = self.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                store.lost();
                self.store.clear_poison();
            }
        }
    }

    fn apply(&self, events: Vec<Event>) {
        let mut store = self.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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
        flushed.into_iter().for_each(|done| drop(done.send(())));
    }

    /// Whether a stream of this form could be answered, everything before it taken into account.
    pub(super) async fn can_serve(&self, protocol: Protocol) -> bool {
        if self.refused.load(Relaxed) {
            return false;
        }
        let (done, flushed) = oneshot::channel();
        if self.events.send(Event::Flush(done)).is_err() || flushed.await.is_err() {
            return false;
        }
        let store = self.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        store.is_whole() && store.mode() == Some(protocol.mode())
    }

    /// The next answer of the stand-in.
    pub(super) fn answer(&self, envoy: &mut StandIn) -> std::io::Result<Option<Bytes>> {
        envoy.answer(&self.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Istiod has answered on a stream.
    pub(super) fn answered(&self) {
        self.refused.store(false, Relaxed);
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
            let store = self.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            store.raw().1
        };
        let since = crate::trouble::rfc3339(std::time::SystemTime::now());
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

/// Whole messages out of the pieces of a stream.
#[derive(Debug)]
pub(super) struct Messages {
    buffer: BytesMut,
    most: u64,
}

impl Messages {
    /// Of at most so many bytes each.
    pub(super) fn new(most: u64) -> Self {
        Self { buffer: BytesMut::new(), most }
    }

    /// The messages that end in this piece, without their headers. `Err`: one is larger than accepted.
    pub(super) fn push(&mut self, piece: &[u8]) -> Result<Vec<Bytes>, u64> {
        self.buffer.extend_from_slice(piece);
        let mut out = Vec::new();
        while let Some((head, _)) = self.buffer.split_first_chunk::<HEADER>() {
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
            if u64::from(length) > self.most {
                return Err(u64::from(length));
            }
            let whole = HEADER + length as usize;
            if self.buffer.len() < whole {
                self.buffer.reserve(whole - self.buffer.len());
                break;
            }
            let mut message = self.buffer.split_to(whole).freeze();
            message.advance(HEADER);
            out.push(message);
        }
        Ok(out)
    }

    /// The piece of a message that has not ended.
    pub(super) fn rest(self) -> Bytes {
        self.buffer.freeze()
    }

    /// Whether it stands between two messages.
    pub(super) fn is_between(&self) -> bool {
        self.buffer.is_empty()
    }
}

/// Notes one direction of a stream for the store.
pub(super) struct Recorder<'a> {
    memory: &'a Memory,
    id: u64,
    protocol: Protocol,
    messages: Messages,
    put: fn(&Memory, u64, Protocol, Bytes),
}

impl<'a> Recorder<'a> {
    /// Of what Envoy says.
    pub(super) fn requests(memory: &'a Memory, id: u64, protocol: Protocol) -> Self {
        Self { memory, id, protocol, messages: Messages::new(u64::from(u32::MAX)), put: Memory::request }
    }

    /// Of what Envoy is told.
    pub(super) fn responses(memory: &'a Memory, id: u64, protocol: Protocol) -> Self {
        Self { put: Memory::response, ..Self::requests(memory, id, protocol) }
    }

    /// The next piece.
    pub(super) fn push(&mut self, piece: &[u8]) {
        for message in self.messages.push(piece).into_iter().flatten() {
            (self.put)(self.memory, self.id, self.protocol, message);
        }
    }
}
