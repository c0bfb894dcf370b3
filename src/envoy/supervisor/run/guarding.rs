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
        self.end_left("an earlier agent", true).await;
    }

    /// The last epoch has ended. What it had started, if it was a script in Envoy's place, goes with it: it holds our
    /// ports, and the guard is not told of it any more. `by_itself`: it was not killed with all it had started.
    pub(super) async fn end_orphans(&self, by_itself: bool) {
        if self.envoy.program.needs_guard && self.epochs.is_empty() {
            self.end_left("what was started in Envoy's place", by_itself).await;
        }
    }

    // What is found without being `news` was on its way out.
    async fn end_left(&self, who: &str, news: bool) {
        let config = self.envoy.file_of_all();
        let looked = LOOKS.run(move || {
            let found = stale::find(&config);
            let pids: Vec<_> = found.iter().map(|one| one.pid).collect();
            (pids, stale::end(&found))
        });
        match tokio::time::timeout(LOOK, looked).await {
            Ok(Ok((pids, _))) if pids.is_empty() => {}
            Ok(Ok((_, left))) if left.is_empty() && !news => {}
            Ok(Ok((pids, left))) if left.is_empty() => {
                tracing::warn!("{who} left Envoy running (process {pids:?}): it was ended");
            }
            Ok(Ok((_, left))) => {
                tracing::error!("{who} left Envoy running, and process {left:?} does not end");
            }
            Ok(Err(error)) => tracing::warn!("the search for Envoys that {who} left failed: {error}"),
            Err(_) => {
                tracing::warn!(
                    "the search for Envoys that {who} left did not end within {LOOK:?} and is given up"
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
