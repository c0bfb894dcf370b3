//! What was found, for people and for programs.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::running::{self, Running};
use crate::base::build_info;
use crate::base::clock::rfc3339;
use crate::base::quote::plain;
use crate::trouble::{Kind, Severity};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Well.
    Ok,
    /// Odd, and the proxy works all the same.
    Warn,
    /// The proxy does not work because of this.
    Fail,
    /// Could not be looked at, or does not apply; why stands beside it.
    Skip,
    /// Came to no end: nothing is known, so nothing is called healthy.
    Late,
}

impl Outcome {
    fn json(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Skip => "skip",
            Self::Late => "late",
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Fail => "FAIL",
            other => other.json(),
        }
    }
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Check {
    /// What was looked at: a word from a closed list.
    pub name: &'static str,
    /// How it ended.
    pub state: Outcome,
    /// What was found, in one line.
    pub said: String,
    /// What to do; empty where nothing needs to be done.
    pub hint: String,
    /// The trouble, where it is one.
    pub kind: Option<Kind>,
}

impl Check {
    pub(super) fn ok(name: &'static str, said: impl Into<String>) -> Self {
        Self { name, state: Outcome::Ok, said: said.into(), hint: String::new(), kind: None }
    }

    pub(super) fn skip(name: &'static str, why: impl Into<String>) -> Self {
        Self { state: Outcome::Skip, ..Self::ok(name, why) }
    }

    pub(super) fn warn(name: &'static str, said: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { state: Outcome::Warn, hint: hint.into(), ..Self::ok(name, said) }
    }

    /// A trouble. One with which the proxy works is a warning.
    pub(super) fn fail(name: &'static str, kind: Kind, said: impl Into<String>) -> Self {
        let state = match kind.severity() {
            Severity::Broken => Outcome::Fail,
            Severity::Degraded => Outcome::Warn,
        };
        let check = Self::ok(name, said);
        Self { state, hint: kind.hint_for(&check.said).to_owned(), kind: Some(kind), ..check }
    }

    /// Broken here, though an agent would go on.
    pub(super) fn broken(mut self) -> Self {
        self.state = Outcome::Fail;
        self
    }

    pub(super) fn late(name: &'static str, said: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { state: Outcome::Late, hint: hint.into(), ..Self::ok(name, said) }
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    pub(super) fn maybe(mut self, kind: Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// The line, without its state and name.
    #[must_use]
    pub(crate) fn sentence(&self) -> String {
        let line =
            if self.hint.is_empty() { self.said.clone() } else { format!("{}; {}", self.said, self.hint) };
        // One check is one line, whatever an error text holds.
        one_line(&line)
    }
}

// Without what a terminal would do: some of it is said by peers that nobody has verified.
fn one_line(text: &str) -> String {
    plain(text.split_whitespace().collect::<Vec<_>>().join(" "), &[]).into_owned()
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Report {
    /// When it was made.
    pub at: SystemTime,
    /// In the order of a start.
    pub checks: Vec<Check>,
    /// What the running agent reports, as it stands in its `/debug/agentz`.
    pub troubles: Vec<Value>,
    took: Duration,
}

/// What to repair first.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Verdict {
    kind: Kind,
    said: String,
    hint: String,
    part: String,
}

impl Report {
    pub(super) fn new(at: SystemTime) -> Self {
        Self { at, checks: Vec::new(), troubles: Vec::new(), took: Duration::ZERO }
    }

    pub(super) fn add_running(&mut self, running: Running) {
        self.checks.push(running.check());
        self.troubles = running.troubles;
    }

    pub(super) fn finish(&mut self, took: Duration) {
        self.took = took;
    }

    /// What is suspicious by itself becomes the cause of what follows from it: a token for another audience, or one that
    /// has expired beside a certificate, when istiod refuses.
    pub(super) fn weigh(&mut self) {
        let refused = |c: &Check| {
            c.state == Outcome::Fail && matches!(c.kind, Some(Kind::AdsRefused | Kind::CertificateRefused))
        };
        if !self.checks.iter().any(refused) {
            return;
        }
        for check in &mut self.checks {
            let quiet = matches!(check.state, Outcome::Ok | Outcome::Warn);
            if let Some(kind) = check.kind.filter(|_| check.name == "token" && quiet) {
                check.state = Outcome::Fail;
                if check.hint.is_empty() {
                    kind.hint_for(&check.said).clone_into(&mut check.hint);
                }
            }
        }
    }

    /// What is wrong here and by the running agent, in no order.
    fn troubles(&self) -> Vec<Verdict> {
        // What the agent reports stands there in the agent's own words.
        let own = self.checks.iter().filter(|c| c.name != running::NAME || self.troubles.is_empty());
        let own = own.filter_map(|c| {
            let kind = c.kind?;
            let meant = match c.state {
                Outcome::Fail => true,
                // Other kinds of a warning are suspicions.
                Outcome::Warn => kind.severity() == Severity::Degraded,
                _ => false,
            };
            meant.then(|| Verdict {
                kind,
                said: c.said.clone(),
                hint: c.hint.clone(),
                part: format!("doctor/{}", c.name),
            })
        });
        let text = |trouble: &Value, name: &str| trouble[name].as_str().unwrap_or_default().to_owned();
        let agents = self.troubles.iter().filter_map(|trouble| {
            let kind = Kind::from_name(trouble["kind"].as_str()?)?;
            let part = format!("agent/{}", text(trouble, "part"));
            Some(Verdict { kind, said: text(trouble, "detail"), hint: text(trouble, "hint"), part })
        });
        own.chain(agents).collect()
    }

    /// What explains the others. It may be what degrades only, and take away more by what follows from it.
    fn verdict(&self) -> Option<Verdict> {
        self.troubles().into_iter().min_by_key(|v| v.kind)
    }

    fn is_broken(&self) -> bool {
        let failed = self.checks.iter().any(|c| c.state == Outcome::Fail);
        failed || self.troubles().iter().any(|v| v.kind.severity() == Severity::Broken)
    }

    /// Checks that came to no end.
    fn unfinished(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> = Vec::new();
        for check in self.checks.iter().filter(|c| c.state == Outcome::Late) {
            if !names.contains(&check.name) {
                names.push(check.name);
            }
        }
        names
    }

    /// 0: nothing is broken; 1: something is, or a check came to no end.
    #[must_use]
    pub(crate) fn exit_code(&self) -> u8 {
        u8::from(self.is_broken() || !self.unfinished().is_empty())
    }

    fn warnings(&self) -> usize {
        self.checks.iter().filter(|c| c.state == Outcome::Warn).count()
    }

    /// The lines, and the verdict as the last.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        for check in &self.checks {
            let _ = writeln!(out, "{:<5} {:<14} {}", check.state.label(), check.name, check.sentence());
        }
        let _ = writeln!(out, "\nverdict: {}", self.verdict_line());
        out
    }

    fn verdict_line(&self) -> String {
        let line = |v: &Verdict| {
            let hint = if v.hint.is_empty() { String::new() } else { format!("; {}", v.hint) };
            let line = format!("{}: {}{hint}", v.kind, v.said);
            one_line(&line)
        };
        let (verdict, unfinished) = (self.verdict(), self.unfinished());
        match (verdict, self.warnings()) {
            (Some(v), _) if self.is_broken() => line(&v),
            _ if !unfinished.is_empty() => format!("not finished: {}", unfinished.join(", ")),
            (Some(v), _) => format!("healthy, but {}", line(&v)),
            (None, 0) => "healthy".to_owned(),
            (None, 1) => "healthy, with one warning".to_owned(),
            (None, n) => format!("healthy, with {n} warnings"),
        }
    }

    /// The documented form: README and `doctor --help` name its fields.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        let verdict = self.verdict();
        let checks = self.checks.iter().map(|c| {
            let mut out = json!({"check": c.name, "state": c.state.json(), "detail": c.said});
            if !c.hint.is_empty() {
                out["hint"] = c.hint.as_str().into();
            }
            if let Some(kind) = c.kind.filter(|_| c.state != Outcome::Ok) {
                out["kind"] = kind.name().into();
            }
            out
        });
        json!({
            "version": build_info::VERSION,
            "time": rfc3339(self.at),
            "seconds": self.took.as_secs_f64(),
            "healthy": self.exit_code() == 0,
            "warnings": self.warnings(),
            "unfinished": self.unfinished(),
            "verdict": verdict.map(|v| json!({
                "kind": v.kind.name(),
                "summary": v.kind.summary(),
                "detail": v.said,
                "hint": v.hint,
                "part": v.part,
            })),
            "checks": checks.collect::<Vec<_>>(),
            "troubles": self.troubles,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topmost_cause_of_both_is_the_verdict() {
        let mut report = Report::new(SystemTime::UNIX_EPOCH);
        assert_eq!((report.exit_code(), report.json()["verdict"].clone()), (0, Value::Null));
        report.checks.push(Check::fail("grpc", Kind::AdsRefused, "UNAUTHENTICATED\nof two lines"));
        report
            .checks
            .push(Check::warn("token", "for audience x", "make another").maybe(Kind::TokenWrongAudience));
        assert_eq!(report.json()["verdict"]["kind"], "AdsRefused");
        assert_eq!(report.text().lines().count(), 4, "{}", report.text());
        report.weigh();
        assert_eq!(report.json()["verdict"]["kind"], "TokenWrongAudience");
        report.checks[1] = Check::ok("token", "expired, certificates are shown").maybe(Kind::TokenExpired);
        assert_eq!(report.json()["verdict"]["kind"], "AdsRefused");
        report.weigh();
        assert_eq!(report.json()["verdict"]["kind"], "TokenExpired");
        assert!(!report.checks[1].hint.is_empty());
        report.troubles = vec![json!({"kind": "DiskFull", "detail": "full", "hint": "free", "part": "x"})];
        assert_eq!(report.json()["verdict"]["part"], "agent/x");
        assert!(report.text().ends_with("\nverdict: DiskFull: full; free\n"));
    }

    #[test]
    fn what_peers_say_commands_no_terminal() {
        let mut report = Report::new(SystemTime::UNIX_EPOCH);
        report.checks.push(Check::fail("tls", Kind::TlsFailed, "shown: \u{1b}[2Jall is\r well\u{9b}1m"));
        report.troubles =
            vec![json!({"kind": "DiskFull", "detail": "\u{1b}c", "hint": "\u{7}", "part": "x"})];
        let text = report.text();
        assert!(text.contains("\\u{1b}[2Jall is well\\u{9b}1m"), "{text}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    }

    #[test]
    fn what_works_all_the_same_is_healthy_and_named() {
        let mut report = Report::new(SystemTime::UNIX_EPOCH);
        report.troubles = vec![json!({"kind": "WasmFailed", "detail": "no module", "part": "wasm"})];
        assert_eq!((report.exit_code(), report.json()["verdict"]["kind"].clone()), (0, "WasmFailed".into()));
        report.checks.push(Check::fail("ports", Kind::StatusPortTaken, "held"));
        report.checks.push(Check::fail("files", Kind::OutputCertsFailed, "no folder"));
        assert_eq!(report.exit_code(), 0, "{}", report.text());
        assert!(report.text().contains("\nverdict: healthy, but OutputCertsFailed: no folder; "));
        // It may explain what is broken.
        report.checks.push(Check::fail("agent", Kind::GrpcBootstrapMissing, "no certificates"));
        assert_eq!(report.exit_code(), 1);
        assert!(report.text().contains("\nverdict: OutputCertsFailed: no folder; "), "{}", report.text());
    }

    #[test]
    fn what_came_to_no_end_is_never_healthy() {
        let mut report = Report::new(SystemTime::UNIX_EPOCH);
        report.checks.push(Check::late("files", "not finished within 14 s", ""));
        report.checks.push(Check::fail("ports", Kind::StatusPortTaken, "held"));
        let json = report.json();
        assert_eq!((report.exit_code(), json["healthy"].clone()), (1, false.into()));
        assert_eq!(json["unfinished"], json!(["files"]));
        assert!(report.text().ends_with("\nverdict: not finished: files\n"), "{}", report.text());
        report.checks.push(Check::fail("token", Kind::TokenMissing, "is not there"));
        assert!(report.text().contains("\nverdict: TokenMissing: "), "{}", report.text());
    }
}
