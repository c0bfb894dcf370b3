//! Why an Envoy ended right after its start: it is asked what it says against its bootstrap.
//!
//! Envoy's own complaint goes to the log past the agent, so the same binary is started once more with `--mode validate`,
//! which binds nothing. Only a program is: a script in Envoy's place may do anything when it is started again.

use std::ffi::OsString;
use std::time::Duration;

use super::Run;
use crate::envoy::guard::Program;
use crate::envoy::process::Written;
use crate::envoy::validate::{self, Verdict};
use crate::trouble::{Kind, Report};

/// For how long the end of the agent waits for the answer; Envoy gives it within a second.
const LIMIT: Duration = Duration::from_secs(5);

/// What is needed to ask.
pub(super) struct Suspect {
    args: Vec<OsString>,
    // There until it was looked at.
    file: Option<Written>,
}

impl Suspect {
    /// None where it cannot be asked.
    pub(super) fn of(program: Program, args: Vec<OsString>, file: &mut Option<Written>) -> Option<Self> {
        program.is_binary.then(|| Self { args, file: file.take() })
    }

    async fn forget(self) {
        if let Some(file) = self.file {
            file.remove().await;
        }
    }
}

impl Run {
    /// Replaces "ended by itself" by Envoy's reason, if it has one. An end that was asked for is not held up.
    pub(super) async fn judge(&mut self) {
        let Some(suspect) = self.suspect.take() else { return };
        if self.reason.is_none() {
            self.ask(&suspect).await;
        }
        suspect.forget().await;
    }

    /// As [`Run::judge`], where other epochs live on: nothing waits for the answer.
    pub(super) fn judge_beside(&mut self) {
        let Some(suspect) = self.suspect.take() else { return };
        let question = self.question(&suspect);
        self.judging = Some(Box::pin(async move {
            let refusal = question.await;
            suspect.forget().await;
            refusal
        }));
    }

    /// Nobody will ask: another Envoy is started, or has ended since.
    pub(super) async fn acquit(&mut self) {
        self.judging = None;
        if let Some(suspect) = self.suspect.take() {
            suspect.forget().await;
        }
    }

    async fn ask(&self, suspect: &Suspect) {
        let refusal = tokio::select! {
            refusal = self.question(suspect) => refusal,
            () = self.asked.changed() => return,
        };
        self.judged(refusal);
    }

    pub(super) fn judged(&self, refusal: Option<Report>) {
        if let Some(refusal) = refusal {
            self.trouble.report(refusal);
        }
    }

    fn question(&self, suspect: &Suspect) -> impl Future<Output = Option<Report>> + Send + use<> {
        let config = &self.envoy.config;
        let (binary, env, user) = (config.binary.clone(), config.extra_env.clone(), config.user);
        let args = suspect.args.clone();
        async move { refusal(validate::again(&binary, &args, &env, user, LIMIT).await) }
    }
}

fn refusal(verdict: Verdict) -> Option<Report> {
    let Verdict::Refused { status, reason } = verdict else { return None };
    let detail = format!("Envoy refuses its bootstrap ({status}): {reason}");
    (!reason.is_empty()).then(|| Report::new(Kind::BootstrapRejected, detail))
}

/// The ports of the listeners in a bootstrap; none where it is not JSON.
pub(super) fn listeners(bootstrap: &[u8]) -> Vec<u16> {
    let document: serde_json::Value = serde_json::from_slice(bootstrap).unwrap_or_default();
    let all = document["static_resources"]["listeners"].as_array();
    let ports = all.into_iter().flatten().flat_map(|listener| {
        let more = listener["additional_addresses"].as_array().into_iter().flatten().map(|a| &a["address"]);
        std::iter::once(&listener["address"]).chain(more)
    });
    ports.filter_map(|a| a["socket_address"]["port_value"].as_u64()?.try_into().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_static_listeners_are_found() {
        let text = r#"{"static_resources": {"listeners": [{"address": {"socket_address": {"port_value": 15090}}},
            {"address": {"pipe": {}}, "additional_addresses": [{"address": {"socket_address": {"port_value": 1}}}]}]}}"#;
        assert_eq!(listeners(text.as_bytes()), [15090, 1]);
        assert_eq!(listeners(b"static_resources: {}"), Vec::<u16>::new());
    }
}
