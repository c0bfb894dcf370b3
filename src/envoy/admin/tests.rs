use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const OWN: [u16; 2] = [15021, 15090];

fn count(text: &str, own: [u16; 2]) -> Option<u64> {
    super::open(text, &own, &[15091]).map(|open| open.connections())
}

#[test]
fn only_foreign_connections_count() {
    let text = "listener.0.0.0.0_15006.downstream_cx_active: 7\n\
                listener.0.0.0.0_15006.worker_0.downstream_cx_active: 7\n\
                listener.10.0.0.1_80.downstream_cx_active: 12\n\
                listener.0.0.0.0_15021.downstream_cx_active: 3\n\
                listener.0.0.0.0_15090.downstream_cx_active: 4\n\
                listener.admin.downstream_cx_active: 1\n\
                listener.admin.main_thread.downstream_cx_active: 1\n\
                listener.envoy_internal_x.downstream_cx_active: 5\n\
                http.inbound_0.0.0.0_80.downstream_cx_active: 9\n";
    assert_eq!(count(text, OWN), Some(19));
}

#[test]
fn odd_lines_are_skipped() {
    assert_eq!(count("", OWN), None);
    assert_eq!(count("\n", OWN), Some(0));
    assert_eq!(count("listener.0.0.0.0_80.downstream_cx_active: -5\n", OWN), Some(0));
    assert_eq!(count("listener.0.0.0.0_80.downstream_cx_active: +5\n", OWN), Some(0));
    assert_eq!(count("listener.[::]_80.downstream_cx_active: 5\n", OWN), Some(0));
    assert_eq!(count("listener.[__]_15021.downstream_cx_active: 1\n", OWN), Some(1));
    for address in ["0.0.0.0", "[__]"] {
        let secure = format!("listener.{address}_15091.downstream_cx_active: 1\n");
        assert_eq!(count(&secure, OWN), Some(0));
    }
    assert_eq!(count("listener.0.0.0.0_80.downstream_cx_active: 18446744073709551616\n", OWN), Some(0));
    assert_eq!(count("listener.a.downstream_cx_active:  2 \r\n", OWN), Some(2));
    // Whatever Envoy answers to the question counts, as in the Go agent.
    assert_eq!(count("listener.a.other: 3\nlistener.b: 4\n", OWN), Some(7));
}

/// Serves one connection with `answer`, gives the port and the request's text.
async fn serve(
    answer: &'static str,
) -> (u16, tokio::sync::oneshot::Receiver<String>, crate::base::tasks::Group) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (send, seen) = tokio::sync::oneshot::channel();
    let group = crate::base::tasks::Group::new();
    group.run("admin", async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = vec![0; 4096];
        let n = stream.read(&mut request).await.unwrap();
        request.truncate(n);
        let _ = send.send(String::from_utf8(request).unwrap());
        if answer.is_empty() {
            std::future::pending::<()>().await;
        }
        stream.write_all(answer.as_bytes()).await.unwrap();
    });
    (port, seen, group)
}

fn client(port: u16) -> Client {
    Client::new(Config { port, ..Config::default() })
}

#[tokio::test]
async fn a_drain_asks_as_the_go_agent_does() {
    let (port, seen, _group) = serve("HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n").await;
    let limit = Duration::from_secs(5);
    assert_eq!(client(port).drain_listeners(true, limit).await.unwrap(), 500);
    let request = seen.await.unwrap();
    assert!(
        request.starts_with("POST /drain_listeners?inboundonly&graceful&skip_exit HTTP/1.1\r\n"),
        "{request}"
    );
    assert!(request.contains(&format!("Host: localhost:{port}\r\n")), "{request}");
    assert!(request.contains("Content-Length: 0\r\n"), "{request}");
}

#[tokio::test]
async fn statistics_need_200_and_an_end() {
    let (port, _seen, _group) = serve("HTTP/1.1 200 OK\r\n\r\nlistener.x.downstream_cx_active: 2\n").await;
    assert_eq!(client(port).open(false).await.unwrap().map(|o| o.connections()), Some(2));
    let (port, _seen, _group) = serve("HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n").await;
    assert!(matches!(client(port).open(false).await, Err(Error::Status { status: 503, .. })));
    let (port, _seen, _group) = serve("garbage\r\n\r\n").await;
    assert!(matches!(client(port).open(false).await, Err(Error::Transport { .. })));
}

#[tokio::test]
async fn an_envoy_that_never_answers_is_given_up() {
    let (port, _seen, _group) = serve("").await;
    let limit = Duration::from_millis(50);
    let error = client(port).drain_listeners(false, limit).await.unwrap_err();
    assert!(error.to_string().ends_with("no answer within 50ms"), "{error}");
}

#[tokio::test]
async fn nobody_there_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let error = client(port).live().await.unwrap_err();
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}/server_info")), "{error}");
}

#[tokio::test]
async fn server_info_tells_state_and_epoch() {
    let (port, _seen, _group) = serve(
        "HTTP/1.1 200 OK\r\n\r\n{\"state\": \"LIVE\", \"command_line_options\": {\"restart_epoch\": 3}}",
    )
    .await;
    assert_eq!(client(port).live().await.unwrap(), (true, 3));
}

#[test]
fn who_holds_what_is_named_and_requests_are_counted_beside() {
    let text = "http.admin.downstream_rq_active: 1\nhttp.inbound_0.0.0.0_80;.downstream_rq_active: 3\n\
                http.stats.downstream_rq_active: 1\nhttp.outbound.downstream_rq_active: 4\n\
                listener.0.0.0.0_80.downstream_cx_active: 2\nlistener.0.0.0.0_81.downstream_cx_active: 0\n\
                listener.10.0.0.1_15006.downstream_cx_active: 7\n";
    let open = super::open(text, &OWN, &[]).unwrap();
    assert_eq!((open.connections(), open.requests), (9, 7));
    assert_eq!(open.holders(), "10.0.0.1_15006 (7), 0.0.0.0_80 (2)");
    let many = Open { listeners: (0..9).map(|n| (format!("l{n}"), 1)).collect(), requests: 0 };
    assert_eq!(many.holders(), "l0 (1), l1 (1), l2 (1), l3 (1), l4 (1), 4 more");
}

#[tokio::test]
async fn a_drain_follows_no_redirect() {
    let (port, _seen, _group) =
        serve("HTTP/1.1 302 X\r\nlocation: /drained\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client(port).drain_listeners(true, Duration::from_secs(5)).await.unwrap(), 302);
}
