//! The verdict: what the parts have told, and what readiness waits for, the cause first.

use std::time::{Duration, Instant, SystemTime};

use crate::trouble::{Kind, Report, Trouble, Troubles};

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
        if !told.contains(&report.kind) && !is_known(&report, &told) {
            let trouble = Trouble::of(report, "default", since, lasts);
            // Of an end that was asked for nothing else is the cause.
            let at = if ends { 0 } else { all.partition_point(|t| t.kind <= trouble.kind) };
            all.insert(at, trouble);
        }
    }
    all
}

/// That no Envoy runs follows from what was told of its end.
pub(super) fn is_known(report: &Report, told: &[Kind]) -> bool {
    let ends = [Kind::BootstrapRejected, Kind::PortTaken, Kind::EnvoyCrashed];
    report.kind == Kind::EnvoyNotStarted && told.iter().any(|kind| ends.contains(kind))
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
    use super::super::envoy::NotReady;
    use super::*;

    #[test]
    fn the_cause_comes_first_and_the_end_before_all() {
        let list = Troubles::default();
        let ca = list.reporter("citadelclient");
        ca.report((Kind::TokenExpired, "it has expired"));
        let all_of = |why: NotReady| all(&list, vec![why.report()], None);
        let line = line(&all_of(NotReady::NoConfig("cds updates: 0".to_owned())));
        assert!(
            line.starts_with("TokenExpired: it has expired; ") && line.contains("| NoConfig: config not"),
            "{line}"
        );
        let envoy = list.reporter("default");
        envoy.report((Kind::EnvoyCrashed, "exit status 7"));
        let kinds: Vec<Kind> = all_of(NotReady::NotRunning).iter().map(|t| t.kind).collect();
        assert_eq!(kinds, [Kind::EnvoyCrashed, Kind::TokenExpired], "binaryPath is right");
        envoy.end();
        let end = NotReady::Terminated("received signal: terminated".to_owned());
        assert_eq!(all_of(end)[0].kind, Kind::Terminating);
        let (admin, limit) = (([127, 0, 0, 1], 15000).into(), Duration::from_secs(1));
        assert_eq!(all_of(NotReady::Silent { admin, limit })[1].kind, Kind::EnvoyAdminSilent);
        let refused = |number| {
            let source = std::io::Error::from_raw_os_error(number);
            NotReady::Admin { admin, source: crate::fetch::Error::Connect { to: String::new(), source } }
                .report()
                .kind
        };
        assert_eq!([refused(111), refused(24)], [Kind::EnvoyAdminSilent, Kind::OpenFiles]);
    }
}
