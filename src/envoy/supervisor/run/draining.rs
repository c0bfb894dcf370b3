//! What the drain machine is told and what it asks for, with a line per phase.

use super::Run;
use crate::base::error::chain;
use crate::envoy::admin;
use crate::envoy::drain::{self, Phase};

impl Run {
    pub(super) fn tell(&mut self, event: drain::Event) -> bool {
        let before = self.machine.phase();
        let action = self.machine.handle(self.origin.elapsed(), event);
        let phase = self.machine.phase();
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
                let client = self.client.clone();
                self.poll = Some(Box::pin(async move { client.active_connections().await }));
                false
            }
            Some(drain::Action::Kill) => {
                self.ask = None;
                self.poll = None;
                self.kill_all();
                false
            }
            Some(drain::Action::End) => true,
        }
    }

    pub(super) fn counted(&mut self, counted: Result<Option<u64>, admin::Error>) -> bool {
        match counted {
            Ok(open) => {
                let shown = open.unwrap_or(0);
                self.open.with_label_values::<&str>(&[]).set(i64::try_from(shown).unwrap_or(i64::MAX));
                match open {
                    None => tracing::info!("Envoy shows no open connections"),
                    Some(n) => tracing::info!("there are still {n} active connections"),
                }
                self.tell(drain::Event::Counted(open))
            }
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
                Phase::Running => tracing::info!("Envoy is killed without a drain"),
                _ => tracing::info!("Envoy is killed: {} is over", before),
            },
        }
    }
}
