//! What stands beside the processes: the guard where one is needed, and the end of what an earlier agent left.

use std::time::Duration;

use tokio::time::Instant;

use super::Run;
use crate::base::lane::Lane;
use crate::envoy::guard::Guard;
use crate::envoy::stale;

/// A guard that somebody has ended is started again, but not more often.
const AGAIN: Duration = Duration::from_secs(10);

/// Looking through /proc takes milliseconds; a process that the kernel holds can make it stand still.
const LOOK: Duration = Duration::from_secs(5);
static LOOKS: Lane = Lane::new("stale Envoys", 1);

impl Run {
    /// Ends Envoys that an earlier agent left behind with our configuration file: they hold our ports.
    pub(super) async fn end_stale(&self) {
        let config = self.envoy.file_of_all();
        let looked = LOOKS.run(move || {
            let found = stale::find(&config);
            let pids: Vec<_> = found.iter().map(|one| one.pid).collect();
            (pids, stale::end(&found))
        });
        match tokio::time::timeout(LOOK, looked).await {
            Ok(Ok((pids, _))) if pids.is_empty() => {}
            Ok(Ok((pids, left))) if left.is_empty() => {
                tracing::warn!("an earlier agent left Envoy running (process {pids:?}): it was ended");
            }
            Ok(Ok((_, left))) => {
                tracing::error!("an earlier agent left Envoy running, and process {left:?} does not end");
            }
            Ok(Err(error)) => tracing::warn!("the search for Envoys of an earlier agent failed: {error}"),
            Err(_) => {
                tracing::warn!(
                    "the search for Envoys of an earlier agent did not end within {LOOK:?} and is given up"
                )
            }
        }
    }

    /// Starts the guard if this Envoy needs one.
    pub(super) fn stand_guard(&mut self) {
        let config = &self.envoy.config;
        if self.guard.is_some() || self.guard_at > Instant::now() {
            return;
        }
        if !self.envoy.program.needs_guard {
            self.guard_lost = false;
            return;
        }
        match Guard::start(&config.launcher, &self.envoy.file_of_all()) {
            Ok(mut guard) => {
                for process in self.epochs.values().filter_map(|e| e.process) {
                    guard.watch(process.id());
                }
                self.guard = Some(guard);
                self.guard_lost = false;
            }
            Err(error) => {
                self.guard_at = Instant::now() + AGAIN;
                self.guard_lost = true;
                tracing::warn!("no guard for Envoy, which may outlive an agent that is killed: {error}");
            }
        }
    }

    /// Whether Envoys run without the guard they had.
    pub(super) fn missing_guard(&self) -> bool {
        self.guard.is_none() && self.guard_lost && !self.epochs.is_empty()
    }

    pub(super) fn unguarded(&mut self, how: &str) {
        self.guard = None;
        self.guard_lost = true;
        self.guard_at = Instant::now() + AGAIN;
        tracing::warn!("the guard of Envoy has ended ({how}); another is started in {AGAIN:?}");
    }
}
