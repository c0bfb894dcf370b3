//! What became of the kubelet's probes of the application: the last answer of each path, and a trouble where one fails
//! again and again. As many entries as there are paths in the table.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};

use super::Unanswered;
use crate::serve::respond::Answer;
use crate::trouble::{Kind, Report, Reporter};

/// The kubelet's default `failureThreshold`: before that nothing comes of it.
const FAILURES: u64 = 3;

#[derive(Debug)]
pub(super) struct Seen {
    trouble: Reporter,
    paths: Mutex<BTreeMap<String, Path>>,
}

#[derive(Debug)]
struct Path {
    probes: u64,
    /// Failed in a row.
    failures: u64,
    last: Instant,
    said: String,
    trouble: Reporter,
}

impl Seen {
    pub(super) fn new(trouble: Reporter) -> Self {
        Self { trouble, paths: Mutex::default() }
    }

    /// A probe of a path of the table has ended. One that was not made says nothing of the application: those that were
    /// under way meanwhile do.
    pub(super) fn note(&self, path: &str, result: &Result<Answer, Unanswered>) {
        if matches!(result, Err(Unanswered::Crowded)) {
            return;
        }
        let (good, said) = match result {
            Ok(answer) => (!answer.status().is_client_error() && !answer.status().is_server_error(), {
                format!("HTTP status code {}", answer.status().as_u16())
            }),
            Err(why) => (false, why.to_string()),
        };
        let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        let known = paths.entry(path.to_owned()).or_insert_with(|| Path {
            probes: 0,
            failures: 0,
            last: Instant::now(),
            said: String::new(),
            trouble: self.trouble.sibling(),
        });
        known.probes += 1;
        known.last = Instant::now();
        known.failures = if good { 0 } else { known.failures + 1 };
        if good {
            known.trouble.end();
        } else if known.failures >= FAILURES {
            let detail = format!("the kubelet's probe {path} of the application fails: {said}");
            known.trouble.report(Report::new(Kind::ApplicationUnhealthy, detail).about(path));
        }
        known.said = said;
    }

    pub(super) fn document(&self) -> Value {
        let paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |(path, known): (&String, &Path)| {
            json!({
                "path": path,
                "probes": known.probes,
                "failuresInARow": known.failures,
                "lastAgeSeconds": known.last.elapsed().as_secs(),
                "last": known.said,
            })
        };
        paths.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::respond::status;
    use crate::trouble::Troubles;
    use http::StatusCode;

    #[test]
    fn a_probe_that_fails_again_and_again_is_a_trouble_until_it_succeeds() {
        let list = Troubles::default();
        let seen = Seen::new(list.reporter("probes"));
        for n in 0..3 {
            assert_eq!(list.verdict(), None, "after {n}");
            seen.note(
                "/app-health/app/livez",
                &Err(Unanswered::At { to: "app".to_owned(), why: "connection refused".into() }),
            );
        }
        seen.note("/app-health/app/readyz", &Ok(status(StatusCode::INTERNAL_SERVER_ERROR)));
        let verdict = list.verdict().unwrap();
        assert_eq!(
            (verdict.kind, verdict.subject.as_str()),
            (Kind::ApplicationUnhealthy, "/app-health/app/livez")
        );
        let document = seen.document();
        assert_eq!(
            (&document[0]["failuresInARow"], &document[1]["last"]),
            (&3.into(), &"HTTP status code 500".into())
        );
        seen.note("/app-health/app/livez", &Err(Unanswered::Crowded));
        assert_eq!(seen.document()[0]["failuresInARow"], 3, "it was not made");
        seen.note("/app-health/app/livez", &Ok(status(StatusCode::OK)));
        assert_eq!(list.verdict(), None);
    }
}
