//! What a scalar of YAML 1.1 is, as Go's library resolves it.

use std::borrow::Cow;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use saphyr_parser::{ScalarStyle, Tag};
use serde_json::{Number, Value};

use super::Error;

/// The value of `text`. A tag that YAML knows decides, also for what stands in quotes; one that it does not know makes text.
pub(super) fn scalar(text: &str, style: ScalarStyle, tag: Option<&Cow<'_, Tag>>) -> Result<Value, Error> {
    let tag = tag.map(|t| format!("{}{}", t.handle, t.suffix));
    let own =
        |t: &str| ["tag:yaml.org,2002:", "!!"].iter().find_map(|p| t.strip_prefix(p)).map(str::to_owned);
    match tag.map(|t| own(&t).unwrap_or_default()).as_deref() {
        None if style == ScalarStyle::Plain => plain(text),
        Some("binary") => {
            let bytes = BASE64_STANDARD.decode(text.replace(['\n', '\r'], ""));
            let bytes = bytes.map_err(|_| Error::new("!!binary value contains invalid base64 data"))?;
            Ok(Value::String(String::from_utf8_lossy(&bytes).into_owned()))
        }
        Some(kind @ ("int" | "float" | "bool" | "null" | "timestamp")) => tagged(kind, text),
        None | Some(_) => Ok(Value::String(text.to_owned())),
    }
}

fn tagged(kind: &str, text: &str) -> Result<Value, Error> {
    let value = plain(text)?;
    let is = match &value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) if integer(text).is_some() => "int",
        Value::Number(_) => "float",
        _ if date(text) => "timestamp",
        _ => "str",
    };
    if is == kind || (is, kind) == ("int", "float") {
        return Ok(value);
    }
    Err(Error::new(format!("cannot decode !!{is} `{text}` as a !!{kind}")))
}

// By its beginning; a date is text all the same.
fn date(text: &str) -> bool {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    digits == 4 && text[4..].starts_with('-')
}

fn plain(text: &str) -> Result<Value, Error> {
    Ok(match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            Value::Bool(true)
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            Value::Bool(false)
        }
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" | "-.inf" | "-.Inf" | "-.INF" | ".nan"
        | ".NaN" | ".NAN" => return Err(Error::new(format!("json: unsupported value: {text}"))),
        _ => number(text).map_or_else(|| Value::String(text.to_owned()), Value::Number),
    })
}

fn number(text: &str) -> Option<Number> {
    if !text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) {
        return None;
    }
    integer(text).or_else(|| float(text))
}

// Go's `ParseInt` with base 0, underscores dropped.
fn integer(text: &str) -> Option<Number> {
    let plain = text.replace('_', "");
    let (negative, digits) = match plain.as_bytes().first()? {
        b'-' => (true, &plain[1..]),
        b'+' => (false, &plain[1..]),
        _ => (false, plain.as_str()),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, body) = match lower.as_bytes() {
        [b'0', b'x', ..] => (16, &lower[2..]),
        [b'0', b'b', ..] => (2, &lower[2..]),
        [b'0', b'o', ..] => (8, &lower[2..]),
        [b'0', _, ..] => (8, &lower[1..]),
        _ => (10, lower.as_str()),
    };
    if body.is_empty() || !body.chars().all(|c| c.is_digit(radix)) {
        return None;
    }
    let value = u64::from_str_radix(body, radix).ok()?;
    if negative { 0i64.checked_sub_unsigned(value).map(Number::from) } else { Some(Number::from(value)) }
}

fn float(text: &str) -> Option<Number> {
    let plain = text.replace('_', "");
    let (mantissa, exponent) = match plain.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent.trim_start_matches(['+', '-']))),
        None => (plain.as_str(), None),
    };
    let digits = mantissa.trim_start_matches(['+', '-']);
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let all = |t: &str| t.chars().all(|c| c.is_ascii_digit());
    let exponent_fits = exponent.is_none_or(|e| !e.is_empty() && all(e));
    if mantissa.len() - digits.len() > 1
        || (whole.is_empty() && fraction.is_empty())
        || !(all(whole) && all(fraction) && exponent_fits)
    {
        return None;
    }
    let value: f64 = plain.parse().ok()?;
    // Go prints a whole float below 1e21 without point or exponent.
    if value.fract() == 0.0 && value.abs() < 9e18 {
        #[expect(clippy::cast_possible_truncation, reason = "whole and within 64 bits")]
        return Some(Number::from(value as i64));
    }
    Number::from_f64(value)
}
