//! What is asked: the checks of a token request, in the order of the Go agent.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, Method, Request, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use sha::{Context, SHA256};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};
use zeroize::Zeroizing;

use super::form::Form;
use crate::net::progress::{Phase, Progress};
use crate::serve::ConnState;

use aws_lc_rs::digest as sha;

const GRANT: &str = "urn:ietf:params:oauth:grant-type:token-exchange";
const JWT: &str = "urn:ietf:params:oauth:token-type:jwt";
const FORM: &str = "application/x-www-form-urlencoded";

/// The Go agent's limit of a body.
const BODY: usize = 10 << 20;
/// ... and of the time for head and body together.
const TIME: Duration = Duration::from_secs(30);

/// A form that holds no more needs no leave: tokens have a few kB, and a thousand callers at once are a pod's worth.
const SMALL: usize = 16 << 10;
/// Larger ones at a time, of up to 2 MiB each. Others wait, unread, as long as a request may take.
static LARGE: Semaphore = Semaphore::const_new(8);

/// Leave to hold a large form, until it is dropped.
type Leave = SemaphorePermit<'static>;

/// A request that passed.
pub(super) struct Ask {
    /// The token to be exchanged.
    pub(super) subject: Zeroizing<String>,
    pub(super) subject_type: String,
    pub(super) grant_type: String,
    pub(super) scope: String,
    /// These three only reach an endpoint of the operator's own.
    pub(super) audience: String,
    pub(super) resource: String,
    pub(super) requested_type: String,
    _leave: Option<Leave>,
}

impl Ask {
    /// Of the pod's own token.
    pub(super) fn own(subject: &str, scope: &str) -> Self {
        Self {
            subject: Zeroizing::new(subject.to_owned()),
            subject_type: JWT.to_owned(),
            grant_type: GRANT.to_owned(),
            scope: scope.to_owned(),
            audience: String::new(),
            resource: String::new(),
            requested_type: String::new(),
            _leave: None,
        }
    }

    /// What a kept token is found by: a digest, so that no subject token is held.
    pub(super) fn key(&self) -> [u8; 32] {
        let mut digest = Context::new(&SHA256);
        for part in [&*self.subject, &self.scope, &self.audience, &self.resource, &self.requested_type] {
            digest.update(&(part.len() as u64).to_be_bytes());
            digest.update(part.as_bytes());
        }
        let mut out = [0; 32];
        out.copy_from_slice(digest.finish().as_ref());
        out
    }
}

/// A request that did not pass.
pub(super) struct Refusal {
    /// A sentence that repeats nothing of the request.
    pub(super) why: String,
    /// The rest of the request is still to come: the connection ends.
    pub(super) close: bool,
}

impl Refusal {
    fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), close: false }
    }
}

/// Requests that a page in a browser can cause: with an `Origin`, or for a name that is not this machine's (a
/// name that somebody makes point here has a dot).
pub(super) fn foreign(headers: &HeaderMap) -> Option<Refusal> {
    if headers.contains_key(header::ORIGIN) {
        return Some(Refusal::new("requests of web pages (header Origin) are not answered"));
    }
    let host = headers.get(header::HOST)?.to_str().unwrap_or(".");
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let here = match name.parse::<std::net::IpAddr>() {
        Ok(ip) => ip.is_loopback(),
        Err(_) => !name.trim_end_matches('.').contains('.') || name.ends_with(".localhost"),
    };
    (!here).then(|| Refusal::new("the Host is not this machine: only localhost and loopback addresses are"))
}

/// Reads and checks a request.
pub(super) async fn read(
    request: &Request<()>,
    body: &mut Incoming,
    conn: &ConnState,
) -> Result<Ask, Refusal> {
    let until = Instant::now() + TIME.saturating_sub(conn.progress.request_age());
    let early = if request.method() != Method::POST {
        Some("request method is invalid: it must be POST".to_owned())
    } else if !is_form(request.headers().get(header::CONTENT_TYPE)) {
        Some(format!("request content type is invalid: it must be {FORM}"))
    } else {
        None
    };
    if let Some(why) = early {
        return Err(Refusal::new(why));
    }
    let (fields, leave) = form(body, request.uri().query().unwrap_or_default(), until, conn).await?;
    let [grant_type, subject, subject_type, scope, audience, resource, requested_type] = fields;
    if *grant_type != GRANT {
        return Err(Refusal::new(format!("request query grant_type is invalid: it must be {GRANT}")));
    }
    if subject.is_empty() {
        return Err(Refusal::new("subject_token is empty"));
    }
    if *subject_type != JWT {
        return Err(Refusal::new(format!("subject_token_type is invalid: it must be {JWT}")));
    }
    let plain = |text: Zeroizing<String>| text.to_string();
    Ok(Ask {
        subject,
        subject_type: plain(subject_type),
        grant_type: plain(grant_type),
        scope: plain(scope),
        audience: plain(audience),
        resource: plain(resource),
        requested_type: plain(requested_type),
        _leave: leave,
    })
}

// A parameter of the type (`; charset=utf-8`) changes nothing in what a form is.
fn is_form(kind: Option<&HeaderValue>) -> bool {
    let text = kind.and_then(|k| k.to_str().ok()).unwrap_or_default();
    text.split(';').next().unwrap_or_default().trim() == FORM
}

type Fields = [Zeroizing<String>; 7];

// What a form needs to go on; `None`: it had none in time.
async fn room(held: usize, leave: &mut Option<Leave>, of: &Progress, until: Instant) -> Option<()> {
    if held <= SMALL || leave.is_some() {
        return Some(());
    }
    of.enter(Phase::Waiting);
    let given = timeout_at(until, LARGE.acquire()).await;
    of.enter(Phase::Body);
    *leave = Some(given.ok()?.ok()?);
    Some(())
}

async fn form(
    body: &mut Incoming,
    query: &str,
    until: Instant,
    conn: &ConnState,
) -> Result<(Fields, Option<Leave>), Refusal> {
    conn.progress.enter(Phase::Body);
    conn.piece();
    let mut form = Form::new([
        "grant_type",
        "subject_token",
        "subject_token_type",
        "scope",
        "audience",
        "resource",
        "requested_token_type",
    ]);
    let broken = |why: &str| Refusal { why: format!("the form cannot be read: {why}"), close: true };
    let (mut length, mut leave) = (0, None);
    loop {
        let frame = match timeout_at(until, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => break,
            Ok(Some(Err(_))) => return Err(broken("its body was cut off")),
            Err(_) => return Err(broken("its body did not come to an end within 30 s")),
        };
        conn.piece();
        let piece = frame.into_data().unwrap_or_default();
        length += piece.len();
        if length > BODY {
            return Err(Refusal::new("the form cannot be read: its body is larger than 10 MiB"));
        }
        form.feed(&piece);
        drop(piece);
        let room = room(form.held(), &mut leave, &conn.progress, until).await;
        room.ok_or_else(|| broken("too many that are larger than 16 KiB are there at a time"))?;
    }
    conn.busy();
    let whole = |why: &str| Refusal::new(format!("the form cannot be read: {why}"));
    let fields = form.end().map_err(|fault| whole(fault.why()))?;
    let mut address = Form::new([]);
    address.feed(query.as_bytes());
    address.end().map_err(|fault| Refusal::new(format!("the address has a bad query: {}", fault.why())))?;
    Ok((fields, leave))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::progress::Heads;

    #[tokio::test(start_paused = true)]
    async fn large_forms_are_few_and_small_ones_need_no_leave() {
        let of = Progress::new(std::sync::Arc::new(Heads::new(0)));
        let until = Instant::now() + TIME;
        let mut held: [Option<Leave>; 8] = Default::default();
        for leave in &mut held {
            room(SMALL + 1, leave, &of, until).await.unwrap();
            room(SMALL * 2, leave, &of, until).await.expect("it has leave already");
            assert!(leave.is_some());
        }
        let mut late = None;
        room(SMALL, &mut late, &of, until).await.unwrap();
        assert!(late.is_none(), "it is small");
        assert!(room(SMALL + 1, &mut late, &of, until).await.is_none() && Instant::now() >= until);
        assert_eq!(of.phase(), Phase::Body);
        held[0] = None;
        room(SMALL + 1, &mut late, &of, until + TIME).await.unwrap();
        assert!(late.is_some());
    }

    #[test]
    fn only_this_machine_is_meant() {
        let refused = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            foreign(&headers).is_some()
        };
        for here in ["localhost:1", "127.0.0.1", "127.9.0.1:80", "[::1]:5", "a.localhost", "LOCALHOST"] {
            assert!(!refused("host", here), "{here}");
        }
        for there in ["evil.example.com", "10.0.0.1", "[fd00::1]:5", "localhost.evil.example.com:80", "a.b."]
        {
            assert!(refused("host", there), "{there}");
        }
        assert!(refused("origin", "null"));
        assert!(foreign(&HeaderMap::new()).is_none());
    }

    #[test]
    fn forms_by_their_type() {
        for (kind, good) in [
            (FORM, true),
            ("application/x-www-form-urlencoded; charset=utf-8", true),
            ("Application/x-www-form-urlencoded", false),
            ("application/json", false),
            ("", false),
        ] {
            assert_eq!(is_form(Some(&HeaderValue::from_static(kind))), good, "{kind}");
        }
        assert!(!is_form(None));
    }

    #[test]
    fn a_kept_token_is_for_one_subject_and_scope() {
        let keys = [("a", "b"), ("ab", ""), ("", "ab"), ("a", "c")].map(|(s, p)| Ask::own(s, p).key());
        let mut distinct = keys.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), keys.len());
        assert_eq!(Ask::own("a", "b").key(), keys[0]);
    }
}
