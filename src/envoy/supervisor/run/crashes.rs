//! What it means that an Envoy has ended by itself, as far as the agent can tell, and what to do.

use std::time::Duration;

use super::taken::{self, Taken};
use super::{Run, SOON};
use crate::base::lane::Lane;
use crate::base::open_files;
use crate::envoy::process::Exit;
use crate::trouble::{Kind, Report};

/// Who holds a port is in /proc, Envoy's other ports are in its bootstrap; a healthy disk gives both at once.
static LOOKS: Lane = Lane::new("taken ports", 1);
const LOOK: Duration = Duration::from_secs(2);
/// A program that cannot run here has crashed by then, and no Envoy that can has.
const AT_ONCE: Duration = Duration::from_millis(100);
/// An Envoy without a listener (1.40, two workers) aborts where it may open 32 files, and runs with 40; it takes more with
/// each listener and worker.
const FEW: u64 = 64;

impl Run {
    /// Its line in the log.
    pub(super) fn report(&self, number: u32, exit: &Exit, aborted: bool, ran: Duration) {
        let which = if self.envoy.config.restart.hot_restart {
            format!("Envoy epoch {number}")
        } else {
            "Envoy".to_owned()
        };
        if aborted {
            tracing::info!("{which} was killed by the agent after {ran:.1?}");
        } else if *exit == Exit::Status(0) {
            tracing::info!("{which} exited normally after {ran:.1?}");
        } else if matches!(exit, Exit::NotStarted(_)) {
            tracing::error!("{which} exited with error: {exit}");
        } else {
            tracing::error!("{which} exited with error: {exit} (after {ran:.1?})");
        }
        if !aborted && exit.killed() {
            tracing::warn!("Envoy may have been out of memory killed. Check memory usage and limits.");
        }
    }

    /// The trouble that it is.
    pub(super) fn crash(&self, exit: &Exit, ran: Duration) -> Report {
        let ended = format!("Envoy ended by itself after {ran:.1?}: {exit}");
        if let Some(Taken { kind, text }) = &self.taken {
            return Report::new(*kind, format!("{ended}; {text}"));
        }
        // All that it says is that something is not there which it takes for granted.
        let aborted = matches!(exit, Exit::Signal { signal: 6, .. } | Exit::Status(134));
        if (aborted || matches!(exit, Exit::Status(1)) && ran < SOON)
            && let Some(limit) = open_files::limit().filter(|limit| *limit < FEW)
        {
            return Report::new(Kind::OpenFiles, ended).hint(format!(
                "raise the limit of open files, which is {limit} here and too low for most Envoys (ulimit -n, LimitNOFILE= in the \
                 systemd unit)"
            ));
        }
        match exit {
            Exit::NotStarted(why) => {
                let kind = Kind::of_start(why).unwrap_or(Kind::EnvoyNotStarted);
                let report =
                    Report::new(kind, format!("Envoy was not started: it could not be executed: {why}"));
                let ends = self.epochs.is_empty() && !self.envoy.config.restart.recovery;
                if ends { report.ending() } else { report }
            }
            Exit::Status(1) if ran < SOON => {
                Report::new(Kind::EnvoyCrashed, format!("{ended}, before it was initialised")).hint(
                    "Envoy's lines above say why; so early this mostly is a bootstrap that it refuses, or a port that is \
                     taken: pilot-agent proxy --dry-run has Envoy judge the bootstrap",
                )
            }
            Exit::Signal { signal: 4 | 7 | 11, .. } if ran < AT_ONCE => {
                Report::new(Kind::EnvoyCrashed, ended).hint(
                    "is its file whole, and for this processor and its C library? Copy it anew, with its checksum",
                )
            }
            _ => Report::new(Kind::EnvoyCrashed, ended),
        }
    }

    /// Who holds the port that it may have wanted: Envoy itself says only that the address is in use.
    pub(super) async fn port_taken(&self, exit: &Exit, number: u32) -> Option<Taken> {
        let Exit::Status(_) = exit else { return None };
        let admin = self.envoy.config.admin.port;
        let path = self.envoy.path(number);
        let looked = LOOKS.within(LOOK, move || taken::look(admin, &path)).await;
        looked.unwrap_or_else(|error| {
            tracing::warn!("nobody looked for who holds Envoy's ports: {error}");
            None
        })
    }
}
