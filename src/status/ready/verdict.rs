//! The verdict: what the parts have told, and what readiness waits for, the cause first.

use std::time::{Duration, Instant, SystemTime};

use crate::trouble::{Kind, Report, Trouble, Troubles};

/// What a sentence about Envoy is; the sentences are those of `envoy` beside this file.
pub(super) fn of_envoy(text: &str) -> Kind {
    for (part, kind) in [
        ("server is terminated", Kind::Terminating),
        ("Envoy is not running", Kind::EnvoyNotStarted),
        ("Envoy has just been started", Kind::EnvoyNotInitialised),
        ("but was rejected", Kind::ConfigRejected),
        ("config not fully received", Kind::NoListeners),
        ("config not received", Kind::NoConfig),
        ("not yet updated", Kind::EnvoyNotInitialised),
        ("is not live", Kind::EnvoyNotInitialised),
        ("workers have not", Kind::EnvoyNotInitialised),
    ] {
        if text.contains(part) {
            return kind;
        }
    }
    Kind::EnvoyAdminSilent
}

/// What a sentence about a part that cannot serve is.
pub(super) fn of_missing(text: &str) -> Kind {
    if text.contains("certificate ends") { Kind::IdentityNearExpiry } else { Kind::NameTableMissing }
}

/// What a sentence of the strict mode is.
pub(super) fn of_degraded(text: &str) -> Kind {
    match text {
        _ if text.starts_with("gateway secret ") => Kind::GatewaySecret,
        _ if text.starts_with("no tokens can be exchanged") => Kind::TokensNotExchanged,
        _ if text.contains("has expired") => Kind::CertificateExpired,
        _ if text.contains("certificate") => Kind::CertificateMissing,
        _ => Kind::NoConfig,
    }
}

/// Both, in the order of causes. What is missing is left out where a part has told the same kind.
pub(super) fn all(
    list: &Troubles,
    missing: Vec<Report>,
    since: Option<(SystemTime, Instant)>,
) -> Vec<Trouble> {
    let mut all = list.snapshot();
    let told: Vec<Kind> = all.iter().map(|t| t.kind).collect();
    let (since, lasts) =
        since.map_or((SystemTime::now(), Duration::ZERO), |(at, started)| (at, started.elapsed()));
    for report in missing {
        let ends = report.kind == Kind::Terminating;
        if !told.contains(&report.kind) {
            let trouble = Trouble::of(report, "default", since, lasts);
            // Of an end that was asked for nothing else is the cause.
            let at = if ends { 0 } else { all.partition_point(|t| t.kind <= trouble.kind) };
            all.insert(at, trouble);
        }
    }
    all
}

/// One line for the header and the log: the verdict with its hint, then what follows from it.
pub(super) fn line(all: &[Trouble]) -> String {
    let Some((first, rest)) = all.split_first() else { return "nothing is known to be wrong".to_owned() };
    let mut text = format!("{}; {}", first.line(), first.hint);
    for other in rest {
        text.push_str(" | ");
        text.push_str(&other.line());
    }
    text
}

/// The body of `?verbose`: a line each, hints below.
pub(super) fn body(state: &str, all: &[Trouble]) -> String {
    let mut text = format!("{state}\n");
    for (n, trouble) in all.iter().enumerate() {
        let lead = if n == 0 { "verdict" } else { "also" };
        text.push_str(&format!("{lead}: {}\n", trouble.line()));
        if n == 0 {
            text.push_str(&format!("what to do: {}\n", trouble.hint));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_comes_first_and_the_end_before_all() {
        let list = Troubles::default();
        let ca = list.reporter("citadelclient");
        ca.report((Kind::TokenExpired, "it has expired"));
        let text = "config not received from XDS server (is Istiod running?): cds updates: 0";
        let all_of = |text: &str| all(&list, vec![Report::new(of_envoy(text), text)], None);
        let line = line(&all_of(text));
        assert!(
            line.starts_with("TokenExpired: it has expired; ") && line.contains("| NoConfig: config not"),
            "{line}"
        );
        assert_eq!(all_of("server is terminated: received signal: terminated")[0].kind, Kind::Terminating);
        assert_eq!(
            all_of("failed to get readiness stats from Envoy's admin at x: y")[1].kind,
            Kind::EnvoyAdminSilent
        );
    }
}
