//! `GoogleTokenExchange`: a Kubernetes token for a federated token, that one for an access token of the mesh's
//! service account.
//!
//! The two endpoints are constants: a variable would let whoever owns the workload send its token elsewhere.
//! Tests reach doubles by name resolution and the system's CA store.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderValue, header};
use jiff::{SignedDuration, civil};
use rustls::crypto::CryptoProvider;
use serde_json::{Map, Value, json};
use zeroize::Zeroizing;

use super::broker::{Access, Exchanger, Fault, Notes, Seen};
use super::call::{self, BadMember, Call, Client};
use super::request::Ask;
use crate::base::clock::{Clock, Until};
use crate::base::seldom::Seldom;
use crate::istiod::auth::claims;

const STS: &str = "https://sts.googleapis.com/v1/token";
const IAM: &str = "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts";
pub(super) const SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";
pub(super) const ACCESS: &str = "urn:ietf:params:oauth:token-type:access_token";
const JSON: &str = "application/json";
const FEDERATED: &str = "federated token";
const LAST: &str = "access token";
/// What an access token lives: asked for, and assumed where the answer does not say.
const LIFE: Duration = Duration::from_secs(3600);
/// Any process of the pod may ask for tokens, as often as it likes.
static FETCHED: Seldom = Seldom::new(60);
static AUDIENCE: Seldom = Seldom::new(10);

/// Whose audience a federated token is for: `identitynamespace:<namespace>:<provider>`.
#[derive(Debug, Clone)]
pub(crate) struct Audience {
    /// The trust domain, where a token has not exactly one audience.
    pub trust_domain: String,
    /// Whether a token's own single audience is the namespace; not so in the agent's calls to Google's CA.
    pub of_token: bool,
    /// The identity provider: a fetcher's, or the cluster's address.
    pub provider: String,
}

impl Audience {
    fn of(&self, subject: &str) -> String {
        let own = self.of_token.then(|| claims::only_audience(subject)).flatten();
        if own.is_none()
            && self.of_token
            && let Some(more) = AUDIENCE.may()
        {
            tracing::warn!(target: "security", "the subject token does not have exactly one audience; the trust \
                domain is taken in its place{more}");
        }
        let namespace = own.as_deref().unwrap_or(&self.trust_domain);
        format!("identitynamespace:{namespace}:{}", self.provider)
    }
}

/// What the plug-in needs to know.
#[derive(Debug, Clone)]
pub(crate) struct Google {
    /// The number of the project, as it stands in the service account's name.
    pub project_number: String,
    /// The audience.
    pub audience: Audience,
}

impl Google {
    pub(super) fn exchanger(self, crypto: Arc<CryptoProvider>, clock: Arc<dyn Clock>) -> Box<dyn Exchanger> {
        let calls = Calls { client: Client::new(crypto), clock };
        Box::new(Both { google: self, calls })
    }
}

/// The calls.
pub(super) struct Calls {
    pub(super) client: Client,
    pub(super) clock: Arc<dyn Clock>,
}

impl Calls {
    pub(super) async fn federated(
        &self,
        audience: &Audience,
        ask: &Ask,
    ) -> Result<(Zeroizing<String>, SystemTime), Fault> {
        let scope = if ask.scope.is_empty() { SCOPE } else { &ask.scope };
        let body = json!({
            "audience": audience.of(&ask.subject),
            "grantType": ask.grant_type,
            "requestedTokenType": ACCESS,
            "scope": scope,
            "subjectToken": ask.subject.as_str(),
            "subjectTokenType": ask.subject_type,
        });
        let headers = HeaderMap::new();
        let call = Call { what: FEDERATED, url: STS, kind: JSON, headers, body: body.to_string().into() };
        let members = self.client.ask(&call).await?;
        let token = call::token(&members, "access_token").map_err(|why| call.wrong(&why))?;
        let life = call::whole(&members, "expires_in").map_err(|why| call.wrong(&why))?;
        Ok((token, after(self.clock.now(), life.unwrap_or(0))))
    }

    async fn access(
        &self,
        project_number: &str,
        federated: &str,
    ) -> Result<(Zeroizing<String>, SystemTime), Fault> {
        let url = format!(
            "{IAM}/service-{project_number}@gcp-sa-meshdataplane.iam.gserviceaccount.com:generateAccessToken"
        );
        // The scope is fixed; the caller's has no effect on the token it gets.
        let body = json!({ "scope": [SCOPE], "lifetime": { "seconds": LIFE.as_secs() } });
        let bearer = Zeroizing::new(format!("Bearer {federated}"));
        let mut bearer = HeaderValue::from_str(&bearer)
            .map_err(|_| Fault::new(format!("the {FEDERATED} of {STS} cannot stand in a header")))?;
        bearer.set_sensitive(true);
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, bearer)]);
        let call = Call { what: LAST, url: &url, kind: JSON, headers, body: body.to_string().into() };
        let members = self.client.ask(&call).await?;
        let token = call::token(&members, "accessToken").map_err(|why| call.wrong(&why))?;
        let ends = expiry(&members).map_err(|why| call.wrong(&why))?;
        Ok((token, ends.unwrap_or_else(|| self.clock.now() + LIFE)))
    }
}

struct Both {
    google: Google,
    calls: Calls,
}

impl Exchanger for Both {
    fn exchange<'a>(&'a self, ask: &'a Ask, notes: &'a Notes) -> BoxFuture<'a, Result<Access, Fault>> {
        Box::pin(async move {
            let started = tokio::time::Instant::now();
            let (federated, ends) = self.calls.federated(&self.google.audience, ask).await?;
            notes.add(Seen { kind: FEDERATED, issued: self.calls.clock.now(), ends });
            let (token, ends) = self.calls.access(&self.google.project_number, &federated).await?;
            let now = self.calls.clock.now();
            notes.add(Seen { kind: LAST, issued: now, ends });
            let ends = Until::new(ends, now);
            if let Some(more) = FETCHED.may() {
                tracing::info!(target: "security", "fetched an access token in {} ms; it is valid for {} s{more}",
                    started.elapsed().as_millis(), super::broker::remaining(ends, now));
            }
            // One that is past its end is handed out like any other: it may be this machine's clock that is wrong.
            Ok(Access {
                token,
                ends,
                issued_type: ACCESS.to_owned(),
                token_type: "Bearer".to_owned(),
                scope: String::new(),
            })
        })
    }
}

/// So many seconds after (or before) `now`.
pub(super) fn after(now: SystemTime, seconds: i64) -> SystemTime {
    // Beyond what a clock can hold it is a hundred years.
    let span = Duration::from_secs(seconds.unsigned_abs().min(100 * 365 * 86_400));
    let at = if seconds < 0 { now.checked_sub(span) } else { now.checked_add(span) };
    at.unwrap_or(now)
}

fn expiry(members: &Map<String, Value>) -> Result<Option<SystemTime>, BadMember> {
    Ok(call::text(members, "expireTime")?.and_then(rfc3339))
}

/// A date of RFC 3339 as Go reads it: capital `T` and `Z`, any fraction, no leap second.
fn rfc3339(text: &str) -> Option<SystemTime> {
    let shape = |text: &str, shape: &str| {
        text.len() == shape.len()
            && text
                .bytes()
                .zip(shape.bytes())
                .all(|(b, s)| if s == b'0' { b.is_ascii_digit() } else { b == s })
    };
    let (date, rest) = text.split_at_checked(19)?;
    if !shape(date, "0000-00-00T00:00:00") || date.ends_with("60") {
        return None;
    }
    let (fraction, zone) = match rest.strip_prefix(['.', ',']) {
        Some(rest) => rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?),
        None => ("0", rest),
    };
    if fraction.is_empty() || !(zone == "Z" || shape(zone, "+00:00") || shape(zone, "-00:00")) {
        return None;
    }
    let fraction = &fraction[..fraction.len().min(9)];
    let local: civil::DateTime = format!("{date}.{fraction}").parse().ok()?;
    // Not by a timestamp: that ends a day before the last one of 9999, which says "never".
    let local = local.duration_since(civil::date(1970, 1, 1).at(0, 0, 0, 0));
    at(local.checked_sub(offset(zone)?)?)
}

/// `Z`, or hours and minutes, as far as Go goes.
fn offset(zone: &str) -> Option<SignedDuration> {
    let Some((sign, rest)) = zone.split_at_checked(1).filter(|(sign, _)| *sign != "Z") else {
        return Some(SignedDuration::ZERO);
    };
    let (hours, minutes) = rest.split_once(':')?;
    let (hours, minutes): (i64, i64) = (hours.parse().ok()?, minutes.parse().ok()?);
    let seconds = (hours <= 24 && minutes <= 60).then_some(hours * 3600 + minutes * 60)?;
    Some(SignedDuration::from_secs(if sign == "-" { -seconds } else { seconds }))
}

fn at(since: SignedDuration) -> Option<SystemTime> {
    match Duration::try_from(since) {
        Ok(since) => SystemTime::UNIX_EPOCH.checked_add(since),
        Err(_) => SystemTime::UNIX_EPOCH.checked_sub(since.unsigned_abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_read_as_go_does() {
        let seconds = |text: &str| {
            rfc3339(text).map(|at| at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis())
        };
        for (text, expected) in [
            ("1970-01-01T00:00:01Z", Some(1000)),
            ("1970-01-01T02:00:01+02:00", Some(1000)),
            ("1970-01-01T00:00:01.5Z", Some(1500)),
            ("1970-01-01T00:00:01.123456789012Z", Some(1123)),
            ("1969-12-31T20:00:01-04:00", Some(1000)),
            ("9999-12-31T23:59:59Z", Some(253_402_300_799_000)),
            ("9999-12-31T23:59:59.9-24:00", Some(253_402_387_199_900)),
            ("1970-01-01T24:00:00Z", None),
            ("1970-01-02T01:00:01+24:60", Some(1000)),
            ("1970-01-01T00:00:01+25:00", None),
            ("1970-01-01T00:00:01+00:61", None),
            ("1970-01-01 00:00:01Z", None),
            ("1970-01-01t00:00:01z", None),
            ("1970-01-01T00:00:01", None),
            ("1970-01-01T00:00:01.Z", None),
            ("1970-13-01T00:00:01Z", None),
            ("1970-01-01T00:00:60Z", None),
            ("1700000000", None),
            ("", None),
        ] {
            assert_eq!(seconds(text), expected, "{text}");
        }
    }

    #[test]
    fn the_audience_is_the_tokens_only_one() {
        use base64::Engine as _;
        let token = |claims: &str| {
            format!("e30.{}.c2ln", base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(claims))
        };
        let audience = Audience { trust_domain: "td".into(), of_token: true, provider: "p".into() };
        for (subject, namespace) in [
            (token(r#"{"aud":"one"}"#), "one"),
            (token(r#"{"aud":["one"]}"#), "one"),
            (token(r#"{"aud":["one","two"]}"#), "td"),
            (token(r#"{"aud":[""]}"#), "td"),
            (token(r#"{"aud":[]}"#), "td"),
            (token(r#"{"aud":["one",7]}"#), "td"),
            (token(r#"{"aud":7}"#), "td"),
            (token("{}"), "td"),
            ("garbage".to_owned(), "td"),
        ] {
            assert_eq!(audience.of(&subject), format!("identitynamespace:{namespace}:p"), "{subject}");
        }
        let ours = Audience { of_token: false, ..audience };
        assert_eq!(ours.of(&token(r#"{"aud":"one"}"#)), "identitynamespace:td:p");
    }

    #[test]
    fn lives_of_any_length_are_dates() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        assert_eq!(after(now, -10), SystemTime::UNIX_EPOCH + Duration::from_secs(990));
        assert!(after(now, i64::MAX) > now && after(now, i64::MIN) < now);
    }
}
