//! Profiles in pprof's own format, of what the kernel and the task group know.
//!
//! No stacks: the one maintained crate that walks them from inside (`pprof`) does it in a signal handler
//! with an unwinder and symbol tables, for a share of this binary and its memory that a sidecar should
//! not carry; `perf` does the same from outside. What is here costs nothing until it is asked for, and
//! `go tool pprof` shows it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flate2::Crc;
use prost::Message;

/// `perftools.profiles.Profile`, the fields in use; numbers from pprof's profile.proto.
#[derive(Clone, PartialEq, Message)]
struct Proto {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
}

/// Amounts by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Profile {
    /// What is counted, and in what unit.
    kinds: Vec<(&'static str, &'static str)>,
    rows: BTreeMap<String, Vec<i64>>,
    duration: Duration,
}

impl Profile {
    fn new(kinds: &[(&'static str, &'static str)]) -> Self {
        Self { kinds: kinds.to_vec(), rows: BTreeMap::new(), duration: Duration::ZERO }
    }

    fn add(&mut self, name: &str, values: &[i64]) {
        let row = self.rows.entry(name.to_owned()).or_insert_with(|| vec![0; values.len()]);
        for (sum, value) in row.iter_mut().zip(values) {
            *sum = sum.saturating_add(*value);
        }
    }

    /// For `go tool pprof`.
    pub(super) fn pprof(&self) -> Vec<u8> {
        let mut proto = Proto { string_table: vec![String::new()], ..Proto::default() };
        let mut text = |text: &str| {
            proto.string_table.push(text.to_owned());
            proto.string_table.len() as i64 - 1
        };
        let kinds: Vec<_> =
            self.kinds.iter().map(|(k, u)| ValueType { kind: text(k), unit: text(u) }).collect();
        let names: Vec<_> = self.rows.keys().map(|name| text(name)).collect();
        proto.sample_type = kinds;
        for ((id, name), values) in (1..).zip(names).zip(self.rows.values()) {
            proto.function.push(Function { id, name });
            proto.location.push(Location { id, line: vec![Line { function_id: id }] });
            proto.sample.push(Sample { location_id: vec![id], value: values.clone() });
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        proto.time_nanos = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
        proto.duration_nanos = i64::try_from(self.duration.as_nanos()).unwrap_or(i64::MAX);
        stored(&proto.encode_to_vec())
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        let heads: Vec<_> = self.kinds.iter().map(|(kind, unit)| format!("{kind} ({unit})")).collect();
        let mut out = format!("{}\n", heads.join("  "));
        for (name, values) in &self.rows {
            let values: Vec<_> = values.iter().map(i64::to_string).collect();
            out.push_str(&format!("{}  {name}\n", values.join("  ")));
        }
        out
    }
}

/// In gzip's format (RFC 1952), as it is: a compressor takes 300 kB, which a flood of these would leave in pieces.
fn stored(bytes: &[u8]) -> Vec<u8> {
    let mut crc = Crc::new();
    crc.update(bytes);
    let mut out = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    // Blocks of RFC 1951, 3.2.4. There is a last one also of nothing.
    let mut rest = bytes;
    loop {
        let (block, after) = rest.split_at(rest.len().min(usize::from(u16::MAX)));
        let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
        out.push(u8::from(after.is_empty()));
        out.extend(length.to_le_bytes());
        out.extend((!length).to_le_bytes());
        out.extend(block);
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    out.extend(crc.sum().to_le_bytes());
    out.extend(crc.amount().to_le_bytes());
    out
}

/// Memory by mapping, from `/proc/self/smaps`.
pub(super) fn heap() -> Profile {
    match File::open("/proc/self/smaps") {
        Ok(smaps) => mappings(BufReader::new(smaps)),
        Err(_) => mappings(&b""[..]),
    }
}

fn mappings(smaps: impl BufRead) -> Profile {
    let mut profile = Profile::new(&[("resident", "bytes"), ("anonymous", "bytes")]);
    let mut name = String::new();
    for line in smaps.split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        let Some((key, value)) = line.split_once(':').filter(|(key, _)| !key.contains(' ')) else {
            // `7f00-7f01 rw-p 00000000 00:00 0   [heap]`
            name = line.split_whitespace().nth(5).unwrap_or("[anonymous]").to_owned();
            continue;
        };
        let kilobytes = || value.split_whitespace().next().and_then(|n| n.parse::<i64>().ok()).unwrap_or(0);
        match key {
            "Rss" => profile.add(&name, &[kilobytes() * 1024, 0]),
            "Anonymous" => profile.add(&name, &[0, kilobytes() * 1024]),
            _ => {}
        }
    }
    profile
}

/// Tasks by name.
pub(super) fn tasks(names: &[String]) -> Profile {
    let mut profile = Profile::new(&[("tasks", "count")]);
    for name in names {
        profile.add(name, &[1]);
    }
    profile
}

/// Threads by name.
pub(super) fn threads() -> Profile {
    let mut profile = Profile::new(&[("threads", "count")]);
    for (name, _) in each_thread() {
        profile.add(&name, &[1]);
    }
    profile
}

/// Waits for locks, which nobody counts here, nor in Go unless it is told to: empty.
pub(super) fn contentions() -> Profile {
    Profile::new(&[("contentions", "count"), ("delay", "nanoseconds")])
}

/// CPU time of each thread in the time given.
pub(super) async fn cpu(time: Duration) -> Profile {
    let mut profile = Profile::new(&[("user", "nanoseconds"), ("system", "nanoseconds")]);
    profile.duration = time;
    for (name, [user, system]) in each_thread() {
        profile.add(&name, &[-user, -system]);
    }
    tokio::time::sleep(time).await;
    for (name, [user, system]) in each_thread() {
        profile.add(&name, &[user, system]);
    }
    profile
}

/// USER_HZ is 100.
const TICK: i64 = 10_000_000;

fn each_thread() -> Vec<(String, [i64; 2])> {
    let Ok(dir) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let stat = |entry: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let (head, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let time = |at: usize| fields.get(at - 3).and_then(|f| f.parse::<i64>().ok()).unwrap_or(0) * TICK;
        Some((head.split_once('(')?.1.to_owned(), [time(14), time(15)]))
    };
    dir.flatten().filter_map(stat).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_summed_by_name() {
        let smaps = "00-01 r-xp 00000000 08:01 12 /bin/a b\nSize: 8 kB\nRss:  4 kB\nAnonymous: 0 kB\n01-02 rw-p 00000000 08:01 12 /bin/a\nRss: 4 kB\nAnonymous: 4 kB\n02-03 rw-p 00000000 00:00 0\nRss: 8 kB\n";
        let profile = mappings(smaps.as_bytes());
        assert_eq!(profile.rows["/bin/a"], [8192, 4096]);
        assert_eq!(profile.rows["[anonymous]"], [8192, 0]);
        assert!(profile.text().contains("8192  4096  /bin/a\n"));
        assert!(heap().rows.len() > 2 && !threads().rows.is_empty());
    }

    #[test]
    fn gzip_reads_what_is_stored() {
        for length in [0, 1, 65_535, 65_536, 200_000] {
            let bytes: Vec<u8> = (0..=250).cycle().take(length).collect();
            let mut read = Vec::new();
            std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&stored(&bytes)[..]), &mut read)
                .unwrap();
            assert!(read == bytes, "{length}");
        }
    }

    #[test]
    fn the_format_is_pprofs() {
        let zipped = tasks(&["sds".to_owned(), "sds".to_owned(), "xds".to_owned()]).pprof();
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&zipped[..]), &mut bytes).unwrap();
        let proto = Proto::decode(&bytes[..]).unwrap();
        assert_eq!(proto.string_table, ["", "tasks", "count", "sds", "xds"]);
        assert_eq!(proto.sample[0].value, [2]);
        assert_eq!(proto.function[1].name, 4);
    }
}
