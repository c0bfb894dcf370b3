//! Envoys that outlive an upgrade of the agent: handed to the new version in this process, and adopted by it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::{Epoch, Run};
use crate::base::handover;
use crate::envoy::NotReplaced;
use crate::envoy::drain::Phase;
use crate::envoy::guard::Guard;
use crate::envoy::kept::{self, Kept};
use crate::envoy::process::{self, Written};
use crate::envoy::supervisor::watch::{BATCH, FileWatch};
use crate::net::own::Own;
use crate::trouble::What;

impl Run {
    /// Takes what the program before us has left; `false` when there is nothing.
    pub(super) fn adopt(&mut self) -> bool {
        let Some(kept) = self.envoy.kept.take() else { return false };
        self.base_id = kept.base_id;
        // Until each has its own name below.
        let _named = std::mem::take(&mut self.envoy.named);
        for epoch in kept.epochs {
            let (process, end) = match process::adopt(epoch.pid, epoch.own_group) {
                Ok(adopted) => adopted,
                Err(error) => {
                    tracing::warn!("Envoy (process {}) is not taken over: {error}", epoch.pid);
                    continue;
                }
            };
            let number = epoch.number;
            self.ends.push(Box::pin(async move { (number, end.await) }));
            let now = Instant::now();
            let ran = since(epoch.started, SystemTime::now());
            self.epochs.insert(
                number,
                Epoch {
                    process: Some(process),
                    _own: Some(Own::process(process.id())),
                    file: epoch.file.map(Written::adopt),
                    args: epoch.args.into_iter().map(Into::into).collect(),
                    started: now.checked_sub(ran).unwrap_or(now),
                    aborted: false,
                },
            );
            self.core.adopt(number);
            self.trouble.note(What::Started, format!("Envoy, epoch {number}, as it ran before"));
        }
        if kept.due && self.envoy.config.restart.hot_restart && !self.epochs.is_empty() {
            // By force: what another version makes of the same inputs is no measure. Not before a batch of changes is over; a
            // refused dial has told by then that istiod is away.
            (self.reload_again, self.retry_at) = (Some(true), Some(Instant::now() + BATCH));
            self.untold = true;
        }
        self.guard = self.envoy.guard.take();
        if self.guard.is_none() && !self.epochs.is_empty() {
            self.stand_guard();
        }
        !self.epochs.is_empty()
    }

    /// Records what a successor needs, where upgrades are on.
    pub(super) fn keep(&self) {
        if handover::is_on() {
            self.asked.keep(self.kept());
        }
    }

    // Whether an epoch would come if this program went on, or has failed and its configuration is still wanted.
    fn is_due(&self) -> bool {
        let looks = self.looking.is_some() || self.files.as_ref().is_some_and(FileWatch::is_batching);
        let waits = self.reload_again.is_some() || self.retry_at.is_some() || self.pending.is_some();
        self.envoy.config.restart.hot_restart && (looks || waits || !self.core.is_settled())
    }

    fn kept(&self) -> Result<Kept, NotReplaced> {
        if self.machine.phase() != Phase::Running || self.machine.is_drained() {
            return Err(NotReplaced::Busy("Envoy drains"));
        }
        let is_held = self.pending.as_ref().is_some_and(|pending| pending.is_held)
            && self.proving.is_none()
            && self.survivor.is_none();
        if self.is_replacing() && !is_held {
            return Err(NotReplaced::Busy("Envoy is being replaced by its next epoch"));
        }
        let epochs = self.epochs.iter().map(|(number, epoch)| {
            let process = epoch.process.filter(|_| !epoch.aborted)?;
            Some(kept::Epoch {
                number: *number,
                pid: process.id(),
                own_group: process.own_group(),
                args: epoch.args.iter().map(|a| a.to_string_lossy().into_owned()).collect(),
                file: epoch.file.as_ref().map(|file| file.path().to_owned()),
                started: millis(SystemTime::now())
                    .saturating_sub(u64::try_from(epoch.started.elapsed().as_millis()).unwrap_or(u64::MAX)),
            })
        });
        let epochs: Vec<_> = epochs.collect::<Option<_>>().unwrap_or_default();
        if epochs.is_empty() {
            return Err(NotReplaced::Busy("Envoy does not run"));
        }
        Ok(Kept {
            epochs,
            binary: self.envoy.config.binary.clone(),
            base_id: self.base_id,
            due: self.is_due(),
            guard: self.guard.as_ref().and_then(Guard::id),
        })
    }
}

fn millis(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

fn since(started: u64, now: SystemTime) -> Duration {
    Duration::from_millis(millis(now).saturating_sub(started))
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, Signal};

    use crate::base::metrics::Metrics;
    use crate::envoy::kept::{Epoch, Kept};
    use crate::envoy::{Config, ConfigFile, Supervisor, admin, command, drain, restart};
    use crate::net::own;

    #[test]
    fn envoys_are_known_on_the_sockets_before_they_are_taken_over() {
        // Of no process that another test names.
        let orphan = ["-c", "sleep 60 >/dev/null 2>&1 & echo $!"];
        let orphan = std::process::Command::new("sh").args(orphan).output().expect("a shell is there");
        let pid: i32 = String::from_utf8(orphan.stdout).unwrap().trim().parse().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            binary: "sleep".to_owned(),
            launcher: "launcher".into(),
            arguments: command::Options::default(),
            extra_env: Vec::new(),
            user: None,
            own_group: false,
            file: ConfigFile::Generated(dir.path().join("envoy-rev.json")),
            admin: admin::Config { port: 1, ..admin::Config::default() },
            drain: drain::Config::default(),
            restart: restart::Config::default(),
            always_zero: false,
        };
        let epoch = Epoch { number: 0, pid, own_group: false, args: Vec::new(), file: None, started: 0 };
        let kept = Kept { epochs: vec![epoch], binary: "sleep".to_owned(), ..Kept::default() };
        let text = || -> Result<_, Box<dyn std::error::Error + Send + Sync>> { Ok(b"{}".to_vec()) };
        assert_eq!(own::which(pid), None);
        let made = Supervisor::adopting(config, Box::new(text), kept, &Metrics::new());
        let (supervisor, _handle) = made.expect("there is a bootstrap");
        assert!(own::which(pid).is_some());
        drop(supervisor);
        assert_eq!(own::which(pid), None, "nobody takes it over");
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
}
