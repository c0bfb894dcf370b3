//! The smallest HTTP client that the tests need.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// What came back.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// What a test's server reads: the head of a request, `None` where the client leaves before its end.
pub async fn head(io: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(io.read_u8().await.ok()?);
    }
    Some(String::from_utf8_lossy(&head).into_owned())
}

/// One request on a connection of its own to `127.0.0.1:port`; an error's text says what failed.
pub async fn call(method: &str, port: u16, path: &str, body: &str) -> Result<Reply, String> {
    call_with(method, port, path, body, &[]).await
}

/// Like [`call`], with more headers.
pub async fn call_with(
    method: &str,
    port: u16,
    path: &str,
    body: &str,
    headers: &[(&str, &str)],
) -> Result<Reply, String> {
    let exchange = async {
        let socket = TcpStream::connect(("127.0.0.1", port)).await.map_err(|e| format!("connect: {e}"))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(socket)).await.map_err(|e| e.to_string())?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let mut request =
            Request::builder().method(method).uri(path).header("host", format!("localhost:{port}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::from(body.to_owned()))).map_err(|e| e.to_string())?;
        let response = sender.send_request(request).await.map_err(|e| format!("{e:?}"))?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(|e| format!("body: {e}"))?.to_bytes();
        Ok(Reply { status: head.status, headers: head.headers, body })
    };
    tokio::time::timeout(Duration::from_secs(25), exchange)
        .await
        .map_err(|_| "no answer in 25 s".to_owned())?
}

pub async fn get(port: u16, path: &str) -> Result<Reply, String> {
    call("GET", port, path, "").await
}

pub async fn post(port: u16, path: &str) -> Result<Reply, String> {
    call("POST", port, path, "").await
}
