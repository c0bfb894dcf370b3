//! The application behind the server's sidecar: it says who asked.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// The header in which Envoy passes on the peer's identity.
const PEER: &str = "x-forwarded-client-cert";

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let peer =
        request.headers().get(PEER).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    Ok(Response::new(Full::new(peer.unwrap_or_else(|| "nobody".to_owned()).into())))
}

/// Serves until dropped.
pub(crate) async fn serve(listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((socket, _)) = accepted else { continue };
                connections.spawn(async move {
                    let service = service_fn(answer);
                    // A connection that Envoy closes is no news.
                    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}
