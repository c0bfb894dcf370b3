//! The other sides of the status server: Envoy's ports and applications that answer at the speed of memory,
//! and a caller that does little beside counting.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::agent::LIMIT;

/// What a request gets.
#[derive(Clone)]
pub(crate) enum Answer {
    /// A whole answer, head and body.
    Whole(Bytes),
    /// As many series, written line by line as they are asked for, as a metrics library does it.
    Series(usize),
}

impl Answer {
    /// 200 with a body.
    pub(crate) fn ok(body: &[u8]) -> Self {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        Self::Whole([head.as_bytes(), body].concat().into())
    }
}

/// A server; ends when dropped.
pub(crate) struct Web {
    /// Where it listens.
    pub port: u16,
    _tasks: JoinSet<()>,
}

impl Web {
    /// Listens on a loopback port (0: any) and answers each path with what `answer` gives for it.
    pub(crate) async fn start(
        port: u16,
        answer: impl Fn(&str) -> Answer + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        let port = listener.local_addr()?.port();
        let answer = Arc::new(answer);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                while open.try_join_next().is_some() {}
                let answer = answer.clone();
                open.spawn(async move {
                    let _ = serve(stream, &*answer).await;
                });
            }
        });
        Ok(Self { port, _tasks: tasks })
    }
}

async fn serve(mut stream: TcpStream, answer: &(dyn Fn(&str) -> Answer + Send + Sync)) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut head = Vec::new();
    loop {
        head.clear();
        while !head.ends_with(b"\r\n\r\n") {
            if stream.read_buf(&mut head).await? == 0 {
                return Ok(());
            }
        }
        let text = String::from_utf8_lossy(&head).to_ascii_lowercase();
        let path = text.split(' ').nth(1).unwrap_or_default();
        match answer(path) {
            Answer::Whole(bytes) => stream.write_all(&bytes).await?,
            Answer::Series(count) => {
                stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n").await?;
                return render(&mut stream, count).await;
            }
        }
        if text.contains("connection: close") {
            return Ok(());
        }
    }
}

async fn render(stream: &mut TcpStream, count: usize) -> io::Result<()> {
    use std::io::Write as _;
    let mut piece = Vec::with_capacity(8192);
    piece.extend_from_slice(b"# HELP http_requests_total Requests.\n# TYPE http_requests_total counter\n");
    for n in 0..count {
        let (route, code) = (n / 5, 200 + n % 5);
        writeln!(piece, "http_requests_total{{method=\"GET\",route=\"/item/{route}\",code=\"{code}\"}} {n}")?;
        if piece.len() > 8000 {
            stream.write_all(&piece).await?;
            piece.clear();
        }
    }
    stream.write_all(&piece).await?;
    stream.shutdown().await
}

/// A connection to ask on.
pub(crate) struct Caller(TcpStream);

impl Caller {
    /// Connects to a loopback port.
    pub(crate) async fn connect(port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).await?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    /// Asks for a page with a short body and keeps the connection; the status.
    pub(crate) async fn ask(&mut self, path: &str) -> io::Result<u16> {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: kube-probe/1.30\r\n\r\n");
        let exchange = async {
            self.0.write_all(request.as_bytes()).await?;
            let mut answer = Vec::with_capacity(1024);
            loop {
                if self.0.read_buf(&mut answer).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                if let Some(status) = whole(&answer) {
                    return Ok(status);
                }
            }
        };
        tokio::time::timeout(LIMIT, exchange).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Asks for a page of any length, as Prometheus does, in a coding of its content; the bytes that came.
    pub(crate) async fn fetch(mut self, path: &str, coding: &str) -> io::Result<u64> {
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: {coding}\r\nConnection: close\r\n\r\n"
        );
        let exchange = async {
            self.0.write_all(request.as_bytes()).await?;
            let (mut total, mut buffer) = (0, vec![0; 64 * 1024]);
            loop {
                match self.0.read(&mut buffer).await? {
                    0 => return Ok(total),
                    n => total += n as u64,
                }
            }
        };
        tokio::time::timeout(LIMIT, exchange).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

// The status, once the answer has come to its end.
fn whole(answer: &[u8]) -> Option<u16> {
    let head = answer.windows(4).position(|w| w == b"\r\n\r\n")?;
    let text = std::str::from_utf8(&answer[..head]).ok()?;
    let length = text
        .lines()
        .filter_map(|l| l.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .map_or(Some(0), |(_, value)| value.trim().parse().ok())?;
    if answer.len() < head + 4 + length {
        return None;
    }
    text.split(' ').nth(1)?.parse().ok()
}
