//! `grpc-timeout`: the bound that a client sets for its own call, which a Go server keeps too.
//!
//! Envoy sets none for its streams. Clients of the gRPC libraries may, and rely on the server to end what they
//! have forgotten.

use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;
use tonic::Status;

/// Digits that gRPC allows.
const DIGITS: usize = 8;

/// The time until which a call may last; `None` without a bound.
///
/// # Errors
/// When the header is not of gRPC's form; the status is the one a Go server gives.
pub(super) fn of(headers: &HeaderMap) -> Result<Option<Instant>, Status> {
    let Some(value) = headers.get("grpc-timeout") else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(parse);
    let Some(timeout) = timeout else {
        return Err(Status::internal(format!("malformed grpc-timeout: {value:?}")));
    };
    // Beyond what a clock can count is no bound.
    Ok(Instant::now().checked_add(timeout))
}

fn parse(value: &str) -> Option<Duration> {
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > DIGITS || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    })
}

/// What a client is told whose time is over.
pub(super) fn exceeded() -> Status {
    Status::deadline_exceeded("context deadline exceeded")
}

/// Returns when the time is over.
pub(super) async fn over(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        for (text, expected) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("99999999S", Some(Duration::from_secs(99_999_999))),
            ("0S", Some(Duration::ZERO)),
            ("5m", Some(Duration::from_millis(5))),
            ("6u", Some(Duration::from_micros(6))),
            ("7n", Some(Duration::from_nanos(7))),
            ("", None),
            ("S", None),
            ("1", None),
            ("1s", None),
            ("-1S", None),
            ("+1S", None),
            ("1.5S", None),
            ("100000000S", None),
            ("1é", None),
        ] {
            assert_eq!(parse(text), expected, "{text:?}");
        }
    }

    #[test]
    fn no_header_is_no_bound() {
        assert_eq!(of(&HeaderMap::new()).unwrap(), None);
    }
}
