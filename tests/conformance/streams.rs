//! Many streams, and messages that never end: what one client may hold of the agent.

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use h2::client::SendRequest;
use http::Request;
use prost::Message;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::support::agent::SDS;
use crate::support::client::{node, secret_request};
use crate::support::{MockIstiod, TestAgent};

/// More than anybody may have.
const TOO_MANY: usize = 17_000;

/// Connections of one process; dropping it closes them.
#[derive(Default)]
struct Flood(JoinSet<()>);

impl Flood {
    async fn connect(&mut self, agent: &TestAgent) -> SendRequest<Bytes> {
        let io = UnixStream::connect(agent.path(SDS)).await.unwrap();
        let (send, connection) = h2::client::handshake(io).await.unwrap();
        self.0.spawn(async move {
            let _ = connection.await;
        });
        send
    }
}

fn call() -> Request<()> {
    let path = "http://localhost/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets";
    Request::post(path).header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap()
}

/// The agent serves the workload's certificate.
pub(super) async fn served(agent: &mut TestAgent) {
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.expect("a certificate");
}

#[tokio::test]
async fn one_process_has_so_many_streams_and_no_more() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    served(&mut agent).await;
    let (mut flood, mut open) = (Flood::default(), Vec::new());
    'refused: loop {
        let send = flood.connect(&agent).await;
        for _ in 0..3000 {
            let mut send = send.clone().ready().await.unwrap();
            let (response, body) = send.send_request(call(), false).unwrap();
            let response = response.await.unwrap();
            if let Some(status) = response.headers().get("grpc-status") {
                assert_eq!(status, "8", "{:?}", response.headers());
                break 'refused;
            }
            open.push((body, response));
        }
        assert!(open.len() < TOO_MANY, "nothing bounds them");
    }
    assert!(open.len() > 5000, "{} streams: a gateway may need more", open.len());
    open.truncate(5000);
    served(&mut agent).await;
    drop((open, flood));
    agent.stop().await;
}

#[tokio::test]
async fn messages_that_are_not_complete_are_bounded_together() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    served(&mut agent).await;
    let mut flood = Flood::default();
    let mut half = vec![0, 0, 0x3f, 0xff, 0xff];
    half.resize(3_000_000, b'a');
    let (mut calls, mut held) = (JoinSet::new(), Vec::new());
    for _ in 0..6 {
        let mut send = flood.connect(&agent).await.ready().await.unwrap();
        let (response, mut body) = send.send_request(call(), false).unwrap();
        body.send_data(half.clone().into(), false).unwrap();
        held.push(body);
        calls.spawn(async move {
            let mut answer = response.await.unwrap().into_body();
            answer.trailers().await.unwrap().expect("a status")["grpc-status"].clone()
        });
    }
    // The others wait for their rest.
    assert_eq!(calls.join_next().await.unwrap().unwrap(), "8");
    served(&mut agent).await;
    // A long name comes whole, in pieces.
    calls.abort_all();
    drop((flood, held));
    let mut flood = Flood::default();
    let message = secret_request(&"n".repeat(900_000)).encode_to_vec();
    let length = u32::try_from(message.len()).unwrap();
    let message = [&[0][..], &length.to_be_bytes(), &message].concat();
    let mut send = flood.connect(&agent).await.ready().await.unwrap();
    let (response, mut body) = send.send_request(call(), false).unwrap();
    body.send_data(message.into(), false).unwrap();
    let trailers = response.await.unwrap().into_body().trailers().await.unwrap().expect("a status");
    assert_eq!(trailers["grpc-status"], "2", "{trailers:?}");
    agent.stop().await;
}

fn subscribe(names: Vec<String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(node("sidecar~1")),
        resource_names_subscribe: names,
        ..DeltaDiscoveryRequest::default()
    }
}

#[tokio::test]
async fn names_are_bounded_together_whether_they_are_followed_or_wait() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    served(&mut agent).await;
    let client = agent.sds().await;
    // Requests that nobody answers have every place, and long names wait behind them.
    let mut waiting = client.delta_secrets();
    for nth in 0..4 {
        waiting.send(&subscribe(vec![format!("file-root:/nowhere/{nth}")]));
    }
    let long = |nth| format!("file-root:/{nth:0>4000}");
    waiting.send(&subscribe((0..900).map(long).collect()));
    let asked = std::time::Instant::now();
    let status = waiting.next().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status:?}");
    assert!(asked.elapsed() < std::time::Duration::from_secs(5), "{:?}", asked.elapsed());
    // Many spellings of one file are followed as if they were many files.
    let root = "var/run/secrets/istio/root-cert.pem";
    let spelt = |nth| format!("file-root:{}{root}", "./".repeat(nth));
    let (mut streams, mut refused) = (Vec::new(), None);
    for _ in 0..60 {
        let mut stream = client.delta_secrets();
        stream.send(&subscribe((0..600).map(spelt).collect()));
        match stream.next().await {
            Ok(_) => streams.push(stream),
            Err(status) => {
                refused = Some(status);
                break;
            }
        }
    }
    assert_eq!(refused.expect("as many as somebody likes").code(), tonic::Code::ResourceExhausted);
    served(&mut agent).await;
    // What is left is free again.
    drop(streams.split_off(streams.len() / 2));
    crate::support::eventually("there is room again", async || {
        let mut stream = client.delta_secrets();
        stream.send(&subscribe((0..600).map(spelt).collect()));
        stream.next().await.is_ok().then_some(())
    })
    .await;
    agent.stop().await;
}
