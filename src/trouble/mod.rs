//! What is wrong at present: one small typed list that every part writes and everything that speaks reads.
//!
//! Whoever is on call finds the cause from whatever is looked at first: the log, the readiness answer,
//! `/debug/agentz`, `wait`, `status`, `doctor`, the last line before the end. All say the same because all
//! read [`Troubles`].
//!
//! * A [`Kind`] is one of a closed list, in causal order: a token that has expired stands above "istiod
//!   refuses", which stands above "no config", which stands above "Envoy is not ready". The topmost is the
//!   [`Troubles::verdict`]. Names are stable; scripts may compare them.
//! * A part holds a [`Reporter`] for each thing that can be wrong on its own (the way to istiod, the
//!   certificate, one type's configuration). A reporter has at most one trouble: reporting again counts it,
//!   reporting another kind replaces it, [`Reporter::end`] ends it.
//! * Two parts with the same trouble (kind and subject) are one entry, so it is said once.
//! * The log says a trouble when it begins (cause and hint), when its kind changes, every 30 s in one folded
//!   line ([`Troubles::attend`]) and when it ends. Parts log their single attempts at debug only.
//! * [`Reporter::note`] keeps the last good and bad events for the page's timeline, bounded.
//!
//! A detail is shown in the log, on the status port and in answers to Envoy: it never holds a secret.
//! Like `base`, every part may use this one. It uses `base` only. Nothing is allocated while nothing is wrong.

mod entry;
mod export;
mod history;
mod kind;
#[cfg(test)]
mod operations;
mod say;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;

use crate::base::clock::{Clock, System};
use crate::base::quote::cut;

pub(crate) use entry::{Report, Trouble};
pub(crate) use export::export;
pub(crate) use history::{Event, What};
pub(crate) use kind::{Kind, Severity};
pub(crate) use say::span;

use entry::Held;
use history::History;

/// Longest detail that is kept, in bytes: others may have a part in it, and it is told in many places, again and again.
const DETAIL: usize = 4096;

/// The list. Clones share it.
#[derive(Clone)]
pub struct Troubles(Arc<Shared>);

struct Shared {
    clock: Arc<dyn Clock>,
    state: Mutex<Present>,
    /// Something began while nothing was wrong.
    began: Notify,
}

#[derive(Default)]
struct Present {
    next: u64,
    held: BTreeMap<u64, Held>,
    history: History,
    /// When a line about a present trouble was written last.
    said: Option<Instant>,
}

impl Default for Troubles {
    fn default() -> Self {
        Self::new(Arc::new(System))
    }
}

impl fmt::Debug for Troubles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.snapshot()).finish()
    }
}

impl Troubles {
    /// An empty list, with dates from `clock`.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(Shared { clock, state: Mutex::default(), began: Notify::new() }))
    }

    /// A handle for one thing that can be wrong, reported by `part`, a scope of the log
    /// ([`crate::base::logging::SCOPES`]).
    #[must_use]
    pub(crate) fn reporter(&self, part: &'static str) -> Reporter {
        let mut state = self.lock();
        state.next += 1;
        Reporter { list: self.clone(), id: state.next, part }
    }

    /// What is wrong now, the cause of most first; the same trouble of several parts is one.
    #[must_use]
    pub(crate) fn snapshot(&self) -> Vec<Trouble> {
        self.end_outlived();
        entry::merged(self.lock().held.values())
    }

    /// The topmost trouble: what to repair first.
    #[must_use]
    pub fn verdict(&self) -> Option<Trouble> {
        self.snapshot().into_iter().next()
    }

    /// Whether a trouble of such a kind is present.
    #[must_use]
    pub fn any(&self, which: impl Fn(Kind) -> bool) -> bool {
        self.end_outlived();
        self.lock().held.values().any(|held| which(held.report.kind))
    }

    /// The last events, oldest first.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.lock().history.all()
    }

    /// Keeps an event for the timeline.
    pub fn note(&self, what: What, text: impl Into<String>) {
        let at = self.0.clock.now();
        self.lock().history.add(Event { at, what, text: text.into() });
    }

    // Called by whoever looks, and at the latest when the next line about what is wrong is due.
    fn end_outlived(&self) {
        let mut state = self.lock();
        if state.held.values().all(|held| held.until.is_none()) {
            return;
        }
        let now = tokio::time::Instant::now();
        let outlived =
            |(id, held): (&u64, &Held)| held.until.is_some_and(|until| until <= now).then_some(*id);
        let outlived: Vec<u64> = state.held.iter().filter_map(outlived).collect();
        let over: Vec<_> = outlived.into_iter().filter_map(|id| state.end(id, self.0.clock.now())).collect();
        drop(state);
        for (part, over) in over {
            say::ends(part, &over);
        }
    }

    // A panic while the lock was held leaves a list that is complete but for one entry.
    fn lock(&self) -> MutexGuard<'_, Present> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Present {
    // What there is to say, where it was the last one of its kind.
    fn end(&mut self, id: u64, now: SystemTime) -> Option<(&'static str, String)> {
        let held = self.held.remove(&id)?;
        if self.held.values().any(|other| other.report.same(&held.report)) {
            return None;
        }
        let over = say::over(&held);
        let text = over.trim_start_matches("over: ").to_owned();
        self.history.add(Event { at: now, what: What::Over, text });
        Some((held.part, over))
    }
}

/// One thing that can be wrong. Dropping it takes its trouble from the list.
pub struct Reporter {
    list: Troubles,
    id: u64,
    part: &'static str,
}

impl Default for Reporter {
    /// On a list of its own that nobody reads.
    fn default() -> Self {
        Troubles::default().reporter("default")
    }
}

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reporter({}, {:?})", self.part, self.kind())
    }
}

impl Reporter {
    /// Another reporter of the same part on the same list.
    #[must_use]
    pub(crate) fn sibling(&self) -> Self {
        self.list.reporter(self.part)
    }

    /// The list it writes.
    #[must_use]
    pub fn list(&self) -> &Troubles {
        &self.list
    }

    /// What it has reported and not ended.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        self.list.lock().held.get(&self.id).map(|held| held.report.kind)
    }

    /// Begins a trouble, or counts it once more, or replaces it by another.
    pub fn report(&self, report: impl Into<Report>) {
        let mut report = report.into();
        if let Cow::Owned(shown) = cut(&report.detail, DETAIL) {
            report.detail = shown;
        }
        let now = self.list.0.clock.now();
        let mut state = self.list.lock();
        let known = state.held.values().any(|held| held.report.same(&report));
        let before = state.held.get(&self.id).map(|held| held.report.kind);
        let again = state.held.get(&self.id).is_some_and(|held| held.report.same(&report));
        if again {
            if let Some(held) = state.held.get_mut(&self.id) {
                held.again(report);
            }
            return;
        }
        let was_empty = state.held.is_empty();
        let held = Held::new(self.part, report, now);
        if known {
            drop(state.held.insert(self.id, held));
            return;
        }
        let text = held.report.line();
        let (kind, part) = (held.report.kind, self.part);
        let old = state.held.insert(self.id, held);
        state.history.add(Event { at: now, what: What::Trouble, text: format!("{kind}: {text}") });
        state.said = Some(Instant::now());
        drop(state);
        drop(old);
        say::begins(part, kind, before, &text);
        if was_empty {
            self.list.0.began.notify_one();
        }
    }

    /// What was wrong is right again.
    pub fn end(&self) {
        let now = self.list.0.clock.now();
        let over = self.list.lock().end(self.id, now);
        if let Some((part, over)) = over {
            say::ends(part, &over);
        }
    }

    /// As [`Reporter::report`], of what somebody has met who may never come again: it is over by itself when nobody has met
    /// it for so long.
    pub(crate) fn report_for(&self, lasts: Duration, report: impl Into<Report>) {
        self.report(report);
        if let Some(held) = self.list.lock().held.get_mut(&self.id) {
            held.until = Some(tokio::time::Instant::now() + lasts);
        }
    }

    /// Ends its trouble if it is of this kind.
    pub(crate) fn end_if(&self, which: impl Fn(Kind) -> bool) {
        if self.kind().is_some_and(which) {
            self.end();
        }
    }

    /// Keeps an event for the timeline.
    pub fn note(&self, what: What, text: impl Into<String>) {
        self.list.note(what, text);
    }
}

impl Drop for Reporter {
    // Without a word: a part that ends with the agent has repaired nothing.
    fn drop(&mut self) {
        self.list.lock().held.remove(&self.id);
    }
}
