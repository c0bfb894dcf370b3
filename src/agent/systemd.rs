//! What the service manager of a VM is told (`Type=notify`): that the agent is up, how it is doing, that its loop turns.
//!
//! `READY=1` comes with the first readiness, so units ordered after this one find the mesh. Without readiness it comes
//! after [`PATIENCE`] all the same: a restart would not bring istiod back, and a boot must not hang on it. `STATUS=` says
//! what is missing. `WATCHDOG=1` is sent from the one loop that does all the work. Costs nothing without a manager.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::stages::Stages;
use crate::base::handover;
use crate::base::notify::{Notify, monotonic_usec};
use crate::envoy::{self, RunState};
use crate::status;
use crate::status::ready::{Envoy, Followed, NotReady};
use crate::trouble::Troubles;

/// When the unit counts as started though it is not ready; systemd's own limit is 90 s.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often readiness is looked at while it is owed, as Kubernetes' startup probe does.
const SOON: Duration = Duration::from_secs(1);
/// And afterwards, as its readiness probe.
const LATER: Duration = Duration::from_secs(15);

/// What readiness is asked of.
pub(super) struct Asked {
    /// The agent.
    pub agent: Arc<dyn status::Agent>,
    /// Envoy, as it is asked; `None` without one.
    pub asks: Option<Followed>,
    /// Changes of Envoy's state.
    pub state: watch::Receiver<RunState>,
    /// What is wrong, the first to repair on top.
    pub troubles: Troubles,
}

impl Asked {
    /// Of a running agent.
    pub(super) fn new(
        agent: Arc<dyn status::Agent>,
        asks: Option<Envoy>,
        envoy: &envoy::Handle,
        troubles: &Troubles,
    ) -> Self {
        Self { agent, asks: asks.map(Followed::new), state: envoy.watch(), troubles: troubles.clone() }
    }
}

/// Starts telling.
pub(super) fn start(notify: Notify, asked: Asked, stages: &Stages) {
    if let Some(limit) = notify.watchdog() {
        let (notify, stop) = (notify.clone(), stages.status.token());
        stages.status.lasting("systemd watchdog", async move {
            loop {
                tell(&notify, &["WATCHDOG=1".to_owned()]);
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(limit / 3) => {}
                }
            }
        });
    }
    let (closing, stop) = (stages.closing(), stages.status.token());
    stages.status.run("systemd", async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = closing.cancelled() => {}
            () = follow(&notify, &asked) => {}
        }
        if handover::passing() {
            // The next program tells.
            return;
        }
        let why = asked.agent.terminating().unwrap_or_else(|| "the agent ends".to_owned());
        tell(&notify, &["STOPPING=1".to_owned(), format!("STATUS=stopping: {why}")]);
    });
}

async fn follow(notify: &Notify, asked: &Asked) {
    let mut state = asked.state.clone();
    let mut running = None;
    let mut said = String::new();
    // When `READY=1` is owed at the latest; at first it is.
    let mut owed = Some(Instant::now() + PATIENCE);
    loop {
        let missing = missing(asked.asks.as_ref(), &*asked.agent).await;
        let mut lines = Vec::new();
        if owed.is_some_and(|latest| missing.is_empty() || Instant::now() >= latest) {
            owed = None;
            lines.push("READY=1".to_owned());
        }
        let status = status(&missing, asked);
        if status != said {
            lines.push(format!("STATUS={status}"));
            said = status;
        }
        tell(notify, &lines);
        let pause = if owed.is_some() || !missing.is_empty() { SOON } else { LATER };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            changed = state.changed() => if changed.is_err() { return },
        }
        let now = state.borrow_and_update().clone();
        if renewed(&mut running, &now) && owed.is_none() {
            tell(notify, &["RELOADING=1".to_owned(), monotonic_usec()]);
            owed = Some(Instant::now() + PATIENCE);
        }
    }
}

// The verdict where there is one: it names the cause, readiness only what is missing.
fn status(missing: &[String], asked: &Asked) -> String {
    let verdict = asked.troubles.verdict().map(|trouble| trouble.sentence());
    match (missing, verdict) {
        ([], None) => "ready".to_owned(),
        ([], Some(verdict)) => format!("ready, but {verdict}"),
        (_, Some(verdict)) => format!("not ready: {verdict}"),
        (_, None) => format!("not ready: {}", missing.join("; ")),
    }
}

// Whether Envoy is being replaced: a new epoch, or another process after a crash.
fn renewed(running: &mut Option<u32>, now: &RunState) -> bool {
    match now {
        RunState::Running { epoch } => running.replace(*epoch).is_some_and(|before| before != *epoch),
        RunState::Recovering => true,
        _ => false,
    }
}

async fn missing(envoy: Option<&Followed>, agent: &dyn status::Agent) -> Vec<String> {
    if let Some(envoy) = envoy {
        if !agent.envoy_running() {
            return vec![NotReady::NotRunning.to_string()];
        }
        if let Err(reason) = envoy.ready(true, || agent.envoy_generation()).await {
            return vec![reason.to_string()];
        }
    }
    agent.not_ready().into_iter().map(|report| report.detail).collect()
}

fn tell(notify: &Notify, lines: &[String]) {
    if !lines.is_empty()
        && let Err(error) = notify.tell(lines)
    {
        tracing::warn!("cannot tell the service manager {}: {error}", lines.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use futures_util::future::BoxFuture;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Of the process that counts Envoy's.
    struct Counted(Arc<AtomicU64>);

    impl status::Agent for Counted {
        fn quit(&self) {}

        fn drain(&self) -> BoxFuture<'_, ()> {
            Box::pin(async {})
        }

        fn envoy_generation(&self) -> u64 {
            self.0.load(Relaxed)
        }
    }

    const CONFIGURED: &str = "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n\
                              server.state: 0\nlistener_manager.workers_started: 1\n";

    #[tokio::test]
    async fn what_one_envoy_has_said_does_not_hold_for_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let number = Arc::new(AtomicU64::new(1));
        let theirs = number.clone();
        let serves = async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let _ = stream.read(&mut [0; 4096]).await;
                let body = if theirs.load(Relaxed) == 1 { CONFIGURED } else { "server.state: 0\n" };
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
            }
        };
        let asks = async {
            let known = Followed::new(Envoy::new(address));
            let agent = Counted(number.clone());
            assert_eq!(missing(Some(&known), &agent).await, Vec::<String>::new());
            // Crashed and started again between two looks.
            number.store(2, Relaxed);
            assert_eq!(missing(Some(&known), &agent).await.len(), 1);
        };
        tokio::select! {
            () = serves => {}
            () = asks => {}
        }
    }

    #[test]
    fn another_epoch_or_a_recovery_is_a_reload() {
        let mut running = None;
        assert!(!renewed(&mut running, &RunState::Running { epoch: 0 }));
        assert!(!renewed(&mut running, &RunState::Running { epoch: 0 }));
        assert!(renewed(&mut running, &RunState::Running { epoch: 1 }));
        assert!(renewed(&mut running, &RunState::Recovering));
        assert!(!renewed(&mut running, &RunState::Stopping("x".into())));
    }
}
