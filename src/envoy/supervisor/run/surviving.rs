//! What still runs when the epoch that was to take its place has ended.
//!
//! A new epoch first takes the admin port, and when it is initialised has the one before drain: that one closes its
//! listeners for good. So what is left may serve, may serve without its admin port, or may serve nobody any more.

use std::error::Error as _;
use std::io;

use super::Run;
use crate::envoy::drain::Phase;
use crate::envoy::{admin, restart};

/// After what it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// Another binary did not come to serve.
    Trial,
    /// An epoch has ended, and was initialised if what is left has lost its admin port.
    TakeOver,
    /// The configuration is put back with which an epoch has failed.
    PutBack,
}

/// What it says of itself.
pub(super) type Answer = (After, Result<(bool, u64), admin::Error>);

impl Run {
    pub(super) fn ask_survivor(&mut self, after: After) {
        let client = self.client.clone();
        self.survivor = Some(Box::pin(async move { (after, client.live().await) }));
    }

    pub(super) fn survived(&mut self, (after, live): &Answer) {
        if self.machine.phase() != Phase::Running {
            return;
        }
        let has_lost_admin = self.has_admin && is_refused(live);
        match after {
            After::Trial if !matches!(live, Ok((true, _))) => self.take_back(),
            After::PutBack if has_lost_admin => {
                // Another one would wait for istiod, too.
                if !self.postponed(true) {
                    self.take_back();
                }
            }
            After::TakeOver if has_lost_admin => self.end_drained(),
            _ => self.reload_now(),
        }
    }

    // One more epoch takes over from what serves without its admin port, with the configuration of now.
    fn take_back(&mut self) {
        self.reload_again = None;
        tracing::warn!("Envoy has lost its admin port to the epoch that failed: another epoch takes it back");
        self.forced += 1;
        self.had_admin = false;
        if let restart::Action::Start(epoch) = self.core.desire(self.envoy.id.wrapping_add(self.forced)) {
            self.start(epoch);
        }
    }

    // Envoy has ended: what is left only finishes what it had. An epoch that waits for it starts alone.
    fn end_drained(&mut self) {
        tracing::error!(
            "what is left of Envoy has closed its listeners for the epoch that ended, and is ended, too"
        );
        self.kill_all();
    }
}

/// Nobody listens there; an Envoy that is slow is another matter.
pub(super) fn is_refused(live: &Result<(bool, u64), admin::Error>) -> bool {
    let Err(error) = live else { return false };
    let causes = std::iter::successors(error.source(), |&error| error.source());
    causes
        .filter_map(|error| error.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::ConnectionRefused)
}
