//! An HTTP server whose answers a test makes up.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response, request};
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
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
