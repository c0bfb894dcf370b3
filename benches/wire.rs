//! The least that a relay can cost here: HTTP/2 from a unix socket to a TLS server, bodies passed through.
//!
//! Nothing is looked at, nothing is healed, no message is counted. It runs as a process of its own in the place of
//! an agent (`bench proxy …`, which is how agents are started), so that an agent's figures have a floor that was
//! measured on the same machine in the same run.

use std::io;
use std::path::Path;
use std::sync::Arc;

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpStream, UnixListener};
use tokio_rustls::TlsConnector;

/// As the agent's.
const WINDOW: u32 = 256 * 1024;

/// Runs in the working directory that an agent would be given.
pub(crate) fn run() -> io::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve())
}

#[expect(
    clippy::disallowed_methods,
    reason = "a measuring tool reads its own settings, and its tasks end with it"
)]
async fn serve() -> io::Result<()> {
    let config = std::env::var("PROXY_CONFIG").map_err(io::Error::other)?;
    let config: serde_json::Value = serde_json::from_str(&config).map_err(io::Error::other)?;
    let upstream: Arc<str> = config["discoveryAddress"].as_str().unwrap_or_default().into();
    let pem = std::fs::read("var/run/secrets/istio/root-cert.pem")?;
    let tls = TlsConnector::from(Arc::new(client(&pem)?));
    let listener = UnixListener::bind(Path::new("etc/istio/proxy/XDS"))?;
    loop {
        let (socket, _) = listener.accept().await?;
        let (upstream, tls) = (upstream.clone(), tls.clone());
        let service = service_fn(move |request| forward(upstream.clone(), tls.clone(), request));
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .serve_connection(TokioIo::new(socket), service);
        tokio::spawn(connection);
    }
}

fn client(pem: &[u8]) -> io::Result<rustls::ClientConfig> {
    use rustls_pki_types::pem::PemObject;
    let mut roots = rustls::RootCertStore::empty();
    let certs = rustls_pki_types::CertificateDer::pem_slice_iter(pem).filter_map(Result::ok);
    roots.add_parsable_certificates(certs);
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

#[expect(clippy::disallowed_methods, reason = "the connection's task ends with its process")]
async fn forward(
    upstream: Arc<str>,
    tls: TlsConnector,
    mut request: Request<Incoming>,
) -> io::Result<Response<Incoming>> {
    const NAME: &str = "istiod.istio-system.svc";
    let token = std::fs::read_to_string("var/run/secrets/tokens/istio-token")?;
    let tcp = TcpStream::connect(&*upstream).await?;
    tcp.set_nodelay(true)?;
    let name = NAME.try_into().map_err(io::Error::other)?;
    let io = TokioIo::new(tls.connect(name, tcp).await?);
    let (mut send, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .handshake(io)
        .await
        .map_err(io::Error::other)?;
    tokio::spawn(connection);
    let bearer = HeaderValue::try_from(format!("Bearer {token}")).map_err(io::Error::other)?;
    request.headers_mut().insert("authorization", bearer);
    request.headers_mut().insert("clusterid", HeaderValue::from_static(""));
    let uri = format!("https://{NAME}{}", request.uri().path());
    *request.uri_mut() = uri.parse().map_err(io::Error::other)?;
    send.send_request(request).await.map_err(io::Error::other)
}
