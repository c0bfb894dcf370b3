//! Kept tokens, and one exchange for all who wait for the same one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use prometheus::IntCounterVec;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::request::Ask;
use crate::base::clock::{Clock, Until};
use crate::base::metrics::Metrics;
use crate::base::seldom::Seldom;
use crate::base::tasks::{Group, caught};
use crate::trouble::{Kind, Report, Reporter};

/// A kept token is used while more than this remains of it; the Go agent's number.
pub(super) const GRACE: Duration = Duration::from_secs(300);
/// Tokens kept at a time. A pod has one or two subject tokens and a few scopes; the one that ends first goes.
const KEPT: usize = 64;
/// Exchanges under way at a time, each for another subject token or scope, of those that were given no token yet: who was
/// given one is not held up by a crowd that asks an endpoint in vain, and there are no more of them than tokens are kept.
const FLIGHTS: usize = 32;

/// A failure after which nobody has asked for so long says nothing of the service any more: while it took readiness
/// away, nobody might ever ask again. Envoy, which waits for a token, asks for each request.
const LASTS: Duration = Duration::from_secs(300);

/// Any process of the pod can be refused as often as it likes.
static REFUSED: Seldom = Seldom::new(10);

/// How long exchanges that are under way at the end are waited for: the Go agent waits without a limit, and an endpoint
/// that hangs would hold up the end for 50 s.
pub(super) const LAST: Duration = Duration::from_secs(3);

/// An access token as it came. Its text is in no `Debug`.
pub(super) struct Access {
    pub(super) token: Zeroizing<String>,
    pub(super) ends: Until,
    pub(super) issued_type: String,
    pub(super) token_type: String,
    pub(super) scope: String,
}

/// Whole seconds until `ends`, cut towards zero; negative when it is past.
pub(super) fn remaining(ends: Until, now: SystemTime) -> i64 {
    let seconds = |d: Duration| i64::try_from(d.as_secs()).unwrap_or(i64::MAX);
    match now.duration_since(ends.date()) {
        Ok(past) => -seconds(past),
        Err(_) => seconds(ends.left(now)),
    }
}

/// Why there is no token: a sentence for people and callers, in which nothing of a token or of an answer is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub(super) struct Fault {
    why: String,
    /// The endpoint works and does not want what the caller brought.
    refused: bool,
}

impl Fault {
    pub(super) fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), refused: false }
    }

    pub(super) fn refusal(why: impl Into<String>) -> Self {
        Self { why: why.into(), refused: true }
    }
}

/// A token of the dump.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) kind: &'static str,
    pub(super) issued: SystemTime,
    pub(super) ends: SystemTime,
}

/// The latest token of each kind.
#[derive(Debug, Clone, Default)]
pub(super) struct Notes(Arc<Mutex<Vec<Seen>>>);

impl Notes {
    pub(super) fn add(&self, seen: Seen) {
        let mut all = lock(&self.0);
        all.retain(|other| other.kind != seen.kind);
        all.push(seen);
    }
}

/// Changes tokens.
pub(super) trait Exchanger: Send + Sync + 'static {
    /// One whole exchange, bounded in time by itself.
    fn exchange<'a>(&'a self, ask: &'a Ask, notes: &'a Notes) -> BoxFuture<'a, Result<Access, Fault>>;
}

type Outcome = Result<Arc<Access>, Fault>;

#[derive(Default)]
struct Slot {
    access: Option<Arc<Access>>,
    flight: Option<watch::Receiver<Option<Outcome>>>,
}

/// What can be told about the service.
#[derive(Debug, Clone)]
pub(crate) struct Handle(Arc<Told>);

#[derive(Debug)]
struct Told {
    port: u16,
    plugin: &'static str,
    trouble: Reporter,
    state: Mutex<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    exchanges: u64,
    failures: u64,
    last_error: Option<String>,
    /// Why the service gives no tokens, and since when that has been the last word; not why one caller got none.
    trouble: Option<(String, Instant)>,
    /// Somebody got a token.
    works: bool,
}

impl Handle {
    /// Of a service on `port` with `plugin`, before it starts.
    #[must_use]
    pub(crate) fn new(port: u16, plugin: &'static str, trouble: Reporter) -> Self {
        Self(Arc::new(Told { port, plugin, trouble, state: Mutex::default() }))
    }

    pub(super) fn plugin(&self) -> &'static str {
        self.0.plugin
    }

    /// Why no tokens can be exchanged; `None` when they can, or when nobody has asked for [`LASTS`]. Where the service has
    /// given tokens, a caller that it refuses and never gave one says nothing of it: any process of the pod can be that.
    #[must_use]
    pub(crate) fn trouble(&self) -> Option<String> {
        let state = lock(&self.0.state);
        state.trouble.as_ref().filter(|(_, last)| last.elapsed() < LASTS).map(|(why, _)| why.clone())
    }

    /// For the status document.
    #[must_use]
    pub(crate) fn status(&self) -> Value {
        let state = lock(&self.0.state);
        json!({
            "port": self.0.port,
            "plugin": self.0.plugin,
            "exchanges": state.exchanges,
            "failures": state.failures,
            "lastError": state.last_error,
        })
    }

    /// `known`: the caller had a token before. What is no trouble of the service's ([`Self::trouble`]) is in the log only.
    fn note(&self, error: Option<&Fault>, known: bool) {
        let mut state = lock(&self.0.state);
        state.exchanges += 1;
        state.failures += u64::from(error.is_some());
        state.works |= error.is_none();
        state.last_error = error.map(|e| e.why.clone());
        let of_the_service = error.is_none_or(|fault| known || !fault.refused || !state.works);
        if of_the_service {
            state.trouble = state.last_error.clone().map(|why| (why, Instant::now()));
        }
        match error {
            Some(fault) if !of_the_service => {
                if let Some(more) = REFUSED.may() {
                    tracing::info!(target: "security", "a caller gets no token: {fault}{more}");
                }
            }
            Some(fault) => {
                tracing::debug!(target: "security", "{fault}");
                let kind = Kind::of_start(&fault.why).unwrap_or(Kind::TokensNotExchanged);
                self.0.trouble.report_for(LASTS, Report::new(kind, fault.why.clone()));
            }
            None => self.0.trouble.end(),
        }
    }
}

/// The cache.
pub(super) struct Broker {
    exchanger: Box<dyn Exchanger>,
    clock: Arc<dyn Clock>,
    group: Group,
    slots: Mutex<HashMap<[u8; 32], Slot>>,
    notes: Notes,
    exchanges: IntCounterVec,
    handle: Handle,
}

impl Broker {
    pub(super) fn new(
        exchanger: Box<dyn Exchanger>,
        clock: Arc<dyn Clock>,
        group: Group,
        metrics: &Metrics,
        handle: Handle,
    ) -> Arc<Self> {
        let help = "Token exchanges of the security token service, by result";
        let exchanges = metrics.counter("sts_token_exchanges_total", help, &["result"]);
        let slots = Mutex::default();
        Arc::new(Self { exchanger, clock, group, slots, notes: Notes::default(), exchanges, handle })
    }

    pub(super) fn now(&self) -> SystemTime {
        self.clock.now()
    }

    pub(super) fn dump(&self) -> Vec<Seen> {
        lock(&self.notes.0).clone()
    }

    /// A token for `ask`: a kept one, or that of an exchange, which goes on when the caller does not wait.
    pub(super) async fn get(self: &Arc<Self>, ask: Ask) -> Outcome {
        let mut flight = match self.look(ask) {
            Ok(flight) => flight,
            Err(outcome) => return outcome,
        };
        let outcome = flight.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone());
        outcome.unwrap_or_else(|| Err(stopping()))
    }

    /// Waits until the exchanges that are now under way have ended.
    pub(super) async fn settled(&self) {
        let flights: Vec<_> = lock(&self.slots).values().filter_map(|slot| slot.flight.clone()).collect();
        for mut flight in flights {
            let _ = flight.wait_for(Option::is_some).await;
        }
    }

    fn look(self: &Arc<Self>, ask: Ask) -> Result<watch::Receiver<Option<Outcome>>, Outcome> {
        let key = ask.key();
        let mut slots = lock(&self.slots);
        if let Some(slot) = slots.get(&key) {
            let fresh = |access: &Arc<Access>| access.ends.left(self.now()) > GRACE;
            if let Some(access) = slot.access.clone().filter(fresh) {
                return Err(Ok(access));
            }
            if let Some(flight) = &slot.flight {
                return Ok(flight.clone());
            }
        }
        let stop = self.group.token();
        if stop.is_cancelled() {
            return Err(Err(stopping()));
        }
        let known = slots.get(&key).is_some_and(|slot| slot.access.is_some());
        let new = |slot: &&Slot| slot.access.is_none() && slot.flight.is_some();
        if !known && slots.values().filter(new).count() >= FLIGHTS {
            return Err(Err(Fault::new("too many exchanges for different subject tokens at a time")));
        }
        // What this key has is in use, and needs no room.
        if !slots.contains_key(&key) {
            self.make_room(&mut slots);
        }
        let (tell, told) = watch::channel(None);
        slots.entry(key).or_default().flight = Some(told.clone());
        drop(slots);
        let broker = self.clone();
        // Bounded by FLIGHTS and KEPT.
        self.group.run("token exchange", async move {
            let over = async {
                stop.cancelled().await;
                tokio::time::sleep(LAST).await;
            };
            let outcome = tokio::select! {
                () = over => None,
                outcome = caught("token exchange", broker.exchanger.exchange(&ask, &broker.notes)) => {
                    let defect = |_| Err(Fault::new("a defect in the agent ended the exchange"));
                    Some(outcome.unwrap_or_else(defect))
                }
            };
            let outcome = broker.settle(&key, outcome);
            tell.send_replace(outcome);
        });
        Ok(told)
    }

    fn settle(&self, key: &[u8; 32], outcome: Option<Result<Access, Fault>>) -> Option<Outcome> {
        let mut slots = lock(&self.slots);
        let slot = slots.entry(*key).or_default();
        slot.flight = None;
        let outcome = outcome?;
        self.exchanges.with_label_values(&[if outcome.is_ok() { "ok" } else { "failed" }]).inc();
        self.handle.note(outcome.as_ref().err(), slot.access.is_some());
        match outcome {
            Ok(access) => {
                let access = Arc::new(access);
                slot.access = Some(access.clone());
                Some(Ok(access))
            }
            // The last good one, while it lives.
            Err(fault) => {
                let old = slot.access.clone().filter(|old| remaining(old.ends, self.now()) > 0);
                if old.is_none() {
                    slots.remove(key);
                }
                Some(old.ok_or(fault))
            }
        }
    }

    // What is past goes first, then what ends first.
    fn make_room(&self, slots: &mut MutexGuard<'_, HashMap<[u8; 32], Slot>>) {
        if slots.len() < KEPT {
            return;
        }
        let now = self.now();
        let ended = |slot: &Slot| slot.access.as_ref().is_none_or(|access| access.ends.left(now).is_zero());
        slots.retain(|_, slot| slot.flight.is_some() || !ended(slot));
        if slots.len() >= KEPT {
            let idle = slots.iter().filter(|(_, slot)| slot.flight.is_none());
            let first =
                idle.min_by_key(|(_, slot)| slot.access.as_ref().map(|a| a.ends.date())).map(|(key, _)| *key);
            first.map(|key| slots.remove(&key));
        }
    }
}

fn stopping() -> Fault {
    Fault::new("the agent is stopping")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
