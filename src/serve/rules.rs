//! What Go's server refuses before any handler sees it, and hyper lets pass.

use http::{HeaderValue, Method, Request, StatusCode, Version, header};

use super::path;
use super::respond::{Answer, TEXT, page, status};
use crate::net::framing;

/// What Go's server answers before any handler sees it, and hyper lets pass.
pub(super) fn malformed<B>(request: &Request<B>) -> Option<Answer> {
    let bad = |why: &str| Some(page(StatusCode::BAD_REQUEST, TEXT, format!("400 Bad Request{why}")));
    let connect = request.method() == Method::CONNECT;
    let preface = request.method().as_str() == "PRI" && request.uri().path() == "*";
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (host, another) = (hosts.next(), hosts.next());
    let path = request.uri().path();
    let whole = path.starts_with('/') || path == "*" || connect;
    // What Go finds while it reads a head, and for which it gives no reason, comes before what it looks at then.
    if !whole || another.is_some() || path::decode(path).is_none() && !only_bad_utf8(path) {
        return bad("");
    }
    if framing::is_coded(request.headers()) {
        return Some(page(StatusCode::NOT_IMPLEMENTED, TEXT, "Unsupported transfer encoding"));
    }
    match host {
        None if request.version() == Version::HTTP_11 && !connect && !preface => {
            return bad(": missing required Host header");
        }
        Some(host)
            if !host.as_bytes().iter().all(|b| b.is_ascii_graphic() && !b"\"<>\\^`{|}/?#@".contains(b)) =>
        {
            return bad(": malformed Host header");
        }
        _ => {}
    }
    let expects = request.headers().get(header::EXPECT).filter(|v| !v.is_empty());
    if expects.is_some_and(|v| !v.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
        return Some(status(StatusCode::EXPECTATION_FAILED));
    }
    None
}

// A path may decode to bytes that are no UTF-8; only a broken escape is malformed.
fn only_bad_utf8(path: &str) -> bool {
    path.match_indices('%').all(|(at, _)| {
        let escape = path.as_bytes().get(at + 1..at + 3);
        escape.is_some_and(|e| e.iter().all(u8::is_ascii_hexdigit))
    })
}

/// The answer to a request to the server as a whole, which is no handler's: only OPTIONS may ask that.
pub(super) fn asterisk<B>(request: &Request<B>, varies: bool) -> Option<Answer> {
    if request.uri().path() != "*" {
        return None;
    }
    if request.method() == Method::OPTIONS {
        return Some(status(StatusCode::OK));
    }
    let mut answer = status(StatusCode::BAD_REQUEST);
    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    if varies {
        answer.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_as_a_whole_is_no_handlers() {
        let answer = |method: &str, target: &str| {
            let request = Request::builder().method(method).uri(target).body(()).unwrap();
            asterisk(&request, false)
                .map(|a| (a.status().as_u16(), a.headers().contains_key(header::CONNECTION)))
        };
        assert_eq!(answer("OPTIONS", "*"), Some((200, false)));
        assert_eq!(answer("GET", "*"), Some((400, true)));
        assert_eq!(answer("OPTIONS", "/token"), None);
    }
}
