//! One event as one line.

use std::fmt::{self, Write as _};
use std::io::Write as _;

use jiff::Timestamp;
use tracing::Event;
use tracing::field::{Field, Visit};

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
    out.extend_from_slice(parts.message.as_bytes());
    for (n, (name, value)) in parts.labels.iter().enumerate() {
        let shown = match value {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        write!(out, "{}{name}={shown}", if n == 0 { '\t' } else { ' ' })?;
    }
    Ok(())
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
        write!(out, ",{}:{value}", quoted(name))?;
    }
    out.push(b'}');
    Ok(())
}

fn quoted(text: &str) -> serde_json::Value {
    serde_json::Value::from(text)
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
