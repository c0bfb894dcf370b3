//! The end, in order: no new status connections → Envoy drains and is gone → XDS → DNS → SDS → secrets →
//! token service → status. Envoy has its certificates and its config until it is gone. Each stage has a limit, and the
//! one that overruns is named.

use tokio::time::Instant;

use crate::base::tasks::Failure;
use crate::envoy::{Handle, Reason, Supervisor};

use super::STAGE;
use super::signals::Signals;
use super::stages::Stages;
use super::upgrade::{Program, Upgrades};
use crate::trouble::{Kind, Report, Troubles};

/// Runs Envoy until it or the agent ends, then stops everything in order; gives the exit status.
///
/// Runs on the main thread, because Envoy's parent-death signal belongs to the thread that started it.
pub(super) async fn supervise(
    supervisor: Supervisor,
    envoy: &Handle,
    mut signals: Signals,
    mut upgrades: Option<Upgrades>,
    stages: Stages,
    troubles: &Troubles,
) -> u8 {
    // Why Envoy ended is the verdict on the end.
    let _kept = supervisor.trouble();
    let mut run = std::pin::pin!(supervisor.run());
    let mut refused = false;
    let started = Instant::now();
    let part = troubles.reporter("default");
    // What ended the agent, where that was not Envoy: no other trouble of this moment is the verdict then.
    let mut cause = None;
    let mut ends = |report: Report| {
        part.report(report.clone());
        cause.get_or_insert(report);
    };
    let mut outcome = loop {
        tokio::select! {
            outcome = &mut run => break outcome,
            reason = signals.next() => begin(&stages, envoy, reason),
            program = next(&mut upgrades) => {
                // Comes back only with bad news.
                if let Some(upgrades) = &mut upgrades
                    && let Some(why) = upgrades.pass(program, || signals.pending()).await
                {
                    ends(Report::new(Kind::PartFailed, why.clone()));
                    begin(&stages, envoy, Reason::Failure(why));
                }
            }
            failure = failed(&stages) => {
                ends(Report::new(Kind::PartFailed, failure.to_string()).about(failure.task.clone()));
                begin(&stages, envoy, Reason::Failure(failure.to_string()));
            }
            // The service cannot do what it was started for: a start that is refused late.
            failure = stages.sts.failed() => {
                refused = true;
                ends(Report::new(Kind::TokensNotExchanged, failure.to_string()));
                begin(&stages, envoy, Reason::Failure(failure.to_string()));
            }
        }
    };
    if refused && outcome.exit_code != 0 {
        outcome.exit_code = 255;
    }
    let ending = Instant::now();
    // Before the parts take their troubles with them.
    let verdict = cause.or_else(|| troubles.verdict().map(Report::from));
    stages.close();
    let mut cut: Vec<String> = Some(outcome.cut.clone()).filter(|cut| !cut.is_empty()).into_iter().collect();
    cut.extend(stop(&stages).await.into_iter().map(|task| format!("task {task}")));
    let cut = if cut.is_empty() { "nothing".to_owned() } else { cut.join(", ") };
    tracing::info!(
        "report: status {}, ran {:.1?}, Envoy {:.1?}, parts ended in {:.1?}, cut off: {cut}",
        outcome.exit_code,
        started.elapsed(),
        outcome.ran,
        ending.elapsed(),
    );
    if outcome.exit_code == 0 {
        tracing::info!("{}", outcome.reason);
    } else {
        match verdict {
            Some(verdict) => tracing::error!("{}", verdict.last_line(&outcome.reason)),
            None => tracing::error!("{}", outcome.reason),
        }
    }
    outcome.exit_code
}

// One part after the other; gives the tasks that were cut off.
async fn stop(stages: &Stages) -> Vec<String> {
    let mut cut = Vec::new();
    for (name, group, limit) in [
        ("xds", &stages.xds, STAGE),
        ("dns", &stages.dns, STAGE),
        ("sds", &stages.sds, STAGE),
        ("secrets", &stages.secrets, STAGE),
        // Callers whose tokens are being exchanged are waited for.
        ("token service", &stages.sts, STAGE * 2),
        ("status", &stages.status, STAGE),
    ] {
        for task in group.stop(limit).await {
            tracing::warn!("the {name} stage did not end within {limit:?}: task {task} was cut off");
            cut.push(task);
        }
    }
    cut
}

async fn next(upgrades: &mut Option<Upgrades>) -> Program {
    match upgrades {
        Some(upgrades) => upgrades.next().await,
        None => std::future::pending().await,
    }
}

/// Envoy drains and ends, and with it the agent.
pub(super) fn begin(stages: &Stages, envoy: &Handle, reason: Reason) {
    stages.close();
    envoy.stop(reason);
}

async fn failed(stages: &Stages) -> Failure {
    tokio::select! {
        f = stages.xds.failed() => f,
        f = stages.dns.failed() => f,
        f = stages.sds.failed() => f,
        f = stages.secrets.failed() => f,
        f = stages.status.failed() => f,
    }
}
