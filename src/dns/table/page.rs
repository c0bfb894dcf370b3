//! The table as JSON, with the names it is found by, in pieces.
//!
//! As a tree of values, or as one text, a table of 300,000 hosts would take a gigabyte. Here only the order of its lines is
//! made first, which is work for a thread; each line is read from the message when it is its turn, so that what is sent
//! holds 8 bytes a name.

use std::cmp::Ordering;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use prost::DecodeError;
use serde_json::{Map, Value, json};

use super::message::{Host, NameInfo, Source};
use super::{KUBERNETES, Table};

/// A piece has so many bytes, or a line more: what a chunk of a scrape has.
const PIECE: usize = 48 * 1024;

/// A line: where its host is in the message; 0 for the host itself, or the number of one of its names.
#[derive(Debug, Clone, Copy)]
struct Line {
    at: u32,
    form: u32,
}

/// A line while its place is looked for: where its name is in the text of all, which is five times as long as the largest
/// message at most.
#[derive(Debug)]
struct Named {
    start: u32,
    end: u32,
    line: Line,
}

/// The pieces.
#[derive(Debug)]
pub(crate) struct Page {
    table: Arc<Table>,
    lines: std::vec::IntoIter<Line>,
    held: Option<Held>,
    begun: bool,
    ended: bool,
}

/// The host of the line before, whose other names mostly follow: it may have tens of thousands.
#[derive(Debug)]
struct Held {
    at: u32,
    host: Host,
    names: Vec<String>,
    /// What each of them has for a value.
    value: Value,
}

impl Held {
    fn of(source: &Source, at: u32) -> Self {
        let host = source.host_at(at).unwrap_or_default();
        let info = host.info();
        let mut addresses = info.addresses();
        addresses.sort_by_key(IpAddr::is_ipv6);
        let ips: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let names = source.scope.names(&host.name, &info);
        Self { at, host, names, value: json!({ "ips": ips, "registry": KUBERNETES }) }
    }
}

impl Page {
    /// Puts the lines in order: for 300,000 hosts the work of seconds.
    ///
    /// # Errors
    /// Never in practice: the message was read once already.
    pub(crate) fn of(table: Arc<Table>) -> Result<Self, DecodeError> {
        let lines = lines(&table.source)?.into_iter();
        Ok(Self { table, lines, held: None, begun: false, ended: false })
    }

    fn write(&mut self, line: Line, out: &mut String) {
        let held = self.held.take().filter(|held| held.at == line.at);
        let held = self.held.insert(held.unwrap_or_else(|| Held::of(&self.table.source, line.at)));
        let _ = match line.form.checked_sub(1) {
            None => write!(out, "{}:{}", json!(held.host.name), shown(&held.host.info())),
            Some(nth) => {
                let name = held.names.get(usize::try_from(nth).unwrap_or(usize::MAX));
                write!(out, "{}:{}", json!(name), held.value)
            }
        };
    }
}

impl Iterator for Page {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let mut out = String::new();
        let mut between = if self.begun { "," } else { "{\"table\":{" };
        while out.len() < PIECE {
            let Some(line) = self.lines.next() else {
                out.push_str(if self.begun { "}}" } else { "{}" });
                self.ended = true;
                break;
            };
            out.push_str(between);
            self.write(line, &mut out);
            (between, self.begun) = (",", true);
        }
        Some(out.into())
    }
}

// Names in one text: a million of them by themselves would take twice the memory.
#[derive(Debug, Default)]
struct Texts(String);

impl Texts {
    fn add(&mut self, name: &str, at: u32, form: u32) -> Named {
        let start = self.end();
        self.0.push_str(name);
        Named { start, end: self.end(), line: Line { at, form } }
    }

    fn end(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    fn of(&self, named: &Named) -> &str {
        let place = |at: u32| usize::try_from(at).unwrap_or(usize::MAX);
        self.0.get(place(named.start)..place(named.end)).unwrap_or_default()
    }

    // Of equals the one stays that `first` puts first. In place: a stable order would take half as much memory again.
    fn order(&self, all: &mut Vec<Named>, first: impl Fn(&Named, &Named) -> Ordering) {
        all.sort_unstable_by(|a, b| self.of(a).cmp(self.of(b)).then_with(|| first(a, b)));
        all.dedup_by(|later, earlier| self.of(later) == self.of(earlier));
    }
}

// In the order of their names. Of a host that stands in the message twice the last one counts; a host's own name beats
// another's, and of two of those the first host's stays.
fn lines(source: &Source) -> Result<Vec<Line>, DecodeError> {
    let mut texts = Texts::default();
    let mut hosts = Vec::new();
    source.each(|at, host| hosts.push(texts.add(&host.name, at, 0)))?;
    texts.order(&mut hosts, |a, b| b.start.cmp(&a.start));
    for nth in 0..hosts.len() {
        let at = hosts[nth].line.at;
        let host = source.host_at(at).unwrap_or_default();
        if host.answers() {
            let forms = (1_u32..).zip(source.scope.names(&host.name, &host.info()));
            hosts.extend(forms.map(|(form, name)| texts.add(&name, at, form)));
        }
    }
    // A host comes before a name that is the same.
    texts.order(&mut hosts, |a, b| a.start.cmp(&b.start));
    Ok(hosts.into_iter().map(|named| named.line).collect())
}

// Empty fields are left out, as protobuf's JSON does.
fn shown(info: &NameInfo) -> Value {
    let mut out = Map::new();
    let mut list = |key: &str, values: &[String]| {
        if !values.is_empty() {
            out.insert(key.to_owned(), json!(values));
        }
    };
    list("ips", &info.ips);
    for (key, text) in
        [("registry", &info.registry), ("shortname", &info.shortname), ("namespace", &info.namespace)]
    {
        if !text.is_empty() {
            out.insert(key.to_owned(), json!(text));
        }
    }
    if !info.alt_hosts.is_empty() {
        out.insert("altHosts".to_owned(), json!(info.alt_hosts));
    }
    Value::Object(out)
}
