//! Envoy's readiness for parts of the agent that ask for themselves, now and then.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::{Envoy, NotReady};

/// What was learned of an Envoy, and of which process.
#[derive(Debug)]
pub(crate) struct Followed {
    envoy: Envoy,
    seen: AtomicBool,
    generation: AtomicU64,
}

impl Followed {
    /// Of this Envoy.
    #[must_use]
    pub(crate) fn new(envoy: Envoy) -> Self {
        let (seen, generation) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { envoy, seen, generation }
    }

    /// Whether it is ready now. `running`: whether a process of it is there; `process`: which, as between two questions
    /// one may end and another begin.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) async fn ready(&self, running: bool, process: impl Fn() -> u64) -> Result<(), NotReady> {
        let envoy = &self.envoy;
        if self.seen.swap(running, Relaxed) && !running {
            envoy.forget();
        }
        // What one process has said does not hold for another. One that was started meanwhile is asked itself: the first
        // probe mostly comes while Envoy is being started, and would call the application unhealthy.
        for _ in 0..2 {
            let generation = process();
            if self.generation.swap(generation, Relaxed) != generation {
                envoy.forget();
            }
            envoy.configured().await?;
            envoy.live().await?;
            if process() == generation {
                return Ok(());
            }
        }
        envoy.forget();
        Err(NotReady::Restarted)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::fetch::fake::{Web, http};

    #[tokio::test]
    async fn an_envoy_that_somebody_else_starts_is_asked_each_time() {
        let ready = Arc::new(AtomicBool::new(true));
        let shown = ready.clone();
        let web = Web::start(move |_| http(200, "", if shown.load(Relaxed) { READY } else { "" })).await;
        let known = Followed::new(Envoy::external(web.addr));
        assert!(known.ready(true, || 1).await.is_ok());
        ready.store(false, Relaxed);
        assert!(known.ready(true, || 1).await.is_err(), "another one may have taken its place");
        ready.store(true, Relaxed);
        assert!(known.ready(true, || 1).await.is_ok());
    }

    const READY: &str = "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n\
                         server.state: 0\nlistener_manager.workers_started: 1\n";

    #[tokio::test]
    async fn an_envoy_that_was_started_between_two_probes_has_to_be_ready_itself() {
        let ready = Arc::new(AtomicBool::new(true));
        let shown = ready.clone();
        let web = Web::start(move |_| http(200, "", if shown.load(Relaxed) { READY } else { "" })).await;
        let known = Followed::new(Envoy::new(web.addr));
        assert!(known.ready(true, || 1).await.is_ok());
        ready.store(false, Relaxed);
        assert!(known.ready(true, || 1).await.is_ok(), "what it has said once holds");
        assert!(known.ready(true, || 2).await.is_err());
        ready.store(true, Relaxed);
        // It is started again while it is asked.
        let asked = web.heads().len();
        let process = || 2 + u64::from(web.heads().len() > asked);
        assert!(known.ready(true, process).await.is_ok(), "the one that was started meanwhile is ready");
        assert!(known.ready(true, || 3).await.is_ok());
        // Again and again.
        let process = || 4 + web.heads().len() as u64;
        assert!(matches!(known.ready(true, process).await, Err(NotReady::Restarted)));
    }
}
