//! Applications that speak TLS, with and without HTTP/2.

use std::net::SocketAddr;

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;

/// Shows one certificate and signs with another one's key.
#[derive(Debug)]
struct Mismatched(Arc<rustls::sign::CertifiedKey>);

impl rustls::server::ResolvesServerCert for Mismatched {
    fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<rustls::sign::CertifiedKey>> {
        Some(self.0.clone())
    }
}

#[tokio::test]
async fn a_wrong_signature_tells_nothing_about_the_application() {
    let made = || rcgen::generate_simple_self_signed(vec!["nobody.example".to_owned()]).unwrap();
    let (shown, other) = (made(), made());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let der = rustls_pki_types::PrivatePkcs8KeyDer::from(other.signing_key.serialize_der());
    let key = provider.key_provider.load_private_key(der.into()).unwrap();
    let pair = Arc::new(rustls::sign::CertifiedKey::new(vec![shown.cert.der().clone()], key));
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Mismatched(pair)));
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let task = spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut tls = acceptor.accept(stream).await.expect("the signature is not looked at");
        let _ = tokio::io::AsyncReadExt::read(&mut tls, &mut [0; 4096]).await;
        let answer = http(200, "", "fine");
        let _ = tokio::io::AsyncWriteExt::write_all(&mut tls, &answer).await;
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut tls).await;
    });
    let served = probing(&http_get(port, ",\"scheme\": \"HTTPS\""), |_| {});
    assert_eq!(ask(&served, KUBELET).await.status, 200);
    task.await.unwrap();
}

/// A self-signed server that offers `alpn`; speaks HTTP/2 when that is chosen.
async fn tls_app(alpn: &[&[u8]]) -> (SocketAddr, JoinHandle<()>) {
    let key = rcgen::generate_simple_self_signed(vec!["nobody.example".to_owned()]).unwrap();
    let der = rustls_pki_types::PrivatePkcs8KeyDer::from(key.signing_key.serialize_der());
    let mut config =
        rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![key.cert.der().clone()], der.into())
            .unwrap();
    config.alpn_protocols = alpn.iter().map(|a| a.to_vec()).collect();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(stream) = acceptor.accept(stream).await else { continue };
            let (sni, alpn) = {
                let tls = stream.get_ref().1;
                (tls.server_name().map(str::to_owned), tls.alpn_protocol().map(<[u8]>::to_vec))
            };
            let alpn = alpn.map_or_else(|| "none".to_owned(), |a| String::from_utf8(a).unwrap());
            let service =
                hyper::service::service_fn(move |request: ::http::Request<hyper::body::Incoming>| {
                    let text = format!(
                        "{alpn} {:?} {sni:?} {}",
                        request.version(),
                        request.headers().contains_key("connection")
                    );
                    async move {
                        Ok::<_, std::convert::Infallible>(::http::Response::new(http_body_util::Full::new(
                            Bytes::from(text),
                        )))
                    }
                });
            let io = hyper_util::rt::TokioIo::new(stream);
            let h2 = io.inner().get_ref().1.alpn_protocol() == Some(b"h2");
            if h2 {
                let _ = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new())
                    .serve_connection(io, service)
                    .await;
            } else {
                let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
            }
        }
    });
    (addr, task)
}

#[tokio::test]
async fn https_takes_any_certificate_and_http2_where_it_is_offered() {
    for (alpn, http2, body) in [
        (&[][..], true, "none HTTP/1.1 None true"),
        (&[&b"http/1.1"[..]][..], true, "http/1.1 HTTP/1.1 None true"),
        (&[&b"h2"[..], b"http/1.1"][..], true, "h2 HTTP/2.0 None false"),
        (&[&b"h2"[..], b"http/1.1"][..], false, "none HTTP/1.1 None true"),
    ] {
        let (addr, task) = tls_app(alpn).await;
        let served = probing(&http_get(addr.port(), ", \"scheme\": \"HTTPS\""), |c| c.http2 = http2);
        let got = ask(&served, KUBELET).await;
        assert_eq!((got.status, got.text().as_str()), (200, body));
        task.abort();
    }
    let (addr, task) = tls_app(&[b"spdy"]).await;
    let served = probing(&http_get(addr.port(), ", \"scheme\": \"HTTPS\""), |_| {});
    assert_eq!(ask(&served, KUBELET).await.status, 500, "no protocol in common");
    let served =
        probing(&http_get(addr.port(), ", \"scheme\": \"HTTPS\""), |c| c.destination = "localhost".into());
    assert_eq!(ask(&served, KUBELET).await.status, 500);
    task.abort();
    let plain = Web::start(|_| http(200, "", "")).await;
    let served = probing(&http_get(plain.addr.port(), ", \"scheme\": \"HTTPS\""), |_| {});
    assert_eq!(ask(&served, KUBELET).await.status, 500);
}
