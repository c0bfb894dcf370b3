//! One trouble: as reported, as held, as shown.

use std::borrow::Cow;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde::ser::SerializeMap;

use super::Kind;
use crate::base::clock::rfc3339;

/// Ends the hint of what is tried again, and of what has ended the agent.
const RETRIES: &str = "; the agent tries again by itself";
const START_AGAIN: &str = ", and start the agent again";

/// What a part says about a trouble.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// What it is.
    pub kind: Kind,
    /// The cause in one line: which input, which value, what happened.
    pub detail: String,
    /// What to do, where this occurrence tells more than [`Kind::hint`].
    pub hint: Option<Cow<'static, str>>,
    /// What tells two troubles of one kind apart (an address, a type URL, a file); empty: nothing.
    pub subject: String,
    /// A gRPC status or HTTP code that belongs to it.
    pub code: Option<String>,
}

impl Report {
    /// A report with the kind's own hint.
    #[must_use]
    pub fn new(kind: Kind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into(), hint: None, subject: String::new(), code: None }
    }

    /// With a hint of its own; an empty one changes nothing.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Self {
        let hint = hint.into();
        let bare = hint.trim_start_matches([';', ' ']);
        if !bare.is_empty() {
            self.hint = Some(Cow::Owned(bare.to_owned()));
        }
        self
    }

    /// About this address, type or file.
    #[must_use]
    pub fn about(mut self, subject: impl Into<String>) -> Self {
        self.subject = subject.into();
        self
    }

    /// With a code.
    #[must_use]
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// Whether it is the same trouble, whatever its last detail.
    pub(super) fn same(&self, other: &Self) -> bool {
        self.kind == other.kind && self.subject == other.subject
    }

    /// What to do about it.
    #[must_use]
    pub(crate) fn hint_text(&self) -> &str {
        self.hint.as_deref().unwrap_or(self.kind.hint_for(&self.detail))
    }

    /// As it is told where the agent ends by it: nobody tries again then.
    #[must_use]
    pub(crate) fn ending(self) -> Self {
        let hint = match self.hint_text().strip_suffix(RETRIES) {
            Some(first) => format!("{first}{START_AGAIN}"),
            None => return self,
        };
        self.hint(hint)
    }

    /// The last line before an end that nobody asked for: what ended it, and the verdict with what to do.
    #[must_use]
    pub(crate) fn last_line(&self, reason: &str) -> String {
        let report = self.clone().ending();
        let (kind, detail, hint) = (report.kind, &report.detail, report.hint_text());
        // Every problem stands on a line of its own; so does the verdict then.
        let between = if reason.contains('\n') { "\n" } else { "; " };
        if detail.contains(reason) || reason.contains(detail.as_str()) {
            return format!("{reason}{between}verdict: {kind}; {hint}");
        }
        format!("{reason}{between}verdict: {kind}: {detail}; {hint}")
    }

    /// Cause and hint in one line.
    pub(super) fn line(&self) -> String {
        format!("{}; {}", self.detail, self.hint_text())
    }
}

impl From<Trouble> for Report {
    fn from(trouble: Trouble) -> Self {
        let Trouble { kind, detail, hint, subject, code, .. } = trouble;
        Self { kind, detail, hint: Some(Cow::Owned(hint)), subject, code }
    }
}

impl<D: Into<String>> From<(Kind, D)> for Report {
    fn from((kind, detail): (Kind, D)) -> Self {
        Self::new(kind, detail)
    }
}

/// A trouble that a reporter has open.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) part: &'static str,
    pub(super) report: Report,
    pub(super) since: SystemTime,
    pub(super) started: Instant,
    pub(super) count: u64,
    /// Nobody has met it again by then, and nobody will say that it is over.
    pub(super) until: Option<tokio::time::Instant>,
}

impl Held {
    pub(super) fn new(part: &'static str, report: Report, since: SystemTime) -> Self {
        Self { part, report, since, started: Instant::now(), count: 1, until: None }
    }

    pub(super) fn again(&mut self, report: Report) {
        self.report = report;
        self.count += 1;
    }

    fn shown(&self) -> Trouble {
        let shown = Trouble::of(self.report.clone(), self.part, self.since, self.started.elapsed());
        Trouble { count: self.count, ..shown }
    }
}

/// A trouble as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// What it is.
    pub kind: Kind,
    /// The last cause, in one line.
    pub detail: String,
    /// What to do.
    pub hint: String,
    /// Who reported it first.
    pub part: &'static str,
    /// What it is about, where there may be several of the kind.
    pub subject: String,
    /// A gRPC status or HTTP code.
    pub code: Option<String>,
    /// When it began.
    pub since: SystemTime,
    /// How long it lasts, by a clock that nobody sets.
    pub lasts: Duration,
    /// How often it was met.
    pub count: u64,
}

impl Trouble {
    /// `TokenExpired: the token in … has expired`: kind and cause.
    #[must_use]
    pub fn line(&self) -> String {
        format!("{}: {}", self.kind, self.detail)
    }

    /// Cause and hint, without the kind.
    #[must_use]
    pub(crate) fn sentence(&self) -> String {
        format!("{}; {}", self.detail, self.hint)
    }

    /// One that was not held by anybody: made for this answer.
    #[must_use]
    pub fn of(report: Report, part: &'static str, since: SystemTime, lasts: Duration) -> Self {
        let hint = report.hint_text().to_owned();
        let Report { kind, detail, subject, code, .. } = report;
        Self { kind, detail, hint, part, subject, code, since, lasts, count: 1 }
    }
}

/// The documented JSON form; times are RFC 3339.
impl Serialize for Trouble {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("kind", self.kind.name())?;
        map.serialize_entry("severity", self.kind.severity().name())?;
        map.serialize_entry("summary", self.kind.summary())?;
        map.serialize_entry("detail", &self.detail)?;
        map.serialize_entry("hint", &self.hint)?;
        map.serialize_entry("part", self.part)?;
        if !self.subject.is_empty() {
            map.serialize_entry("subject", &self.subject)?;
        }
        if let Some(code) = &self.code {
            map.serialize_entry("code", code)?;
        }
        map.serialize_entry("since", &rfc3339(self.since))?;
        map.serialize_entry("seconds", &self.lasts.as_secs())?;
        map.serialize_entry("count", &self.count)?;
        map.end()
    }
}

/// One entry a trouble, by kind (the order of causes), then by age.
pub(super) fn merged<'a>(held: impl Iterator<Item = &'a Held>) -> Vec<Trouble> {
    let mut out: Vec<Trouble> = Vec::new();
    for one in held {
        let same = |t: &&mut Trouble| t.kind == one.report.kind && t.subject == one.report.subject;
        match out.iter_mut().find(same) {
            Some(trouble) => {
                let count = trouble.count + one.count;
                if one.since < trouble.since {
                    *trouble = one.shown();
                }
                trouble.count = count;
            }
            None => {
                out.push(one.shown());
            }
        }
    }
    out.sort_by_key(|t| (t.kind, t.since));
    out
}
