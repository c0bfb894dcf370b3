//! httpGet: a GET with the kubelet's own headers, judged by its status.

use ::http::{HeaderMap, HeaderValue, StatusCode, header};

use super::sniff::kind_of;
use super::{Prober, Unanswered, limit};
use crate::base::error::BoxError;
use crate::fetch::Get;
use crate::fetch::url::shown;
use crate::net::proxy::split;
use crate::serve::respond::{Answer, page, status};

/// As much of a body as goes back to the kubelet, which shows it in the event of a failed probe.
const BODY: usize = 10_240;

/// An answer's head, as Go's client takes it; of a body no more than [`BODY`] is read...
const HEAD: usize = 1 << 20;
/// ... and where more than [`super::WIDE`] probes are under way, which no kubelet does, a head of so much.
const NARROW: usize = 32 << 10;

impl Prober {
    pub(super) async fn http(
        &self,
        path: &str,
        port: i32,
        https: bool,
        seconds: i32,
        headers: &HeaderMap,
    ) -> Result<Answer, Unanswered> {
        let scheme = if https { "https" } else { "http" };
        let slash = if path.starts_with('/') { "" } else { "/" };
        let url = format!("{scheme}://{}{slash}{path}", self.authority(port));
        let failed = |why: BoxError| Unanswered::At { to: shown(&url), why };
        let wide = self.wide.try_acquire().ok();
        let get = Get::new(&url)
            .map_err(Unanswered::Url)?
            .headers(passed_on(headers))
            .host(host(headers, self.status_port, port))
            .dialer(&self.dialer)
            .keep(self.kept.as_ref())
            .buffer(if wide.is_some() { HEAD } else { NARROW })
            // Another host is not the application's business; port and scheme may differ.
            .follow(|first, next| first.host == next.host);
        let until = tokio::time::Instant::now() + limit(seconds);
        let mut reply = match tokio::time::timeout_at(until, get.send()).await {
            Ok(reply) => reply.map_err(|error| failed(error.into()))?,
            Err(_) => return Err(failed(format!("no answer within {seconds} s").into())),
        };
        let code = reply.status();
        if code.is_informational() {
            return Err(failed(format!("it answered {code} and went no further").into()));
        }
        // The status has been given; a body that is late or breaks off does not take it back.
        let mut body = Vec::new();
        let whole = async {
            while body.len() < BODY {
                match reply.piece().await {
                    Ok(Some(piece)) => body.extend_from_slice(&piece[..piece.len().min(BODY - body.len())]),
                    Ok(None) | Err(_) => break,
                }
            }
        };
        let _ = tokio::time::timeout_at(until, whole).await;
        reply.finish(self.kept.as_ref()).await;
        if code.is_redirection() {
            return Ok(status(StatusCode::OK));
        }
        let bodyless = code == StatusCode::NO_CONTENT || body.is_empty();
        Ok(if bodyless { status(code) } else { page(code, kind_of(&body), body) })
    }
}

/// The kubelet's headers; what describes its own connection to us or its body is left out.
fn passed_on(headers: &HeaderMap) -> HeaderMap {
    let mut out = headers.clone();
    for name in [header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::TRAILER] {
        out.remove(name);
    }
    // Go's server adds this as it reads a request, so the application sees it.
    let uncached = out.get(header::PRAGMA).is_some_and(|value| value == "no-cache");
    if uncached && !out.contains_key(header::CACHE_CONTROL) {
        out.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    out
}

/// The kubelet's Host, with the application's port where it names ours.
fn host(headers: &HeaderMap, status_port: u16, port: i32) -> Option<HeaderValue> {
    let value = headers.get(header::HOST).filter(|v| !v.is_empty())?;
    match value.to_str().ok().and_then(split) {
        // As a number, with zeros before it or a sign, as the Go agent reads it.
        Some((name, found)) if found.parse() == Ok(i64::from(status_port)) => {
            let name = if name.contains(':') { format!("[{name}]") } else { name.to_owned() };
            HeaderValue::from_str(&format!("{name}:{port}")).ok()
        }
        _ => Some(value.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_wants_nothing_cached_the_old_way_says_so_in_the_new_one_too() {
        let seen = |given: &[(header::HeaderName, &'static str)]| {
            let headers = given.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
            let passed = passed_on(&headers.collect());
            passed.get(header::CACHE_CONTROL).map(|v| v.to_str().unwrap().to_owned())
        };
        let both = [(header::PRAGMA, "no-cache"), (header::CACHE_CONTROL, "max-age=0")];
        assert_eq!(seen(&[(header::PRAGMA, "no-cache")]).as_deref(), Some("no-cache"));
        assert_eq!(seen(&[(header::PRAGMA, "x")]), None);
        assert_eq!(seen(&both).as_deref(), Some("max-age=0"));
    }

    #[test]
    fn our_port_in_the_host_becomes_the_applications() {
        let to = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static(text));
            host(&headers, 15020, 8080).map(|v| v.to_str().unwrap().to_owned())
        };
        for ours in ["a:15020", "a:015020", "a:+15020"] {
            assert_eq!(to(ours).as_deref(), Some("a:8080"), "{ours}");
        }
        assert_eq!(to("[fd00::9]:15020").as_deref(), Some("[fd00::9]:8080"));
        assert_eq!(to("[a]:15020").as_deref(), Some("a:8080"));
        for same in ["a", "a:9999", "a:x", "[fd00::9]", "fd00::9:15020", "::1]:15020", "[::1:15020", "a:"] {
            assert_eq!(to(same).as_deref(), Some(same));
        }
        assert_eq!(to(""), None);
    }
}
