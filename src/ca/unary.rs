//! One gRPC connection for a few unary calls in a row.
//!
//! The connection is driven by the call itself, so it needs no task, and it is closed when the caller
//! is done: certificates are asked for every few hours, and a connection kept that long is either
//! closed by the server meanwhile or a half-open one waiting to be found out. Why not tonic's channel:
//! it keeps a worker task, a reconnect loop of its own and 2 MB windows per connection, and decides
//! about reconnecting out of our sight.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use h2::client::{Connection, SendRequest};
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use tonic::{Code, Status};

use crate::istiod::Stream;
use crate::net::grpc::{FRAME, code_of_http, code_of_reset, framed, status_in, unframed};

/// An answer above this is not a certificate chain.
const MAX_ANSWER: usize = 16 << 20;
/// An open connection.
pub(super) struct UnaryConnection {
    send: SendRequest<Bytes>,
    connection: Connection<Stream, Bytes>,
    base: String,
    alive: bool,
}

impl UnaryConnection {
    /// Speaks HTTP/2 on a fresh connection.
    pub(super) async fn open(connection: crate::istiod::Connection) -> Result<Self, Status> {
        let base = format!("{}://{}", connection.scheme, connection.authority);
        let (send, connection) = h2::client::Builder::new()
            .enable_push(false)
            .max_send_buffer_size(64 << 10)
            .handshake(connection.io)
            .await
            .map_err(|e| status_of(&e))?;
        Ok(Self { send, connection, base, alive: true })
    }

    /// Whether another call may be tried on it.
    pub(super) fn usable(&self) -> bool {
        self.alive
    }

    /// One call. The answer is the message's bytes; any failure is a status, as gRPC maps them.
    pub(super) async fn call(
        &mut self,
        path: &str,
        metadata: HeaderMap,
        message: Bytes,
        timeout: Duration,
    ) -> Result<Bytes, Status> {
        let mut request = Request::post(format!("{}{path}", self.base))
            .body(())
            .map_err(|e| Status::internal(format!("cannot form the request: {e}")))?;
        *request.headers_mut() = metadata;
        let fixed = [
            ("te", HeaderValue::from_static("trailers")),
            ("content-type", HeaderValue::from_static("application/grpc")),
            ("user-agent", HeaderValue::from_static(concat!("pilot-agent/", env!("CARGO_PKG_VERSION")))),
            // So that the server stops working when we stop waiting.
            (
                "grpc-timeout",
                HeaderValue::from_str(&format!("{}m", timeout.as_millis().clamp(1, 99_999_999)))
                    .map_err(|e| Status::internal(e.to_string()))?,
            ),
        ];
        for (name, value) in fixed {
            request.headers_mut().insert(name, value);
        }
        let exchange = exchange(self.send.clone(), request, message);
        tokio::pin!(exchange);
        let done = loop {
            tokio::select! {
                biased;
                done = &mut exchange => break done,
                // Its end reaches the exchange as an error of the stream.
                ended = &mut self.connection, if self.alive => {
                    self.alive = false;
                    if let Err(e) = ended {
                        break Err(Broken::Transport(status_of(&e)));
                    }
                }
            }
        };
        match done {
            Ok(message) => Ok(message),
            Err(Broken::Answered(status)) => Err(status),
            Err(Broken::Transport(status)) => {
                self.alive = false;
                Err(status)
            }
        }
    }

    /// Says goodbye, as far as the socket takes it at once, which it does as a rule: the certificate that was
    /// asked for is waited for, the end of the connection by nobody.
    pub(super) fn close(self) {
        drop(self.send);
        if self.alive {
            let _ = self.connection.now_or_never();
        }
    }
}

/// What went wrong: the server said so, or it could not.
enum Broken {
    Answered(Status),
    Transport(Status),
}

async fn exchange(send: SendRequest<Bytes>, request: Request<()>, message: Bytes) -> Result<Bytes, Broken> {
    let transport = |e: h2::Error| Broken::Transport(status_of(&e));
    let mut send = send.ready().await.map_err(transport)?;
    let (response, mut body) = send.send_request(request, false).map_err(transport)?;
    let message = framed(&message).ok_or_else(|| {
        Broken::Answered(Status::resource_exhausted("the request does not fit a gRPC message"))
    })?;
    // Waits in the connection's buffer for the peer's window; requests are a few KB.
    body.send_data(message, true).map_err(transport)?;

    let (head, mut body) = response.await.map_err(transport)?.into_parts();
    // An answer that is only headers carries the status there.
    if let Some(status) = status_in(&head.headers) {
        return if status.code() == Code::Ok { Err(empty()) } else { Err(Broken::Answered(status)) };
    }
    if head.status != StatusCode::OK {
        return Err(Broken::Answered(status_of_http(head.status)));
    }
    let mut bytes = BytesMut::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk.map_err(transport)?;
        body.flow_control().release_capacity(chunk.len()).map_err(transport)?;
        if bytes.len() + chunk.len() > MAX_ANSWER + FRAME {
            return Err(Broken::Transport(Status::resource_exhausted("the answer is larger than 16 MB")));
        }
        bytes.extend_from_slice(&chunk);
    }
    let trailers = body.trailers().await.map_err(transport)?;
    match trailers.as_ref().and_then(status_in) {
        Some(status) if status.code() == Code::Ok => unframe(bytes.freeze()).map_err(Broken::Answered),
        Some(status) => Err(Broken::Answered(status)),
        None => {
            let text = "the answer ended without a status: a proxy in between may have cut it";
            Err(Broken::Answered(Status::unknown(text)))
        }
    }
}

fn empty() -> Broken {
    Broken::Answered(Status::internal("the answer has a status and no message"))
}

/// The one message of an answer.
fn unframe(bytes: Bytes) -> Result<Bytes, Status> {
    unframed(bytes).map_err(|why| Status::internal(format!("the answer is not one gRPC message: {why}")))
}

/// The status of an answer that is not gRPC's.
fn status_of_http(status: StatusCode) -> Status {
    let text = format!("the server answered with HTTP status {status}, which is not gRPC's way");
    Status::new(code_of_http(status), text)
}

/// gRPC's table of HTTP/2 errors; a connection that broke is unavailable.
fn status_of(error: &h2::Error) -> Status {
    let code = match error.reason() {
        None => Code::Unavailable,
        Some(_) if error.is_go_away() => Code::Unavailable,
        Some(reason) => code_of_reset(reason),
    };
    Status::new(code, format!("the connection broke: {error}"))
}
