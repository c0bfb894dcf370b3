//! The report: what, ours, the peer's, the ratio, and how far the runs were apart. Printed, and kept for `--json`.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

/// One measured value: the median of its runs and their spread.
#[derive(Debug, Clone)]
pub(crate) struct Value {
    median: f64,
    low: f64,
    high: f64,
}

impl Value {
    /// Of several runs.
    pub(crate) fn of(mut runs: Vec<f64>) -> Option<Self> {
        if runs.is_empty() {
            return None;
        }
        runs.sort_by(f64::total_cmp);
        Some(Self { median: runs[runs.len() / 2], low: runs[0], high: runs[runs.len() - 1] })
    }

    /// Runs that differ by more than half of their median say little.
    fn noisy(&self) -> bool {
        self.high - self.low > self.median / 2.0
    }

    fn show(&self) -> String {
        let number = |n: f64| if n < 10.0 { format!("{n:.2}") } else { format!("{n:.1}") };
        if self.high > self.low {
            let mark = if self.noisy() { " noisy" } else { "" };
            format!("{} [{}–{}]{mark}", number(self.median), number(self.low), number(self.high))
        } else {
            number(self.median)
        }
    }
}

/// One line of the report.
#[derive(Debug)]
pub(crate) struct Row {
    /// What was measured, with its unit.
    pub what: String,
    /// This agent.
    pub ours: Option<Value>,
    /// The agent named by `PEER_AGENT`.
    pub peer: Option<Value>,
    /// The least that a process between can cost (`wire`).
    pub wire: Option<Value>,
    /// Without any agent between.
    pub direct: Option<Value>,
    /// What we aim for, if we said so.
    pub target: &'static str,
}

/// All that was measured, for other programs (`scripts/numbers`).
#[derive(Debug, Default)]
pub(crate) struct Report {
    sections: Vec<serde_json::Value>,
    herds: Vec<serde_json::Value>,
}

impl Report {
    /// Whether nothing was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.sections.is_empty()
    }

    /// Prints a section and keeps it.
    pub(crate) fn add(&mut self, title: &str, rows: &[Row], with_peer: bool) {
        print(title, rows, with_peer);
        let value = |v: &Option<Value>| v.as_ref().map(|v| json!([v.median, v.low, v.high]));
        let row = |r: &Row| {
            json!({
                "what": r.what, "ours": value(&r.ours), "peer": value(&r.peer), "wire": value(&r.wire),
                "direct": value(&r.direct), "target": r.target,
            })
        };
        self.sections.push(json!({"title": title, "rows": rows.iter().map(row).collect::<Vec<_>>()}));
    }

    /// Keeps what istiod saw of a herd.
    pub(crate) fn herd(&mut self, herd: serde_json::Value) {
        self.herds.push(herd);
    }

    /// The whole, with the curves; `agent` is what it says its version is.
    pub(crate) fn json(&self, agent: &str, curves: &[serde_json::Value]) -> serde_json::Value {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut all =
            json!({"agent": agent, "unix_seconds": since, "sections": self.sections, "curves": curves});
        if !self.herds.is_empty() {
            all["herds"] = json!(self.herds);
        }
        all
    }
}

/// Prints the report.
fn print(title: &str, rows: &[Row], with_peer: bool) {
    println!("\n{title}");
    let cell = |v: &Option<Value>| v.as_ref().map_or_else(|| "–".to_owned(), Value::show);
    let ratio = |row: &Row| match (&row.ours, &row.peer) {
        (Some(o), Some(p)) if p.median > 0.0 => format!("{:.2}", o.median / p.median),
        _ => "–".to_owned(),
    };
    let with_wire = rows.iter().any(|row| row.wire.is_some());
    let mut lines = Vec::new();
    let mut head = vec!["what".to_owned(), "this agent".to_owned()];
    if with_peer {
        head.extend(["peer".to_owned(), "ratio".to_owned()]);
    }
    if with_wire {
        head.push("bare proxy".to_owned());
    }
    head.extend(["direct".to_owned(), "target".to_owned()]);
    lines.push(head);
    for row in rows {
        let mut line = vec![row.what.clone(), cell(&row.ours)];
        if with_peer {
            line.extend([cell(&row.peer), ratio(row)]);
        }
        if with_wire {
            line.push(cell(&row.wire));
        }
        line.extend([cell(&row.direct), row.target.to_owned()]);
        lines.push(line);
    }
    let columns = lines[0].len();
    let widths: Vec<usize> =
        (0..columns).map(|c| lines.iter().map(|l| l[c].chars().count()).max().unwrap_or(0)).collect();
    for line in lines {
        let padded = line.iter().zip(&widths).map(|(text, width)| {
            let gap = width - text.chars().count();
            format!("{text}{}", " ".repeat(gap))
        });
        println!("  {}", padded.collect::<Vec<_>>().join("  ").trim_end());
    }
}
