//! What the drain machine is told and what it asks for, with a line per phase.

use super::{LIVE_POLL, Run};
use crate::base::error::chain;
use crate::envoy::drain::{self, Phase};
use crate::envoy::supervisor::RunState;
use crate::envoy::supervisor::handle::DRAIN_NOW_LIMIT;
use crate::envoy::{Reason, admin};

impl Run {
    pub(super) fn tell(&mut self, event: drain::Event) -> bool {
        let before = self.machine.phase();
        let action = self.machine.handle(self.origin.elapsed(), event);
        let phase = self.machine.phase();
        if (before, phase) == (Phase::Running, Phase::Killing) && self.reason.is_none() {
            // Drained, and left standing.
            let reason = Reason::Drained;
            let _ = self.state.send(RunState::Stopping(reason.to_string()));
            tracing::warn!("{reason}: the agent stops");
            self.reason = Some(reason);
            self.start_no_more();
        }
        if phase != before && !matches!((before, phase), (Phase::Counting { .. }, Phase::Counting { .. })) {
            self.say(before, phase);
        }
        match action {
            None => false,
            Some(drain::Action::Ask) => {
                // The machine's limit decides; this one only frees the connection.
                let (client, limit) = (self.client.clone(), self.machine.ask_limit() * 2);
                self.ask = Some(Box::pin(async move { client.drain_listeners(false, limit).await }));
                false
            }
            Some(drain::Action::Count) => {
                let (client, requests) = (self.client.clone(), self.machine.counts_requests());
                self.poll = Some(Box::pin(async move { client.open(requests).await }));
                false
            }
            Some(drain::Action::Kill) => {
                self.ask = None;
                self.poll = None;
                self.drain_again = None;
                self.kill_all();
                // The last one may have ended before, and another was to come.
                self.epochs.is_empty() && self.tell(drain::Event::Gone)
            }
            Some(drain::Action::End) => true,
        }
    }

    /// Epoch `number` takes the place of one that was drained by `/drain`. Whoever asked for that wants no new work to
    /// come, and at the end nothing is waited for: it is drained as soon as it is live.
    pub(super) fn drain_again(&mut self, number: u32) {
        let client = self.client.clone();
        self.drain_again = Some(Box::pin(async move {
            while !matches!(client.live().await, Ok((true, epoch)) if epoch == u64::from(number)) {
                tokio::time::sleep(LIVE_POLL).await;
            }
            match client.drain_listeners(true, DRAIN_NOW_LIMIT).await {
                Ok(status) => {
                    tracing::info!(
                        "Envoy takes the place of one that was drained, was asked to drain and answered {status}"
                    )
                }
                Err(error) => {
                    tracing::warn!(
                        "Envoy takes the place of one that was drained and could not be asked to: {}",
                        chain(&error)
                    )
                }
            }
        }));
    }

    pub(super) fn counted(&mut self, counted: Result<Option<admin::Open>, admin::Error>) -> bool {
        match counted {
            Ok(open) => {
                let shown = open.as_ref().map_or(0, admin::Open::connections);
                self.meters.open(shown);
                let mut requests = String::new();
                if self.machine.counts_requests() {
                    let n = open.as_ref().map_or(0, |open| open.requests);
                    self.meters.requests(n);
                    requests = format!(", {n} requests under way");
                }
                match open.as_ref().map(|open| (open.connections(), open.holders())) {
                    None => tracing::info!("Envoy shows no open connections"),
                    Some((0, _)) => tracing::info!("there are still 0 active connections{requests}"),
                    Some((n, by)) => {
                        tracing::info!("there are still {n} active connections{requests}, held by {by}")
                    }
                }
                let connections = open.as_ref().map(admin::Open::connections);
                self.held = open;
                self.tell(drain::Event::Counted(connections))
            }
            // Nobody is left to tell.
            Err(_) if self.epochs.is_empty() => self.tell(drain::Event::CountFailed),
            Err(error) => {
                tracing::warn!("the open connections could not be counted: {}", chain(&error));
                self.tell(drain::Event::CountFailed)
            }
        }
    }

    // One line per phase, with what remains of it.
    fn say(&self, before: Phase, phase: Phase) {
        let left = self.machine.deadline().map(|d| d.saturating_sub(self.origin.elapsed()));
        let left = left.unwrap_or_default();
        match phase {
            Phase::Running | Phase::Ended => {}
            Phase::Counting { .. } if self.epochs.is_empty() => {}
            Phase::Jitter => {
                tracing::info!("Envoy is drained in {left:.1?}, so that not all gateways do at once")
            }
            Phase::Asking => tracing::info!("Envoy is asked to drain; it has {left:.1?} to answer"),
            Phase::Waiting => {
                tracing::info!("Envoy drains; it is killed in {left:.1?} unless it ends before")
            }
            Phase::Minimum => tracing::info!("Envoy drains; its connections are counted in {left:.1?}"),
            Phase::Counting { .. } => {
                tracing::info!(
                    "Envoy is killed when its last connection has ended; asked every {:?}",
                    drain::POLL
                );
            }
            Phase::Killing => match before {
                Phase::Asking => tracing::warn!("Envoy has not answered the request to drain: it is killed"),
                Phase::Counting { errors: 4, .. } => {
                    tracing::warn!(
                        "the open connections could not be counted five times in a row: Envoy is killed"
                    );
                }
                Phase::Counting { open: Some(n), .. } => {
                    tracing::info!("Envoy is killed; {n} connections were open before")
                }
                Phase::Running if self.reason == Some(Reason::Drained) => {}
                Phase::Running => tracing::info!("Envoy is killed without a drain"),
                _ => tracing::info!("Envoy is killed: {} is over", before),
            },
        }
    }
}
