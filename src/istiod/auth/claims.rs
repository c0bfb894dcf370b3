//! Reads a JWT's payload without verifying it, to tell people what is wrong with a token.
//!
//! Nothing here decides whether a token is sent: istiod judges. Claims, never the token, are shown.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::alphabet::URL_SAFE;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// base64url with or without padding.
const ENGINE: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// Payloads above this are not looked into; a service account token has about 1 KB.
const MAX_PAYLOAD: usize = 64 << 10;
/// At most so many audiences, of so many characters, are kept.
const MAX_AUDIENCES: usize = 8;
const MAX_AUDIENCE: usize = 128;

/// The claims that tell what usually is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claims {
    /// `exp`.
    pub expires: Option<SystemTime>,
    /// `aud`, one or several, cut to a length for logs.
    pub audiences: Vec<String>,
    /// `iat`.
    pub issued: Option<SystemTime>,
    /// `iss`, cut to a length for logs.
    pub issuer: Option<String>,
    /// `sub`, likewise: `system:serviceaccount:NAMESPACE:ACCOUNT`.
    pub subject: Option<String>,
}

/// A token's payload; `None` when it is no JWT.
#[must_use]
pub(crate) fn payload(token: &str) -> Option<serde_json::Map<String, serde_json::Value>> {
    let mut parts = token.trim().split('.');
    let (_, payload, _) = (parts.next()?, parts.next()?, parts.next()?);
    // In quotes it is none.
    let foreign = |c: char| !(c.is_ascii_alphanumeric() || "-_=.".contains(c));
    if parts.next().is_some() || payload.len() > MAX_PAYLOAD || token.trim().contains(foreign) {
        return None;
    }
    serde_json::from_slice(&ENGINE.decode(payload).ok()?).ok()
}

/// The one audience of a token; `None` when it has several, none, an empty one or one that is no text.
#[must_use]
pub(crate) fn only_audience(token: &str) -> Option<String> {
    use serde_json::Value;
    let text = match payload(token)?.remove("aud")? {
        Value::String(text) => text,
        Value::Array(all) => match <[Value; 1]>::try_from(all).ok()? {
            [Value::String(text)] => text,
            _ => return None,
        },
        _ => return None,
    };
    (!text.is_empty()).then_some(text)
}

/// The claims of a token; `None` when it is no JWT.
#[must_use]
pub fn read(token: &str) -> Option<Claims> {
    let payload = payload(token)?;
    // Numbers may be written as fractions (RFC 7519 NumericDate).
    let date = |name: &str| {
        let seconds = payload.get(name).and_then(serde_json::Value::as_f64);
        let seconds = seconds.filter(|s| s.is_finite() && *s >= 0.0);
        UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds?).ok()?)
    };
    let text = |name: &str| payload.get(name).and_then(serde_json::Value::as_str).map(cut);
    let audiences = match payload.get("aud") {
        Some(serde_json::Value::String(one)) => vec![cut(one)],
        Some(serde_json::Value::Array(all)) => {
            all.iter().filter_map(serde_json::Value::as_str).take(MAX_AUDIENCES).map(cut).collect()
        }
        _ => Vec::new(),
    };
    Some(Claims {
        expires: date("exp"),
        audiences,
        issued: date("iat"),
        issuer: text("iss"),
        subject: text("sub"),
    })
}

fn cut(text: &str) -> String {
    text.chars().take(MAX_AUDIENCE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::{URL_SAFE as PADDED, URL_SAFE_NO_PAD as BARE};
    use proptest::prelude::*;

    fn token(payload: &str, engine: &GeneralPurpose) -> String {
        format!("e30.{}.sig", engine.encode(payload))
    }

    #[test]
    fn claims_are_read_with_and_without_padding() {
        let payload = r#"{"aud":["istio-ca","x"],"exp":1700000000.5}"#;
        for engine in [&PADDED, &BARE] {
            let claims = read(&token(payload, engine)).unwrap();
            assert_eq!(claims.audiences, ["istio-ca", "x"]);
            assert_eq!(claims.expires, Some(UNIX_EPOCH + Duration::from_millis(1_700_000_000_500)));
        }
        assert_eq!(read(&token(r#"{"aud":"one"}"#, &BARE)).unwrap().audiences, ["one"]);
    }

    #[test]
    fn what_is_no_jwt_or_no_date_is_passed_over() {
        for no in ["", "token-one", "a.b", "a.b.c.d", "e30.!!!.x", "e30.W10.x"] {
            assert_eq!(read(no), None, "{no}");
        }
        for odd in [r#"{"exp":-1}"#, r#"{"exp":1e300}"#, r#"{"exp":"soon"}"#, r#"{"aud":7}"#] {
            assert_eq!(read(&token(odd, &BARE)), Some(Claims::default()), "{odd}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in any::<String>(), payload in any::<String>()) {
            let _ = read(&text);
            let _ = read(&token(&payload, &BARE));
        }
    }
}
