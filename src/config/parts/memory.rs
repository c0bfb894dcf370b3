//! `GOMEMLIMIT`: what the agent's own memory may come to, in the words of Go's runtime, for which injectors set it.

use crate::config::env::Settings;
use crate::config::env::var;

/// Digits, and what they count: Go takes no other unit.
const UNITS: &[(&str, u32)] = &[("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("B", 0), ("", 0)];
/// What is shown of a wrong one, in characters.
const SHOWN: usize = 64;

/// The limit in bytes, if there is one, and what is wrong with what was given.
#[must_use]
pub(crate) fn limit(settings: &Settings) -> (Option<u64>, Option<String>) {
    let text = settings.text(var::GOMEMLIMIT);
    if text.is_empty() || text == "off" {
        return (None, None);
    }
    let bytes = bytes(text);
    let shown: String = text.chars().take(SHOWN).collect();
    let wrong = bytes.is_none().then(|| {
        format!("Invalid environment variable value `{shown}` for GOMEMLIMIT, expecting bytes, or as 64MiB, defaulting to off")
    });
    (bytes, wrong)
}

fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = UNITS.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)))?;
    let number: i64 = digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok())??;
    let bytes = number.checked_mul(1 << shift)?;
    u64::try_from(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::env::Env;

    #[test]
    fn a_limit_is_read_as_go_reads_it() {
        for (text, bytes) in [
            ("", None),
            ("off", None),
            ("1073741824", Some(1 << 30)),
            ("5B", Some(5)),
            ("10KiB", Some(10 << 10)),
            ("64MiB", Some(64 << 20)),
            ("1GiB", Some(1 << 30)),
            ("2TiB", Some(2 << 40)),
        ] {
            let settings = Settings::read(&Env::of(&[("GOMEMLIMIT", text)])).0;
            assert_eq!(limit(&settings), (bytes, None), "{text}");
        }
    }

    #[test]
    fn what_go_would_not_start_with_is_told_and_no_limit() {
        for text in
            ["64Mi", "64MB", "-1", "+1", "1.5GiB", "MiB", " 1", "9999999999999999999", "9007199254740993KiB"]
        {
            let settings = Settings::read(&Env::of(&[("GOMEMLIMIT", text)])).0;
            let (bytes, told) = limit(&settings);
            assert!(bytes.is_none() && told.is_some_and(|line| line.contains(text)), "{text}");
        }
    }
}
