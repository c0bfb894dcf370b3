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

use crate::base::heap;
use crate::base::wire::has_few_fields;
use crate::istiod::Stream;
use crate::net::grpc::{FRAME, HEADERS, code_of_http, code_of_reset, framed, is_grpc, status_in, unframed};

/// An answer above this, in bytes or in fields, is not a certificate chain.
const MAX_ANSWER: usize = 4 << 20;
const MAX_FIELDS: usize = 4096;

/// An open connection.
pub(super) struct UnaryConnection {
    send: SendRequest<Bytes>,
    connection: Connection<Stream, Bytes>,
    base: String,
    alive: bool,
}

impl UnaryConnection {
    /// Speaks HTTP/2 on a fresh connection.
    pub(super) async fn open(connection: crate::istiod::Connection) -> Result<Self, Broken> {
        let base = format!("{}://{}", connection.scheme, connection.authority);
        let (send, connection) = h2::client::Builder::new()
            .enable_push(false)
            .max_send_buffer_size(64 << 10)
            .max_header_list_size(HEADERS)
            .handshake(connection.io)
            .await
            .map_err(|e| Broken::Transport(status_of(&e)))?;
        Ok(Self { send, connection, base, alive: true })
    }

    /// Whether another call may be tried on it.
    pub(super) fn usable(&self) -> bool {
        self.alive
    }

    /// One call. The answer is the message's bytes; any failure has a status, as gRPC maps them.
    pub(super) async fn call(
        &mut self,
        path: &str,
        metadata: HeaderMap,
        message: Bytes,
        timeout: Duration,
    ) -> Result<Bytes, Broken> {
        let unformed =
            |e: String| Broken::Answered(Status::internal(format!("cannot form the request: {e}")));
        let mut request =
            Request::post(format!("{}{path}", self.base)).body(()).map_err(|e| unformed(e.to_string()))?;
        *request.headers_mut() = metadata;
        let fixed = [
            ("te", HeaderValue::from_static("trailers")),
            ("content-type", HeaderValue::from_static("application/grpc")),
            ("user-agent", HeaderValue::from_static(concat!("pilot-agent/", env!("CARGO_PKG_VERSION")))),
            // So that the server stops working when we stop waiting.
            (
                "grpc-timeout",
                HeaderValue::from_str(&format!("{}m", timeout.as_millis().clamp(1, 99_999_999)))
                    .map_err(|e| unformed(e.to_string()))?,
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
        // Of an answer that cannot be used the rest may still be on its way.
        self.alive &= matches!(done, Ok(_) | Err(Broken::Answered(_)));
        done
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

/// What went wrong.
#[derive(Debug)]
pub(super) enum Broken {
    /// The server said so, or what it said is none.
    Answered(Status),
    /// There is an answer that cannot be used: to ask again would bring another of its kind.
    Unusable(String),
    /// It could not say anything.
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
    let cut = is_grpc(&head.headers) && !body.is_end_stream();
    let mut bytes = BytesMut::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk.map_err(transport)?;
        body.flow_control().release_capacity(chunk.len()).map_err(transport)?;
        if bytes.len() + chunk.len() > MAX_ANSWER + FRAME {
            return Err(Broken::Unusable("it is larger than 4 MB".to_owned()));
        }
        bytes.extend_from_slice(&chunk);
    }
    let trailers = body.trailers().await.map_err(transport)?;
    match trailers.as_ref().and_then(status_in) {
        Some(status) if status.code() == Code::Ok => unframe(bytes.freeze()),
        Some(status) => Err(Broken::Answered(status)),
        None => {
            // As Go's library: a body that ends the stream is an answer that was cut off, and asked for again.
            let code = if cut && trailers.is_none() { Code::Internal } else { Code::Unknown };
            let text = "the answer ended without a status: a proxy in between may have cut it";
            Err(Broken::Answered(Status::new(code, text)))
        }
    }
}

fn empty() -> Broken {
    Broken::Answered(Status::internal("the answer has a status and no message"))
}

/// The one message of an answer.
fn unframe(bytes: Bytes) -> Result<Bytes, Broken> {
    heap::freed(bytes.len());
    let message = unframed(bytes).map_err(|why| {
        Broken::Answered(Status::internal(format!("the answer is not one gRPC message: {why}")))
    })?;
    if !has_few_fields(&message, MAX_FIELDS) {
        return Err(Broken::Unusable(format!("it has more than {MAX_FIELDS} entries")));
    }
    Ok(message)
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpStream};

    /// The code of an answer with this type, a message if there is one, and these trailers if there are any.
    async fn code(kind: &'static str, message: Option<&'static [u8]>, trailers: Option<HeaderMap>) -> Code {
        outcome(kind, message, trailers).await.unwrap()
    }

    /// Its code, or why it cannot be used.
    async fn outcome(
        kind: &'static str,
        message: Option<&'static [u8]>,
        trailers: Option<HeaderMap>,
    ) -> Result<Code, String> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = listener.local_addr().unwrap();
        let server = async {
            let (io, _) = listener.accept().await.unwrap();
            io.set_nodelay(true).unwrap();
            let mut connection = h2::server::handshake(io).await.unwrap();
            let (_, mut respond) = connection.accept().await.unwrap().unwrap();
            let head = http::Response::builder().header("content-type", kind).body(()).unwrap();
            let mut body = respond.send_response(head, message.is_none() && trailers.is_none()).unwrap();
            if let Some(message) = message {
                body.send_data(Bytes::from_static(message), trailers.is_none()).unwrap();
            }
            if let Some(trailers) = trailers {
                body.send_trailers(trailers).unwrap();
            }
            while connection.accept().await.is_some() {}
        };
        let client = async {
            let io = TcpStream::connect(peer).await.unwrap();
            // Windows of a long answer are told at once.
            io.set_nodelay(true).unwrap();
            let io = Stream::Plain(io);
            let authority = peer.to_string();
            let connection = crate::istiod::Connection { io, peer, authority, scheme: "http" };
            let mut connection = UnaryConnection::open(connection).await.unwrap();
            let asked = Bytes::from_static(b"x");
            let outcome = connection.call("/a.B/C", HeaderMap::new(), asked, Duration::from_secs(30)).await;
            connection.close();
            match outcome {
                Ok(_) => Ok(Code::Ok),
                Err(Broken::Answered(status) | Broken::Transport(status)) => Ok(status.code()),
                Err(Broken::Unusable(why)) => Err(why),
            }
        };
        tokio::join!(server, client).1
    }

    #[tokio::test]
    async fn an_answer_is_bounded_in_bytes_and_in_entries() {
        let good =
            Some(HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]));
        let answer = |entry: &[u8], count: usize| {
            let all: &'static [u8] = framed(&entry.repeat(count)).unwrap().to_vec().leak();
            outcome("application/grpc", Some(all), good.clone())
        };
        assert_eq!(answer(&[0x0a, 0], MAX_FIELDS).await, Ok(Code::Ok));
        assert_eq!(answer(&[0x0a, 0], MAX_FIELDS + 1).await, Err("it has more than 4096 entries".to_owned()));
        let large = [&[0x0a, 0x80, 0x80, 0x40][..], &[b'a'; 1 << 20]].concat();
        assert_eq!(answer(&large, 3).await, Ok(Code::Ok));
        assert_eq!(answer(&large, 4).await, Err("it is larger than 4 MB".to_owned()));
    }

    #[tokio::test]
    async fn trailers_are_bounded() {
        let said = |length: usize| {
            let code = ("grpc-status".parse().unwrap(), HeaderValue::from_static("7"));
            let text = ("grpc-message".parse().unwrap(), HeaderValue::from_str(&"w".repeat(length)).unwrap());
            // Of what is too long the rest is not read.
            Some(HeaderMap::from_iter([text, code]))
        };
        assert_eq!(code("application/grpc", None, said(200_000)).await, Code::PermissionDenied);
        assert_ne!(code("application/grpc", None, said(300_000)).await, Code::PermissionDenied);
    }

    #[tokio::test]
    async fn an_answer_without_a_status_has_the_code_of_gos_library() {
        let message: Option<&[u8]> = Some(&[0, 0, 0, 0, 0]);
        let other = HeaderMap::from_iter([(http::header::CONTENT_TYPE, HeaderValue::from_static("x"))]);
        assert_eq!(code("application/grpc", message, None).await, Code::Internal);
        assert_eq!(code("application/grpc", message, Some(other)).await, Code::Unknown);
        assert_eq!(code("application/grpc", None, None).await, Code::Unknown);
        assert_eq!(code("text/html", message, None).await, Code::Unknown);
    }
}
