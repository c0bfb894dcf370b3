//! One small request to a metadata server.
//!
//! Nothing is left running when it is dropped ([`crate::net::http`]).

use ::http::header::{HOST, HeaderMap, HeaderName, HeaderValue};
use ::http::{Method, Request, StatusCode};
use bytes::Bytes;

use super::{CONNECT, REQUEST};
use crate::net::http;

/// The longest answer that is read; Azure's whole instance document is a few kilobytes.
const LONGEST: usize = 1 << 20;

/// What came back.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
}

impl Answer {
    /// The body of a 200, without space around it.
    pub(super) fn text(&self) -> Option<String> {
        self.untrimmed().map(|text| text.trim().to_owned())
    }

    pub(super) fn untrimmed(&self) -> Option<String> {
        (self.status == StatusCode::OK).then(|| self.body.clone())
    }
}

/// Asks `host` (a literal or a name, perhaps with a port) for `path`; nothing if it does not answer in time.
pub(super) async fn ask(
    method: Method,
    host: &str,
    path: &str,
    headers: &[(&'static str, &str)],
) -> Option<Answer> {
    let result = tokio::time::timeout(REQUEST, exchange(method, host, path, headers)).await;
    match result {
        Ok(Ok(answer)) => Some(answer),
        Ok(Err(error)) => {
            tracing::debug!("http://{host}{path}: {error}");
            None
        }
        Err(_) => {
            tracing::debug!("http://{host}{path}: no answer within {REQUEST:?}");
            None
        }
    }
}

/// `GET`.
pub(super) async fn get(host: &str, path: &str, headers: &[(&'static str, &str)]) -> Option<Answer> {
    ask(Method::GET, host, path, headers).await
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn exchange(
    method: Method,
    host: &str,
    path: &str,
    headers: &[(&'static str, &str)],
) -> Result<Answer, Failure> {
    let io = tokio::time::timeout(CONNECT, http::reach(host)).await??;
    let mut request = Request::builder().method(method).uri(path).header(HOST, host);
    for (name, value) in headers {
        request = request.header(HeaderName::from_static(name), HeaderValue::from_str(value)?);
    }
    let (head, body) = http::exchange(io, request.body(Bytes::new())?, LONGEST).await?.into_parts();
    let body = String::from_utf8_lossy(&body).into_owned();
    Ok(Answer { status: head.status, headers: head.headers, body })
}
