//! One request and its answer on one connection, HTTP/1.1 or HTTP/2.

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Version, header, response};
use http_body::Body;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;

use super::conn::Stream;
use super::{Dialer, Error, Io, PIECE, Url, refused};
use crate::net::framing;
use crate::net::interim::{Slowed, Waiting};
use crate::net::proxy::Proxy;

type H1Conn = Pin<Box<http1::Connection<TokioIo<Slowed<Box<dyn Stream>>>, Full<Bytes>>>>;
/// Bytes of frames that are read in a turn.
const FRAMES: usize = 4096;

type H2Conn = Pin<Box<h2::client::Connection<Slowed<Box<dyn Stream>>>>>;

/// A request that a server refuses is made so often.
const TRIES: u32 = 4;

/// Read on at most this much to make a kept connection usable again.
const REST: usize = 256 * 1024;
/// ... and at most this long.
const REST_TIME: Duration = Duration::from_millis(250);
/// Kept connections: how many for all, and how long unused (Go's `IdleConnTimeout` in the agent).
const KEPT: usize = 16;
const KEPT_FOR: Duration = Duration::from_secs(90);

struct H1 {
    sender: http1::SendRequest<Full<Bytes>>,
    /// `None` once it has ended.
    conn: Option<H1Conn>,
    waiting: Waiting,
}

impl H1 {
    fn drive(&mut self, cx: &mut Context<'_>) {
        if self.conn.as_mut().is_some_and(|conn| conn.as_mut().poll(cx).is_ready()) {
            // Whatever went wrong shows in the response or its body. It must be dropped: a request handed to a
            // connection that the other side has closed meanwhile would wait in it, and its answer with it.
            self.conn = None;
        }
    }
}

/// Connections that may be used again (only with `ENABLE_PROBE_KEEPALIVE_CONNECTIONS`).
#[derive(Default)]
pub(crate) struct Kept(Mutex<Vec<(String, Instant, H1)>>);

impl Kept {
    fn take(&self, key: &str) -> Option<H1> {
        let mut kept = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        kept.retain(|(_, since, _)| since.elapsed() < KEPT_FOR);
        let at = kept.iter().rposition(|(k, _, _)| k == key)?;
        Some(kept.remove(at).2)
    }

    fn give(&self, key: String, h1: H1) {
        let mut kept = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if kept.len() >= KEPT {
            kept.remove(0);
        }
        kept.push((key, Instant::now(), h1));
    }
}

enum Kind {
    H1 { h1: H1, body: Incoming },
    H2 { conn: H2Conn, body: h2::RecvStream, done: bool },
}

/// A body on its connection.
pub(crate) struct Exchange {
    kind: Kind,
    rest: Bytes,
    ended: bool,
    /// What a kept connection is found by.
    key: String,
}

/// What is sent: a GET, or a POST where there is a body.
pub(crate) struct Sent<'a> {
    pub(crate) url: &'a Url,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) host: &'a HeaderValue,
    pub(crate) body: &'a Bytes,
    /// Ask the other side to close.
    pub(crate) close: bool,
    /// Room for the head of the answer; its body is read ahead as far.
    pub(crate) buffer: usize,
}

impl Sent<'_> {
    fn method(&self) -> Method {
        if self.body.is_empty() { Method::GET } else { Method::POST }
    }
}

/// Sends it and waits for the head of its answer.
pub(crate) async fn send(
    sent: &Sent<'_>,
    dialer: &Dialer,
    kept: Option<&Kept>,
) -> Result<(response::Parts, Exchange), Error> {
    if let Some(h1) = kept.and_then(|kept| kept.take(&key(sent.url)))
        && let Ok(answer) = h1_send(h1, sent, None).await
    {
        return Ok(answer);
    }
    let mut tries = TRIES;
    loop {
        let Io { stream, h2, proxy } = dialer.dial(sent.url).await?;
        if !h2 {
            return h1_send(h1(stream, sent.buffer).await?, sent, proxy.as_ref()).await;
        }
        tries -= 1;
        match h2_send(stream, sent).await {
            Err(Error::H2(error)) if tries > 0 && refused(&error) => {}
            answer => return answer,
        }
    }
}

async fn h1(stream: Box<dyn Stream>, buffer: usize) -> Result<H1, Error> {
    let (stream, waiting) = Slowed::new(stream);
    let (sender, conn) = framing::client().max_buf_size(buffer).handshake(TokioIo::new(stream)).await?;
    Ok(H1 { sender, conn: Some(Box::pin(conn)), waiting })
}

fn key(url: &Url) -> String {
    format!("{}://{}:{}", url.scheme(), url.host, url.port())
}

fn names_token(headers: &HeaderMap, token: &str) -> bool {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .any(|value| value.to_str().is_ok_and(|v| v.split(',').any(|t| t.trim().eq_ignore_ascii_case(token))))
}

async fn h1_send(
    mut h1: H1,
    sent: &Sent<'_>,
    proxy: Option<&Proxy>,
) -> Result<(response::Parts, Exchange), Error> {
    let Sent { url, headers, host, .. } = sent;
    let target = if proxy.is_some() { url.to_string() } else { url.target.clone() };
    let mut request =
        Request::builder().method(sent.method()).uri(target).body(Full::new(sent.body.clone()))?;
    if let Some(authorization) = proxy.and_then(Proxy::authorization) {
        let mut value = HeaderValue::from_str(authorization).map_err(http::Error::from)?;
        value.set_sensitive(true);
        request.headers_mut().insert(header::PROXY_AUTHORIZATION, value);
    }
    request.headers_mut().insert(header::HOST, (*host).clone());
    for (name, value) in *headers {
        request.headers_mut().append(name, value.clone());
    }
    let switching = headers.contains_key(header::UPGRADE) && names_token(headers, "upgrade");
    if sent.close && !names_token(headers, "close") && !switching {
        request.headers_mut().append(header::CONNECTION, HeaderValue::from_static("close"));
    }
    h1.waiting.set(true);
    let mut response = Box::pin(h1.sender.send_request(request));
    let response = std::future::poll_fn(|cx| {
        if let Poll::Ready(response) = response.as_mut().poll(cx) {
            return Poll::Ready(response);
        }
        h1.drive(cx);
        response.as_mut().poll(cx)
    })
    .await?;
    h1.waiting.set(false);
    let (head, body) = response.into_parts();
    framing::check(&head.headers)?;
    Ok((head, Exchange { kind: Kind::H1 { h1, body }, rest: Bytes::new(), ended: false, key: key(url) }))
}

async fn h2_send(stream: Box<dyn Stream>, sent: &Sent<'_>) -> Result<(response::Parts, Exchange), Error> {
    let Sent { url, headers, host, .. } = sent;
    let (sender, conn) = h2::client::Builder::new()
        .max_frame_size(16 * 1024)
        // Room for a head, as in HTTP/1.1; the library's own is 16 MB.
        .max_header_list_size(u32::try_from(sent.buffer).unwrap_or(u32::MAX))
        .initial_window_size(256 * 1024)
        .initial_connection_window_size(256 * 1024)
        .handshake::<_, Bytes>(Slowed::of_frames(stream, FRAMES))
        .await?;
    let mut conn = Box::pin(conn);
    let uri = format!("{}://{}{}", url.scheme(), host.to_str().unwrap_or(&url.host), url.target);
    let mut request = Request::builder().method(sent.method()).uri(uri).version(Version::HTTP_2).body(())?;
    for (name, value) in *headers {
        // Of the connection, not of the request: HTTP/2 forbids them.
        let hop = matches!(
            name.as_str(),
            "connection"
                | "keep-alive"
                | "proxy-connection"
                | "transfer-encoding"
                | "upgrade"
                | "http2-settings"
        ) || (name == header::TE && value != "trailers");
        if !hop {
            request.headers_mut().append(name, value.clone());
        }
    }
    let call = async {
        let mut sender = sender.ready().await?;
        let (response, mut body) = sender.send_request(request, sent.body.is_empty())?;
        if !sent.body.is_empty() {
            body.send_data(sent.body.clone(), true)?;
        }
        // The sender goes along so that the connection is not closed for want of users.
        Ok::<_, h2::Error>((response.await?, sender))
    };
    let mut call = Box::pin(call);
    let mut done = false;
    let (response, _sender) = std::future::poll_fn(|cx| {
        if let Poll::Ready(answer) = call.as_mut().poll(cx) {
            return Poll::Ready(answer);
        }
        if !done && conn.as_mut().poll(cx).is_ready() {
            done = true;
        }
        call.as_mut().poll(cx)
    })
    .await?;
    let (head, body) = response.into_parts();
    Ok((
        head,
        Exchange { kind: Kind::H2 { conn, body, done }, rest: Bytes::new(), ended: false, key: key(url) },
    ))
}

impl Exchange {
    /// The next piece of the body, at most [`PIECE`] bytes; `None` at its proper end.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            if !self.rest.is_empty() {
                let n = self.rest.len().min(PIECE);
                return Ok(Some(self.rest.split_to(n)));
            }
            if self.ended {
                return Ok(None);
            }
            match self.frame().await? {
                Some(bytes) => self.rest = bytes,
                None => self.ended = true,
            }
        }
    }

    async fn frame(&mut self) -> Result<Option<Bytes>, Error> {
        match &mut self.kind {
            Kind::H1 { h1, body } => {
                let frame = std::future::poll_fn(|cx| {
                    if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(cx) {
                        return Poll::Ready(frame);
                    }
                    h1.drive(cx);
                    Pin::new(&mut *body).poll_frame(cx)
                });
                let frame = frame.await;
                h1.waiting.piece();
                match frame {
                    Some(frame) => Ok(Some(frame?.into_data().unwrap_or_default())),
                    None => Ok(None),
                }
            }
            Kind::H2 { conn, body, done } => {
                let data = std::future::poll_fn(|cx| {
                    if let Poll::Ready(data) = body.poll_data(cx) {
                        return Poll::Ready(data);
                    }
                    if !*done && conn.as_mut().poll(cx).is_ready() {
                        *done = true;
                    }
                    body.poll_data(cx)
                });
                match data.await.transpose()? {
                    Some(bytes) => {
                        let _ = body.flow_control().release_capacity(bytes.len());
                        Ok(Some(bytes))
                    }
                    None => Ok(None),
                }
            }
        }
    }

    /// Done with: a connection that may be kept is given back, after what is left of the body has been
    /// read, but only so much and so long. Any other is closed.
    pub(crate) async fn finish(mut self, kept: Option<&Kept>) {
        let Some(kept) = kept else { return };
        if self.drained().await
            && let Kind::H1 { mut h1, .. } = self.kind
        {
            std::future::poll_fn(|cx| {
                h1.drive(cx);
                Poll::Ready(())
            })
            .await;
            if h1.conn.is_some() && h1.sender.is_ready() {
                kept.give(self.key, h1);
            }
        }
    }

    async fn drained(&mut self) -> bool {
        let mut left = REST;
        let all = async {
            loop {
                match self.piece().await {
                    Ok(None) => return true,
                    Ok(Some(piece)) if piece.len() < left => left -= piece.len(),
                    _ => return false,
                }
            }
        };
        tokio::time::timeout(REST_TIME, all).await.unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::base::beside::turns_of_others;
    use crate::fetch::fake::spawn;

    // Whether a head of so many bytes is taken over HTTP/2 where there is that much room.
    async fn taken(head: usize, buffer: usize) -> bool {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let server = spawn(async move {
            let mut http2 = h2::server::handshake(theirs).await.unwrap();
            while let Some(Ok((_, mut respond))) = http2.accept().await {
                let answer = http::Response::builder().header("x", "a".repeat(head)).body(()).unwrap();
                let _ = respond.send_response(answer, true);
            }
        });
        let (url, host) = (Url::parse("https://a/").unwrap(), HeaderValue::from_static("a"));
        let (headers, body) = (HeaderMap::new(), Bytes::new());
        let sent = Sent { url: &url, headers: &headers, host: &host, body: &body, close: false, buffer };
        let answered = h2_send(Box::new(ours), &sent).await;
        server.abort();
        answered.is_ok()
    }

    #[tokio::test]
    async fn others_have_their_turn_between_interim_answers() {
        let mut answers = b"HTTP/1.1 100 A\r\n\r\n".repeat(100_000);
        answers.extend_from_slice(b"HTTP/1.1 204 B\r\n\r\n");
        let (url, host) = (Url::parse("http://a/").unwrap(), HeaderValue::from_static("a"));
        let (headers, body) = (HeaderMap::new(), Bytes::new());
        let sent =
            Sent { url: &url, headers: &headers, host: &host, body: &body, close: true, buffer: 1 << 20 };
        let (ours, mut theirs) = tokio::io::duplex(answers.len());
        let ask = async { h1_send(h1(Box::new(ours), sent.buffer).await?, &sent, None).await };
        let server = async {
            crate::net::http::head(&mut theirs).await.unwrap();
            theirs.write_all(&answers).await.unwrap();
            std::future::pending().await
        };
        let asked = async {
            tokio::select! { biased; answer = ask => answer.unwrap(), () = server => unreachable!() }
        };
        let ((head, _), turns) = turns_of_others(asked).await;
        assert_eq!(head.status, 204);
        // 1.8 MB, 16 kB a turn.
        assert!(turns >= 100, "{turns}");
    }

    #[tokio::test]
    async fn others_have_their_turn_between_interim_answers_of_http2() {
        // SETTINGS; HEADERS of stream 1 with 103 as a literal; with 204 from the table, at the stream's end.
        let mut answers = b"\0\0\0\x04\0\0\0\0\0".to_vec();
        answers.extend(b"\0\0\x05\x01\x04\0\0\0\x01\x08\x03103".repeat(100_000));
        answers.extend(b"\0\0\x01\x01\x05\0\0\0\x01\x89");
        let (url, host) = (Url::parse("https://a/").unwrap(), HeaderValue::from_static("a"));
        let (headers, body) = (HeaderMap::new(), Bytes::new());
        let sent =
            Sent { url: &url, headers: &headers, host: &host, body: &body, close: true, buffer: 1 << 20 };
        let (ours, mut theirs) = tokio::io::duplex(answers.len());
        let server = async {
            // HEADERS of stream 1, the request.
            let mut read = Vec::new();
            while memchr::memmem::find(&read, b"\x01\x05\0\0\0\x01").is_none() {
                theirs.read_buf(&mut read).await.unwrap();
            }
            theirs.write_all(&answers).await.unwrap();
            std::future::pending().await
        };
        let asked = async {
            tokio::select! {
                biased;
                () = server => unreachable!(),
                answer = h2_send(Box::new(ours), &sent) => answer.unwrap(),
            }
        };
        let ((head, _), turns) = turns_of_others(asked).await;
        assert_eq!(head.status, 204);
        // 1.4 MB.
        assert!(turns >= 300, "{turns}");
    }

    #[tokio::test]
    async fn heads_are_bounded_in_http2_too() {
        assert!(taken(20_000, 32 << 10).await);
        assert!(!taken(100_000, 32 << 10).await);
        assert!(taken(100_000, 1 << 20).await);
    }
}
