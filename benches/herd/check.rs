//! The model beside real agents: what `make herd` measured (benches/herd.json) and simulated herds of the same settings.

use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;

use crate::model::{Arrivals, Herd, Mesh};
use crate::plot::{self, Back};

/// Simulated herds for each real one.
const HERDS: usize = 500;
/// The part of them, in hundredths, that lies below the ranges shown, and the part that lies above.
const OUTSIDE: usize = 1;

/// What the bench writes.
#[derive(Debug, Deserialize)]
struct Measured {
    /// Version and revision.
    agent: String,
    unix_seconds: i64,
    herds: Vec<Real>,
}

/// One herd that lost its istiod; times in seconds since it could be reached again.
#[derive(Debug, Deserialize)]
struct Real {
    agents: usize,
    away: f64,
    spread: Option<f64>,
    /// Streams a second; 0: all.
    admitted: u32,
    attempts: String,
    served: String,
}

/// What is compared: 50 %, 99 %, 100 % (s), the busiest second's attempts, attempts each.
type Figures = [f64; 5];

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn figures(attempts: &[f64], served: &[f64]) -> Figures {
    let at = |share: usize| served.get((served.len() * share / 100).min(served.len().saturating_sub(1)));
    let [half, most, all] = [50, 99, 100].map(|share| at(share).copied().unwrap_or(f64::NAN));
    let within = |first: &f64| attempts.iter().filter(|t| (*first..first + 1.0).contains(t)).count();
    let busiest = attempts.iter().map(within).max().unwrap_or_default();
    [half, most, all, busiest as f64, attempts.len() as f64 / served.len().max(1) as f64]
}

fn sorted(mut times: Vec<f64>) -> Vec<f64> {
    times.sort_by(f64::total_cmp);
    times
}

// Of as many values as there are simulated herds: the middle, and the ends of the range shown.
fn range(values: Vec<f64>) -> [f64; 3] {
    let values = sorted(values);
    let last = values.len() - 1;
    [last / 2, last * OUTSIDE / 100, last - last * OUTSIDE / 100].map(|n| values[n])
}

impl Real {
    fn times(text: &str) -> Result<Vec<f64>, String> {
        let times = text.split_whitespace().map(|word| word.parse().map_err(|e| format!("{word:?}: {e}")));
        times.collect::<Result<_, _>>().map(sorted)
    }

    fn model(&self) -> Vec<(Figures, Vec<f64>)> {
        let rate = (self.admitted > 0).then_some(f64::from(self.admitted));
        let mesh = Mesh { rate, spread: self.spread };
        let one = |_| {
            let Arrivals { attempts, served, .. } = Herd::new(self.agents).after_outage(self.away, mesh);
            let served = sorted(served);
            (figures(&attempts, &served), served)
        };
        (0..HERDS).map(one).collect()
    }

    // How many, streams admitted a second, spread.
    fn settings(&self) -> [String; 3] {
        let spread = self.spread.map_or_else(|| "unset".to_owned(), |over| format!("{over:.0}s"));
        let admitted = if self.admitted == 0 { "all".to_owned() } else { self.admitted.to_string() };
        [self.agents.to_string(), admitted, spread]
    }

    // Its two rows, and its curve.
    fn compared(&self) -> Result<(String, Back), String> {
        let (attempts, served) = (Self::times(&self.attempts)?, Self::times(&self.served)?);
        if served.len() != self.agents {
            return Err(format!("{} of {} agents came back", served.len(), self.agents));
        }
        let (real, model) = (figures(&attempts, &served), self.model());
        let ranges: Vec<[f64; 3]> =
            (0..real.len()).map(|n| range(model.iter().map(|(figures, _)| figures[n]).collect())).collect();
        let number =
            |n: usize, value: f64| if n == 3 { format!("{value:.0}") } else { format!("{value:.1}") };
        let mut rows = format!("| {} | real ", self.settings().join(" | "));
        for (n, (value, [_, low, high])) in real.iter().zip(&ranges).enumerate() {
            // As they are shown: what is rounded away is no difference.
            let [low, value, high] = [*low, *value, *high].map(|value| number(n, value));
            let parsed = |text: &str| text.parse::<f64>().unwrap_or(f64::NAN);
            let inside = (parsed(&low)..=parsed(&high)).contains(&parsed(&value));
            let _ = write!(rows, "| {value}{} ", if inside { "" } else { " (outside)" });
        }
        rows.push_str("|\n| | | | model ");
        for (n, [middle, low, high]) in ranges.iter().enumerate() {
            let _ = write!(rows, "| {} [{}–{}] ", number(n, *middle), number(n, *low), number(n, *high));
        }
        rows.push_str("|\n");
        let each: Vec<[f64; 3]> =
            (0..self.agents).map(|n| range(model.iter().map(|(_, served)| served[n]).collect())).collect();
        let [low, high] = [1, 2].map(|end| each.iter().map(|range| range[end]).collect());
        let [agents, admitted, spread] = self.settings();
        let label = format!("{agents} agents, admitted a second: {admitted}, XDS_RECONNECT_SPREAD {spread}");
        Ok((rows, Back { label, real: served, low, high }))
    }
}

/// The section of the page, and its plot.
pub(crate) fn section(measured: &Path) -> Result<(String, String), String> {
    let why = |e: &dyn std::fmt::Display| format!("{} (make herd measures it anew): {e}", measured.display());
    let text = std::fs::read_to_string(measured).map_err(|e| why(&e))?;
    let Measured { agent, unix_seconds, herds } = serde_json::from_str(&text).map_err(|e| why(&e))?;
    let day = jiff::Timestamp::from_second(unix_seconds).map_err(|e| why(&e))?.strftime("%Y-%m-%d");
    let away = herds.first().map(|herd| herd.away).unwrap_or_default();
    let mut out = format!(
        "## Checked against real agents\n\n\
         Real agents ({agent}) lost a mock istiod for {away:.0} s on {day} (`make herd`, kept in `benches/herd.json`), which admits \
         streams as istiod does. Beside each herd\nthe model's: the median of {HERDS} simulated herds of the same size and settings, \
         and the range of all but the outermost {OUTSIDE} % at either end. A real figure\nthat is not in it is marked; of so many, now and \
         then one is outside by chance.\n\n\
         | agents | admitted a second | spread | | 50 % | 99 % | 100 % | busiest second | attempts each |\n|{}\n",
        "---|".repeat(9)
    );
    let mut curves = Vec::new();
    for herd in &herds {
        let (rows, curve) = herd.compared().map_err(|e| why(&e))?;
        out.push_str(&rows);
        curves.push(curve);
    }
    out.push_str("\n![share of the agents that are back, real and simulated](scale/check.svg)\n");
    Ok((out, plot::back(&curves)))
}
