//! How it ended: the exit code and the sentence for it, and what is cleared away.

use std::time::Duration;

use super::Run;
use crate::base::lane::Lane;
use crate::envoy::process::Exit;
use crate::envoy::supervisor::RunState;
use crate::envoy::{Outcome, shared};

static LEFT: Lane = Lane::new("Envoy's base id", 1);
const FORGET: Duration = Duration::from_secs(1);

impl Run {
    pub(super) async fn outcome(mut self) -> Outcome {
        self.forget_base_id().await;
        let (exit, ran) = self.last.take().map_or((None, Duration::ZERO), |(e, r)| (Some(e), r));
        let left = !self.epochs.is_empty();
        if left {
            tracing::error!(
                "Envoy does not end on SIGKILL (blocked in the kernel?); the agent does not wait for it"
            );
        }
        let _ = self.state.send(RunState::Ended);
        match self.reason.take() {
            Some(reason) => {
                let mut outcome = Outcome::stopped(&reason);
                // A stop ends in a kill by the agent; any other end that is not clean is reported.
                if let Some(exit) = exit.as_ref().filter(|e| !self.aborted && !e.orderly()) {
                    outcome.reason.push_str(&format!("; Envoy ended before it was killed: {exit}"));
                }
                outcome.exit = exit;
                outcome.ran = ran;
                outcome.cut = self.cut();
                outcome
            }
            None => self.by_itself(exit, ran),
        }
    }

    // What was open when Envoy was killed, as far as anybody counted.
    fn cut(&self) -> String {
        let Some(open) = self.held.as_ref().filter(|open| open.connections() > 0) else {
            return String::new();
        };
        format!("{} connections of {}", open.connections(), open.holders())
    }

    fn by_itself(&self, exit: Option<Exit>, ran: Duration) -> Outcome {
        let code = exit.as_ref().map_or(1, Exit::code);
        let code = if self.core.exhausted() { code.max(1) } else { code };
        let mut reason = match &exit {
            None => "Envoy never ran".to_owned(),
            Some(exit @ Exit::NotStarted(_)) => format!("Envoy was not started: {exit}"),
            Some(exit) => format!("Envoy ended by itself after {ran:.1?}: {exit}"),
        };
        if self.core.exhausted() {
            reason.push_str("; no restart is left");
        }
        if let Some(taken) = &self.taken {
            reason.push_str("; ");
            reason.push_str(&taken.text);
        }
        Outcome {
            exit_code: if self.envoy.config.always_zero { 0 } else { code },
            reason,
            exit,
            ran,
            cut: String::new(),
        }
    }

    // Only hot restart makes Envoy write one.
    async fn forget_base_id(&self) {
        if !self.envoy.config.restart.hot_restart {
            return;
        }
        let path = self.envoy.base_id_path();
        let forgotten = LEFT.within(FORGET, move || {
            let id = std::fs::read_to_string(&path).ok().and_then(|t| t.trim().parse().ok());
            let _ = std::fs::remove_file(path);
            if let Some(id) = id {
                let _ = std::fs::remove_file(shared::path(id));
            }
        });
        if let Err(error) = forgotten.await {
            tracing::debug!("what Envoy's epochs shared is left over: {error}");
        }
    }
}
