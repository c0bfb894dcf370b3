//! What callers read.

use std::time::SystemTime;

use http::{HeaderValue, StatusCode, header};
use serde_json::json;

use super::broker::{Access, Seen, remaining};
use super::request::Refusal;
use crate::serve::respond::{Answer, JSON, page};

pub(super) fn access(access: &Access, now: SystemTime) -> Answer {
    let body = json!({
        "access_token": access.token.as_str(),
        "issued_token_type": access.issued_type,
        "token_type": access.token_type,
        "expires_in": remaining(access.ends, now),
        "scope": access.scope,
        "refresh_token": "",
    });
    page(StatusCode::OK, JSON, body.to_string())
}

pub(super) fn invalid_request(refusal: &Refusal) -> Answer {
    let mut answer = error(StatusCode::BAD_REQUEST, "invalid_request", &refusal.why);
    if refusal.close {
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

pub(super) fn invalid_target(why: &str) -> Answer {
    error(StatusCode::INTERNAL_SERVER_ERROR, "invalid_target", why)
}

fn error(status: StatusCode, code: &str, why: &str) -> Answer {
    let body = json!({ "error": code, "error_description": why, "error_uri": "" });
    page(status, JSON, body.to_string())
}

/// The dump: kinds and dates, never a token.
pub(super) fn dump(seen: &[Seen]) -> Answer {
    let tokens: Vec<_> = seen
        .iter()
        .map(|s| {
            json!({
                "token_type": s.kind,
                "issue_time": date(s.issued),
                "expire_time": date(s.ends),
                "token": "",
            })
        })
        .collect();
    page(StatusCode::OK, JSON, json!({ "tokens": tokens }).to_string())
}

fn date(at: SystemTime) -> String {
    let at = jiff::Timestamp::try_from(at).unwrap_or(jiff::Timestamp::MAX);
    at.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_have_a_fraction() {
        assert_eq!(date(SystemTime::UNIX_EPOCH + Duration::from_millis(1500)), "1970-01-01T00:00:01.500000Z");
    }
}
