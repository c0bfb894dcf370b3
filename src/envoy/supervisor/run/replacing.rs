//! Another Envoy binary takes over by hot restart, and the old binary comes back if the new one does not serve.
//!
//! An epoch that fails early leaves the one before as it was. One that has come further has taken over the admin port,
//! even if it fails then; so the way back is one more epoch: the old binary takes over from the old process, which
//! serves until then.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::preparing::For;
use super::{LIVE_POLL, Run};
use crate::envoy::admin;
use crate::envoy::drain::Phase;
use crate::envoy::supervisor::handle::{NotReplaced, Replace};

const LOOKING: NotReplaced = NotReplaced::Busy("Envoy's configuration is being looked at");

/// An epoch of another binary.
#[derive(Debug)]
pub(super) struct Proving {
    epoch: u32,
    pub(super) next_check: Instant,
    until: Instant,
    limit: Duration,
    /// The binary of before.
    old: String,
    /// Why it was given up.
    why: Option<String>,
    done: oneshot::Sender<Result<u32, NotReplaced>>,
}

impl Run {
    pub(super) fn replace(&mut self, replace: Replace) {
        let busy = self.busy().or_else(|| self.looking.is_some().then_some(LOOKING));
        if let Some(why) = busy {
            // Whoever asked may have gone; the same holds below.
            let _ = replace.done.send(Err(why));
            return;
        }
        self.look(For::Replace(replace));
        if self.looking.is_none() {
            self.looked(None);
        }
    }

    fn busy(&self) -> Option<NotReplaced> {
        let why = match () {
            () if !self.envoy.config.restart.hot_restart => return Some(NotReplaced::Off),
            () if self.machine.phase() != Phase::Running || self.machine.is_drained() => "Envoy drains",
            () if self.is_replacing() || self.epochs.len() > 1 => {
                "an earlier epoch of Envoy is still being replaced"
            }
            () if self.epochs.is_empty() => "Envoy does not run",
            () => return None,
        };
        Some(NotReplaced::Busy(why))
    }

    /// The inputs were looked at, and are usable or not.
    pub(super) fn replace_with(&mut self, Replace { binary, limit, done }: Replace, is_usable: bool) {
        if let Some(why) = self.busy() {
            let _ = done.send(Err(why));
            return;
        }
        let old = std::mem::replace(&mut self.envoy.config.binary, binary);
        if is_usable {
            self.changed(true);
        }
        let Some(pending) = &self.pending else {
            self.envoy.config.binary = old;
            let _ = done.send(Err(NotReplaced::Bootstrap));
            return;
        };
        let (epoch, now) = (pending.epoch, Instant::now());
        tracing::info!("{} takes Envoy's place as epoch {epoch}", self.envoy.config.binary);
        let next_check = now + LIVE_POLL;
        self.proving = Some(Proving { epoch, next_check, until: now + limit, limit, old, why: None, done });
    }

    /// Epoch `number` has been started; if it is to show that it serves, its time begins.
    pub(super) fn prove(&mut self, number: u32) {
        let now = Instant::now();
        if let Some(proving) = self.proving.as_mut().filter(|p| p.epoch == number) {
            (proving.next_check, proving.until) = (now + LIVE_POLL, now + proving.limit);
            proving.why = None;
        }
    }

    /// The admin port has answered, or not.
    pub(super) fn proved(&mut self, live: &Result<(bool, u64), admin::Error>) {
        let Some(proving) = &mut self.proving else { return };
        let now = Instant::now();
        if proving.why.is_none() && matches!(live, Ok((true, epoch)) if *epoch == u64::from(proving.epoch)) {
            let Some(Proving { epoch, done, .. }) = self.proving.take() else { return };
            tracing::info!("{} serves as epoch {epoch}", self.envoy.config.binary);
            let _ = done.send(Ok(epoch));
            return self.reload_now();
        }
        proving.next_check = now + LIVE_POLL;
        // The one before it has answered: its own time begins when it is started.
        let is_started = self.epochs.contains_key(&proving.epoch);
        if !is_started || now < proving.until || proving.why.is_some() {
            return;
        }
        proving.why = Some(format!("it was not live within {:?}", proving.limit));
        // Its end is what brings the old one back.
        if let Some(epoch) = self.epochs.get_mut(&proving.epoch) {
            epoch.aborted = true;
            if let Some(process) = epoch.process {
                process.kill();
            }
        }
    }

    /// Epoch `number` has ended; whether it was one of another binary that had yet to show that it serves.
    pub(super) fn gave_up(&mut self, number: u32, how: &str) -> bool {
        let Some(Proving { epoch, old, why, done, .. }) = self.proving.take_if(|p| p.epoch == number) else {
            return false;
        };
        let why = why.unwrap_or_else(|| format!("it ended before it served: {how}"));
        tracing::error!("{} does not take Envoy's place, {old} comes back: {why}", self.envoy.config.binary);
        self.envoy.config.binary = old;
        // The number that told it from the one before.
        self.forced = self.forced.wrapping_sub(1);
        let _ = done.send(Err(NotReplaced::GaveUp { epoch, why }));
        true
    }
}
