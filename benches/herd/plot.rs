//! A histogram as SVG: two colours, no script, readable on light and dark pages.

use std::fmt::Write as _;

use super::model::Arrivals;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 220.0;

/// Bars of arrivals over time.
#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
pub(crate) fn bars(title: &str, arrivals: &Arrivals) -> String {
    let (bars, span) = arrivals.histogram();
    let top = bars.iter().copied().max().unwrap_or(1).max(1);
    let step = WIDTH / bars.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-50 -30 {} {}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#777\">\n\
         <text x=\"0\" y=\"-12\">{title}: arrivals in each {span:.0} s, 10,000 agents</text>\n",
        WIDTH + 70.0,
        HEIGHT + 60.0
    );
    for (n, count) in bars.iter().enumerate() {
        let height = *count as f64 / top as f64 * HEIGHT;
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"#4477aa\"/>",
            n as f64 * step,
            HEIGHT - height,
            (step * 0.9).max(0.5)
        );
    }
    let end = bars.len() as f64 * span;
    let _ = write!(
        out,
        "<path d=\"M0 0V{HEIGHT}H{WIDTH}\" fill=\"none\" stroke=\"#777\"/>\n\
         <text x=\"-6\" y=\"10\" text-anchor=\"end\">{top}</text>\n\
         <text x=\"{WIDTH}\" y=\"{}\" text-anchor=\"end\">{end:.0} s</text>\n</svg>\n",
        HEIGHT + 18.0
    );
    out
}
