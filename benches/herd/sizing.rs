//! What istiod must be sized for, and what to set: from the worst second of the outages.

use std::fmt::Write as _;

use crate::model::{Arrivals, CONFIG_MB, Herd, Mesh};

/// Of what istiod admits, the share that a mesh in turns asks for.
const LOAD: f64 = 0.8;
/// The longest that the agent takes, in seconds.
const LONGEST: f64 = 600.0;
/// Below this agents come back over as long by themselves.
const SHORTEST: f64 = 3.0;

/// What `XDS_RECONNECT_SPREAD` to set, in whole seconds; `None`: nothing.
pub(crate) fn spread(agents: usize, rate: f64) -> Option<f64> {
    let over = needed(agents, rate);
    (over >= SHORTEST).then_some(over.min(LONGEST))
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn needed(agents: usize, rate: f64) -> f64 {
    (agents as f64 / (rate * LOAD)).ceil()
}

/// The first part of the page.
pub(crate) fn page() -> String {
    let mut out = format!(
        "## What to set, and what istiod must be sized for\n\n\
         An agent does not know how big its mesh is. By itself it is back within 4 s of istiod, which suits a mesh of a few thousand pods \
         for each 1,000 streams\nthat istiod admits a second. For a larger one set, for all agents alike,\n\n    \
         XDS_RECONNECT_SPREAD = agents / ({LOAD} × streams admitted a second by all istiods together)\n\n\
         mesh-wide, and restart the pods as they come:\n\n```yaml\nmeshConfig:\n  defaultConfig:\n    proxyMetadata:\n      \
         XDS_RECONNECT_SPREAD: 125s\n```\n\n\
         An istiod admits `PILOT_MAX_REQUESTS_PER_SECOND` streams a second; unset, 15 + 5 for each core, 100 at most. A refused agent \
         costs it a TLS handshake, a served one its\nwhole configuration. What it costs: after istiod has ended an agent's stream, or was \
         away, the agent has what was pushed meanwhile up to that much later (the half of it on average);\nEnvoy goes on with what it \
         has. It is not for Envoys that start, which have nothing: those are dialled for at once.\n\n\
         With it set, an agent whose stream broke dials after a random part of that time, and after a failure or a refusal again after \
         the whole of it (and up to a tenth more), so that at any\nmoment the next attempts of all agents lie evenly over the time that \
         follows. The most in a second, of a restart (30 s), a third of the istiods dying and a network cut for 10 minutes:\n\n\
         | agents | istiods admit a second | XDS_RECONNECT_SPREAD | connects and TLS handshakes a second | CSRs a second | MB of \
         configuration a second | all back after (s) | × even share |\n|{}\n",
        "---|".repeat(8)
    );
    for agents in [1_000, 10_000, 100_000] {
        for rate in [None, Some(100.0), Some(300.0), Some(1_000.0)] {
            let _ = writeln!(out, "| {agents} | {} |", cells(agents, rate));
        }
    }
    let _ = write!(
        out,
        "\nTo this comes, at any time, what the mesh does anyway: a connect, a CSR and a configuration for each pod that starts, and the \
         CSRs of renewals\n(a mesh whose certificates last 24 h: {:.1} a second for 100,000 pods; see the last scenario for a mesh that \
         was started all at once).\nThe row without a limit is what arrives where nothing is set: an istiod that is to serve all of it \
         must push so much in that second.\n",
        100_000.0 / 43_200.0
    );
    out
}

fn cells(agents: usize, rate: Option<f64>) -> String {
    let admitted = rate.map_or_else(|| "all".to_owned(), |rate| format!("{rate:.0}"));
    if let Some(rate) = rate
        && needed(agents, rate) > LONGEST
    {
        return format!("{admitted} | too few istiods: above 10m | | | | |");
    }
    let spread = rate.and_then(|rate| spread(agents, rate));
    let mesh = Mesh { rate, spread };
    let all = [
        Herd::new(agents).after_outage(30.0, mesh),
        Herd::new(agents / 3).after_outage(0.0, mesh),
        Herd::new(agents).after_outage(600.0, mesh),
    ];
    let worst = |of: usize| all.iter().map(|arrivals| arrivals.most()[of]).max().unwrap_or_default();
    let last = all.iter().map(Arrivals::last).fold(0.0, f64::max);
    let share = all.iter().map(Arrivals::share).fold(0.0, f64::max);
    let set = spread.map_or_else(|| "unset".to_owned(), |over| format!("{over:.0}s"));
    format!(
        "{admitted} | {set} | {} | {} | {} | {last:.0} | {share:.1}",
        worst(0),
        worst(1),
        worst(2) * CONFIG_MB
    )
}
