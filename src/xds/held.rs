//! A stream that is held while istiod is dialled: registered, counted and logged until its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::time::Instant;

use super::shared::Shared;
use crate::base::seldom::Seldom;

/// Any client can cause these, as often as it likes.
static HOLDS: Seldom = Seldom::new(60);
static HELD: Seldom = Seldom::new(60);

/// A stream that may be held shows as held until istiod answers; counted and logged once at its end.
pub(super) struct Held {
    shared: Arc<Shared>,
    id: u64,
    // It is the workload's, or nobody has what istiod says: of others' beside one who has nobody is told.
    counts: bool,
    since: Instant,
    ended: AtomicBool,
}

impl Held {
    /// From now on it is held.
    pub(super) fn new(shared: &Arc<Shared>, id: u64) -> Self {
        let counts = shared.is_workloads(id) || !shared.is_live();
        if counts {
            shared.meters.held(1);
        }
        shared.state.held(id, true);
        if let Some(more) = HOLDS.may() {
            let why = match shared.put_off() {
                Some(_) if !shared.has_failed() => "dialling istiod is put off",
                _ => "istiod has failed before",
            };
            let whose =
                if counts { "Envoy's stream" } else { "the stream of a client beside the workload's own" };
            tracing::info!(target: "xdsproxy", stream = id,
                "{why}, so {whose} is held while the agent dials {}{more}", shared.upstream.address());
        }
        let ended = AtomicBool::new(false);
        Self { shared: shared.clone(), id, counts, since: Instant::now(), ended }
    }

    /// The hold is over; only the first word counts.
    pub(super) fn end(&self, result: &'static str) {
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        if self.counts {
            self.shared.meters.held(-1);
            self.shared.meters.hold_ended(result);
        }
        self.shared.state.held(self.id, false);
        if let Some(more) = HELD.may() {
            tracing::info!(target: "xdsproxy", "the stream held for {:?} is {result}{more}", self.since.elapsed());
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.end("given up");
    }
}
