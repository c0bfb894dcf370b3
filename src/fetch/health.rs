//! `grpc.health.v1.Health/Check`, asked without TLS, for the probes of applications.
//!
//! Spoken with `h2` itself: one call on one connection does not need a channel, its tasks and its pool.
//! A server that cannot be reached is dialled again until the deadline, as the Go library's blocking dial does.
//! One that has begun to speak HTTP/2 gets no second try, its answer counts, unless that is that it did not take the call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use ::http::{HeaderValue, Method, Request, StatusCode, header};
use bytes::Bytes;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_util::io::InspectReader;

use super::{Dialer, refused};
use crate::base::error::chain;
use crate::net::grpc::is_grpc;
use crate::net::interim::Slowed;
use crate::net::percent;

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, Message)]
struct CheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, Message)]
struct CheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// The one good state.
pub(crate) const SERVING: i32 = 1;
/// Longest answer that is read: a health answer is two bytes.
const ANSWER: usize = 64 * 1024;
/// Longest list of headers, or of trailers with a status' text; the library's own is 16 MB.
const HEADERS: u32 = 64 * 1024;
/// Bytes of an answer that are read in a turn: more than it has, but for those that mean ill. There may be a hundred at a time.
const TURN: usize = 1024;
/// Between two tries to connect; the last one is repeated.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
];

/// What became of one try.
enum Tried {
    /// The server spoke HTTP/2: this is its word.
    Final(Result<i32, Failure>),
    /// There was no server yet.
    NotYet(String),
}

/// A question to the health service at one place.
pub(crate) struct Call<'a> {
    pub(crate) dialer: &'a Dialer,
    /// Without brackets.
    pub(crate) host: &'a str,
    pub(crate) port: u16,
    /// What the server is called in the request where that is not `host`.
    pub(crate) name: Option<&'a str>,
    /// Empty: the server as a whole.
    pub(crate) service: &'a str,
    /// Stands before our own name.
    pub(crate) user_agent: Option<&'a str>,
}

/// Why there is no health state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// Nobody who speaks HTTP/2 was reached within the limit; why the last try failed.
    #[error("{0}")]
    Unreached(String),
    /// The server was reached but gave no answer within the limit.
    #[error("it did not answer in time")]
    Silent,
    /// The call ended with a gRPC status other than OK.
    #[error("the call failed with gRPC status {code} {message}")]
    Status {
        /// As on the wire.
        code: u32,
        /// Decoded.
        message: String,
    },
    /// What came was no answer of a health service.
    #[error("{0}")]
    Nonsense(String),
}

impl Call<'_> {
    /// The state as the service gives it ([`name`] says what it means).
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) async fn run(&self, until: Instant) -> Result<i32, Failure> {
        let mut last = "no answer".to_owned();
        let spoke = Arc::new(AtomicBool::new(false));
        let tries = async {
            let mut pauses = PAUSES.iter();
            let mut pause = PAUSES[0];
            loop {
                match self.check(until, &spoke).await {
                    Tried::Final(result) => return result,
                    Tried::NotYet(why) => last = why,
                }
                pause = pauses.next().copied().unwrap_or(pause);
                tokio::time::sleep(pause).await;
            }
        };
        match tokio::time::timeout_at(until, tries).await {
            Ok(result) => result,
            Err(_) if spoke.load(Relaxed) => Err(Failure::Silent),
            Err(_) => Err(Failure::Unreached(last)),
        }
    }

    async fn check(&self, until: Instant, spoke: &Arc<AtomicBool>) -> Tried {
        let stream = match self.dialer.tcp(self.host, self.port).await {
            Ok(stream) => stream,
            Err(error) => return Tried::NotYet(format!("cannot connect: {error}")),
        };
        match self.call(listening(stream, spoke.clone()), until).await {
            Err(Failure::Unreached(why)) => Tried::NotYet(why),
            Err(Failure::Nonsense(why)) if !spoke.load(Relaxed) => {
                Tried::NotYet(format!("it does not speak gRPC: {why}"))
            }
            result => Tried::Final(result),
        }
    }

    async fn call(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin,
        until: Instant,
    ) -> Result<i32, Failure> {
        let failed = |e: h2::Error| {
            let why = chain(&e);
            if refused(&e) { Failure::Unreached(why) } else { Failure::Nonsense(why) }
        };
        let stream = Slowed::of_frames(stream, TURN);
        let handshake =
            h2::client::Builder::new().max_header_list_size(HEADERS).handshake::<_, Bytes>(stream);
        let (sender, connection) = handshake.await.map_err(failed)?;
        let exchange = async {
            let mut sender = sender.ready().await.map_err(failed)?;
            let request = self.request(until).map_err(|e| Failure::Nonsense(e.to_string()))?;
            let (response, mut body) = sender.send_request(request, false).map_err(failed)?;
            body.send_data(frame(&CheckRequest { service: self.service.to_owned() }), true)
                .map_err(failed)?;
            let response = response.await.map_err(failed)?;
            answer(response).await
        };
        let (mut exchange, mut connection) = (std::pin::pin!(exchange), std::pin::pin!(connection));
        let mut ended = false;
        std::future::poll_fn(|cx| {
            if let Poll::Ready(answer) = exchange.as_mut().poll(cx) {
                return Poll::Ready(answer);
            }
            if !ended && connection.as_mut().poll(cx).is_ready() {
                ended = true;
            }
            exchange.as_mut().poll(cx)
        })
        .await
    }

    fn request(&self, until: Instant) -> Result<Request<()>, http::Error> {
        let own = concat!("pilot-agent/", env!("CARGO_PKG_VERSION"));
        let agent = self.user_agent.map_or_else(|| own.to_owned(), |caller| format!("{caller} {own}"));
        let left = until.saturating_duration_since(Instant::now());
        // At most eight digits of a unit.
        let timeout = match left.as_millis() {
            millis @ 0..=99_999_999 => format!("{millis}m"),
            _ => format!("{}S", left.as_secs().min(99_999_999)),
        };
        let host = self.name.unwrap_or(self.host);
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        Request::builder()
            .method(Method::POST)
            .uri(format!("http://{host}:{}/grpc.health.v1.Health/Check", self.port))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers")
            .header(header::USER_AGENT, agent)
            .header("grpc-timeout", timeout)
            .body(())
    }
}

/// What a state other than SERVING is called.
pub(crate) fn name(state: i32) -> &'static str {
    match state {
        0 => "UNKNOWN",
        2 => "NOT_SERVING",
        3 => "SERVICE_UNKNOWN",
        _ => "a state that is not known",
    }
}

fn frame(message: &CheckRequest) -> Bytes {
    let length = u32::try_from(message.encoded_len()).unwrap_or(u32::MAX);
    let mut out = vec![0];
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(&message.encode_to_vec());
    out.into()
}

async fn answer(response: ::http::Response<h2::RecvStream>) -> Result<i32, Failure> {
    let nonsense = |why: &str| Failure::Nonsense(why.to_owned());
    let (head, mut body) = response.into_parts();
    if !is_grpc(&head.headers) {
        if head.status != StatusCode::OK {
            return Err(Failure::Nonsense(format!("it answered {}", head.status)));
        }
        let kind = head.headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        return Err(Failure::Nonsense(format!("it answered in {}, no gRPC", String::from_utf8_lossy(kind))));
    }
    let mut bytes = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece.map_err(|e| Failure::Nonsense(chain(&e)))?;
        let _ = body.flow_control().release_capacity(piece.len());
        if bytes.len() + piece.len() > ANSWER {
            return Err(nonsense("its answer is too long"));
        }
        bytes.extend_from_slice(&piece);
    }
    let trailers = body.trailers().await.map_err(|e| Failure::Nonsense(chain(&e)))?;
    let trailers = trailers.as_ref().unwrap_or(&head.headers);
    match trailers.get("grpc-status").map(HeaderValue::as_bytes) {
        Some(b"0") => {}
        None => return Err(nonsense("its answer broke off")),
        Some(code) => {
            let message = trailers.get("grpc-message").map_or(&b""[..], HeaderValue::as_bytes);
            let message = String::from_utf8_lossy(message);
            let message = percent::decode_text(&message).unwrap_or_else(|| message.into_owned());
            let code = std::str::from_utf8(code).ok().and_then(|code| code.parse().ok());
            // 2: UNKNOWN, as every client takes a code it cannot read.
            return Err(Failure::Status { code: code.unwrap_or(2), message });
        }
    }
    let [compressed, a, b, c, d, message @ ..] = bytes.as_slice() else {
        return Err(nonsense("its answer has no message"));
    };
    let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
    if *compressed != 0 || length != message.len() {
        return Err(nonsense("its answer is not one plain message"));
    }
    CheckResponse::decode(message)
        .map(|m| m.status)
        .map_err(|e| Failure::Nonsense(format!("its answer is no message: {e}")))
}

/// Where a frame's type stands, and the type of SETTINGS (RFC 9113, 4.1 and 6.5).
const TYPE_AT: usize = 3;
const SETTINGS: u8 = 4;

/// A connection that tells whether the other side begins as HTTP/2 does, with SETTINGS.
fn listening(stream: TcpStream, spoke: Arc<AtomicBool>) -> impl AsyncRead + AsyncWrite + Unpin {
    let mut read = 0;
    InspectReader::new(stream, move |new: &[u8]| {
        if read <= TYPE_AT && new.get(TYPE_AT - read) == Some(&SETTINGS) {
            spoke.store(true, Relaxed);
        }
        read += new.len();
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::fake::spawn;

    // What a call comes to where the head of the answer is this one.
    async fn answered(status: u16, kind: &'static str) -> Result<i32, Failure> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let app = spawn(async move {
            let mut http2 = h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
            while let Some(Ok((_, mut respond))) = http2.accept().await {
                let head = ::http::Response::builder().status(status).header(header::CONTENT_TYPE, kind);
                let mut body = respond.send_response(head.body(()).unwrap(), false).unwrap();
                body.send_data(Bytes::from_static(b"\0\0\0\0\x02\x08\x01"), false).unwrap();
                let code = (header::HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"));
                body.send_trailers([code].into_iter().collect()).unwrap();
            }
        });
        let dialer = Dialer::default();
        let call =
            Call { dialer: &dialer, name: None, host: "127.0.0.1", port, service: "", user_agent: None };
        let got = call.run(Instant::now() + Duration::from_secs(30)).await;
        app.abort();
        got
    }

    #[tokio::test]
    async fn the_type_says_whether_it_is_grpc_and_the_status_nothing() {
        for (status, kind) in
            [(200, "application/grpc"), (200, "application/grpc+proto"), (404, "application/grpc;a=b")]
        {
            assert_eq!(answered(status, kind).await, Ok(SERVING), "{status} {kind}");
        }
        for (status, kind) in [(200, "application/grpc-web"), (200, "application/grpcx"), (503, "text/html")]
        {
            assert!(matches!(answered(status, kind).await, Err(Failure::Nonsense(_))), "{status} {kind}");
        }
    }

    #[tokio::test]
    async fn a_very_long_word_is_not_read() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let app = spawn(async move {
            let mut http2 = h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
            while let Some(Ok((_, mut respond))) = http2.accept().await {
                let head = ::http::Response::builder().header(header::CONTENT_TYPE, "application/grpc");
                let mut body = respond.send_response(head.body(()).unwrap(), false).unwrap();
                let said = HeaderValue::from_str(&"a".repeat(200_000)).unwrap();
                let code = HeaderValue::from_static("5");
                let status = [("grpc-status", code), ("grpc-message", said)];
                let status = status.map(|(name, value)| (header::HeaderName::from_static(name), value));
                let _ = body.send_trailers(status.into_iter().collect());
            }
        });
        let dialer = Dialer::default();
        let call =
            Call { dialer: &dialer, name: None, host: "127.0.0.1", port, service: "", user_agent: None };
        let got = call.run(Instant::now() + Duration::from_secs(30)).await;
        assert!(matches!(&got, Err(Failure::Nonsense(why)) if why.len() < 1000), "{got:?}");
        app.abort();
    }
}
