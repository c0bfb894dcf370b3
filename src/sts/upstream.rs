//! `Passthrough` (ours): the exchange at any endpoint that speaks RFC 8693, named by `STS_UPSTREAM_URL`.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use http::HeaderMap;
use rustls::crypto::CryptoProvider;

use super::broker::{Access, Exchanger, Fault, Notes, Seen};
use super::call::{self, Call, Client};
use super::google::{ACCESS, after};
use super::request::Ask;
use crate::base::clock::{Clock, Until};
use crate::fetch::url::{Url, shown};
use crate::net::percent;

const WHAT: &str = "access token";
/// What a token is taken to live when its endpoint does not say: less than is kept, so each caller gets its own.
const LIFE: i64 = 300;

/// Why an address is no endpoint.
#[derive(Debug, thiserror::Error)]
#[error("STS_UPSTREAM_URL={url}: {why}")]
pub(crate) struct Bad {
    url: String,
    why: String,
}

/// The endpoint.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    url: String,
    audience: String,
}

impl Upstream {
    /// The endpoint at `url`; `audience` is asked for where a caller names none.
    ///
    /// # Errors
    /// When `url` is no address, or tokens would leave this machine unencrypted.
    pub(crate) fn new(url: &str, audience: &str) -> Result<Self, Bad> {
        let bad = |why: &str| Bad { url: shown(url), why: why.to_owned() };
        let parsed = Url::parse(url).map_err(|e| bad(&e.to_string()))?;
        if parsed.user.is_some() {
            return Err(bad("a user and a password have no place in it"));
        }
        let local = parsed.host.eq_ignore_ascii_case("localhost")
            || parsed.host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        if !parsed.https && !local {
            return Err(bad(
                "tokens are sent to it, so it must begin with https:// (http:// only on localhost)",
            ));
        }
        Ok(Self { url: url.to_owned(), audience: audience.to_owned() })
    }

    pub(super) fn exchanger(self, crypto: Arc<CryptoProvider>, clock: Arc<dyn Clock>) -> Box<dyn Exchanger> {
        Box::new(Passthrough { upstream: self, client: Client::new(crypto), clock })
    }
}

struct Passthrough {
    upstream: Upstream,
    client: Client,
    clock: Arc<dyn Clock>,
}

impl Exchanger for Passthrough {
    fn exchange<'a>(&'a self, ask: &'a Ask, notes: &'a Notes) -> BoxFuture<'a, Result<Access, Fault>> {
        Box::pin(async move {
            let or = |text: &'a str, default: &'a str| if text.is_empty() { default } else { text };
            let pairs = [
                ("grant_type", ask.grant_type.as_str()),
                ("subject_token", &ask.subject),
                ("subject_token_type", &ask.subject_type),
                ("requested_token_type", or(&ask.requested_type, ACCESS)),
                ("scope", &ask.scope),
                ("audience", or(&ask.audience, &self.upstream.audience)),
                ("resource", &ask.resource),
            ];
            let call = Call {
                what: WHAT,
                url: &self.upstream.url,
                kind: "application/x-www-form-urlencoded",
                headers: HeaderMap::new(),
                body: percent::pairs(pairs).into_bytes().into(),
            };
            let members = self.client.ask(&call).await?;
            let wrong = |why: call::BadMember| call.wrong(&why);
            let token = call::token(&members, "access_token").map_err(wrong)?;
            let text = |name: &str, default: &str| {
                call::text(&members, name).map(|t| t.unwrap_or(default).to_owned()).map_err(wrong)
            };
            let life = call::whole(&members, "expires_in").map_err(wrong)?.unwrap_or(LIFE);
            let now = self.clock.now();
            let ends = after(now, life);
            notes.add(Seen { kind: WHAT, issued: now, ends });
            Ok(Access {
                token,
                ends: Until::new(ends, now),
                issued_type: text("issued_token_type", ACCESS)?,
                token_type: text("token_type", "Bearer")?,
                scope: text("scope", "")?,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_do_not_leave_the_machine_unencrypted() {
        for good in [
            "https://sts.example.com/token",
            "http://localhost:8080/token",
            "http://127.0.0.1/",
            "http://[::1]:1",
        ] {
            assert!(Upstream::new(good, "").is_ok(), "{good}");
        }
        for bad in ["http://sts.example.com/", "ftp://x", "", "https://u:s3cret@h/", "https://"] {
            let error = Upstream::new(bad, "").unwrap_err().to_string();
            assert!(error.starts_with("STS_UPSTREAM_URL=") && !error.contains("s3cret"), "{error}");
        }
    }
}
