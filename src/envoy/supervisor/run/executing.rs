//! From the process that was started to the Envoy in it.
//!
//! That process looks for Envoy's binary, reads and executes it. All of that waits for a disk and so is done by nobody
//! else. A disk that does not answer leaves the agent without an Envoy, which is said, and ended with the agent; when it
//! answers again, Envoy runs.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

use super::{Run, SOON};
use crate::envoy::process::Process;
use crate::trouble::{Kind, Report};

/// Thousands of times what a healthy disk needs.
const LATE: Duration = Duration::from_secs(5);

type Executed = Pin<Box<dyn Future<Output = bool> + Send>>;

/// How far a process has come.
pub(super) enum Execution {
    /// It was Envoy, or had ended, in time.
    InTime,
    /// It is not Envoy yet.
    Late(Process, Executed),
    /// It has become Envoy late, or not.
    After(Process, bool),
}

/// How far it has come when it should be Envoy.
pub(super) async fn begun(process: Process, mut executed: Executed) -> Execution {
    match tokio::time::timeout(LATE, &mut executed).await {
        Ok(_) => Execution::InTime,
        Err(_) => Execution::Late(process, executed),
    }
}

impl Run {
    pub(super) fn executed(&mut self, execution: Execution) {
        match execution {
            Execution::InTime => {}
            Execution::Late(process, executed) => {
                let binary = &self.envoy.config.binary;
                let detail =
                    format!("{binary} is not read from its disk, which does not answer, for {LATE:?}");
                self.trouble.report(
                    Report::new(Kind::EnvoyNotStarted, detail)
                        .hint("the agent serves without Envoy until that disk answers: look at where it is mounted from"),
                );
                self.settled_at = None;
                // Its end, whatever the disk does, ends this too.
                self.executing.push(Box::pin(async move { Execution::After(process, executed.await) }));
            }
            Execution::After(process, true) if self.runs(process) => {
                tracing::info!("the disk of {} has answered: Envoy runs", self.envoy.config.binary);
                self.trouble.end_if(|kind| kind == Kind::EnvoyNotStarted);
                self.settled_at = self.trouble.kind().map(|_| Instant::now() + SOON);
            }
            Execution::After(..) => {}
        }
    }

    fn runs(&self, process: Process) -> bool {
        self.epochs.values().any(|epoch| epoch.process == Some(process))
    }
}
