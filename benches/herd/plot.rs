//! Histograms as SVG: two colours, no script, readable on light and dark pages.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 120.0;
/// From one histogram to the next below it.
const STEP: f64 = HEIGHT + 50.0;
/// Bars at most.
const BARS: f64 = 600.0;

/// One histogram: what is counted, when it came (in seconds), and how much each counts.
pub(crate) struct Panel<'a> {
    pub label: String,
    pub at: &'a [f64],
    pub each: f64,
}

/// Histograms above each other, over one axis of time.
#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
pub(crate) fn bars(title: &str, panels: &[Panel<'_>]) -> String {
    let end = panels.iter().flat_map(|panel| panel.at.iter().copied()).fold(0.0, f64::max);
    let span = (end / BARS).ceil().max(1.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-60 -50 {} {}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#777\">\n\
         <text x=\"0\" y=\"-34\">{title}: 10,000 agents, in each {span:.0} s</text>\n",
        WIDTH + 80.0,
        STEP * panels.len() as f64 + 20.0
    );
    for (n, panel) in panels.iter().enumerate() {
        histogram(&mut out, panel, STEP * n as f64, span, end);
    }
    out.push_str("</svg>\n");
    out
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "at most so many bars; counts far below 2^53"
)]
fn histogram(out: &mut String, panel: &Panel<'_>, y: f64, span: f64, end: f64) {
    let mut bars = vec![0_usize; (end / span) as usize + 1];
    for at in panel.at {
        bars[(at / span) as usize] += 1;
    }
    let top = bars.iter().copied().max().unwrap_or(1).max(1);
    let step = WIDTH / bars.len() as f64;
    let _ = writeln!(out, "<g transform=\"translate(0 {y})\"><text x=\"0\" y=\"-8\">{}</text>", panel.label);
    for (n, count) in bars.iter().enumerate().filter(|(_, count)| **count > 0) {
        let height = *count as f64 / top as f64 * HEIGHT;
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"#4477aa\"/>",
            n as f64 * step,
            HEIGHT - height,
            (step * 0.9).max(0.5)
        );
    }
    let _ = writeln!(
        out,
        "<path d=\"M0 0V{HEIGHT}H{WIDTH}\" fill=\"none\" stroke=\"#777\"/>\
         <text x=\"-6\" y=\"10\" text-anchor=\"end\">{:.0}</text>\
         <text x=\"{WIDTH}\" y=\"{}\" text-anchor=\"end\">{:.0} s</text></g>",
        top as f64 * panel.each,
        HEIGHT + 16.0,
        bars.len() as f64 * span
    );
}

/// When the agents of a herd were back, in seconds, the first to the last: real ones, and simulated ones between two ends.
pub(crate) struct Back {
    pub label: String,
    pub real: Vec<f64>,
    pub low: Vec<f64>,
    pub high: Vec<f64>,
}

/// The share of each herd that is back, over time: a line for the real one, a band for the simulated ones.
#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
pub(crate) fn back(herds: &[Back]) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-60 -50 {} {}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#777\">\n\
         <text x=\"0\" y=\"-34\">agents that are back, after istiod is there: <tspan fill=\"#4477aa\">real</tspan>, \
         <tspan fill=\"#bb8844\">simulated</tspan></text>\n",
        WIDTH + 80.0,
        STEP * herds.len() as f64 + 20.0
    );
    for (n, herd) in herds.iter().enumerate() {
        let end = herd.real.iter().chain(&herd.high).copied().fold(1.0, f64::max).ceil();
        let points = |times: &[f64]| -> Vec<String> {
            let share = |agent: usize| HEIGHT * (1.0 - (agent + 1) as f64 / times.len() as f64);
            let point = |(agent, at): (usize, &f64)| format!("{:.1},{:.1}", at / end * WIDTH, share(agent));
            times.iter().enumerate().map(point).collect()
        };
        let mut band = points(&herd.low);
        band.extend(points(&herd.high).into_iter().rev());
        let _ = writeln!(
            out,
            "<g transform=\"translate(0 {})\"><text x=\"0\" y=\"-8\">{}</text>\n\
             <polygon points=\"{}\" fill=\"#bb8844\" fill-opacity=\"0.5\"/>\n\
             <polyline points=\"{}\" fill=\"none\" stroke=\"#4477aa\" stroke-width=\"2\"/>\n\
             <path d=\"M0 0V{HEIGHT}H{WIDTH}\" fill=\"none\" stroke=\"#777\"/>\
             <text x=\"-6\" y=\"10\" text-anchor=\"end\">{}</text>\
             <text x=\"{WIDTH}\" y=\"{}\" text-anchor=\"end\">{end:.0} s</text></g>",
            STEP * n as f64,
            herd.label,
            band.join(" "),
            points(&herd.real).join(" "),
            herd.real.len(),
            HEIGHT + 16.0
        );
    }
    out.push_str("</svg>\n");
    out
}
