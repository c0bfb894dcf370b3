//! The agent's own look at its readiness: what only Envoy's admin port tells is in the log and on the list of troubles
//! also where nobody probes, and an Envoy that hangs long after it was ready is noticed.

use std::time::Duration;

use super::{Readiness, verdict};
use crate::base::slack;
use crate::status::Agent;
use crate::trouble::{Kind, Severity};

/// The first look: most starts are over by then.
const FIRST: Duration = Duration::from_secs(20);
/// Between two looks at an Envoy that is ready: one request on loopback.
const EVERY: Duration = Duration::from_secs(30);

/// Looks until it is dropped.
pub(in crate::status) async fn watch(readiness: &Readiness, agent: &dyn Agent) {
    let mut pause = FIRST;
    loop {
        slack::sleep(pause).await;
        pause = if look(readiness, agent).await { EVERY } else { FIRST };
    }
}

/// Whether all is well.
async fn look(readiness: &Readiness, agent: &dyn Agent) -> bool {
    let trouble = &readiness.own;
    if agent.terminating().is_some() {
        return true;
    }
    let mut found = readiness.missing(agent).await.into_iter().next();
    if found.is_none() && readiness.still_live().await.is_some() {
        // One answer that is late is a busy machine.
        found = readiness.still_live().await;
    }
    let Some(report) = found.filter(|r| r.kind != Kind::Terminating) else {
        trouble.end();
        return true;
    };
    // What follows from something that was told needs no line of its own.
    let told: Vec<Kind> = trouble.list().snapshot().iter().map(|t| t.kind).collect();
    let above = |kind: &Kind| *kind <= report.kind && kind.severity() == Severity::Broken;
    if !(trouble.kind().is_none() && told.iter().any(above) || verdict::is_known(&report, &told)) {
        trouble.report(report);
    }
    false
}
