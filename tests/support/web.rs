//! An HTTP server whose answers a test makes up.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response, request};
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

type Answer = Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>;
type Handler = dyn Fn(request::Parts, Bytes) -> Answer + Send + Sync;

/// Serves until dropped.
pub struct Web {
    pub port: u16,
    _tasks: Mutex<JoinSet<()>>,
}

impl Web {
    /// Each request, whole, is given to `handler`.
    pub async fn start<F: Future<Output = Response<Full<Bytes>>> + Send + 'static>(
        handler: impl Fn(request::Parts, Bytes) -> F + Send + Sync + 'static,
    ) -> Self {
        let handler: Arc<Handler> = Arc::new(move |head, body| Box::pin(handler(head, body)));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((io, _)) = listener.accept().await {
                let handler = handler.clone();
                let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                    let handler = handler.clone();
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await?.to_bytes();
                        Ok::<_, hyper::Error>(handler(head, body).await)
                    }
                });
                connections.spawn(async move {
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(io), service).await;
                });
            }
        });
        Self { port, _tasks: Mutex::new(tasks) }
    }
}

/// An answer of JSON.
pub fn json(status: u16, body: &serde_json::Value) -> Response<Full<Bytes>> {
    let body = Full::new(Bytes::from(body.to_string()));
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(body)
        .expect("a response")
}

/// What becomes of a connection in place of being served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rough {
    /// Nothing special.
    Pass,
    /// Reset as soon as it is accepted.
    Reset,
    /// Accepted, read, and never answered.
    Silent,
    /// Half of an answer, then the end.
    Cut,
    /// No HTTP.
    Garbage,
    /// An answer without an end.
    Endless,
    /// An answer of which a byte comes now and then.
    Drip,
    /// This body with status 200.
    Body(&'static str),
    /// This status without a body.
    Status(u16),
    /// Elsewhere: a port of this machine.
    Redirect(u16),
}

/// Stands before a server and misbehaves, one connection after the other.
pub struct Gate {
    pub port: u16,
    next: Arc<Mutex<VecDeque<Rough>>>,
    _tasks: Mutex<JoinSet<()>>,
}

impl Gate {
    /// Before the server on this port of localhost.
    pub async fn before(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let next = Arc::<Mutex<VecDeque<Rough>>>::default();
        let (mut tasks, queue) = (JoinSet::new(), next.clone());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((io, _)) = listener.accept().await {
                let rough = queue.lock().expect("no panic holds it").pop_front().unwrap_or(Rough::Pass);
                connections.spawn(async move {
                    let _ = behave(io, rough, to).await;
                });
            }
        });
        Self { port, next, _tasks: Mutex::new(tasks) }
    }

    /// What becomes of the next connections.
    pub fn next(&self, rough: impl IntoIterator<Item = Rough>) {
        self.next.lock().expect("no panic holds it").extend(rough);
    }

    /// Takes back what is still to come, and tells how much it was.
    pub fn forget(&self) -> usize {
        self.next.lock().expect("no panic holds it").drain(..).count()
    }

    /// How much of that is still to come.
    pub fn left(&self) -> usize {
        self.next.lock().expect("no panic holds it").len()
    }
}

async fn behave(mut io: TcpStream, rough: Rough, to: u16) -> std::io::Result<()> {
    match rough {
        Rough::Pass => {
            let mut server = TcpStream::connect(("127.0.0.1", to)).await?;
            tokio::io::copy_bidirectional(&mut io, &mut server).await?;
            return Ok(());
        }
        Rough::Reset => return socket2::SockRef::from(&io).set_linger(Some(std::time::Duration::ZERO)),
        _ => {}
    }
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if io.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let whole = |status: u16, headers: &str, body: &str| {
        format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len())
    };
    match rough {
        Rough::Silent => while io.read(&mut [0; 512]).await? > 0 {},
        Rough::Cut => io.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{\"auth\": {\"cl").await?,
        Rough::Garbage => io.write_all(b"\x15\x03\x01\x00\x02\x02\x28 no HTTP \r\n\r\n").await?,
        Rough::Endless => {
            io.write_all(b"HTTP/1.1 200 OK\r\n\r\n{\"x\": \"").await?;
            loop {
                io.write_all(&[b'a'; 16 * 1024]).await?;
            }
        }
        Rough::Drip => {
            io.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n").await?;
            loop {
                io.write_all(b" ").await?;
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
        Rough::Body(text) => io.write_all(whole(200, "", text).as_bytes()).await?,
        Rough::Status(status) => io.write_all(whole(status, "", "").as_bytes()).await?,
        Rough::Redirect(port) => {
            let to = format!("Location: http://localhost:{port}/elsewhere\r\n");
            io.write_all(whole(307, &to, "").as_bytes()).await?;
        }
        Rough::Pass | Rough::Reset => {}
    }
    // So that what was written is read before the end is seen; a client that goes away ends it.
    io.shutdown().await?;
    while io.read(&mut [0; 512]).await? > 0 {}
    Ok(())
}
