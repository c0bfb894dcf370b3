//! The session against a model, under random interleavings: nothing is lost, reordered or sent twice.
//!
//! Four actors write and read both legs at random speeds and in random pieces. The model is what each reader
//! must see, computed from what was written: Envoy's requests as they were, without health reports before its
//! first request for listeners; the agent's own request right after that one; istiod's responses of Envoy's
//! types in order, and one answer for each of the agent's own that has a resource.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

const DROPPED: &str = "type.googleapis.com/istio.security.Authorization";

/// What one run writes.
struct Script {
    requests: Vec<DiscoveryRequest>,
    responses: Vec<DiscoveryResponse>,
    // Streams that istiod refuses, each after having read so many requests.
    refusals: Vec<usize>,
}

impl Script {
    fn random(random: &mut StdRng) -> Self {
        let large = if random.random_bool(0.2) { 200_000 } else { 2_000 };
        let requests = (0..random.random_range(1..40)).map(|n| {
            let kind = [CDS, types::LISTENER, types::HEALTH, DROPPED][random.random_range(0..4)];
            // A health report that is too large to be judged whole would pass; real ones are tiny.
            let most = if kind == types::HEALTH { 2_000 } else { large };
            let name = format!("{n}{}", "n".repeat(random.random_range(0..most)));
            let node = Some(Default::default());
            DiscoveryRequest { node, resource_names: vec![name], ..request(kind) }
        });
        let requests: Vec<_> = requests.collect();
        let responses = (0..random.random_range(1..40)).map(|n| {
            let kind = [CDS, CDS, types::PROXY_CONFIG, DROPPED][random.random_range(0..4)];
            let sizes = vec![random.random_range(0..large); random.random_range(0..3)];
            response(kind, &n.to_string(), &sizes)
        });
        let responses = responses.collect();
        // Kept requests are bounded, so a stream that may move has small ones.
        let few = if large > 2_000 || random.random_bool(0.5) { 0 } else { random.random_range(1..3) };
        let refusals = (0..few).map(|_| random.random_range(0..requests.len())).collect();
        Self { requests, responses, refusals }
    }

    /// What istiod must see of Envoy's requests and of the agent's first own one; `None` is the latter.
    fn upward(&self) -> Vec<Option<&DiscoveryRequest>> {
        let mut seen = Vec::new();
        let mut asked = false;
        for request in &self.requests {
            if request.type_url == types::HEALTH && !asked {
                continue;
            }
            seen.push(Some(request));
            if request.type_url == types::LISTENER && !asked {
                asked = true;
                seen.push(None);
            }
        }
        seen
    }

    fn downward(&self) -> Vec<&DiscoveryResponse> {
        self.responses.iter().filter(|r| types::for_envoy(&r.type_url)).collect()
    }

    /// Nonces that the agent answers itself.
    fn answered(&self) -> Vec<&str> {
        let own = |r: &&DiscoveryResponse| r.type_url == types::PROXY_CONFIG && !r.resources.is_empty();
        self.responses.iter().filter(own).map(|r| r.nonce.as_str()).collect()
    }
}

async fn pause(random: &mut StdRng) {
    match random.random_range(0..4) {
        0 => tokio::time::sleep(Duration::from_millis(random.random_range(0..3))).await,
        1 => tokio::task::yield_now().await,
        _ => {}
    }
}

async fn send(stream: &mut SendStream<Bytes>, frames: impl Iterator<Item = Bytes>, random: &mut StdRng) {
    // Frames run together and are cut anywhere.
    let mut bytes: Bytes = frames.flatten().collect::<Vec<u8>>().into();
    while !bytes.is_empty() {
        let piece = bytes.split_to(random.random_range(1..=bytes.len().min(50_000)));
        write(stream, piece).await;
        pause(random).await;
    }
}

async fn read_requests(
    istiod: &mut RecvStream,
    buffer: &mut BytesMut,
    count: usize,
    random: &mut StdRng,
) -> Vec<DiscoveryRequest> {
    let mut seen = Vec::new();
    while seen.len() < count {
        let frame =
            tokio::time::timeout(SOON, next_frame(istiod, buffer)).await.expect("a request is missing");
        seen.push(DiscoveryRequest::decode(frame.expect("the stream is open")).unwrap());
        pause(random).await;
    }
    seen
}

async fn run(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let script = Script::random(&mut random);
    let mut rig = Rig::new().await;
    if !script.refusals.is_empty() {
        let (mut told, istiod) = rig.pair(Protocol::Sotw).await;
        istiod.end(Code::Unauthenticated);
        assert_eq!(told.status().await.0, Code::Unauthenticated);
    }
    let (envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    let Envoy { mut sink, response: answer, mut buffer, .. } = envoy;
    let upward = script.upward();
    let [mut r1, mut r2, mut r3, mut r4] =
        std::array::from_fn(|n| StdRng::seed_from_u64(seed + n as u64 + 1));
    let writing = send(&mut sink, script.requests.iter().map(frames::frame), &mut r1);
    let serving = async {
        for refused in &script.refusals {
            let some = (*refused).min(upward.len());
            let seen = read_requests(&mut istiod.body, &mut istiod.buffer, some, &mut r2).await;
            check_upward(&upward[..some], &[], &seen);
            istiod.end(Code::PermissionDenied);
            rig.news.send_modify(|n| *n += 1);
            istiod = rig.istiod().await;
        }
        let Istiod { body, buffer, stream, respond, .. } = &mut istiod;
        let answered = script.answered();
        // Answers may overtake nothing, but may stand anywhere behind the first response.
        let reading = read_requests(body, buffer, upward.len() + answered.len(), &mut r2);
        let stream = stream.get_or_insert_with(|| {
            let head = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
            respond.send_response(head, false).unwrap()
        });
        let pushing = send(stream, script.responses.iter().map(frames::frame), &mut r3);
        let (seen, ()) = tokio::join!(reading, pushing);
        check_upward(&upward, &answered, &seen);
        // Kept: dropping it would reset the stream.
        istiod
    };
    let reading = async {
        let expected = script.downward();
        if expected.is_empty() {
            return;
        }
        let mut body = answer.expect("not yet taken").await.unwrap().into_body();
        for response in expected {
            let frame = tokio::time::timeout(SOON, next_frame(&mut body, &mut buffer)).await;
            let Some(frame) = frame.expect("a response is missing") else {
                panic!("the stream ended: {:?}", body.trailers().await);
            };
            assert!(DiscoveryResponse::decode(frame).unwrap() == *response, "another response than pushed");
            pause(&mut r4).await;
        }
    };
    tokio::join!(writing, serving, reading);
    rig.group.token().cancel();
}

/// `seen` is `upward` with the answers to `nonces` somewhere between, each in order.
fn check_upward(upward: &[Option<&DiscoveryRequest>], nonces: &[&str], seen: &[DiscoveryRequest]) {
    let (mut upward, mut nonces) = (upward.iter(), nonces.iter());
    for request in seen {
        if request.response_nonce.is_empty() {
            match upward.next().expect("nothing more was to come") {
                Some(envoys) => assert!(request == *envoys, "another request than Envoy's"),
                None => assert_eq!(*request, super::request(types::PROXY_CONFIG)),
            }
        } else {
            assert_eq!((request.node.as_ref(), request.type_url.as_str()), (None, types::PROXY_CONFIG));
            assert_eq!(Some(&request.response_nonce.as_str()), nonces.next());
        }
    }
    assert!(upward.next().is_none() && nonces.next().is_none(), "something is missing");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_follow_the_model_under_random_interleavings() {
    for seed in 0..40 {
        let run = std::panic::AssertUnwindSafe(run(seed * 1000));
        let done = futures_util::FutureExt::catch_unwind(run).await;
        assert!(done.is_ok(), "seed {seed}");
    }
}
