//! The server as a client sees it: over TLS, with a hand-made HTTP/2 client that can look at every byte.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::Request;
use mock_istiod::ads::{DELTA, SOTW};
use mock_istiod::ca::{self, Response};
use mock_istiod::grpc::{Deframer, frame};
use mock_istiod::resources::{CLUSTER, ENDPOINTS};
use mock_istiod::{Builder, Code, Fault, MockIstiod, Pair, Resource, Set, Status};
use prost::Message;
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use x509_parser::prelude::{FromDer, X509Certificate};

const LIMIT: Duration = Duration::from_secs(10);
const NODE: &str = "sidecar~127.0.0.1~pod.ns~ns.svc.cluster.local";

/// A connection to the server.
struct Client {
    sender: SendRequest<Bytes>,
    token: Option<String>,
    _driver: JoinSet<Result<(), h2::Error>>,
}

/// One call.
struct Call {
    head: Option<ResponseFuture>,
    body: Option<RecvStream>,
    requests: SendStream<Bytes>,
    deframer: Deframer,
}

impl Client {
    async fn connect(mock: &MockIstiod, certificate: Option<Pair>) -> Self {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(mock.authority().root_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match certificate {
            None => config.with_no_client_auth(),
            Some(pair) => {
                let chain =
                    CertificateDer::pem_slice_iter(pair.chain.as_bytes()).map(Result::unwrap).collect();
                let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
                config.with_client_auth_cert(chain, key).unwrap()
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let socket = TcpStream::connect(mock.address()).await.unwrap();
        let name = ServerName::try_from("istiod.istio-system.svc").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, socket).await.unwrap();
        Self::over(stream).await
    }

    async fn plaintext(mock: &MockIstiod) -> Self {
        Self::over(TcpStream::connect(mock.address()).await.unwrap()).await
    }

    async fn over<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static>(io: T) -> Self {
        let (sender, connection) = h2::client::handshake(io).await.unwrap();
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        Self { sender, token: None, _driver: driver }
    }

    fn with(self, token: impl Into<String>) -> Self {
        Self { token: Some(token.into()), ..self }
    }

    async fn open(&self, path: &str) -> Call {
        let mut request = Request::post(format!("https://istiod.istio-system.svc{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("clusterid", "Kubernetes");
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut sender = self.sender.clone().ready().await.unwrap();
        let (head, requests) = sender.send_request(request.body(()).unwrap(), false).unwrap();
        Call { head: Some(head), body: None, requests, deframer: Deframer::default() }
    }

    /// `CreateCertificate`: the response and status.
    async fn sign(&self, csr: &str, seconds: i64) -> Result<Response, Status> {
        let mut call = self.open(ca::PATH).await;
        let request = ca::Request { csr: csr.to_owned(), validity_duration: seconds, metadata: None };
        call.requests.send_data(frame(&request.encode_to_vec()), true).unwrap();
        let message = call.next().await?.expect("a message or a status");
        let rest = call.next().await;
        assert!(rest.is_err_and(|status| status.code == Code::Ok), "a unary call ends with OK");
        Ok(Response::decode(message).unwrap())
    }
}

impl Call {
    fn send(&mut self, message: &impl Message) {
        self.requests.send_data(frame(&message.encode_to_vec()), false).unwrap();
    }

    /// The next message, or the status; `Ok(None)` never comes back.
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        tokio::time::timeout(LIMIT, self.read()).await.expect("an answer in time")
    }

    async fn read(&mut self) -> Result<Option<Bytes>, Status> {
        let reset = |e: h2::Error| Status::new(Code::Internal, format!("reset: {e}"));
        if let Some(head) = self.head.take() {
            let response = head.await.map_err(reset)?;
            if let Some(status) = status(response.headers()) {
                return Err(status);
            }
            self.body = Some(response.into_body());
        }
        let body = self.body.as_mut().unwrap();
        loop {
            if let Some(message) = self.deframer.take()? {
                return Ok(Some(message));
            }
            match body.data().await {
                Some(data) => {
                    let data = data.map_err(reset)?;
                    body.flow_control().release_capacity(data.len()).unwrap();
                    self.deframer.push(&data);
                }
                None => {
                    let trailers = body.trailers().await.map_err(reset)?.expect("gRPC ends with trailers");
                    return Err(status(&trailers).expect("grpc-status"));
                }
            }
        }
    }

    async fn sotw(&mut self) -> DiscoveryResponse {
        DiscoveryResponse::decode(self.next().await.unwrap().unwrap()).unwrap()
    }

    async fn delta(&mut self) -> DeltaDiscoveryResponse {
        DeltaDiscoveryResponse::decode(self.next().await.unwrap().unwrap()).unwrap()
    }
}

fn status(headers: &http::HeaderMap) -> Option<Status> {
    let code = headers.get("grpc-status")?.to_str().unwrap().parse().unwrap();
    let message = headers.get("grpc-message").map(|m| m.to_str().unwrap().to_owned()).unwrap_or_default();
    Some(Status::new(code, message))
}

fn csr() -> (KeyPair, String) {
    let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let request =
        CertificateParams::new(vec!["ignored.example".to_owned()]).unwrap().serialize_request(&key).unwrap();
    (key, request.pem().unwrap())
}

fn node(id: &str) -> Option<Node> {
    Some(Node { id: id.to_owned(), ..Node::default() })
}

fn first(type_url: &str, names: &[&str]) -> DiscoveryRequest {
    DiscoveryRequest {
        node: node(NODE),
        type_url: type_url.to_owned(),
        resource_names: names.iter().map(ToString::to_string).collect(),
        ..DiscoveryRequest::default()
    }
}

async fn start(change: impl FnOnce(Builder) -> Builder) -> MockIstiod {
    change(MockIstiod::builder()).start().await.unwrap()
}

#[tokio::test]
async fn a_certificate_is_istiods_in_every_part() {
    let mock = MockIstiod::start().await;
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    let (key, csr) = csr();
    let chain = client.sign(&csr, 3600).await.unwrap().cert_chain;
    assert_eq!(chain.len(), 3, "leaf, intermediate, root bundle");
    assert_eq!(chain[2], mock.root_pem());
    assert!(chain.iter().all(|entry| entry.ends_with("-----END CERTIFICATE-----\n")));

    let der = CertificateDer::from_pem_slice(chain[0].as_bytes()).unwrap();
    let (_, leaf) = X509Certificate::from_der(&der).unwrap();
    assert_eq!(leaf.subject().iter().count(), 0, "the subject is empty");
    assert_eq!(leaf.public_key().raw, key.subject_public_key_info(), "the key is the request's");
    let san = leaf.subject_alternative_name().unwrap().unwrap();
    assert!(san.critical);
    let names: Vec<_> = san.value.general_names.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["URI(spiffe://cluster.local/ns/ns/sa/sa)"], "the request's own names are not heard");
    let usage = leaf.key_usage().unwrap().unwrap().value;
    assert!(usage.digital_signature() && usage.key_encipherment() && !usage.key_cert_sign());
    let extended = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(extended.server_auth && extended.client_auth);
    assert!(!leaf.basic_constraints().unwrap().unwrap().value.ca);
    let validity = leaf.validity();
    assert_eq!(validity.not_after.timestamp() - validity.not_before.timestamp(), 3600 + 120);
    let issuer = CertificateDer::from_pem_slice(chain[1].as_bytes()).unwrap();
    let (_, issuer) = X509Certificate::from_der(&issuer).unwrap();
    leaf.verify_signature(Some(issuer.public_key())).unwrap();

    let call = &mock.record().signed()[0];
    assert_eq!(call.identity.as_deref(), Some("spiffe://cluster.local/ns/ns/sa/sa"));
    assert!(call.headers.contains(&("clusterid".to_owned(), "Kubernetes".to_owned())));
    assert_eq!(call.csr, csr);
}

#[tokio::test]
async fn callers_and_requests_that_are_refused() {
    let mock = MockIstiod::start().await;
    let anonymous = Client::connect(&mock, None).await;
    let (_, good) = csr();
    let refused = anonymous.sign(&good, 0).await.unwrap_err();
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (Code::Unauthenticated, "request authenticate failure")
    );

    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    let unsigned = {
        // Near the end of the signature, before the last four characters of base64, some of whose bits are padding.
        let at = good.rfind("-----END").unwrap() - 8;
        let mut text = good.clone();
        let other = if &text[at..=at] == "A" { "B" } else { "A" };
        text.replace_range(at..=at, other);
        text
    };
    for (csr, seconds) in [("junk", 60), (unsigned.as_str(), 60), (good.as_str(), 91 * 24 * 3600)] {
        let refused = client.sign(csr, seconds).await.unwrap_err();
        assert_eq!(refused.code, Code::InvalidArgument, "{refused:?}");
        assert!(refused.message.starts_with("CSR signing error ("), "{refused:?}");
    }

    let plain = start(|b| b.plaintext()).await;
    let client = Client::plaintext(&plain).await.with(plain.mint("ns", "sa"));
    assert_eq!(
        client.sign(&good, 0).await.unwrap_err().code,
        Code::Unauthenticated,
        "no certificates in the clear"
    );
}

#[tokio::test]
async fn a_client_certificate_is_an_identity() {
    let mock = MockIstiod::start().await;
    let identity = mock.identity("vm", "account");
    let client = Client::connect(&mock, Some(mock.issue(&identity, Duration::from_secs(60)))).await;
    client.sign(&csr().1, 0).await.unwrap();
    assert_eq!(mock.record().signed()[0].identity, Some(identity.clone()));
    assert_eq!(mock.record().connections()[0].client_names, [identity]);
}

#[tokio::test]
async fn streams_above_the_admission_rate_are_refused() {
    let mock = MockIstiod::start().await;
    mock.resources().update(|set| set.put(None, Resource::new(CLUSTER, "c", Vec::new())));
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    mock.set_admitted(1);
    let mut calls = Vec::new();
    for _ in 0..10 {
        let mut call = client.open(SOTW).await;
        call.send(&first(CLUSTER, &[]));
        calls.push(call);
    }
    // The first has its turn at once, the last would have to wait for nine seconds.
    assert_eq!(calls[0].sotw().await.type_url, CLUSTER);
    let refusal = calls[9].next().await.unwrap_err();
    assert_eq!(
        (refusal.code, refusal.message.as_str()),
        (Code::ResourceExhausted, "request rate limit exceeded")
    );
    mock.set_admitted(0);
    for _ in 0..10 {
        let mut call = client.open(SOTW).await;
        call.send(&first(CLUSTER, &[]));
        assert_eq!(call.sotw().await.type_url, CLUSTER);
    }
}

#[tokio::test]
async fn the_script_spoils_answers_in_order() {
    let mock = MockIstiod::start().await;
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    let (key, csr) = csr();
    mock.ca().next(Fault::exhausted());
    mock.ca().next(Fault::Cut(100));
    mock.ca().next(Fault::EmptyChain);
    mock.ca().next(Fault::WrongKey);
    mock.ca().next(Fault::WrongSan("spiffe://evil/ns/x/sa/y".to_owned()));
    mock.ca().next(Fault::Drip(64, Duration::from_millis(1)));
    assert_eq!(client.sign(&csr, 0).await.unwrap_err().code, Code::ResourceExhausted);
    let cut = client.sign(&csr, 0).await.unwrap_err();
    assert!(cut.message.starts_with("reset"), "{cut:?}");
    assert!(client.sign(&csr, 0).await.unwrap().cert_chain.is_empty());
    let other = client.sign(&csr, 0).await.unwrap().cert_chain;
    let der = CertificateDer::from_pem_slice(other[0].as_bytes()).unwrap();
    assert_ne!(X509Certificate::from_der(&der).unwrap().1.public_key().raw, key.subject_public_key_info());
    let other = client.sign(&csr, 0).await.unwrap().cert_chain;
    let der = CertificateDer::from_pem_slice(other[0].as_bytes()).unwrap();
    assert_eq!(mock_istiod::pki::names(&der).unwrap(), ["spiffe://evil/ns/x/sa/y"]);
    assert_eq!(client.sign(&csr, 0).await.unwrap().cert_chain.len(), 3, "dripping, and whole in the end");

    mock.ca().next(Fault::WrongOrder);
    let turned = client.sign(&csr, 0).await.unwrap().cert_chain;
    let der = CertificateDer::from_pem_slice(turned[0].as_bytes()).unwrap();
    assert_ne!(X509Certificate::from_der(&der).unwrap().1.public_key().raw, key.subject_public_key_info());

    mock.ca().next(Fault::GoAway);
    client.sign(&csr, 0).await.expect("the call under way is answered");
    assert!(client.sender.clone().ready().await.is_err(), "and there is no next one on this connection");
}

#[tokio::test]
async fn a_connection_breaks_in_the_middle_of_an_answer() {
    let mock = MockIstiod::start().await;
    // The first bytes may be of the connection's own frames; a whole answer has a thousand and more.
    for after in [0, 1, 50, 500] {
        let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
        mock.ca().next(Fault::Sever(after));
        client.sign(&csr().1, 0).await.unwrap_err();
        assert!(client.sender.clone().ready().await.is_err(), "{after}: the connection is gone");
    }
    assert_eq!(mock.record().signed().len(), 4, "each was signed, and none arrived");
}

#[tokio::test]
async fn state_of_the_world_pushes_what_changed() {
    let mock = MockIstiod::start().await;
    let cluster = |name: &str, bytes: &[u8]| Resource::new(CLUSTER, name, bytes.to_vec());
    mock.resources().update(|set| {
        set.put(None, cluster("a", b"\x0a\x01a"));
        set.put(Some("pod.ns"), cluster("own", b"\x0a\x03own"));
        set.put(Some("other.ns"), cluster("alien", b"\x0a\x05alien"));
        set.put(None, Resource::new(ENDPOINTS, "a", b"\x0a\x01a".to_vec()));
    });
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    let mut stream = client.open(SOTW).await;
    stream.send(&first(CLUSTER, &[]));
    let clusters = stream.sotw().await;
    assert_eq!(clusters.resources.len(), 2, "the common one and its own");
    let ack = |response: &DiscoveryResponse, names: &[&str]| DiscoveryRequest {
        version_info: response.version_info.clone(),
        response_nonce: response.nonce.clone(),
        node: None,
        ..first(&response.type_url, names)
    };
    stream.send(&ack(&clusters, &[]));
    stream.send(&first(ENDPOINTS, &["a", "nothing"]));
    let endpoints = stream.sotw().await;
    assert_eq!((endpoints.type_url.as_str(), endpoints.resources.len()), (ENDPOINTS, 1));
    stream.send(&ack(&endpoints, &["a", "nothing"]));
    mock.record()
        .wait("both accepted", LIMIT, |r| (r.ads_requests().len() == 4).then_some(()))
        .await
        .unwrap();

    mock.resources().update(|set| set.put(None, cluster("a", b"\x0a\x01a\x20\x01")));
    let (clusters, endpoints) = (stream.sotw().await, stream.sotw().await);
    assert_eq!(clusters.type_url, CLUSTER);
    assert_eq!(endpoints.type_url, ENDPOINTS, "a changed cluster waits for its endpoints");

    let mut nack = ack(&clusters, &[]);
    nack.error_detail =
        Some(envoy_types::pb::google::rpc::Status { code: 13, message: "no".into(), details: vec![] });
    stream.send(&nack);
    let seen = mock.record().wait("the refusal", LIMIT, |r| r.ads_requests().pop()?.nack).await.unwrap();
    assert_eq!(seen, (13, "no".to_owned()));
    mock.resources().update(|set| set.common.retain(|resource| resource.type_url != ENDPOINTS));
    let endpoints = stream.sotw().await;
    assert_eq!(
        (endpoints.type_url.as_str(), endpoints.resources.len()),
        (ENDPOINTS, 0),
        "a refusal is not answered"
    );
}

#[tokio::test]
async fn incremental_sends_differences() {
    let mock = MockIstiod::start().await;
    let cluster = |name: &str, version: u8| Resource::new(CLUSTER, name, vec![0x20, version]);
    mock.resources().replace(Set { common: vec![cluster("a", 1), cluster("b", 1)], ..Set::default() });
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    let mut stream = client.open(DELTA).await;
    let request = DeltaDiscoveryRequest { node: node(NODE), type_url: CLUSTER.into(), ..Default::default() };
    stream.send(&request);
    let names = |r: &DeltaDiscoveryResponse| r.resources.iter().map(|r| r.name.clone()).collect::<Vec<_>>();
    let all = stream.delta().await;
    assert_eq!(names(&all), ["a", "b"]);
    mock.resources().replace(Set { common: vec![cluster("a", 2), cluster("c", 1)], ..Set::default() });
    let changed = stream.delta().await;
    assert_eq!(
        (names(&changed), &changed.removed_resources[..]),
        (vec!["a".into(), "c".into()], &["b".to_owned()][..])
    );

    let mut again = client.open(DELTA).await;
    let held =
        all.resources.iter().chain(&changed.resources).map(|r| (r.name.clone(), r.version.clone())).collect();
    again.send(&DeltaDiscoveryRequest { initial_resource_versions: held, ..request });
    let rest = again.delta().await;
    assert_eq!(
        (names(&rest), &rest.removed_resources[..]),
        (vec![], &["b".to_owned()][..]),
        "a and c are held"
    );
}

#[tokio::test]
async fn nodes_are_checked_as_istiod_does() {
    let mock = MockIstiod::start().await;
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    for (id, code) in [("", 3), ("a~b", 3), ("pony~1~a.ns~ns.svc", 3), ("sidecar~1~a.other~other.svc", 7)] {
        let mut stream = client.open(SOTW).await;
        stream.send(&DiscoveryRequest { node: node(id), ..first(CLUSTER, &[]) });
        assert_eq!(stream.next().await.unwrap_err().code as u8, code, "{id}");
    }
    let anonymous = Client::connect(&mock, None).await;
    assert_eq!(anonymous.open(SOTW).await.next().await.unwrap_err().code, Code::Unauthenticated);
}

#[tokio::test]
async fn headers_come_with_the_first_response() {
    let mock = MockIstiod::start().await;
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    let mut streams = mock.take_streams();
    let mut call = client.open(SOTW).await;
    let mut taken = streams.recv().await.unwrap();
    call.send(&first(CLUSTER, &[]));
    let request = taken.requests.recv().await.unwrap();
    assert_eq!(request.raw, first(CLUSTER, &[]).encode_to_vec());
    // The server has read a request and has done nothing else: no headers may have come.
    let mut head = call.head.take().unwrap();
    assert!(futures_util::poll!(&mut head).is_pending());
    taken.responses.raw(frame(b"\x0a\x01x").slice(..4)).await.unwrap();
    head.await.unwrap();

    mock.set_eager_headers(true);
    let mut call = client.open(SOTW).await;
    let _taken = streams.recv().await.unwrap();
    call.head.take().unwrap().await.expect("headers before any message");
}

#[tokio::test]
async fn a_stream_in_the_tests_hands() {
    let mock = MockIstiod::start().await;
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    let mut streams = mock.take_streams();
    let mut call = client.open(DELTA).await;
    let taken = streams.recv().await.unwrap();
    assert!(taken.opened.delta);
    let big = mock_istiod::bulk::delta(mock_istiod::bulk::Kind::Endpoints, 3 << 20, "n");
    let (head, tail) = (big.slice(..1000), big.slice(1000..));
    taken.responses.raw(head).await.unwrap();
    taken.responses.raw(tail).await.unwrap();
    assert_eq!(call.delta().await.nonce, "n");
    taken.responses.end(Status::new(Code::Aborted, "enough")).await.unwrap();
    assert_eq!(call.next().await.unwrap_err(), Status::new(Code::Aborted, "enough"));
    drop(taken);

    let mut call = client.open(DELTA).await;
    drop(streams.recv().await.unwrap());
    assert_eq!(call.next().await.unwrap_err().code, Code::Ok, "dropping the stream ends it well");
}

#[tokio::test]
async fn down_and_up_again_on_the_same_port() {
    let mock = start(|b| b.down()).await;
    TcpStream::connect(mock.address()).await.expect_err("not there yet");
    mock.up().await.unwrap();
    let client = Client::connect(&mock, None).await.with(mock.mint("ns", "sa"));
    let mut stream = client.open(SOTW).await;
    stream.send(&first(CLUSTER, &[]));
    stream.sotw().await;
    mock.down().await;
    assert!(stream.next().await.is_err());
    TcpStream::connect(mock.address()).await.expect_err("gone");
    mock.up().await.unwrap();
    Client::connect(&mock, None).await;
}

#[tokio::test]
async fn a_rotated_root_trusts_both_for_a_while() {
    let mock = MockIstiod::start().await;
    let old = mock.root_pem();
    let pair = mock.issue(&mock.identity("vm", "x"), Duration::from_secs(60));
    mock.rotate_root(true);
    assert!(mock.root_pem().ends_with(&old) && mock.root_pem() != old);
    let client = Client::connect(&mock, Some(pair)).await;
    let chain = client.sign(&csr().1, 0).await.unwrap().cert_chain;
    assert_eq!(chain.last(), Some(&mock.root_pem()));
    mock.rotate_root(false);
    assert!(!mock.root_pem().contains(&old));
}
