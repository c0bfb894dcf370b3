//! Durations as Go writes them (`1m30s`, `500ms`) and as protobuf's JSON does (`90s`).

/// Nanoseconds of a duration in Go's syntax: a sign, then numbers with a unit each (ns us µs ms s m h); a
/// bare `0` needs none.
///
/// # Errors
/// One phrase, for a text that is not a duration or beyond 292 years.
pub(crate) fn parse(text: &str) -> Result<i64, String> {
    let bad = || format!("{text:?} is not a duration such as 10s or 1m30s");
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(bad());
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let digits = |s: &str| s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len());
        let end = digits(rest);
        let (whole, mut after) = rest.split_at(end);
        let mut fraction = "";
        if let Some(tail) = after.strip_prefix('.') {
            (fraction, after) = tail.split_at(digits(tail));
        }
        if whole.is_empty() && fraction.is_empty() {
            return Err(bad());
        }
        let unit_end = after.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, next) = after.split_at(unit_end);
        let unit: i128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return Err(bad()),
        };
        let number = |t: &str| if t.is_empty() { Ok(0) } else { t.parse::<i64>().map_err(|_| bad()) };
        total += i128::from(number(whole)?) * unit;
        // Digits below a nanosecond cannot count.
        let fraction = &fraction[..fraction.len().min(15)];
        total +=
            i128::from(number(fraction)?) * unit / 10_i128.pow(u32::try_from(fraction.len()).unwrap_or(0));
        if total > i128::from(i64::MAX) {
            return Err(bad());
        }
        rest = next;
    }
    let total = i64::try_from(total).map_err(|_| bad())?;
    Ok(if negative { -total } else { total })
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
            assert_eq!(parse(text).map(seconds).as_deref(), Ok(wanted), "{text}");
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
