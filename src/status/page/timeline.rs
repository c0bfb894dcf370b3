//! The events as an inline SVG: one lane a sort of event, time from left to right.
//!
//! The start is seconds, the rest may be days: time is drawn by the logarithm of the distance from the first
//! event, so that both can be read.

use std::fmt::Write as _;
use std::time::SystemTime;

use super::{escaped, span};
use crate::trouble::{Event, What};

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 110.0;
const LANE: f64 = 26.0;
const TOP: f64 = 10.0;

/// Lane, colour.
fn style(what: What) -> (usize, &'static str) {
    match what {
        What::Started => (0, "#3367d6"),
        What::Ready => (0, "#1a8a4a"),
        What::Certificate => (1, "#1a8a4a"),
        What::Connected => (2, "#1a8a4a"),
        What::Lost => (2, "#c62828"),
        What::Push => (3, "#3367d6"),
        What::Trouble => (4, "#c62828"),
        What::Over => (4, "#1a8a4a"),
    }
}

const LANES: [&str; 5] = ["process", "certificate", "istiod", "pushes", "troubles"];

/// Twice the time, one step more: the logarithm to base 2 with straight lines between its whole numbers. `ln` is the
/// only thing the agent would need libm for, 0.3 MB of memory.
fn scale(seconds: f64) -> f64 {
    // A tenth of a second is the first step that can be told apart.
    let tenths = 1.0 + seconds * 10.0;
    let steps = (tenths as u64).max(1).ilog2();
    f64::from(steps) + tenths / (1_u64 << steps) as f64 - 1.0
}

pub(super) fn render(out: &mut String, events: &[Event], now: SystemTime) {
    let Some(first) = events.first().map(|e| e.at) else {
        out.push_str("<p class=dim>Nothing has happened yet.</p>");
        return;
    };
    let since = |at: SystemTime| at.duration_since(first).map_or(0.0, |d| d.as_secs_f64());
    let whole = scale(since(now).max(1.0));
    let x = |seconds: f64| LEFT + (WIDTH - LEFT - 20.0) * (scale(seconds) / whole).min(1.0);
    let height = TOP + LANE * 5.0 + 24.0;
    let _ =
        write!(out, "<svg viewBox='0 0 {WIDTH} {height}' role=img aria-label='timeline of the last events'>");
    for (n, name) in LANES.iter().enumerate() {
        let y = TOP + LANE * (n as f64 + 0.5);
        let _ = write!(
            out,
            "<line x1='{LEFT}' y1='{y}' x2='{}' y2='{y}' stroke='#dde2e8'/><text x='0' y='{}' font-size='13' fill='#51606f'>{name}</text>",
            WIDTH - 20.0,
            y + 4.0
        );
    }
    let bottom = TOP + LANE * 5.0;
    for seconds in [0.0, 1.0, 10.0, 60.0, 600.0, 3600.0, 36_000.0, 360_000.0] {
        if seconds <= since(now).max(1.0) {
            let at = x(seconds);
            let _ = write!(
                out,
                "<line x1='{at:.1}' y1='{TOP}' x2='{at:.1}' y2='{bottom}' stroke='#eef1f4'/>\
                 <text x='{at:.1}' y='{}' font-size='12' fill='#51606f' text-anchor='middle'>+{}</text>",
                bottom + 16.0,
                span(seconds as u64)
            );
        }
    }
    for event in events {
        let (lane, colour) = style(event.what);
        let y = TOP + LANE * (lane as f64 + 0.5);
        let _ = write!(
            out,
            "<circle cx='{:.1}' cy='{y}' r='6' fill='{colour}' fill-opacity='.75'><title>+{:.1}s {}: {}</title></circle>",
            x(since(event.at)),
            since(event.at),
            event.what.name(),
            escaped(&event.text)
        );
    }
    out.push_str(
        "</svg><p class=dim>Time since the first event, in growing steps; point at a dot to read it.</p>",
    );
}

#[cfg(test)]
mod tests {
    use super::scale;

    #[test]
    fn the_scale_grows_without_a_jump() {
        let marks = [0.0, 0.04, 0.1, 0.69, 0.7, 0.71, 1.5, 10.0, 3600.0, 1e9];
        let at = marks.map(scale);
        assert!(at.is_sorted_by(|a, b| a < b), "{at:?}");
        assert!((scale(0.1) - 1.0).abs() < 1e-9 && (scale(0.7) - 3.0).abs() < 1e-9, "{at:?}");
        assert!(scale(0.7) - scale(0.6999) < 0.001, "{at:?}");
    }
}
