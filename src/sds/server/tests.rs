use std::collections::HashMap;
use std::sync::Mutex;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use envoy_types::pb::google::rpc::Status as RpcStatus;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::*;
use crate::base::eventually::eventually;
use crate::base::tasks::Group;
use crate::sds::revoked::{FOUND, LOOKS};
use crate::sds::stream::LONGEST;
use crate::secrets::slot::fake::Source;
use crate::secrets::{Error, Fetched, Identity, ResourceName, Roots, Secret};

#[derive(Debug, Default)]
struct Fake {
    sources: Mutex<HashMap<String, Arc<Source>>>,
    /// What is late fails with this.
    until: Arc<tokio::sync::Notify>,
    /// How many secrets were asked for.
    fetches: std::sync::atomic::AtomicUsize,
}

impl Fake {
    fn source(&self, name: &str) -> Arc<Source> {
        self.sources.lock().unwrap().entry(name.to_owned()).or_default().clone()
    }

    fn identity(&self, text: &str) {
        let key = zeroize::Zeroizing::new(b"key".to_vec());
        let identity = Identity { chain: text.as_bytes().to_vec(), key };
        self.source("default").publish(Secret::Identity(Arc::new(identity)));
    }

    fn roots(&self, text: &str) {
        self.source("ROOTCA").publish(Secret::Roots(Arc::new(Roots { pem: text.as_bytes().to_vec() })));
    }
}

impl SecretSource for Fake {
    fn fetch(&self, name: ResourceName) -> BoxFuture<'static, Result<Fetched, Arc<Error>>> {
        self.fetches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if name.to_string().ends_with("tomorrow") {
            return Box::pin(std::future::pending());
        }
        if name.to_string().ends_with("late") {
            let until = self.until.clone();
            return Box::pin(async move {
                until.notified().await;
                Err(Arc::new(Error::File { name: name.to_string(), reason: "nothing".to_owned() }))
            });
        }
        let fetched = self.source(&name.to_string()).fetched();
        let failed = |reason: &str| Error::File { name: name.to_string(), reason: reason.to_owned() };
        let fetched = fetched.ok_or_else(|| Arc::new(failed("nothing")));
        Box::pin(async move { fetched })
    }
}

struct World {
    _dir: tempfile::TempDir,
    path: PathBuf,
    fake: Arc<Fake>,
    group: Group,
    registry: crate::base::metrics::Metrics,
}

impl World {
    fn new() -> Self {
        Self::with(Encoder::default())
    }

    fn with(encoder: Encoder) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sds/socket");
        let fake = Arc::new(Fake::default());
        fake.identity("chain 1");
        fake.roots("root 1");
        let registry = crate::base::metrics::Metrics::new();
        let shared = Shared {
            encoder,
            metrics: Metrics::new(&registry),
            keepalive: KEEPALIVE,
            peers: Peers::default(),
            stop: Stop::new(),
        };
        let watches = Watches::default();
        let server = Server::with(vec![path.clone().into()], Whose::One(fake.clone()), shared, watches);
        assert_eq!(server.bound().collect::<Vec<_>>(), [path.as_path()]);
        let group = Group::new();
        group.run("sds", server.run(group.token()));
        Self { _dir: dir, path, fake, group, registry }
    }

    async fn client(&self) -> SecretDiscoveryServiceClient<Channel> {
        let path = self.path.clone();
        let connect = tower::service_fn(move |_| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://sds-grpc").connect_with_connector(connect).await.unwrap();
        SecretDiscoveryServiceClient::new(channel)
    }

    async fn stream(&self) -> Stream {
        let (requests, outgoing) = mpsc::channel(8);
        let mut client = self.client().await;
        let responses = client.stream_secrets(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
        Stream { requests, responses }
    }

    fn count(&self, name: &str) -> f64 {
        let families = self.registry.registry().gather();
        let family = families.iter().find(|f| f.name() == name);
        family.map_or(0.0, |f| {
            f.get_metric()[0].get_counter().get_value() + f.get_metric()[0].get_gauge().get_value()
        })
    }
}

struct Stream {
    requests: mpsc::Sender<DiscoveryRequest>,
    responses: Streaming<DiscoveryResponse>,
}

fn request(names: &[&str], nonce: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(Node { id: "sidecar~1".to_owned(), ..Node::default() }),
        resource_names: names.iter().map(|n| (*n).to_owned()).collect(),
        type_url: crate::sds::encode::SECRET_TYPE.to_owned(),
        response_nonce: nonce.to_owned(),
        ..DiscoveryRequest::default()
    }
}

fn text(response: &DiscoveryResponse) -> String {
    let all: Vec<u8> = response.resources.iter().flat_map(|r| r.value.clone()).collect();
    String::from_utf8_lossy(&all).into_owned()
}

impl Stream {
    async fn send(&self, request: DiscoveryRequest) {
        self.requests.send(request).await.unwrap();
    }

    async fn next(&mut self) -> Result<DiscoveryResponse, Status> {
        let next =
            tokio::time::timeout(Duration::from_secs(20), self.responses.message()).await.expect("silence");
        Ok(next?.expect("the stream ended"))
    }
}

#[tokio::test]
async fn answers_acks_and_pushes() {
    let world = World::new();
    let mut stream = world.stream().await;
    stream.send(request(&["default", "ROOTCA"], "")).await;
    let first = stream.next().await.unwrap();
    assert_eq!(first.resources.len(), 2);
    assert!(first.version_info.contains("Z/"), "{}", first.version_info);
    stream.send(request(&["default", "ROOTCA"], &first.nonce)).await;
    // The certificate was published first here; the root still goes out first.
    world.fake.identity("chain 2");
    world.fake.roots("root 2");
    let (one, two) = (stream.next().await.unwrap(), stream.next().await.unwrap());
    assert!(text(&one).contains("root 2") && text(&two).contains("chain 2"), "{} {}", text(&one), text(&two));
    assert_eq!(one.resources.len(), 1);
    assert_ne!(one.nonce, two.nonce);
}

#[tokio::test]
async fn who_is_behind_is_sent_the_newest_only() {
    let world = World::new();
    let mut stream = world.stream().await;
    stream.send(request(&["default"], "")).await;
    let first = stream.next().await.unwrap();
    stream.send(request(&["default"], &first.nonce)).await;
    // Nothing else runs in between, so the stream has seen none of them.
    (2..=5).for_each(|n| world.fake.identity(&format!("chain {n}")));
    assert!(text(&stream.next().await.unwrap()).contains("chain 5"));
    world.fake.identity("chain 6");
    assert!(text(&stream.next().await.unwrap()).contains("chain 6"), "nothing stood between them");
}

#[tokio::test]
async fn failures_end_the_stream_with_the_reason() {
    let world = World::new();
    for (name, words) in
        [("other", "unknown resource"), ("file-cert:a~", "file-cert"), ("file-root:x", "nothing")]
    {
        let mut stream = world.stream().await;
        stream.send(request(&["default", name], "")).await;
        let status = stream.next().await.unwrap_err();
        assert_eq!(status.code(), Code::Unknown);
        assert!(status.message().contains(&format!("failed to generate secret for {name}")), "{status:?}");
        assert!(status.message().contains(words), "{status:?}");
    }
    let mut stream = world.stream().await;
    stream.send(request(&["default"], "")).await;
    stream.next().await.unwrap();
    world
        .fake
        .source("default")
        .fail(Error::File { name: "default".to_owned(), reason: "no luck".to_owned() });
    let status = stream.next().await.unwrap_err();
    assert!(status.message().contains("no luck"));
    let mut stream = world.stream().await;
    stream.send(DiscoveryRequest { node: None, ..request(&["default"], "") }).await;
    assert_eq!(stream.next().await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_refusal_as_first_message_is_counted() {
    let world = World::new();
    let mut stream = world.stream().await;
    let detail = Some(RpcStatus { message: "bad".to_owned(), ..RpcStatus::default() });
    // Whatever type it names: a client's words make no series.
    for type_url in [request(&[], "").type_url, "of/another.Type".to_owned()] {
        let refusal =
            DiscoveryRequest { error_detail: detail.clone(), type_url, ..request(&["default"], "n") };
        stream.send(refusal).await;
    }
    stream.send(request(&["default"], "")).await;
    stream.next().await.unwrap();
    assert_eq!(world.count("pilot_total_xds_rejects"), 2.0);
}

fn delta(subscribe: &[&str], unsubscribe: &[&str]) -> DeltaDiscoveryRequest {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    DeltaDiscoveryRequest {
        node: Some(Node { id: "sidecar~1".to_owned(), ..Node::default() }),
        resource_names_subscribe: owned(subscribe),
        resource_names_unsubscribe: owned(unsubscribe),
        ..DeltaDiscoveryRequest::default()
    }
}

#[tokio::test]
async fn fetch_and_delta_are_served() {
    let world = World::new();
    let mut client = world.client().await;
    let response = client.fetch_secrets(request(&["ROOTCA"], "")).await.unwrap().into_inner();
    assert!(text(&response).contains("root 1"));
    assert_eq!(client.fetch_secrets(request(&["x"], "")).await.unwrap_err().code(), Code::Unknown);

    let (requests, outgoing) = mpsc::channel(8);
    let mut responses = client.delta_secrets(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
    requests.send(delta(&["default"], &[])).await.unwrap();
    let first = responses.message().await.unwrap().unwrap();
    assert_eq!(first.resources[0].name, "default");
    world.fake.identity("chain 2");
    let second = responses.message().await.unwrap().unwrap();
    assert_ne!(first.resources[0].version, second.resources[0].version);
}

#[tokio::test]
async fn a_name_that_nobody_answers_holds_up_no_other() {
    let world = World::new();
    let mut client = world.client().await;
    let (requests, outgoing) = mpsc::channel(8);
    let mut responses = client.delta_secrets(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
    let mut next = async || {
        let next = tokio::time::timeout(Duration::from_secs(20), responses.message()).await.expect("silence");
        next.unwrap().expect("the stream ended").resources.remove(0).name
    };
    let subscribe = |name: &str| delta(&[name], &[]);
    requests.send(subscribe("default")).await.unwrap();
    assert_eq!(next().await, "default");
    requests.send(subscribe("file-root:/tomorrow")).await.unwrap();
    requests.send(subscribe("ROOTCA")).await.unwrap();
    assert_eq!(next().await, "ROOTCA");
    world.fake.identity("chain 2");
    assert_eq!(next().await, "default", "and what is followed is followed");
    world.fake.roots("root 2");
    assert_eq!(next().await, "ROOTCA");
}

#[tokio::test]
async fn what_is_wanted_no_more_ends_no_stream() {
    let world = World::new();
    let mut client = world.client().await;
    let (requests, outgoing) = mpsc::channel(8);
    let mut responses = client.delta_secrets(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
    let mut next = async || {
        let next = tokio::time::timeout(Duration::from_secs(20), responses.message()).await.expect("silence");
        next.map(|next| next.expect("the stream ended").resources.remove(0).name)
    };
    let send = async |names: &[&str], leave: &[&str]| {
        requests.send(delta(names, leave)).await.unwrap();
    };
    send(&["file-root:/late", "default"], &[]).await;
    send(&["ROOTCA"], &["file-root:/late"]).await;
    assert_eq!(next().await.unwrap(), "default", "it was asked for together with the one that is left");
    assert_eq!(next().await.unwrap(), "ROOTCA");
    world.fake.identity("chain 2");
    assert_eq!(next().await.unwrap(), "default");
    // What is wanted ends it.
    send(&["file-root:/late"], &[]).await;
    world.fake.until.notify_one();
    assert!(next().await.unwrap_err().message().contains("file-root:/late"));
}

#[tokio::test]
async fn names_that_nobody_answers_are_left_and_then_hold_up_nothing() {
    let world = World::new();
    let mut client = world.client().await;
    let (requests, outgoing) = mpsc::channel(8);
    let mut responses = client.delta_secrets(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
    let mut next = async || {
        let next = tokio::time::timeout(Duration::from_secs(20), responses.message()).await.expect("silence");
        next.unwrap().expect("the stream ended").resources.remove(0).name
    };
    let nobody: Vec<String> = (0..7).map(|nth| format!("file-root:/{nth}/tomorrow")).collect();
    let nobody: Vec<&str> = nobody.iter().map(String::as_str).collect();
    for name in &nobody {
        requests.send(delta(&[*name], &[])).await.unwrap();
    }
    requests.send(delta(&["default"], &[])).await.unwrap();
    requests.send(delta(&["ROOTCA"], &nobody[5..])).await.unwrap();
    requests.send(delta(&[], &nobody[2..4])).await.unwrap();
    assert_eq!([next().await, next().await], ["default", "ROOTCA"], "two places are free and one waits");
    requests.send(delta(&["default"], &[])).await.unwrap();
    assert_eq!(next().await, "default");

    let mut stream = world.stream().await;
    for name in nobody {
        stream.requests.send(request(&[name], "")).await.unwrap();
    }
    stream.requests.send(request(&["ROOTCA"], "")).await.unwrap();
    let answer = tokio::time::timeout(Duration::from_secs(20), stream.responses.message()).await;
    assert!(text(&answer.expect("silence").unwrap().unwrap()).contains("root 1"));
}

#[tokio::test]
async fn to_leave_a_name_costs_that_name() {
    let world = World::new();
    let mut client = world.client().await;
    let (requests, outgoing) = mpsc::channel(8);
    let mut responses = client.delta_secrets(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
    let nobody: Vec<String> = (0..50).map(|nth| format!("file-root:/{nth}/tomorrow")).collect();
    let nobody: Vec<&str> = nobody.iter().map(String::as_str).collect();
    let mut names = nobody.clone();
    names.insert(7, "ROOTCA");
    names.push("default");
    requests.send(delta(&names, &[])).await.unwrap();
    for name in &nobody {
        requests.send(delta(&[], &[*name])).await.unwrap();
    }
    let answer = tokio::time::timeout(Duration::from_secs(20), responses.message()).await.expect("silence");
    let answered: Vec<_> = answer.unwrap().unwrap().resources.into_iter().map(|one| one.name).collect();
    assert_eq!(answered, ["ROOTCA", "default"], "in the order of the request");
    assert_eq!(
        world.fake.fetches.load(std::sync::atomic::Ordering::Relaxed),
        52,
        "nothing was asked for again"
    );
    world.fake.identity("chain 2");
    assert_eq!(responses.message().await.unwrap().unwrap().resources[0].name, "default");
}

#[tokio::test]
async fn what_names_nothing_does_not_wait_for_its_turn() {
    let world = World::new();
    let mut client = world.client().await;
    let (requests, outgoing) = mpsc::channel(8);
    let mut responses = client.delta_secrets(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
    for nth in 0..5 {
        requests.send(delta(&[&format!("file-root:/{nth}/tomorrow")], &[])).await.unwrap();
    }
    requests.send(delta(&["nonsense"], &[])).await.unwrap();
    let answer = tokio::time::timeout(Duration::from_secs(20), responses.message()).await.expect("silence");
    let status = answer.unwrap_err();
    assert_eq!(status.code(), Code::Unknown);
    assert!(status.message().contains("failed to generate secret for nonsense"), "{status:?}");
}

// A revocation list on a disk that does not answer before the last is dropped, and a stream that was sent a root without it.
async fn unseen(first: Duration) -> (tempfile::TempDir, World, Stream, std::sync::mpsc::Sender<()>) {
    let dir = tempfile::tempdir().unwrap();
    let crl = dir.path().join("crl.pem");
    std::fs::write(&crl, "x").unwrap();
    let encoder = Encoder { private_key_provider: None, crl: Revoked::new(Some(crl)).hasty(first) };
    let world = World::with(encoder);
    let (let_go, hold) = std::sync::mpsc::channel::<()>();
    let (begun, begins) = tokio::sync::oneshot::channel();
    let held = LOOKS.run(move || {
        let _ = begun.send(());
        let _ = hold.recv();
    });
    tokio::select! {
        _ = held => panic!("it is held"),
        begun = begins => begun.unwrap(),
    }
    let mut stream = world.stream().await;
    stream.send(request(&["default", "ROOTCA"], "")).await;
    let first = stream.next().await.unwrap();
    assert!(text(&first).contains("root 1") && !text(&first).contains("crl.pem"));
    (dir, world, stream, let_go)
}

#[tokio::test]
async fn a_root_that_was_sent_too_soon_is_sent_again_with_the_revocation_list() {
    let (_dir, world, mut stream, let_go) = unseen(Duration::from_millis(1)).await;
    drop(let_go);
    let second = stream.next().await.unwrap();
    assert!(text(&second).contains("root 1") && text(&second).contains("crl.pem"));
    assert_eq!(second.resources.len(), 1);
    // While another look is waited for there may come another root.
    assert_eq!(FOUND.get(), 1);
    // Once.
    world.fake.identity("chain 2");
    assert!(text(&stream.next().await.unwrap()).contains("chain 2"));
}

#[tokio::test]
async fn a_root_that_comes_while_the_revocation_list_is_looked_for_is_sent_with_it_once() {
    let (_dir, world, mut stream, let_go) = unseen(Duration::from_millis(100)).await;
    drop(let_go);
    world.fake.roots("root 2");
    loop {
        let next = stream.next().await.unwrap();
        if text(&next).contains("root 2") && text(&next).contains("crl.pem") {
            break;
        }
    }
    world.fake.identity("chain 2");
    assert!(text(&stream.next().await.unwrap()).contains("chain 2"));
}

#[tokio::test]
async fn who_has_asked_and_sends_no_more_is_answered() {
    let world = World::new();
    let stream = world.stream().await;
    stream.send(request(&["default"], "")).await;
    let Stream { requests, mut responses } = stream;
    drop(requests);
    assert!(text(&responses.message().await.unwrap().unwrap()).contains("chain 1"));
    assert!(responses.message().await.unwrap().is_none());
}

#[tokio::test]
async fn the_end_of_a_stream_unsubscribes() {
    let world = World::new();
    let mut stream = world.stream().await;
    stream.send(request(&["default"], "")).await;
    stream.next().await.unwrap();
    let source = world.fake.source("default");
    assert_eq!(source.followers(), 1);
    assert_eq!(world.count("sds_streams"), 1.0);
    drop(stream);
    let is_gone = async || source.followers() == 0 && world.count("sds_streams") == 0.0;
    eventually("the stream is gone", is_gone).await;
}

#[tokio::test]
async fn the_stop_ends_streams_and_removes_the_socket() {
    let world = World::new();
    let mut stream = world.stream().await;
    stream.send(request(&["default"], "")).await;
    stream.next().await.unwrap();
    assert!(world.group.stop(Duration::from_secs(10)).await.is_empty());
    assert_eq!(stream.next().await.unwrap_err().code(), Code::Unavailable);
    assert!(!world.path.exists());
}

#[tokio::test]
async fn a_removed_socket_is_bound_again_and_open_streams_stay() {
    let world = World::new();
    let mut stream = world.stream().await;
    stream.send(request(&["default"], "")).await;
    stream.next().await.unwrap();
    std::fs::remove_file(&world.path).unwrap();
    eventually("it is bound again", async || world.path.exists()).await;
    let mut other = world.stream().await;
    other.send(request(&["default"], "")).await;
    other.next().await.unwrap();
    world.fake.identity("chain 2");
    assert!(text(&stream.next().await.unwrap()).contains("chain 2"));
}

#[tokio::test]
async fn clients_that_come_without_end_hold_up_nothing_else() {
    let world = World::new();
    let moved = world.path.with_extension("moved");
    std::fs::rename(&world.path, &moved).unwrap();
    // They come faster than they are accepted, until nobody accepts there any more.
    for _ in 0..2 {
        let moved = moved.clone();
        std::thread::spawn(move || while std::os::unix::net::UnixStream::connect(&moved).is_ok() {});
    }
    eventually("it is bound again", async || world.path.exists()).await;
}

#[tokio::test]
async fn an_answer_is_bounded() {
    let world = World::new();
    let half = "a".repeat(LONGEST / 2 + 1);
    world.fake.identity(&half);
    world.fake.roots(&half);
    let mut client = world.client().await;
    let fetched = client.fetch_secrets(request(&["default", "ROOTCA"], "")).await;
    let mut stream = world.stream().await;
    stream.send(request(&["default", "ROOTCA"], "")).await;
    for status in [fetched.unwrap_err(), stream.next().await.unwrap_err()] {
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("ask for them on more streams"), "{status:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn idle_sockets_hardly_wake_the_agent() {
    let _world = World::new();
    // What a start leaves to do.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let parks = || tokio::runtime::Handle::current().metrics().worker_park_count(0);
    let before = parks();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let woken = parks() - before;
    // Where the system refuses to report changes the file is looked at every 20 s, each look a few wake-ups.
    assert!(woken <= 3600 / 3, "woken {woken} times in an hour");
}

#[tokio::test]
async fn a_socket_that_cannot_be_bound_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    std::fs::create_dir_all(path.join("in the way")).unwrap();
    let config = Config { sockets: vec![path.clone().into()], ..Config::default() };
    let server = Server::bind(config, Arc::new(Fake::default()), &crate::base::metrics::Metrics::new());
    assert_eq!(server.bound().count(), 0);
    let group = Group::new();
    group.run("sds", server.run(group.token()));
    std::fs::remove_dir(path.join("in the way")).unwrap();
    eventually("it is bound", async || tokio::net::UnixStream::connect(&path).await.is_ok()).await;
    group.stop(Duration::from_secs(5)).await;
}
