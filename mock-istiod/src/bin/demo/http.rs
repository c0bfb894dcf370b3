//! One request at a time over HTTP/1.1.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// A connection that is kept.
pub(crate) struct Client {
    sender: SendRequest<Full<Bytes>>,
    _driver: JoinSet<Result<(), hyper::Error>>,
}

/// What came back.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Client {
    pub(crate) async fn connect(port: u16) -> Result<Self, String> {
        let socket = TcpStream::connect(("127.0.0.1", port)).await.map_err(|e| format!("connect: {e}"))?;
        let (sender, connection) = handshake(TokioIo::new(socket)).await.map_err(|e| e.to_string())?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        Ok(Self { sender, _driver: driver })
    }

    pub(crate) async fn get(&mut self, path: &str) -> Result<Reply, String> {
        let request = Request::get(path).header("host", "server.demo").body(Full::default());
        let request = request.map_err(|e| e.to_string())?;
        let exchange = async {
            self.sender.ready().await.map_err(|e| e.to_string())?;
            let response = self.sender.send_request(request).await.map_err(|e| e.to_string())?;
            let (head, body) = response.into_parts();
            let body = body.collect().await.map_err(|e| e.to_string())?.to_bytes();
            let body = String::from_utf8_lossy(&body).into_owned();
            Ok(Reply { status: head.status, headers: head.headers, body })
        };
        tokio::time::timeout(Duration::from_secs(5), exchange)
            .await
            .map_err(|_| "no answer in 5 s".to_owned())?
    }
}

/// One request on a connection of its own.
pub(crate) async fn get(port: u16, path: &str) -> Result<Reply, String> {
    Client::connect(port).await?.get(path).await
}
