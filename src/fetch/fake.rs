//! A web server for tests that plays Envoy, an application or a registry.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use http::HeaderMap;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

#[expect(clippy::disallowed_methods, reason = "a test joins or aborts what it starts")]
pub(crate) fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(task)
}

/// A server that gives each path a raw answer and remembers the request heads.
pub(crate) struct Web {
    pub(crate) addr: SocketAddr,
    pub(crate) heads: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

impl Drop for Web {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Web {
    /// `answer` gives the raw bytes for a request head; an empty answer hangs.
    pub(crate) async fn start(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let heads = Arc::new(Mutex::new(Vec::new()));
        let (answer, seen) = (Arc::new(answer), heads.clone());
        let task = spawn(async move {
            let mut open = crate::base::tasks::Set::new("test connection");
            loop {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let (answer, seen) = (answer.clone(), seen.clone());
                open.spawn(async move {
                    let Some(head) = crate::net::http::head(&mut stream).await else { return };
                    let out = answer(&head);
                    seen.lock().unwrap().push(head);
                    if out.is_empty() {
                        std::future::pending::<()>().await;
                    }
                    let _ = stream.write_all(&out).await;
                });
            }
        });
        Self { addr, heads, task }
    }

    pub(crate) fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

pub(crate) fn http(status: u16, headers: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len()).into_bytes()
}

/// A health service that answers with the given state, or the given gRPC status.
pub(crate) async fn grpc_app(
    listener: TcpListener,
    state: Vec<u8>,
    code: &'static str,
) -> JoinHandle<Vec<(String, String, Vec<u8>)>> {
    spawn(async move {
        let mut seen = Vec::new();
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        if let Some(Ok((request, mut respond))) = connection.accept().await {
            let (head, mut body) = request.into_parts();
            let state = state.clone();
            let exchange = async move {
                let mut bytes = Vec::new();
                while let Some(Ok(piece)) = body.data().await {
                    bytes.extend_from_slice(&piece);
                }
                let answer =
                    http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
                let mut send = respond.send_response(answer, false).unwrap();
                send.send_data(state.into(), false).unwrap();
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", code.parse().unwrap());
                send.send_trailers(trailers).unwrap();
                bytes
            };
            let mut exchange = std::pin::pin!(exchange);
            let bytes = std::future::poll_fn(|cx| {
                use std::future::Future;
                let _ = connection.poll_closed(cx);
                exchange.as_mut().poll(cx)
            })
            .await;
            let agent = head.headers["user-agent"].to_str().unwrap().to_owned();
            seen.push((head.uri.to_string(), agent, bytes));
            let _ = std::future::poll_fn(|cx| connection.poll_closed(cx)).await;
        }
        seen
    })
}
