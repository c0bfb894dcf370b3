//! The gRPC health service.

use std::time::Duration;

use ::http::HeaderMap;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;

/// A health service that answers with the given state, or the given gRPC status.
async fn grpc_app(
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
                    ::http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
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

#[tokio::test]
async fn grpc_health() {
    for (state, code, status) in [
        (&b"\0\0\0\0\x02\x08\x01"[..], "0", 200),
        (b"\0\0\0\0\x02\x08\x02", "0", 500),
        (b"\0\0\0\0\0", "0", 500),
        (b"\0\0\0\0\x02\x08\x01", "5", 500),
        (b"\0\0\0\0\x03\xff\xff\xff", "0", 500),
        (b"\x01\0\0\0\x02\x08\x01", "0", 500),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let app = grpc_app(listener, state.to_vec(), code).await;
        let served = probing(
            &format!("{{\"grpc\":{{\"port\":{port},\"service\":\"s\"}},\"timeoutSeconds\":5}}"),
            |_| {},
        );
        assert_eq!(ask(&served, KUBELET).await.status, status, "{state:?} {code}");
        let seen = app.await.unwrap();
        assert_eq!(seen[0].0, format!("http://127.0.0.1:{port}/grpc.health.v1.Health/Check"));
        assert!(seen[0].1.starts_with("kube-probe/1.30 pilot-agent/"), "{}", seen[0].1);
        assert_eq!(seen[0].2, b"\0\0\0\0\x03\x0a\x01s");
    }
}

#[tokio::test]
async fn grpc_waits_for_a_server_that_starts_within_the_limit() {
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    drop(holder);
    let served = probing(&format!("{{\"grpc\":{{\"port\":{port}}},\"timeoutSeconds\":10}}"), |_| {});
    let later = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let app = grpc_app(listener, b"\0\0\0\0\x02\x08\x01".to_vec(), "0").await;
        app.await.unwrap()
    };
    let (got, _) = tokio::join!(ask(&served, KUBELET), later);
    assert_eq!(got.status, 200);
}
