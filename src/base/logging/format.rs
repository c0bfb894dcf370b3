//! One event as one line.

use std::fmt::{self, Write as _};
use std::io::Write as _;

use jiff::Timestamp;
use tracing::Event;
use tracing::field::{Field, Visit};

use crate::base::quote::plain;

/// What a line starts with.
pub(super) struct Line<'a> {
    pub(super) level: &'static str,
    pub(super) scope: &'static str,
    pub(super) caller: Option<(&'a str, u32)>,
}

/// Appends the line, newline included.
pub(super) fn write(out: &mut Vec<u8>, line: &Line<'_>, event: &Event<'_>, as_json: bool) {
    // Always UTC, always six decimals.
    let time = format!("{:.6}", Timestamp::now());
    // Writing to memory does not fail.
    let _ = if as_json { json(out, line, event, &time) } else { text(out, line, event, &time) };
    out.push(b'\n');
}

fn text(out: &mut Vec<u8>, line: &Line<'_>, event: &Event<'_>, time: &str) -> std::io::Result<()> {
    write!(out, "{time}\t{}\t", line.level)?;
    if line.scope != "default" {
        write!(out, "{}\t", line.scope)?;
    }
    if let Some((file, number)) = line.caller {
        write!(out, "{file}:{number}\t")?;
    }
    let mut parts = Parts::default();
    event.record(&mut parts);
    out.extend_from_slice(printable(&parts.message).as_bytes());
    for (n, (name, value)) in parts.labels.iter().enumerate() {
        let shown = match value {
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Number(number) if SPANS.contains(name) => {
                span(number.as_i64().unwrap_or_default())
            }
            other => other.to_string(),
        };
        write!(out, "{}{name}={}", if n == 0 { '\t' } else { ' ' }, printable(&shown))?;
    }
    Ok(())
}

// Texts of several lines are meant.
fn printable(text: &str) -> std::borrow::Cow<'_, str> {
    plain(text, &['\n', '\t'])
}

fn json(out: &mut Vec<u8>, line: &Line<'_>, event: &Event<'_>, time: &str) -> std::io::Result<()> {
    let mut parts = Parts::default();
    event.record(&mut parts);
    write!(out, "{{\"level\":\"{}\",\"time\":\"{time}\"", line.level)?;
    if line.scope != "default" {
        write!(out, ",\"scope\":\"{}\"", line.scope)?;
    }
    if let Some((file, number)) = line.caller {
        write!(out, ",\"caller\":\"{file}:{number}\"")?;
    }
    write!(out, ",\"msg\":{}", quoted(&parts.message))?;
    for (name, value) in &parts.labels {
        let list = LISTS.contains(name).then(|| value.as_str()).flatten().map(listed);
        write!(out, ",{}:{}", quoted(name), list.as_ref().unwrap_or(value))?;
    }
    out.push(b'}');
    Ok(())
}

fn quoted(text: &str) -> serde_json::Value {
    serde_json::Value::from(text)
}

/// Labels that hold nanoseconds: a number in JSON, in text as Go prints a duration. As in the Go agent.
const SPANS: [&str; 2] = ["latency", "ttl"];
/// Labels that hold `[a b]`: an array in JSON, as in the Go agent; an event has no type for one.
const LISTS: [&str; 1] = ["ips"];

fn listed(text: &str) -> serde_json::Value {
    text.trim_matches(['[', ']']).split_ascii_whitespace().collect()
}

/// `1h2m3.5s`, `12.345ms`.
fn span(nanoseconds: i64) -> String {
    let sign = if nanoseconds < 0 { "-" } else { "" };
    let all = nanoseconds.unsigned_abs();
    let (unit, name) = match all {
        0 => return "0s".to_owned(),
        1..1_000 => (1, "ns"),
        1_000..1_000_000 => (1_000, "\u{b5}s"),
        1_000_000..1_000_000_000 => (1_000_000, "ms"),
        _ => {
            let seconds = all / 1_000_000_000;
            let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
            let lead = match (hours, minutes) {
                (0, 0) => String::new(),
                (0, _) => format!("{minutes}m"),
                _ => format!("{hours}h{minutes}m"),
            };
            return format!("{sign}{lead}{}s", fraction(all % 60_000_000_000, 1_000_000_000));
        }
    };
    format!("{sign}{}{name}", fraction(all, unit))
}

// `value / unit` with as many digits as it has.
fn fraction(value: u64, unit: u64) -> String {
    let width = unit.ilog10() as usize;
    let text = format!("{}.{:0width$}", value / unit, value % unit);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[derive(Default)]
struct Parts {
    message: String,
    labels: Vec<(&'static str, serde_json::Value)>,
}

impl Parts {
    fn label(&mut self, field: &Field, value: impl Into<serde_json::Value>) {
        self.labels.push((field.name(), value.into()));
    }
}

impl Visit for Parts {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            // Writing to a string does not fail.
            let _ = write!(self.message, "{value:?}");
        } else {
            self.label(field, format!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message.push_str(value);
        } else {
            self.label(field, value);
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.label(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.label(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.label(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.label(field, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_told_nothing() {
        assert_eq!(printable("a\u{1b}[31m\r\u{9b}b\n\tc"), "a\\u{1b}[31m\\r\\u{9b}b\n\tc");
    }

    #[test]
    fn durations_read_as_go_prints_them() {
        for (nanoseconds, text) in [
            (0, "0s"),
            (999, "999ns"),
            (12_345, "12.345\u{b5}s"),
            (12_000_000, "12ms"),
            (1_500_000_000, "1.5s"),
            (60_000_000_000, "1m0s"),
            (86_399_999_000_000, "23h59m59.999s"),
            (-1_000_000_000, "-1s"),
        ] {
            assert_eq!(span(nanoseconds), text);
        }
        assert_eq!(listed("[10.0.0.1 fd00::1]").to_string(), r#"["10.0.0.1","fd00::1"]"#);
    }
}
