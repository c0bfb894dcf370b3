//! One call to an endpoint that gives tokens: up to five tries, each bounded, and the members of its answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, header};
use rustls::crypto::CryptoProvider;
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout_at};
use zeroize::Zeroizing;

use super::broker::Fault;
use crate::base::error::chain;
use crate::base::lane::Lane;
use crate::fetch::url::shown;
use crate::fetch::{self, Dialer, Get, Kept, Tls, Trust};

/// Tries of one call, the pause between them and the time of each; the Go agent's numbers.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(10);
const TIME: Duration = Duration::from_secs(5);
/// No answer with a token is longer, in bytes: a token goes into a header. Each caller may cause one to be read.
const ANSWER: usize = 128 << 10;

/// Look-ups of endpoints' names.
static NAMES: Lane = Lane::new("names of token endpoints", 4);

/// Calls endpoints. Connections are kept between calls; there is no HTTP proxy on this way, as in the Go agent.
pub(super) struct Client {
    dialer: Dialer,
    kept: Kept,
}

/// What is sent.
pub(super) struct Call<'a> {
    /// What it is to bring, for errors: `federated token`.
    pub(super) what: &'static str,
    pub(super) url: &'a str,
    pub(super) kind: &'static str,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// Why one try failed.
enum Tried {
    /// Worth another one.
    Again(String),
    /// The same would happen again.
    Over(String),
    /// What was brought is not wanted.
    Refused(String),
}

impl Client {
    pub(super) fn new(crypto: Arc<CryptoProvider>) -> Self {
        let tls = Some(Arc::new(Tls::new(crypto, false, Trust::System)));
        Self { dialer: Dialer { tls, names: &NAMES, ..Dialer::default() }, kept: Kept::default() }
    }

    /// The answer's members.
    pub(super) async fn ask(&self, call: &Call<'_>) -> Result<Map<String, Value>, Fault> {
        let mut last = String::new();
        for number in 0..TRIES {
            if number > 0 {
                tokio::time::sleep(PAUSE).await;
            }
            match self.attempt(call).await {
                Ok(members) => return Ok(members),
                Err(Tried::Over(why)) => return Err(call.fault(&why)),
                Err(Tried::Refused(why)) => return Err(Fault::refusal(call.said(&why))),
                Err(Tried::Again(why)) => last = why,
            }
        }
        Err(call.fault(&format!("{last} ({TRIES} tries)")))
    }

    async fn attempt(&self, call: &Call<'_>) -> Result<Map<String, Value>, Tried> {
        let until = Instant::now() + TIME;
        let late = || format!("no answer within {} s", TIME.as_secs());
        let get = Get::new(call.url).map_err(|e| Tried::Over(e.to_string()))?;
        let get = get.headers(call.headers.clone()).post(call.kind, call.body.clone());
        let sent = get.dialer(&self.dialer).keep(Some(&self.kept)).send();
        let mut reply = match timeout_at(until, sent).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(error)) => return Err(Tried::Again(chain(&error))),
            Err(_) => return Err(Tried::Again(late())),
        };
        let status = reply.status();
        // What leads nowhere is no redirect, and tried again like any other answer that is none.
        let leads = reply.headers().get(header::LOCATION).is_some_and(|to| !to.is_empty());
        if matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) && leads {
            return Err(Tried::Over(format!("HTTP status {}: redirects are not followed", status.as_u16())));
        }
        if status != http::StatusCode::OK {
            reply.finish(Some(&self.kept)).await;
            let why = format!("HTTP status {}", status.as_u16());
            return Err(match status.as_u16() {
                400 | 401 | 403 => Tried::Refused(why),
                400..500 => Tried::Over(why),
                _ => Tried::Again(why),
            });
        }
        let body = match timeout_at(until, reply.bytes(ANSWER)).await {
            Ok(Ok(body)) => Zeroizing::new(body),
            Ok(Err(fetch::Error::TooLong(limit))) => {
                return Err(Tried::Over(format!("the answer is longer than {limit} bytes")));
            }
            Ok(Err(_)) => return Err(Tried::Over("the answer was cut off".to_owned())),
            Err(_) => return Err(Tried::Over(late())),
        };
        reply.finish(Some(&self.kept)).await;
        // What serde says about a bad one may repeat a part of it.
        serde_json::from_slice(&body).map_err(|_| Tried::Over("the answer is no JSON object".to_owned()))
    }
}

impl Call<'_> {
    /// What an error of this call says; `why` repeats nothing of an answer.
    pub(super) fn fault(&self, why: &str) -> Fault {
        Fault::new(self.said(why))
    }

    /// As [`Self::fault`], of an answer's member.
    pub(super) fn wrong(&self, why: &BadMember) -> Fault {
        self.fault(&why.to_string())
    }

    fn said(&self, why: &str) -> String {
        format!("failed to get the {} from {}: {why}", self.what, shown(self.url))
    }
}

/// A member of an answer that is not what it must be. Its value may be a token and is not repeated.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadMember {
    #[error("the answer has no {0}")]
    Missing(String),
    #[error("{0} in the answer is no text")]
    NoText(String),
    #[error("{0} in the answer is no whole number")]
    NoNumber(String),
}

/// A text that must be there. Names match in any letter case, the last one counts, as in Go.
pub(super) fn token(members: &Map<String, Value>, name: &str) -> Result<Zeroizing<String>, BadMember> {
    match text(members, name)? {
        Some(token) if !token.is_empty() => Ok(Zeroizing::new(token.to_owned())),
        _ => Err(BadMember::Missing(name.to_owned())),
    }
}

/// A text that may be there.
pub(super) fn text<'a>(members: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>, BadMember> {
    let mut found = None;
    for (_, value) in members.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name)) {
        match value {
            Value::Null => {}
            Value::String(text) => found = Some(text.as_str()),
            _ => return Err(BadMember::NoText(name.to_owned())),
        }
    }
    Ok(found)
}

/// A whole number that may be there.
pub(super) fn whole(members: &Map<String, Value>, name: &str) -> Result<Option<i64>, BadMember> {
    let mut found = None;
    for (_, value) in members.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name)) {
        match value {
            Value::Null => {}
            value => {
                let number = value.as_i64();
                found = Some(number.ok_or_else(|| BadMember::NoNumber(name.to_owned()))?);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::fake::{Web, http};
    use crate::tls::provider::{Compliance, provider};
    use serde_json::json;

    #[tokio::test]
    async fn what_is_no_redirect_is_tried_again() {
        for (status, headers, tries) in [
            (204, "", 5),
            (300, "Location: http://127.0.0.1:1/\r\n", 5),
            (302, "", 5),
            (304, "", 5),
            (302, "Location: http://127.0.0.1:1/\r\n", 1),
            (307, "Location: /\r\n", 1),
            (404, "", 1),
        ] {
            let web = Web::start(move |_| http(status, headers, "")).await;
            let url = format!("http://127.0.0.1:{}/", web.addr.port());
            let client = Client::new(provider(Compliance::None).0);
            let (headers, body) = (HeaderMap::new(), Bytes::from_static(b"x"));
            let fault =
                client.ask(&Call { what: "token", url: &url, kind: "text/plain", headers, body }).await;
            assert_eq!(web.heads().len(), tries, "{status}: {fault:?}");
            let said = fault.unwrap_err().to_string();
            assert!(said.contains(&format!("token from http://127.0.0.1:{}/: ", web.addr.port())), "{said}");
        }
    }

    #[tokio::test]
    async fn an_answer_has_128_kb_at_most() {
        for (length, fits) in [(131_072, true), (131_073, false)] {
            let web =
                Web::start(move |_| http(200, "", &format!("{{\"a\":1{}}}", " ".repeat(length - 7)))).await;
            let url = format!("http://127.0.0.1:{}/", web.addr.port());
            let client = Client::new(provider(Compliance::None).0);
            let (headers, body) = (HeaderMap::new(), Bytes::new());
            let answer =
                client.ask(&Call { what: "token", url: &url, kind: "text/plain", headers, body }).await;
            assert_eq!(answer.is_ok(), fits, "{length}: {answer:?}");
            assert_eq!(web.heads().len(), 1, "the same would come again");
        }
    }

    #[test]
    fn members_are_found_in_any_case_and_must_have_their_type() {
        let of = |value: Value| value.as_object().unwrap().clone();
        let members =
            of(json!({"Access_Token": "a", "ACCESS_TOKEN": "b", "n": 7, "f": 7.0, "e": "", "z": null}));
        assert_eq!(&*token(&members, "access_token").unwrap(), "b");
        assert!(
            token(&members, "e").is_err() && token(&members, "z").is_err() && token(&members, "n").is_err()
        );
        assert_eq!(whole(&members, "n"), Ok(Some(7)));
        assert_eq!(whole(&members, "z"), Ok(None));
        assert!(whole(&members, "f").is_err() && whole(&members, "e").is_err());
        assert_eq!(text(&members, "absent"), Ok(None));
    }
}
