//! Values in the notations that Go's standard library reads, since that is what people have written.

pub(crate) use crate::base::go_duration::{Signed, parse as duration};

/// `1 t T TRUE true True 0 f F FALSE false False`.
#[must_use]
pub(crate) fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// Text that is no integer, in the words of `strconv.ParseInt`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("strconv.ParseInt: parsing {text:?}: {why}")]
pub(crate) struct NoInteger {
    text: String,
    why: &'static str,
}

impl NoInteger {
    /// It is an integer, beyond what fits.
    #[must_use]
    pub(crate) fn is_range(&self) -> bool {
        self.why == RANGE
    }
}

const RANGE: &str = "value out of range";

/// A flag's integer: decimal, or with a prefix `0x`, `0o`, `0b` (`0` alone means octal), sign and
/// underscores between digits allowed.
///
/// # Errors
/// When it is no integer or does not fit `bits`.
pub(crate) fn integer(text: &str, bits: u32) -> Result<i64, NoInteger> {
    read(text, bits, true)
}

/// The same in decimal only: `08` is 8, and there are no prefixes and no underscores.
///
/// # Errors
/// As [`integer`].
pub(crate) fn decimal(text: &str, bits: u32) -> Result<i64, NoInteger> {
    read(text, bits, false)
}

fn read(text: &str, bits: u32, any_base: bool) -> Result<i64, NoInteger> {
    let no = |why| NoInteger { text: text.to_owned(), why };
    let syntax = || no("invalid syntax");
    let range = || no(RANGE);
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, body) = if !any_base {
        (10, lower.as_str())
    } else if let Some(hex) = lower.strip_prefix("0x") {
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
    // Between digits, or between the prefix and a digit.
    let led = radix != 10;
    if (!any_base && body.contains('_'))
        || body.ends_with('_')
        || body.contains("__")
        || (body.starts_with('_') && !led)
    {
        return Err(syntax());
    }
    let bare = body.replace('_', "");
    if bare.is_empty() || !bare.chars().all(|c| c.is_digit(radix)) {
        return Err(syntax());
    }
    let value = i128::from_str_radix(&bare, radix).map_err(|_| range())?;
    let value = if negative { -value } else { value };
    let limit = 1i128 << (bits - 1);
    if value >= limit || value < -limit { Err(range()) } else { i64::try_from(value).map_err(|_| range()) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        assert_eq!(
            (integer("1_000", 64), integer("0x_f", 64), integer("0_7", 64)),
            (Ok(1000), Ok(15), Ok(7))
        );
        for bad in ["_1", "1_", "1__0", "0x_", "0_", "08"] {
            assert!(integer(bad, 64).is_err(), "{bad}");
        }
        assert_eq!((decimal("08", 32), decimal("-010", 32), decimal("+3", 32)), (Ok(8), Ok(-10), Ok(3)));
        for bad in ["0x8", "0o7", "0b1", "1_0", "", "-", "3000000000"] {
            assert!(decimal(bad, 32).is_err(), "{bad}");
        }
        assert!(integer("abc", 64).unwrap_err().to_string().ends_with("invalid syntax"));
        assert!(integer("3000000000", 32).unwrap_err().to_string().ends_with("value out of range"));
    }
}
