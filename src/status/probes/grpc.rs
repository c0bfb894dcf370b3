//! grpc: the standard health service, asked without TLS.
//!
//! Spoken with `h2` itself: one call on one connection does not need a channel, its tasks and its pool.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use bytes::Bytes;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::Prober;
use crate::base::error::chain;
use crate::status::respond::{Answer, status};

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

const SERVING: i32 = 1;
/// Longest answer that is read: a health answer is two bytes.
const ANSWER: usize = 64 * 1024;
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
    Final(Result<(), String>),
    /// There was no server yet.
    NotYet(String),
}

impl Prober {
    pub(super) async fn grpc(
        &self,
        port: i32,
        service: &str,
        seconds: i32,
        headers: &HeaderMap,
    ) -> Result<Answer, String> {
        let to = self.authority(port);
        let Ok(seconds @ 1..) = u64::try_from(seconds) else {
            return Err(format!("{to}: its timeout of {seconds} s is over before it begins"));
        };
        let port = u16::try_from(port).map_err(|_| format!("{to}: no such port"))?;
        let until = Instant::now() + Duration::from_secs(seconds);
        let mut last = "no answer".to_owned();
        let tries = async {
            let mut pauses = PAUSES.iter();
            let mut pause = PAUSES[0];
            loop {
                match self.check(port, &to, service, until, headers).await {
                    Tried::Final(result) => return result,
                    Tried::NotYet(why) => last = why,
                }
                pause = pauses.next().copied().unwrap_or(pause);
                tokio::time::sleep(pause).await;
            }
        };
        match tokio::time::timeout_at(until, tries).await {
            Ok(Ok(())) => Ok(status(StatusCode::OK)),
            Ok(Err(why)) => Err(format!("{to}: {why}")),
            Err(_) => Err(format!("{to}: {last} (within {seconds} s)")),
        }
    }

    async fn check(&self, port: u16, to: &str, service: &str, until: Instant, headers: &HeaderMap) -> Tried {
        let stream = match self.dialer.tcp(&self.destination, port).await {
            Ok(stream) => stream,
            Err(error) => return Tried::NotYet(format!("cannot connect: {error}")),
        };
        let spoke = Arc::new(AtomicBool::new(false));
        let stream = Listening { stream, spoke: spoke.clone(), read: 0 };
        match call(stream, to, service, until, headers).await {
            Ok(SERVING) => Tried::Final(Ok(())),
            Ok(state) => Tried::Final(Err(format!("it says {}", name(state)))),
            Err(why) if spoke.load(Relaxed) => Tried::Final(Err(why)),
            Err(why) => Tried::NotYet(format!("it does not speak gRPC: {why}")),
        }
    }
}

fn name(state: i32) -> &'static str {
    match state {
        0 => "UNKNOWN",
        2 => "NOT_SERVING",
        3 => "SERVICE_UNKNOWN",
        _ => "a state that is not known",
    }
}

async fn call(
    stream: Listening,
    to: &str,
    service: &str,
    until: Instant,
    headers: &HeaderMap,
) -> Result<i32, String> {
    let failed = |e: h2::Error| chain(&e);
    let (sender, connection) = h2::client::handshake(stream).await.map_err(failed)?;
    let exchange = async {
        let mut sender = sender.ready().await.map_err(failed)?;
        let request = request(to, until, headers)?;
        let (response, mut body) = sender.send_request(request, false).map_err(failed)?;
        body.send_data(frame(&CheckRequest { service: service.to_owned() }), true).map_err(failed)?;
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

fn request(to: &str, until: Instant, headers: &HeaderMap) -> Result<Request<()>, String> {
    let own = concat!("pilot-agent/", env!("CARGO_PKG_VERSION"));
    let caller = headers.get(header::USER_AGENT).and_then(|v| v.to_str().ok()).filter(|v| !v.is_empty());
    let agent = caller.map_or_else(|| own.to_owned(), |caller| format!("{caller} {own}"));
    let left = until.saturating_duration_since(Instant::now());
    // At most eight digits of a unit.
    let timeout = match left.as_millis() {
        millis @ 0..=99_999_999 => format!("{millis}m"),
        _ => format!("{}S", left.as_secs().min(99_999_999)),
    };
    let value = |text: String| HeaderValue::from_str(&text).map_err(|e| e.to_string());
    Request::builder()
        .method(Method::POST)
        .uri(format!("http://{to}/grpc.health.v1.Health/Check"))
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::TE, "trailers")
        .header(header::USER_AGENT, value(agent)?)
        .header("grpc-timeout", value(timeout)?)
        .body(())
        .map_err(|e| e.to_string())
}

fn frame(message: &CheckRequest) -> Bytes {
    let length = u32::try_from(message.encoded_len()).unwrap_or(u32::MAX);
    let mut out = vec![0];
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(&message.encode_to_vec());
    out.into()
}

async fn answer(response: ::http::Response<h2::RecvStream>) -> Result<i32, String> {
    let (head, mut body) = response.into_parts();
    if head.status != StatusCode::OK {
        return Err(format!("it answered {}", head.status));
    }
    let kind = head.headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    if !kind.starts_with(b"application/grpc") {
        return Err(format!("it answered in {}, no gRPC", String::from_utf8_lossy(kind)));
    }
    let mut bytes = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece.map_err(|e| chain(&e))?;
        let _ = body.flow_control().release_capacity(piece.len());
        if bytes.len() + piece.len() > ANSWER {
            return Err("its answer is too long".to_owned());
        }
        bytes.extend_from_slice(&piece);
    }
    let trailers = body.trailers().await.map_err(|e| chain(&e))?;
    let trailers = trailers.as_ref().unwrap_or(&head.headers);
    match trailers.get("grpc-status").map(HeaderValue::as_bytes) {
        Some(b"0") => {}
        None => return Err("its answer broke off".to_owned()),
        Some(code) => {
            let message = trailers.get("grpc-message").map_or(&b""[..], HeaderValue::as_bytes);
            let (code, message) = (String::from_utf8_lossy(code), String::from_utf8_lossy(message));
            return Err(format!("the call failed with gRPC status {code} {message}"));
        }
    }
    let [compressed, a, b, c, d, message @ ..] = bytes.as_slice() else {
        return Err("its answer has no message".to_owned());
    };
    let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
    if *compressed != 0 || length != message.len() {
        return Err("its answer is not one plain message".to_owned());
    }
    CheckResponse::decode(message).map(|m| m.status).map_err(|e| format!("its answer is no message: {e}"))
}

/// A connection that notices whether the other side begins as HTTP/2 does, with SETTINGS.
struct Listening {
    stream: TcpStream,
    spoke: Arc<AtomicBool>,
    read: usize,
}

/// Where a frame's type stands, and the type of SETTINGS (RFC 9113, 4.1 and 6.5).
const TYPE_AT: usize = 3;
const SETTINGS: u8 = 4;

impl AsyncRead for Listening {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let new = &buf.filled()[before..];
        if self.read <= TYPE_AT && new.get(TYPE_AT - self.read) == Some(&SETTINGS) {
            self.spoke.store(true, Relaxed);
        }
        self.read += new.len();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Listening {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
