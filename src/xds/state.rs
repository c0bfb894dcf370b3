//! What is known about Envoy's configuration: per type the last version, whether Envoy took it, and why
//! not; and how the way to istiod stands. Feeds `/debug/agentz` and the metrics; holds no resources.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use super::protocol::Protocol;
use super::scan::Facts;
use super::types;
use crate::base::clock::Clock;
use crate::base::quote::cut;

mod view;

pub(crate) use view::{Freshness, Nack, Snapshot, StreamView, Timeline, TypeView, UpstreamView};

/// Types kept apart; a mesh has about ten, and the names come from outside.
const TYPES: usize = 64;
/// Longest cause that is kept of an end.
const CAUSE: usize = 2048;
/// Rejections kept.
const NACKS: usize = 32;

#[derive(Debug, Clone, Default)]
struct Type {
    version: String,
    nonce: String,
    requests: u64,
    responses: u64,
    rejected: u64,
    bytes: u64,
    resources: u64,
    last_response: Option<SystemTime>,
    last_accepted: Option<SystemTime>,
    answered: Option<bool>,
}

#[derive(Debug, Default)]
struct Inner {
    types: BTreeMap<String, Type>,
    nacks: Vec<Nack>,
    // Open ones, by their number, and when each was opened.
    streams: BTreeMap<u64, (StreamView, SystemTime)>,
    // That of the workload.
    shown: Option<u64>,
    // Those that are held, and since when.
    held: BTreeMap<u64, u64>,
    upstream: UpstreamView,
}

impl Inner {
    // Notes when a phase of the stream was first reached.
    fn reached(&mut self, now: SystemTime, phase: impl FnOnce(&mut Timeline) -> &mut Option<u64>) {
        let Some((stream, opened)) = self.shown.and_then(|id| self.streams.get_mut(&id)) else { return };
        let after = now.duration_since(*opened).unwrap_or_default().as_millis();
        phase(&mut stream.timeline).get_or_insert(u64::try_from(after).unwrap_or(u64::MAX));
    }
}

/// The record. Clones are not needed: it is shared behind an `Arc`.
#[derive(Debug)]
pub(crate) struct RelayState {
    inner: Mutex<Inner>,
    clock: Arc<dyn Clock>,
}

/// What a request turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// A subscription, or an answer to an older response.
    None,
    /// The last response was taken.
    Ack,
    /// A rejection; `fresh` when it should be logged (repeated ones are folded).
    Nack {
        /// Whether to log it.
        fresh: bool,
        /// How often the same came so far.
        count: u64,
        /// Version of the rejected response.
        version: String,
    },
}

fn unix(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

impl RelayState {
    /// Nothing known yet.
    #[must_use]
    pub(crate) fn new(clock: Arc<dyn Clock>, address: String) -> Self {
        let upstream = UpstreamView { address, ..UpstreamView::default() };
        Self { inner: Mutex::new(Inner { upstream, ..Inner::default() }), clock }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Inner, SystemTime) -> T) -> T {
        let now = self.clock.now();
        change(&mut self.inner.lock().expect("no panic holds this lock"), now)
    }

    /// A request has gone to istiod (Envoy's, or one of the agent's own).
    pub(crate) fn request(&self, type_url: &str, facts: &Facts) -> Answer {
        self.with(|inner, now| {
            let Some(kind) = entry(&mut inner.types, type_url) else { return Answer::None };
            kind.requests += 1;
            if facts.nonce.is_empty() && !facts.rejected {
                return Answer::None;
            }
            if !facts.rejected {
                // With the older protocol each change of what is asked for names the last response again, one that was
                // rejected, too.
                if facts.nonce != kind.nonce || kind.answered == Some(false) {
                    return Answer::None;
                }
                kind.answered = Some(true);
                kind.last_accepted = Some(now);
                inner.reached(now, |t| &mut t.first_accepted);
                return Answer::Ack;
            }
            kind.rejected += 1;
            let current = facts.nonce == kind.nonce;
            if current {
                kind.answered = Some(false);
            }
            let version = if current { kind.version.clone() } else { String::new() };
            let (fresh, count) = nack(&mut inner.nacks, type_url, facts, &version, unix(now));
            Answer::Nack { fresh, count, version }
        })
    }

    /// The agent has taken a response itself, or refused it; what answers it is no request of Envoy's.
    pub(super) fn taken(&self, type_url: &str, nonce: &str, refused: bool) {
        self.with(|inner, now| {
            let Some(kind) = inner.types.get_mut(type_url).filter(|kind| kind.nonce == nonce) else { return };
            kind.requests += 1;
            kind.answered = Some(!refused);
            if refused {
                kind.rejected += 1;
            } else {
                kind.last_accepted = Some(now);
            }
        });
    }

    /// Envoy asks for nothing of this type any more, so it has all that it wants of it.
    pub(super) fn dropped(&self, type_url: &str) {
        self.with(|inner, _| {
            if let Some(kind) = inner.types.get_mut(type_url).filter(|kind| kind.answered == Some(false)) {
                kind.answered = Some(true);
            }
        });
    }

    /// A new Envoy has rejected nothing yet.
    pub(super) fn begins_anew(&self) {
        self.with(|inner, _| {
            let rejected = inner.types.values_mut().filter(|kind| kind.answered == Some(false));
            rejected.for_each(|kind| kind.answered = None);
        });
    }

    /// A response has come.
    pub(crate) fn response(&self, type_url: &str, facts: &Facts, bytes: u64) {
        self.with(|inner, now| {
            let Some(kind) = entry(&mut inner.types, type_url) else { return };
            kind.responses += 1;
            kind.version.clone_from(&facts.version);
            kind.nonce.clone_from(&facts.nonce);
            kind.bytes = bytes;
            kind.resources = facts.count;
            kind.last_response = Some(now);
            kind.answered = None;
        });
    }

    /// A stream was opened.
    pub(crate) fn stream_opened(&self, id: u64, protocol: Protocol) {
        self.with(|inner, now| {
            let timeline = Timeline::default();
            inner.streams.insert(id, (StreamView { id, protocol, since: unix(now), timeline }, now));
        });
    }

    /// It has ended.
    pub(crate) fn stream_closed(&self, id: u64) {
        self.with(|inner, _| inner.streams.remove(&id));
    }

    /// Which stream is the workload's from now on: the one that is shown.
    pub(crate) fn show(&self, id: Option<u64>) {
        self.with(|inner, _| inner.shown = id);
    }

    /// A way to istiod is open; it has not answered yet.
    pub(crate) fn upstream_open(&self, peer: String, token_expires: Option<SystemTime>) {
        self.with(|inner, now| {
            inner.upstream.peer = Some(peer);
            inner.upstream.token_expires = token_expires.map(unix);
            if let Some((stream, _)) = inner.shown.and_then(|id| inner.streams.get_mut(&id)) {
                // An earlier attempt does not count.
                stream.timeline.upstream_opened = None;
            }
            inner.reached(now, |t| &mut t.upstream_opened);
        });
    }

    /// Istiod has answered.
    pub(crate) fn upstream_live(&self) {
        self.with(|inner, now| {
            inner.reached(now, |t| &mut t.first_response);
            let up = &mut inner.upstream;
            up.connected_since = Some(unix(now));
            (up.down_since, up.last_error, up.next_attempt_ms) = (None, None, None);
            up.failures = 0;
        });
    }

    /// The way is closed.
    pub(crate) fn upstream_down(&self, why: Option<String>) {
        self.with(|inner, now| {
            let up = &mut inner.upstream;
            up.connected_since = None;
            up.down_since.get_or_insert(unix(now));
            if let Some(why) = why {
                up.last_error = Some(cut(&why, CAUSE).into_owned());
            }
        });
    }

    /// An attempt has failed: the number of consecutive failures, and the milliseconds until the next attempt.
    pub(crate) fn upstream_failed(&self, failures: u32, why: String, next_attempt_ms: Option<u64>) {
        self.upstream_down(Some(why));
        self.with(|inner, _| {
            inner.upstream.failures = failures;
            inner.upstream.next_attempt_ms = next_attempt_ms;
        });
    }

    /// The next attempt waits for its turn, so many milliseconds.
    pub(crate) fn put_off(&self, next_attempt_ms: u64) {
        self.with(|inner, _| inner.upstream.next_attempt_ms = Some(next_attempt_ms));
    }

    /// A stream is held from now on, or no longer.
    pub(crate) fn held(&self, id: u64, held: bool) {
        self.with(|inner, now| {
            if held {
                inner.held.insert(id, unix(now));
            } else {
                inner.held.remove(&id);
            }
        });
    }

    /// For people.
    #[must_use]
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.with(|inner, now| {
            let live = inner.upstream.connected_since.is_some();
            let down = inner.upstream.down_since;
            let age = |at: Option<SystemTime>| at.map(|at| now.duration_since(at).map_or(0, |d| d.as_secs()));
            let types = inner.types.iter().map(|(type_url, t)| {
                let state = freshness(t, live);
                TypeView {
                    name: types::short(type_url),
                    type_url: type_url.clone(),
                    state,
                    stale_since: if state == Freshness::Stale { down } else { None },
                    version: t.version.clone(),
                    nonce: t.nonce.clone(),
                    requests: t.requests,
                    responses: t.responses,
                    rejected: t.rejected,
                    bytes: t.bytes,
                    resources: t.resources,
                    response_age_s: age(t.last_response),
                    accepted_age_s: age(t.last_accepted),
                }
            });
            let held_since = inner.shown.and_then(|id| inner.held.get(&id)).copied();
            Snapshot {
                stream: inner.shown.and_then(|id| inner.streams.get(&id)).map(|(stream, _)| stream.clone()),
                upstream: UpstreamView { held_since, ..inner.upstream.clone() },
                types: types.collect(),
                nacks: inner.nacks.clone(),
            }
        })
    }
}

fn freshness(t: &Type, live: bool) -> Freshness {
    match (t.responses, t.answered, live) {
        (0, ..) => Freshness::Never,
        (_, Some(false), _) => Freshness::Rejected,
        (.., false) => Freshness::Stale,
        (_, Some(true), true) => Freshness::Synced,
        (_, None, true) => Freshness::Sent,
    }
}

// Names come from outside, so their number is bounded; what does not fit is not recorded.
fn entry<'a>(types: &'a mut BTreeMap<String, Type>, type_url: &str) -> Option<&'a mut Type> {
    if !types.contains_key(type_url) {
        if types.len() >= TYPES {
            return None;
        }
        types.insert(type_url.to_owned(), Type::default());
    }
    types.get_mut(type_url)
}

fn nack(nacks: &mut Vec<Nack>, type_url: &str, facts: &Facts, version: &str, now: u64) -> (bool, u64) {
    // Envoy ends its list with a line break.
    let message = facts.error_message.trim_end();
    if let Some(at) = nacks.iter().position(|n| n.type_url == type_url && n.message == message) {
        let mut known = nacks.remove(at);
        known.count += 1;
        known.last = now;
        version.clone_into(&mut known.version);
        let count = known.count;
        nacks.push(known);
        // 10, 100, 1000, ...: a repeated rejection stays visible without filling the log.
        return (count.ilog10() > 0 && 10u64.pow(count.ilog10()) == count, count);
    }
    if nacks.len() >= NACKS {
        nacks.remove(0);
    }
    nacks.push(Nack {
        name: types::short(type_url),
        type_url: type_url.to_owned(),
        resources: facts.names.clone(),
        message: message.to_owned(),
        version: version.to_owned(),
        first: now,
        last: now,
        count: 1,
    });
    (true, 1)
}

#[cfg(test)]
mod tests;
