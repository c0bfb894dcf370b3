//! The cheap end: what signals, the status server and debug pages hold.

use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::{Request, State};
use crate::envoy::{Reason, admin};

/// Limit of `/drain`: an Envoy that accepts and never answers does not hold its caller longer. The Go
/// agent waits for ever.
pub const DRAIN_NOW_LIMIT: Duration = Duration::from_secs(10);

/// Asks the supervisor; clones are cheap. Works, and does what makes sense, without Envoy too.
#[derive(Debug, Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    state: watch::Receiver<State>,
    client: Option<admin::Client>,
}

impl Handle {
    pub(super) fn new(
        requests: mpsc::Sender<Request>,
        state: watch::Receiver<State>,
        client: Option<admin::Client>,
    ) -> Self {
        Self { requests, state, client }
    }

    /// Begins the end: Envoy drains first unless it already has. Only the first reason counts; later
    /// calls change nothing. Returns when the supervisor will see it.
    pub async fn stop(&self, reason: Reason) {
        // Nobody there any more: it is over already.
        let _ = self.requests.send(Request::Stop(reason)).await;
    }

    /// `/quitquitquit`: the end without a drain. The caller's answer must be on its way before the agent
    /// exits, so the agent closes the status server last and lets it finish its answers.
    pub async fn quit(&self) {
        self.stop(Reason::Quit).await;
    }

    /// `/drain`: Envoy drains its listeners and stays; a later stop does not drain again. Returns when
    /// Envoy has answered, or after [`DRAIN_NOW_LIMIT`]; a failure is logged and counts as done, as in
    /// the Go agent.
    pub async fn drain_now(&self) {
        let Some(client) = &self.client else { return };
        match client.drain_listeners(true, DRAIN_NOW_LIMIT).await {
            Ok(status) => tracing::info!("Envoy was asked to drain and answered {status}"),
            Err(error) => {
                tracing::warn!("Envoy could not be asked to drain: {}", crate::base::error::chain(&error))
            }
        }
        let _ = self.requests.send(Request::Drained).await;
    }

    /// The configuration's inputs may have changed: starts a new epoch if they have and hot restart is
    /// on. With `force` also when they have not (a request through the debug interface).
    pub async fn reload(&self, force: bool) {
        let _ = self.requests.send(Request::Reload { force }).await;
    }

    /// What the supervisor is doing.
    #[must_use]
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// The state as it changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<State> {
        self.state.clone()
    }
}
