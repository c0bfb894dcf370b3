//! Durations as Go's `time.ParseDuration` reads them. The one parser; callers may put a
//! bad one in other words.

use std::fmt;
use std::time::Duration;

/// A text that is no duration, in Go's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bad {
    text: String,
    wrong: Wrong,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Wrong {
    Invalid,
    NoUnit,
    Unit(String),
}

impl std::error::Error for Bad {}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.text;
        match &self.wrong {
            Wrong::Invalid => write!(f, "time: invalid duration {text:?}"),
            Wrong::NoUnit => write!(f, "time: missing unit in duration {text:?}"),
            Wrong::Unit(unit) => write!(f, "time: unknown unit {unit:?} in duration {text:?}"),
        }
    }
}

/// A signed span as Go's `time.ParseDuration` reads it: `1h15m30.918s`, `-1.5h`, `+3ms`, `0`.
///
/// # Errors
/// In the words of Go, with the value quoted.
pub(crate) fn parse(text: &str) -> Result<Signed, Bad> {
    let bad = |wrong| Bad { text: text.to_owned(), wrong };
    let invalid = || bad(Wrong::Invalid);
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
            "" => return Err(bad(Wrong::NoUnit)),
            other => return Err(bad(Wrong::Unit(other.to_owned()))),
        };
        let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| invalid())? };
        nanos = nanos.checked_add(whole.checked_mul(scale).ok_or_else(invalid)?).ok_or_else(invalid)?;
        nanos += part(fraction, scale);
    }
    let limit = u128::from(i64::MAX.unsigned_abs()) + u128::from(negative);
    if nanos > limit {
        return Err(invalid());
    }
    let nanos = u64::try_from(nanos).map_err(|_| invalid())?;
    Ok(Signed { negative: negative && nanos > 0, span: Duration::from_nanos(nanos) })
}

// As Go counts it, in double precision: with many digits the last nanosecond depends on that.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "what is cut off is less than a nanosecond"
)]
fn part(fraction: &str, scale: u128) -> u128 {
    let (mut digits, mut fold) = (0_u64, 1.0);
    for digit in fraction.bytes().map(|digit| u64::from(digit - b'0')) {
        let next = digits.checked_mul(10).and_then(|all| all.checked_add(digit));
        let Some(next) = next.filter(|next| *next <= 1 << 63) else { break };
        digits = next;
        fold *= 10.0;
    }
    (digits as f64 * (scale as f64 / fold)) as u128
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
    /// Nanoseconds.
    #[must_use]
    pub(crate) fn nanos(self) -> i64 {
        let nanos = i128::try_from(self.span.as_nanos()).unwrap_or(i128::MAX);
        let signed = if self.negative { -nanos } else { nanos };
        i64::try_from(signed).unwrap_or(i64::MAX)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_what_go_reads() {
        let nanos = |text: &str| parse(text).ok().map(Signed::nanos);
        assert_eq!(nanos("9223372036854775807ns"), Some(i64::MAX));
        assert_eq!(nanos("9223372036854775808ns"), None);
        assert_eq!(nanos("-9223372036854775808ns"), Some(i64::MIN));
        assert_eq!(nanos("-9223372036854775809ns"), None);
        assert_eq!(parse("-0s").unwrap(), Signed::default());
        assert_eq!(nanos("1h.5m"), Some(3_630_000_000_000));
        assert_eq!(nanos("0.333333333333333333h"), Some(1_199_999_999_999));
        assert_eq!(nanos("0.99999999999999999999999999s"), Some(1_000_000_000));
        assert_eq!(nanos("0.3333333333333333333333333h"), Some(1_200_000_000_000));
        assert_eq!(nanos(".123456789123456789h"), Some(444_444_440_844));
    }
}
