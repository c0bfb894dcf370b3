//! Durations as Go writes them (`1m30s`, `500ms`) and as protobuf's JSON does (`90s`).

use crate::base::go_duration::{self, Signed};

/// A text that is no duration.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a duration such as 10s or 1m30s")]
pub(crate) struct Bad(String);

/// Nanoseconds of a duration in Go's syntax.
///
/// # Errors
/// For a text that is not a duration or beyond 292 years.
pub(crate) fn parse(text: &str) -> Result<i64, Bad> {
    go_duration::parse(text).map(Signed::nanos).map_err(|_| Bad(text.to_owned()))
}

/// Seconds with `s`, with as many decimals as needed.
#[must_use]
pub(crate) fn seconds(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    let (whole, rest) = (nanos.unsigned_abs() / 1_000_000_000, nanos.unsigned_abs() % 1_000_000_000);
    if rest == 0 {
        return format!("{sign}{whole}s");
    }
    let decimals = format!("{rest:09}");
    format!("{sign}{whole}.{}s", decimals.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_go_and_writes_seconds() {
        for (text, wanted) in [
            ("10s", "10s"),
            ("1m", "60s"),
            ("1m30s", "90s"),
            ("500ms", "0.5s"),
            ("1.5h", "5400s"),
            (".5s", "0.5s"),
            ("0", "0s"),
            ("-2s", "-2s"),
            ("1us", "0.000001s"),
            ("1h0m0.25s", "3600.25s"),
        ] {
            assert_eq!(parse(text).map(seconds).unwrap(), wanted, "{text}");
        }
        for bad in ["", "10", "s", "1x", "1 s", "-", ".", "1..5s", "9999999999h", "1s2", "१s", "1sé"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics_and_round_trips(nanos in proptest::prelude::any::<i64>(), text in "\\PC*") {
            let _ = parse(&text);
            if nanos != i64::MIN {
                proptest::prop_assert_eq!(parse(&seconds(nanos)), Ok(nanos));
            }
        }
    }
}
