//! The gRPC health service.

use std::time::Duration;

use tokio::net::TcpListener;

use super::*;
use crate::fetch::fake::grpc_app;

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
async fn a_server_without_a_host_is_called_localhost() {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let app = grpc_app(listener, b"\0\0\0\0\x02\x08\x01".to_vec(), "0").await;
    let served = probing(&format!("{{\"grpc\":{{\"port\":{port}}},\"timeoutSeconds\":5}}"), |c| {
        c.destination = String::new();
    });
    assert_eq!(ask(&served, KUBELET).await.status, 200);
    assert_eq!(app.await.unwrap()[0].0, format!("http://localhost:{port}/grpc.health.v1.Health/Check"));
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
