//! One request over one plain connection, its answer read whole: Envoy's admin port, metadata servers, the
//! agent's own port.
//!
//! What streams, follows redirects, keeps connections or speaks TLS goes by `fetch`. Why not the pooled client of
//! `hyper-util`: it needs an executor for its connections; here the connection is driven by whoever waits for
//! the answer, and ends with it, so dropping the future is all it takes to give up.
//!
//! The caller bounds the time, and chooses the addresses.

use std::io;
use std::net::{Ipv6Addr, SocketAddr};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::framing;
use super::interim::Slowed;
use crate::base::lane;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Connect(#[from] io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error("the request cannot be made")]
    Request(#[from] http::Error),
    #[error(transparent)]
    Framing(#[from] framing::Framing),
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
}

/// Connects to `host`, a literal or a name, perhaps with a port; without one it is 80.
///
/// # Errors
/// The resolver's, or that of the last address.
pub(crate) async fn reach(host: &str) -> io::Result<TcpStream> {
    let bare = |host: &str| host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let (host, port) = match host.rsplit_once(':').map(|(name, port)| (name, port.parse::<u16>())) {
        _ if host.parse::<Ipv6Addr>().is_ok() => (host.to_owned(), 80),
        Some((name, Ok(port))) if !name.starts_with('[') || name.ends_with(']') => (bare(name), port),
        _ => (bare(host), 80),
    };
    // Not by the runtime's own resolver, which panics where the system gives no thread.
    connect(lane::NAMES.look_up(&host, port).await?).await
}

/// Connects to the first of these that takes a connection; the error is the last one's.
pub(crate) async fn connect(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no address");
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(last)
}

/// Sends `request` (its URI is path and query; it names its `Host`) and reads an answer of at most `most` bytes.
pub(crate) async fn exchange(
    io: TcpStream,
    mut request: Request<Bytes>,
    most: usize,
) -> Result<Response<Bytes>, Error> {
    // hyper leaves it out where there is no body; some servers refuse a POST without it.
    if request.body().is_empty() && [Method::POST, Method::PUT, Method::PATCH].contains(request.method()) {
        request.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    let (io, waiting) = Slowed::new(io);
    waiting.set(true);
    let (mut sender, connection) = framing::client().handshake(TokioIo::new(io)).await?;
    let answered = async {
        let (head, body) = sender.send_request(request.map(Full::new)).await?.into_parts();
        waiting.set(false);
        framing::check(&head.headers)?;
        let body = body.map_frame(|piece| {
            waiting.piece();
            piece
        });
        let whole = Limited::new(body, most).collect().await.map_err(|error| {
            match error.downcast::<hyper::Error>() {
                Ok(error) => Error::Http(*error),
                Err(error) => {
                    debug_assert!(error.is::<LengthLimitError>(), "{error}");
                    Error::TooLong(most)
                }
            }
        })?;
        Ok(Response::from_parts(head, whole.to_bytes()))
    };
    tokio::pin!(answered, connection);
    tokio::select! {
        biased;
        answer = &mut answered => answer,
        // The connection is over; what it brought is in the answer's hands. Without an answer this is the reason.
        ended = &mut connection => match (answered.await, ended) {
            (Err(_), Err(reason)) => Err(reason.into()),
            (answer, _) => answer,
        },
    }
}

/// What a test's server reads: the head of a request, `None` where the client leaves before its end.
#[cfg(test)]
pub(crate) async fn head(io: &mut (impl tokio::io::AsyncRead + Unpin)) -> Option<String> {
    use tokio::io::AsyncReadExt;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(io.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).expect("text"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    // Answers one request, closes, and tells what it was asked.
    async fn asked(method: Method, with: &str) -> (Result<Response<Bytes>, Error>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let serve = async {
            let (mut io, _) = listener.accept().await.unwrap();
            let seen = head(&mut io).await.unwrap();
            io.write_all(with.as_bytes()).await.unwrap();
            seen
        };
        let ask = async {
            let request = Request::builder().method(method).uri("/x").header("host", "h");
            let io = connect(vec![nobody, address]).await?;
            exchange(io, request.body(Bytes::new())?, 4).await
        };
        tokio::join!(ask, serve)
    }

    #[tokio::test]
    async fn an_answer_is_read_whole_and_bounded() {
        let (answer, seen) = asked(Method::POST, "HTTP/1.1 201 x\r\nContent-Length: 4\r\n\r\nbody").await;
        let answer = answer.unwrap();
        assert_eq!((answer.status().as_u16(), &answer.body()[..]), (201, &b"body"[..]));
        assert!(seen.starts_with("POST /x HTTP/1.1\r\n") && seen.contains("Content-Length: 0\r\n"), "{seen}");
        let (answer, seen) = asked(Method::GET, "HTTP/1.1 200 OK\r\n\r\nendless").await;
        assert!(matches!(answer, Err(Error::TooLong(4))), "{answer:?}");
        assert!(!seen.contains("Content-Length"), "{seen}");
        let (answer, _) = asked(Method::GET, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1").await;
        assert!(matches!(answer, Err(Error::Http(_))), "{answer:?}");
        let (answer, _) = asked(Method::GET, "garbage").await;
        assert!(matches!(answer, Err(Error::Http(_))), "{answer:?}");
    }

    #[tokio::test]
    async fn heads_are_taken_as_go_takes_them() {
        // A coding is passed over in an old answer, names may have blanks, values may be folded.
        for head in ["1.0 200 OK\r\nTransfer-Encoding: chunked", "1.1 200 OK\r\nA b : c\r\n d"] {
            let (answer, _) = asked(Method::GET, &format!("HTTP/{head}\r\n\r\n3\r\n")).await;
            assert_eq!(&answer.unwrap().body()[..], b"3\r\n", "{head}");
        }
        for fields in ["Transfer-Encoding: gzip, chunked", "Content-Length: 2, 2"] {
            let (answer, _) = asked(Method::GET, &format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\nab")).await;
            assert!(matches!(answer, Err(Error::Framing(_))), "{fields}: {answer:?}");
        }
    }

    #[tokio::test]
    async fn where_nobody_listens_the_address_is_named() {
        let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let error = connect(vec![nobody]).await.unwrap_err().to_string();
        assert!(error.starts_with(&nobody.to_string()), "{error}");
        assert_eq!(connect(Vec::new()).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
