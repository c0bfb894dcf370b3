//! The log's lines about troubles: when one begins, while it lasts, when it is over.

use std::time::{Duration, Instant};

use super::entry::Held;
use super::{Kind, Severity, Trouble, Troubles};
use crate::base::quote::cut;
use crate::base::seldom::Seldom;
use crate::base::slack;

/// Whoever speaks to the agent can cause troubles as fast as it likes: so many lines a minute, so long at most.
static BEGUN: Seldom = Seldom::new(60);
static OVER: Seldom = Seldom::new(60);
/// A kind's first line in a minute is told, whatever others have caused.
static FIRST: [Seldom; Kind::ALL.len()] = [const { Seldom::new(1) }; Kind::ALL.len()];
const LONGEST: usize = 2048;

/// While something is wrong, one line says so this often.
pub(super) const EVERY: Duration = Duration::from_secs(30);

// An event's target is part of its call site, so each scope has its own.
macro_rules! scoped {
    ($level:ident, $part:expr, $text:expr) => {
        match $part {
            "xdsproxy" => tracing::$level!(target: "xdsproxy", "{}", $text),
            "citadelclient" => tracing::$level!(target: "citadelclient", "{}", $text),
            "cache" => tracing::$level!(target: "cache", "{}", $text),
            "sds" => tracing::$level!(target: "sds", "{}", $text),
            "dns" => tracing::$level!(target: "dns", "{}", $text),
            "wasm" => tracing::$level!(target: "wasm", "{}", $text),
            "probes" => tracing::$level!(target: "probes", "{}", $text),
            "healthcheck" => tracing::$level!(target: "healthcheck", "{}", $text),
            "security" => tracing::$level!(target: "security", "{}", $text),
            _ => tracing::$level!("{}", $text),
        }
    };
}

pub(super) fn begins(part: &str, kind: Kind, before: Option<Kind>, text: &str) {
    let text = cut(text, LONGEST);
    let more = if FIRST[kind as usize].is_first() { Some(String::new()) } else { BEGUN.may_hold(text.len()) };
    let Some(more) = more else { return };
    let text = match before {
        Some(before) => format!("{text} (before: {before}){more}"),
        None => format!("{text}{more}"),
    };
    match kind.severity() {
        Severity::Broken => scoped!(error, part, text),
        Severity::Degraded => scoped!(warn, part, text),
    }
}

/// One is over.
pub(super) fn ends(part: &str, text: &str) {
    let text = cut(text, LONGEST);
    if let Some(more) = OVER.may_hold(text.len()) {
        scoped!(info, part, format!("{text}{more}"));
    }
}

/// What is said when a trouble ends.
pub(super) fn over(held: &Held) -> String {
    let about = if held.report.subject.is_empty() { "" } else { &held.report.subject };
    let space = if about.is_empty() { "" } else { " " };
    format!(
        "over: {}{space}{about}, after {}{}",
        held.report.kind,
        span(held.started.elapsed()),
        times(held.count)
    )
}

fn times(count: u64) -> String {
    if count > 1 { format!(", {count} attempts") } else { String::new() }
}

fn still(troubles: &[Trouble]) -> Option<String> {
    let (first, rest) = troubles.split_first()?;
    let mut text = format!("still: {} for {}{}", first.line(), span(first.lasts), times(first.count));
    for (n, other) in rest.iter().take(4).enumerate() {
        let about = if other.subject.is_empty() { String::new() } else { format!(" {}", other.subject) };
        let lead = if n == 0 { "; also " } else { ", " };
        text.push_str(&format!("{lead}{}{about} for {}", other.kind, span(other.lasts)));
    }
    if rest.len() > 4 {
        text.push_str(&format!(" and {} more", rest.len() - 4));
    }
    Some(text)
}

/// `1m30s`, as Go prints durations, without fractions above a second.
#[must_use]
pub(crate) fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) if seconds == 0 => format!("{}ms", time.as_millis()),
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
}

impl Troubles {
    /// While something is wrong, says so in one line every `EVERY`. Never ends; costs nothing while
    /// nothing is wrong.
    pub(crate) async fn attend(&self) {
        loop {
            let due = {
                self.end_outlived();
                let state = self.lock();
                let said = if state.held.is_empty() { None } else { state.said };
                said.map(|at| EVERY.saturating_sub(at.elapsed()))
            };
            match due {
                None => self.0.began.notified().await,
                Some(Duration::ZERO) => self.say_still(),
                Some(wait) => slack::sleep(wait).await,
            }
        }
    }

    fn say_still(&self) {
        let troubles = self.snapshot();
        self.lock().said = Some(Instant::now());
        if let (Some(text), Some(first)) = (still(&troubles), troubles.first()) {
            scoped!(warn, first.part, text);
        }
    }
}
