//! Values in the notations that Go's standard library reads, since that is what people have written.

use std::time::Duration;

/// A signed span as Go's `time.ParseDuration` reads it: `1h15m30.918s`, `-1.5h`, `+3ms`, `0`.
///
/// # Errors
/// The reason, with the value quoted.
pub(crate) fn duration(text: &str) -> Result<Signed, String> {
    let invalid = || format!("time: invalid duration {text:?}");
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(Signed::default());
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let whole = &rest[..digits];
        rest = &rest[digits..];
        let mut fraction = "";
        if let Some(after) = rest.strip_prefix('.') {
            let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
            fraction = &after[..digits];
            rest = &after[digits..];
        }
        if whole.is_empty() && fraction.is_empty() {
            return Err(invalid());
        }
        let unit_len = rest.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(rest.len());
        let unit = &rest[..unit_len];
        rest = &rest[unit_len..];
        let scale: u128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "" => return Err(format!("time: missing unit in duration {text:?}")),
            other => return Err(format!("time: unknown unit {other:?} in duration {text:?}")),
        };
        let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| invalid())? };
        nanos = nanos.checked_add(whole.checked_mul(scale).ok_or_else(invalid)?).ok_or_else(invalid)?;
        let mut part = scale;
        for digit in fraction.bytes().take(18) {
            part /= 10;
            nanos += u128::from(digit - b'0') * part;
        }
    }
    let limit = u128::from(i64::MAX.unsigned_abs()) + u128::from(negative);
    if nanos > limit {
        return Err(invalid());
    }
    let nanos = u64::try_from(nanos).map_err(|_| invalid())?;
    Ok(Signed { negative: negative && nanos > 0, span: Duration::from_nanos(nanos) })
}

/// A span of time with a sign.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Signed {
    /// Before zero.
    pub negative: bool,
    /// How long.
    pub span: Duration,
}

impl Signed {
    /// As protobuf's JSON shows it: seconds with no, three, six or nine decimals.
    #[must_use]
    pub(crate) fn to_proto(self) -> String {
        let sign = if self.negative { "-" } else { "" };
        let (seconds, nanos) = (self.span.as_secs(), self.span.subsec_nanos());
        match nanos {
            0 => format!("{sign}{seconds}s"),
            n if n % 1_000_000 == 0 => format!("{sign}{seconds}.{:03}s", n / 1_000_000),
            n if n % 1_000 == 0 => format!("{sign}{seconds}.{:06}s", n / 1_000),
            n => format!("{sign}{seconds}.{n:09}s"),
        }
    }

    /// Zero for everything negative.
    #[must_use]
    pub(crate) fn at_least_zero(self) -> Duration {
        if self.negative { Duration::ZERO } else { self.span }
    }
}

/// `1 t T TRUE true True 0 f F FALSE false False`.
#[must_use]
pub(crate) fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// A flag's integer: decimal, or with a prefix `0x`, `0o`, `0b` (`0` alone means octal), sign and
/// underscores between digits allowed.
///
/// # Errors
/// In the words of `strconv.ParseInt`, when it is no integer or does not fit `bits`.
pub(crate) fn integer(text: &str, bits: u32) -> Result<i64, String> {
    let syntax = || format!("strconv.ParseInt: parsing {text:?}: invalid syntax");
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, body) = if let Some(hex) = lower.strip_prefix("0x") {
        (16, hex)
    } else if let Some(octal) = lower.strip_prefix("0o") {
        (8, octal)
    } else if let Some(binary) = lower.strip_prefix("0b") {
        (2, binary)
    } else if lower.len() > 1 && lower.starts_with('0') {
        (8, &lower[1..])
    } else {
        (10, lower.as_str())
    };
    let bare = body.replace('_', "");
    if bare.is_empty() || !bare.chars().all(|c| c.is_digit(radix)) {
        return Err(syntax());
    }
    let range = || format!("strconv.ParseInt: parsing {text:?}: value out of range");
    let value = i128::from_str_radix(&bare, radix).map_err(|_| range())?;
    let value = if negative { -value } else { value };
    let limit = 1i128 << (bits - 1);
    if value >= limit || value < -limit { Err(range()) } else { i64::try_from(value).map_err(|_| range()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let ok = |t: &str| duration(t).unwrap();
        assert_eq!(ok("1m30s").span, Duration::from_secs(90));
        assert_eq!(ok("1.5h").span, Duration::from_secs(5400));
        assert_eq!(ok(".5s").span, Duration::from_millis(500));
        assert_eq!(ok("0").span, Duration::ZERO);
        assert!(ok("-1s").negative);
        for bad in ["", "5", "1x", "s", "1s 2s", "99999999h", "--1s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn integers_take_a_base_prefix_and_know_their_width() {
        assert_eq!(integer("0x10", 64), Ok(16));
        assert_eq!(integer("-12", 32), Ok(-12));
        assert_eq!(integer("010", 64), Ok(8));
        assert!(integer("abc", 64).unwrap_err().ends_with("invalid syntax"));
        assert!(integer("3000000000", 32).unwrap_err().ends_with("value out of range"));
    }
}
