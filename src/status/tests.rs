use std::sync::atomic::Ordering::Relaxed;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::*;
use crate::base::eventually::eventually;
use crate::status::fake::{Fake, envoy, exchange, spawn, start, with_envoy};

#[test]
fn the_family_follows_the_addresses() {
    assert!(!ipv6_mode(false, ""));
    assert!(!ipv6_mode(false, "10.0.0.1"));
    assert!(!ipv6_mode(false, "fe80::1"));
    assert!(!ipv6_mode(false, "nonsense"));
    assert!(ipv6_mode(false, "fd00::2"));
    assert!(ipv6_mode(true, "10.0.0.1"));
    assert_eq!(probe_source(true).to_string(), "::6");
    assert_eq!(probe_source(false).to_string(), "127.0.0.6");
}

#[tokio::test]
async fn silent_connections_make_place() {
    let mut config = Config::new(0);
    config.address = Some(Ipv4Addr::LOCALHOST.into());
    let listener = listen(&config).unwrap();
    let addr = listener.local_addr().unwrap();
    let handles = Handles {
        agent: Arc::new(Fake::default()),
        metrics: Metrics::new(),
        crypto: Arc::new(rustls::crypto::aws_lc_rs::default_provider()),
        started: Instant::now(),
    };
    let shared = Arc::new(shared::Shared::new(config, addr.port(), handles).unwrap());
    let (stop, limits) = (Stop::new(), Limits { connections: 4, asking: 4, idle: None });
    let task = spawn(serve::serve(Some(listener), shared.clone(), limits, Stop::new(), stop.clone()));
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(addr).await.unwrap());
        // A head that does not come to an end holds its place only as long as nobody else wants it.
    }
    let mut asking = TcpStream::connect(addr).await.unwrap();
    assert_eq!(exchange(&mut asking, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n", false).await.status, 404);
    assert_eq!(silent[0].read(&mut [0; 1]).await.unwrap_or(0), 0, "the one that was silent longest is gone");
    assert!(shared.most_connections() <= 4);
    stop.cancel();
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn requests_in_a_row_without_waiting_are_answered_in_order() {
    let served = start(Config::new(0));
    let mut stream = served.connect().await;
    stream.write_all(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let first =
        exchange(&mut stream, "POST /drain HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", false).await;
    let second = exchange(&mut stream, "", false).await;
    assert_eq!((first.status, second.status), (404, 200));
    // A caller that has said all it will say still gets its answer.
    stream.write_all(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(exchange(&mut stream, "", false).await.status, 404);
}

#[tokio::test]
async fn quit_answers_before_the_agent_is_told() {
    let served = start(Config::new(0));
    for _ in 0..20 {
        let before = served.agent.quits.load(Relaxed);
        let got = served.ask("POST", "/quitquitquit", "Content-Length: 0\r\n").await;
        assert_eq!((got.status, got.text().as_str()), (200, "OK"));
        // The answer was read to its end, so it was written; the word to the agent follows at once.
        eventually("the agent is told", async || served.agent.quits.load(Relaxed) > before).await;
    }
    assert_eq!(served.agent.quits.load(Relaxed), 20);
}

#[tokio::test]
async fn closing_refuses_new_connections_and_keeps_the_kept() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    let mut kept = served.connect().await;
    let ask = "GET /healthz/ready HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_eq!(exchange(&mut kept, ask, false).await.status, 200);
    served.closing.cancel();
    eventually("nobody is let in", async || TcpStream::connect(served.addr).await.is_err()).await;
    assert_eq!(exchange(&mut kept, ask, false).await.status, 200);
    served.stop.cancel();
    assert_eq!(kept.read(&mut [0; 1]).await.unwrap(), 0, "an idle connection ends with the server");
}

#[tokio::test]
async fn a_busy_port_is_named_and_taken_later() {
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = Config::new(holder.local_addr().unwrap().port());
    config.address = Some(loopback(false));
    let error = bind(&config).unwrap_err();
    assert!(error.to_string().contains(&config.port.to_string()), "{error}");
    let handles = Handles {
        agent: Arc::new(Fake::default()),
        metrics: Metrics::new(),
        crypto: Arc::new(rustls::crypto::aws_lc_rs::default_provider()),
        started: tokio::time::Instant::now(),
    };
    drop(holder);
    let (port, stop) = (config.port, Stop::new());
    let task = spawn(Bound::later(&config, crate::trouble::Reporter::default()).serve(
        handles,
        Stop::new(),
        stop.clone(),
    ));
    eventually("it is taken", async || TcpStream::connect(("127.0.0.1", port)).await.is_ok()).await;
    stop.cancel();
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_listener_that_is_gone_ends_the_server_with_an_error() {
    let mut config = Config::new(0);
    config.address = Some(Ipv4Addr::LOCALHOST.into());
    let bound = bind(&config).unwrap();
    // As far as the kernel is concerned it listens no more.
    let listener = bound.listener.as_ref().unwrap();
    socket2::SockRef::from(listener).shutdown(std::net::Shutdown::Both).unwrap();
    let handles = Handles {
        agent: Arc::new(Fake::default()),
        metrics: Metrics::new(),
        crypto: Arc::new(rustls::crypto::aws_lc_rs::default_provider()),
        started: Instant::now(),
    };
    let error = bound.serve(handles, Stop::new(), Stop::new()).await.unwrap_err();
    assert!(error.to_string().contains("listener failed"), "{error}");
}
