//! An Envoy that comes while istiod is away, answered from memory.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::xds::probe::{Refused, probe};

const EDS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

fn replay() -> Replay {
    Replay { after: Duration::ZERO, most: 1 << 20, disk: None, left: None }
}

// So many names that a request or a response with all of them is larger than the windows.
fn many() -> Vec<String> {
    (0..3000).map(|n| format!("outbound|8080||service-{n:04}.namespace.svc.cluster.local")).collect()
}

// A first request of an Envoy that has none of them.
fn first(names: &[String]) -> DeltaDiscoveryRequest {
    subscription(CDS, names.to_vec(), Vec::new())
}

#[tokio::test]
async fn a_first_request_larger_than_the_window_is_answered() {
    let mut rig = Rig::with(|c| c.replay = Some(replay())).await;
    let names = many();
    rig.filled(&names).await;
    rig.way.open.store(false, Ordering::SeqCst);
    let mut envoy = rig.envoy(Protocol::Delta).await;
    let asked = first(&names);
    assert!(asked.encoded_len() > 2 * 64 * 1024);
    tokio::time::timeout(SOON, envoy.send(&asked)).await.expect("Envoy may go on writing");
    let told = envoy.delta().await;
    assert_eq!(told.resources.len(), names.len());
    assert!(told.nonce.starts_with("memory-"));
    // And another, so that all of the window is there again.
    envoy.send(&delta_request(types::LISTENER)).await;
    assert_eq!(envoy.delta().await.resources[0].name, "l");
}

#[tokio::test]
async fn what_istiod_had_not_read_when_it_answered_is_told_to_its_end() {
    let mut rig = Rig::with(|c| c.replay = Some(replay())).await;
    let names = many();
    rig.filled(&names).await;
    let mut envoy = rig.envoy(Protocol::Delta).await;
    tokio::time::timeout(SOON, envoy.send(&first(&names))).await.expect("Envoy may go on writing");
    // It takes the stream and reads less than the first request.
    let mut istiod = rig.istiod().await;
    assert_eq!(envoy.delta().await.resources.len(), names.len());
    envoy.send(&delta_request(types::LISTENER)).await;
    assert_eq!(envoy.delta().await.type_url, types::LISTENER);
    let news = delta(CDS, "i1", &names[..1], "2");
    istiod.push(&news).await;
    assert_eq!(envoy.delta().await, news);
    let asked = istiod.delta().await;
    assert_eq!((asked.type_url.as_str(), asked.resource_names_subscribe.len()), (CDS, names.len()));
    assert_eq!(istiod.delta().await.type_url, types::LISTENER);
    assert_eq!(istiod.delta().await.type_url, types::PROXY_CONFIG);
    envoy.send(&delta_answer(CDS, "i1")).await;
    assert_eq!(istiod.delta().await.response_nonce, "i1");
    // What was told late was noted once: what Envoy has accepted is kept.
    rig.way.open.store(false, Ordering::SeqCst);
    istiod.cut.cancel();
    assert_eq!(envoy.status().await.0, Code::Unavailable);
    let mut envoy = rig.envoy(Protocol::Delta).await;
    envoy.send(&delta_request(CDS)).await;
    let told = envoy.delta().await;
    assert_eq!(told.resources.len(), names.len());
    let versions = |version| told.resources.iter().filter(|r| r.version == version).count();
    assert_eq!((versions("2"), versions("1")), (1, names.len() - 1));
}

// An istiod that has taken the stream and is silent, and an Envoy that is answered from memory meanwhile.
async fn silent(rig: &mut Rig) -> (Envoy, Istiod) {
    rig.filled(&["a".to_owned()]).await;
    let mut envoy = rig.envoy(Protocol::Delta).await;
    envoy.send(&delta_request(CDS)).await;
    assert!(envoy.delta().await.nonce.starts_with("memory-"));
    let istiod = rig.istiod().await;
    (envoy, istiod)
}

#[tokio::test]
async fn a_file_that_changes_while_istiod_is_asked_hurries_the_next_dial() {
    let mut rig = Rig::with(|c| {
        c.replay = Some(replay());
        c.spread = Some(Duration::from_secs(3600));
    })
    .await;
    let (_envoy, istiod) = silent(&mut rig).await;
    // What istiod was shown is replaced before it has said what it thinks of it.
    rig.news.send(1).unwrap();
    istiod.cut.cancel();
    rig.istiod().await;
}

fn subscription(of: &str, more: Vec<String>, less: Vec<String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        resource_names_subscribe: more,
        resource_names_unsubscribe: less,
        ..delta_request(of)
    }
}

#[tokio::test]
async fn what_envoy_takes_back_is_not_kept_for_an_istiod_that_does_not_read() {
    let mut rig = Rig::with(|c| c.replay = Some(replay())).await;
    let (mut envoy, mut istiod) = silent(&mut rig).await;
    // Ten times what istiod's window takes.
    let name = |n: usize| format!("{n:01000}");
    for n in 0..640 {
        let asks = subscription(EDS, vec![name(n + 1)], vec![name(n)]);
        tokio::time::timeout(SOON, envoy.send(&asks)).await.expect("Envoy may go on writing");
    }
    // Once this is answered all before it has been read.
    envoy.send(&delta_request(types::LISTENER)).await;
    while envoy.delta().await.type_url != types::LISTENER {}
    istiod.push(&delta(CDS, "i1", &["a".to_owned()], "2")).await;
    let (mut asked, mut read, mut requests) = (std::collections::BTreeSet::new(), 0, 0);
    loop {
        let told = istiod.delta().await;
        requests += 1;
        read += told.encoded_len();
        if told.type_url == EDS {
            asked.extend(told.resource_names_subscribe);
            for name in &told.resource_names_unsubscribe {
                asked.remove(name);
            }
        }
        // The agent's own comes when all of Envoy's is told.
        if told.type_url == types::PROXY_CONFIG {
            break;
        }
    }
    assert_eq!(asked.into_iter().collect::<Vec<_>>(), [name(640)]);
    assert!(read < 300_000, "{read} bytes in {requests} requests");
}

#[tokio::test]
async fn an_envoy_that_asks_for_more_than_can_be_kept_is_told_so() {
    let mut rig = Rig::with(|c| c.replay = Some(replay())).await;
    let (mut envoy, _istiod) = silent(&mut rig).await;
    // A megabyte of names each time, far above the bound in all.
    for n in 0..100 {
        let names = (0..1000).map(|k| format!("{n:03}-{k:01000}")).collect();
        let asks = subscription(EDS, names, Vec::new());
        tokio::time::timeout(SOON, envoy.send(&asks)).await.expect("it is read, or the stream ends");
    }
    let (code, text) = envoy.status().await;
    assert_eq!(code, Code::ResourceExhausted, "{text}");
    assert!(text.contains("MiB of names"), "{text}");
}

// An Envoy that asks and does not read what memory answers.
async fn deaf(rig: &mut Rig) -> Envoy {
    rig.filled(&many()).await;
    rig.way.open.store(false, Ordering::SeqCst);
    let mut envoy = rig.envoy(Protocol::Delta).await;
    envoy.send(&delta_request(CDS)).await;
    rig.eventually("it is served", || rig.metric("xds_replay_serving", None) == 1.0).await;
    envoy
}

#[tokio::test]
async fn an_envoy_that_does_not_read_is_replaced_all_the_same() {
    let mut rig = Rig::with(|c| c.replay = Some(replay())).await;
    let _deaf = deaf(&mut rig).await;
    let mut next = rig.envoy(Protocol::Delta).await;
    next.send(&delta_request(CDS)).await;
    next.delta().await;
    rig.eventually("the older one has ended", || rig.metric("xds_replay_streams", Some("ended")) == 1.0)
        .await;
}

#[tokio::test]
async fn istiod_is_asked_while_envoy_does_not_read_and_no_message_is_cut() {
    let mut rig = Rig::with(|c| c.replay = Some(replay())).await;
    let mut envoy = deaf(&mut rig).await;
    rig.way.open.store(true, Ordering::SeqCst);
    rig.news.send(1).unwrap();
    let mut istiod = rig.istiod().await;
    assert_eq!(istiod.delta().await.type_url, CDS);
    let news = delta(CDS, "i1", &["new".to_owned()], "2");
    istiod.push(&news).await;
    assert!(envoy.delta().await.nonce.starts_with("memory-"), "what was begun comes first, and whole");
    assert_eq!(envoy.delta().await, news);
}

// An istiod that refuses, says goodbye and closes in one breath.
async fn refuses_in_one_breath() -> (Way, Group) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let group = Group::new();
    group.run("istiod", async move {
        while let Ok((mut io, _)) = listener.accept().await {
            let mut preface = [0; 24];
            io.read_exact(&mut preface).await.unwrap();
            // Until the request's headers are there.
            loop {
                let mut head = [0; 9];
                io.read_exact(&mut head).await.unwrap();
                let mut body = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
                io.read_exact(&mut body).await.unwrap();
                if head[3] == 1 {
                    break;
                }
            }
            let mut out = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
            let mut headers = vec![0x88];
            for (name, value) in
                [("content-type", "application/grpc"), ("grpc-status", "7"), ("grpc-message", "no")]
            {
                headers.extend([0, u8::try_from(name.len()).unwrap()]);
                headers.extend(name.as_bytes());
                headers.push(u8::try_from(value.len()).unwrap());
                headers.extend(value.as_bytes());
            }
            out.extend([0, 0, u8::try_from(headers.len()).unwrap(), 1, 5, 0, 0, 0, 1]);
            out.extend(headers);
            out.extend([0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
            io.write_all(&out).await.unwrap();
            io.shutdown().await.unwrap();
        }
    });
    (Way { address, open: AtomicBool::new(true), away: Arc::default() }, group)
}

#[tokio::test]
async fn a_status_that_comes_with_the_end_of_the_connection_is_heard() {
    let (way, _group) = refuses_in_one_breath().await;
    let headers = CallHeaders::default();
    let opened = upstream::open(&way, &Tokens, &headers, Protocol::Delta, &|_| {}).await;
    let Ok(link) = opened else { panic!("no stream was opened") };
    let (_more, queue) = mpsc::channel(1);
    let Err(status) = stand_in::ask(link, VecDeque::new(), queue).await else { panic!("it was taken") };
    assert_eq!((status.code(), status.message()), (Code::PermissionDenied, "no"));
    match probe(&way, &Tokens, &headers, SOON).await {
        Err(Refused::Ended(status)) => assert_eq!(status.code(), Code::PermissionDenied),
        other => panic!("{other:?}"),
    }
}

fn on_disk(config: &mut Config, dir: &std::path::Path) {
    let disk = Disk { file: dir.join("kept"), max_age: Duration::from_secs(86_400) };
    config.replay = Some(Replay { disk: Some(disk), ..replay() });
}

#[tokio::test]
async fn a_stream_that_is_cut_or_replaced_does_not_count_as_alive() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::with(|c| {
        on_disk(c, dir.path());
        c.keepalive = Keepalive { interval: Duration::from_millis(100), timeout: Duration::from_secs(1) };
    })
    .await;
    let memory: Arc<memory::Memory> = rig.handle.memory().unwrap();
    assert!(memory.left().is_some());
    // Another takes its place, and finds istiod gone.
    let (mut envoy, _istiod) = rig.configured().await;
    assert!(memory.left().is_none(), "istiod confirms what is kept");
    rig.way.open.store(false, Ordering::SeqCst);
    let mut next = rig.envoy(Protocol::Sotw).await;
    assert_eq!(next.status().await.0, Code::Unavailable);
    assert_eq!(envoy.status().await.0, Code::Ok);
    rig.eventually("nobody confirms it", || memory.left().is_some()).await;
    // Its connection is given up because Envoy answers no ping.
    rig.way.open.store(true, Ordering::SeqCst);
    rig.news.send(1).unwrap();
    let (_envoy, _istiod) = rig.configured().await;
    assert!(memory.left().is_none());
    rig.deaf.cancel();
    rig.eventually("nobody confirms it", || memory.left().is_some()).await;
}

#[tokio::test]
async fn what_gets_too_old_while_it_is_served_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::with(|c| {
        on_disk(c, dir.path());
        let disk = c.replay.as_mut().and_then(|replay| replay.disk.as_mut());
        disk.unwrap().max_age = Duration::from_secs(5);
    })
    .await;
    rig.filled(&["a".to_owned()]).await;
    rig.way.open.store(false, Ordering::SeqCst);
    let mut envoy = rig.envoy(Protocol::Delta).await;
    envoy.send(&delta_request(CDS)).await;
    envoy.delta().await;
    // Nobody stands behind it any more.
    let (code, text) = envoy.status().await;
    assert_eq!(code, Code::Unavailable);
    assert!(text.contains("too old"), "{text}");
}

// The stream of an Envoy whose last push was not answered any more, with what it has.
async fn ahead(rig: &mut Rig) -> Envoy {
    rig.filled(&["a".to_owned(), "b".to_owned()]).await;
    rig.way.open.store(false, Ordering::SeqCst);
    let mut envoy = rig.envoy(Protocol::Delta).await;
    let has = [("a".to_owned(), "2".to_owned()), ("c".to_owned(), "2".to_owned())];
    envoy.send(&DeltaDiscoveryRequest { initial_resource_versions: has.into(), ..delta_request(CDS) }).await;
    envoy
}

#[tokio::test]
async fn an_envoy_that_lives_is_told_what_it_waits_for_and_nothing_else() {
    let mut rig = Rig::with(|c| c.replay = Some(replay())).await;
    let mut envoy = ahead(&mut rig).await;
    // Of which it has nothing: answered, and after clusters.
    envoy.send(&delta_request(types::LISTENER)).await;
    let told = envoy.delta().await;
    assert_eq!((told.type_url.as_str(), told.resources.len()), (types::LISTENER, 1));
    assert_eq!(rig.metric("xds_replay_serving", None), 1.0);
    envoy.send(&delta_answer(types::LISTENER, &told.nonce)).await;
    // With istiod back its word is all there is.
    rig.way.open.store(true, Ordering::SeqCst);
    rig.news.send(1).unwrap();
    let mut istiod = rig.istiod().await;
    assert_eq!(istiod.delta().await.initial_resource_versions.len(), 2);
    let news = delta(CDS, "i1", &["b".to_owned()], "3");
    istiod.push(&news).await;
    assert_eq!(envoy.delta().await, news);
}

#[tokio::test]
async fn an_envoy_that_has_everything_is_not_served_from_memory() {
    let mut rig = Rig::with(|c| c.replay = Some(replay())).await;
    let mut envoy = ahead(&mut rig).await;
    rig.eventually("istiod is dialled", || rig.metric("xds_dials", Some("failed")) >= 1.0).await;
    assert_eq!(rig.metric("xds_replay_serving", None), 0.0);
    rig.way.open.store(true, Ordering::SeqCst);
    rig.news.send(1).unwrap();
    let mut istiod = rig.istiod().await;
    let news = delta(CDS, "i1", &["b".to_owned()], "3");
    istiod.push(&news).await;
    assert_eq!(envoy.delta().await, news, "the first that it hears");
}

#[tokio::test]
async fn a_held_stream_ends_when_memory_can_stand_in() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kept");
    {
        let mut rig = Rig::with(|c| on_disk(c, dir.path())).await;
        rig.filled(&["a".to_owned()]).await;
        let _ = rig.group.stop(SOON).await;
    }
    let kept = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    // The disk takes its time.
    crate::base::reading::pipe::make(&file);
    let rig = Rig::with(|c| on_disk(c, dir.path())).await;
    rig.way.open.store(false, Ordering::SeqCst);
    let mut told = rig.envoy(Protocol::Delta).await;
    assert_eq!(told.status().await.0, Code::Unavailable);
    let mut held = rig.envoy(Protocol::Delta).await;
    held.send(&delta_request(CDS)).await;
    rig.eventually("it is held and dialled for", || rig.metric("xds_dials", Some("failed")) >= 2.0).await;
    let written = crate::base::lane::begin("the file", move || std::fs::write(file, kept).unwrap()).unwrap();
    written.await.unwrap();
    assert_eq!(held.status().await.0, Code::Unavailable);
    let mut next = rig.envoy(Protocol::Delta).await;
    next.send(&delta_request(CDS)).await;
    assert_eq!(next.delta().await.resources[0].name, "a");
}
