//! Both clients against a double that answers one path over plain HTTP/2.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, Response};
use tokio::net::TcpListener;

use super::*;
use crate::istiod::auth::{CallHeaders, Mock};
use crate::istiod::{Config, Connector, Transport};

/// Serves one call: gives the path, headers and message, answers with `message`.
async fn serve(listener: &TcpListener, message: impl Message) -> (String, HeaderMap, Bytes) {
    let (io, _) = listener.accept().await.unwrap();
    let mut connection = h2::server::handshake(io).await.unwrap();
    let (request, mut respond) = connection.accept().await.unwrap().unwrap();
    let (head, mut body) = request.into_parts();
    let exchange = async {
        let mut bytes = BytesMut::new();
        while let Some(chunk) = body.data().await {
            bytes.extend_from_slice(&chunk.unwrap());
        }
        let mut send = respond.send_response(Response::new(()), false).unwrap();
        let message = message.encode_to_vec();
        let mut framed = BytesMut::new();
        framed.put_u8(0);
        framed.put_u32(u32::try_from(message.len()).unwrap());
        framed.put_slice(&message);
        send.send_data(framed.freeze(), false).unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", 0.into());
        send.send_trailers(trailers).unwrap();
        bytes.freeze()
    };
    tokio::pin!(exchange);
    // The connection is driven until the client says goodbye.
    let mut bytes = None;
    loop {
        tokio::select! {
            done = &mut exchange, if bytes.is_none() => bytes = Some(done),
            next = connection.accept() => match next {
                Some(_) => panic!("a second call"),
                None => break,
            },
        }
    }
    let message = crate::net::grpc::unframed(bytes.unwrap()).unwrap();
    (head.uri.path().to_owned(), head.headers, message)
}

async fn double() -> (TcpListener, Calls) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new(Config {
        address: listener.local_addr().unwrap().to_string(),
        transport: Transport::Plaintext,
        connect_timeout: Duration::from_secs(5),
        shuffle: false,
        user_timeout: None,
        proxy: None,
    })
    .unwrap();
    let calls = Calls {
        connector,
        tokens: Arc::new(Mock),
        headers: CallHeaders::default(),
        attempt_timeout: Calls::ATTEMPT_TIMEOUT,
        total_timeout: Calls::TOTAL_TIMEOUT,
        trouble: Arc::default(),
    };
    (listener, calls)
}

#[tokio::test]
async fn mesh_ca_is_routed_by_the_cluster_and_refuses_short_chains() {
    let (listener, calls) = double().await;
    let url = "https://container.googleapis.com/v1/projects/p/locations/us-central1-c/clusters/c";
    let client = MeshCa::new(calls, url, &Metrics::new());
    let chain = vec!["leaf".to_owned(), "root".to_owned()];
    let answer = MeshResponse { cert_chain: chain.clone() };
    let (signed, (path, headers, message)) =
        tokio::join!(client.sign("csr", Duration::from_secs(60)), serve(&listener, answer));
    assert_eq!(signed.unwrap(), chain);
    assert_eq!(path, "/google.security.meshca.v1.MeshCertificateService/CreateCertificate");
    assert_eq!(headers["x-goog-request-params"], "location=locations/us-central1-c");
    assert_eq!(headers["authorization"], "Bearer test_token");
    let request = MeshRequest::decode(message).unwrap();
    assert_eq!((request.csr.as_str(), request.validity.unwrap().seconds), ("csr", 60));
    assert!(uuid::Uuid::parse_str(&request.request_id).is_ok());

    let answer = MeshResponse { cert_chain: chain[..1].to_vec() };
    let (signed, _) = tokio::join!(client.sign("csr", Duration::from_secs(60)), serve(&listener, answer));
    assert_eq!(signed.unwrap_err().label(), "answer");
}

#[tokio::test]
async fn cas_reflects_the_callers_identity_and_has_its_roots_apart() {
    let (listener, calls) = double().await;
    let pool = "projects/p/locations/l/caPools/c";
    let client = CertificateAuthorityService::new(calls, pool, &Metrics::new());
    let answer = Certificate {
        pem_certificate: "leaf".to_owned(),
        pem_certificate_chain: vec!["inter".to_owned(), "root".to_owned()],
        ..Certificate::default()
    };
    let (signed, (path, headers, message)) =
        tokio::join!(client.sign("csr", Duration::from_secs(60)), serve(&listener, answer));
    assert_eq!(signed.unwrap(), ["leaf", "inter", "root"]);
    assert_eq!(path, "/google.cloud.security.privateca.v1.CertificateAuthorityService/CreateCertificate");
    assert_eq!(headers["x-goog-request-params"], "parent=projects%2Fp%2Flocations%2Fl%2FcaPools%2Fc");
    let request = CreateRequest::decode(message).unwrap();
    assert_eq!(request.parent, pool);
    assert!(request.certificate_id.starts_with("csr-workload-"));
    let certificate = request.certificate.unwrap();
    assert_eq!((certificate.subject_mode, certificate.lifetime.unwrap().seconds), (2, 60));
    assert_eq!(certificate.config.unwrap().public_key.unwrap().key, b"csr");

    let chains = [vec!["a", "z"], vec!["b", "y"], vec!["c", "z"], vec![]];
    let ca_certs = chains
        .iter()
        .map(|chain| CertChain { certificates: chain.iter().map(ToString::to_string).collect() })
        .collect();
    let (roots, (path, ..)) =
        tokio::join!(client.root_bundle(), serve(&listener, FetchResponse { ca_certs }));
    assert_eq!(roots.unwrap(), ["y", "z"]);
    assert!(path.ends_with("/FetchCaCerts"));
    let (roots, _) = tokio::join!(client.root_bundle(), serve(&listener, FetchResponse::default()));
    assert_eq!(roots.unwrap_err().label(), "answer");
    let (signed, _) =
        tokio::join!(client.sign("csr", Duration::from_secs(60)), serve(&listener, Certificate::default()));
    assert_eq!(signed.unwrap_err().label(), "answer");
}

#[test]
fn the_zone_is_found_in_the_clusters_url() {
    assert_eq!(zone("https://h/v1/projects/p/locations/l-1/clusters/c"), Some("l-1"));
    for bad in ["", "https://h/locations/l/clusters/c", "https://h/projects/p/locations//clusters/c", "x"] {
        assert_eq!(zone(bad), None, "{bad}");
    }
}
