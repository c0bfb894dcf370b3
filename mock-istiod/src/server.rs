//! The listener, its connections, and which service a call belongs to.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use http::{HeaderMap, StatusCode};
use rustls::RootCertStore;
use rustls::server::{NoServerSessionStorage, ServerConfig, WebPkiClientVerifier};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ads::{AdsStream, DELTA, SOTW};
use crate::auth::Peer;
use crate::fault::{Fault, Script};
use crate::google::Form;
use crate::grpc::{Code, Status};
use crate::pki::{Authority, names};
use crate::record::{Connected, Event, Record};
use crate::reply::{Reply, Requests};
use crate::resources::Store;
use crate::sever::{Sever, Severable};

/// A value that a test may change while the server runs.
#[derive(Debug, Default)]
pub(crate) struct Setting<T>(Mutex<T>);

impl<T: Clone> Setting<T> {
    pub(crate) fn get(&self) -> T {
        self.0.lock().expect("no panic holds this lock").clone()
    }

    pub(crate) fn set(&self, value: T) {
        *self.0.lock().expect("no panic holds this lock") = value;
    }
}

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) record: Record,
    pub(crate) ca: Script,
    pub(crate) ads: Script,
    pub(crate) connections: Script,
    pub(crate) resources: Store,
    pub(crate) trust_domain: String,
    pub(crate) dns_names: Vec<String>,
    pub(crate) plaintext: bool,
    pub(crate) plaintext_auth: bool,
    pub(crate) ads_auth: AtomicBool,
    pub(crate) eager_headers: AtomicBool,
    pub(crate) ttl: Setting<Option<Duration>>,
    /// Where streams go when a test plays the server itself.
    pub(crate) takers: Setting<Option<mpsc::UnboundedSender<AdsStream>>>,
    pub(crate) pki: RwLock<Pki>,
    pub(crate) next_connection: AtomicU64,
    pub(crate) next_stream: AtomicU64,
}

pub(crate) struct Pki {
    pub(crate) authority: Authority,
    /// What workloads are told to trust: more than one root during a rotation.
    pub(crate) bundle: String,
    pub(crate) tls: Arc<ServerConfig>,
}

impl Shared {
    pub(crate) fn authority(&self) -> Authority {
        self.pki.read().expect("no panic holds this lock").authority.clone()
    }

    pub(crate) fn root_bundle(&self) -> String {
        self.pki.read().expect("no panic holds this lock").bundle.clone()
    }

    fn tls(&self) -> Arc<ServerConfig> {
        self.pki.read().expect("no panic holds this lock").tls.clone()
    }
}

/// A TLS configuration with a fresh certificate of `authority`; client certificates of these roots are verified
/// when they are shown.
pub(crate) fn tls_config(authority: &Authority, trusted: &[&Authority], dns: &[String]) -> Arc<ServerConfig> {
    tls_config_of(authority.server(dns), trusted)
}

/// The same with this certificate.
pub(crate) fn tls_config_of(
    (chain, key): (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
    trusted: &[&Authority],
) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut roots = RootCertStore::empty();
    for trusted in trusted {
        roots.add(trusted.root_der()).expect("our own root");
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .expect("there is a root");
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has the default versions")
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .expect("our own chain and key");
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Arc::new(config)
}

/// Takes connections until `stop`.
pub(crate) async fn accept(
    shared: Arc<Shared>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((socket, peer)) => {
                let task = stop.clone().run_until_cancelled_owned(handshake(shared.clone(), socket, peer));
                tasks.spawn(task);
            }
            Err(error) => {
                // Out of descriptors, most likely: the next attempt would fail at once, so give others time.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn handshake(shared: Arc<Shared>, socket: TcpStream, from: SocketAddr) {
    let connection = shared.next_connection.fetch_add(1, Ordering::Relaxed) + 1;
    let _ = socket.set_nodelay(true);
    for fault in shared.connections.take() {
        match fault {
            Fault::Delay(time) => tokio::time::sleep(time).await,
            Fault::HalfOpen => return hold(socket).await,
            Fault::Drop => return,
            other => tracing::warn!(?other, "this fault has no meaning for a connection"),
        }
    }
    let mut connected = Connected {
        connection,
        peer: from.to_string(),
        sni: None,
        alpn: None,
        tls: None,
        client_names: Vec::new(),
    };
    if shared.plaintext {
        return serve(shared, socket, connected).await;
    }
    let failed = |error: String| shared.record.add(Event::HandshakeFailed { connection, error });
    let stream = match TlsAcceptor::from(shared.tls()).accept(socket).await {
        Ok(stream) => stream,
        Err(error) => return failed(error.to_string()),
    };
    let (_, session) = stream.get_ref();
    connected.sni = session.server_name().map(ToOwned::to_owned);
    connected.alpn = session.alpn_protocol().map(|alpn| String::from_utf8_lossy(alpn).into_owned());
    connected.tls = session.protocol_version().map(|version| format!("{version:?}"));
    if let Some(leaf) = session.peer_certificates().and_then(<[_]>::first) {
        connected.client_names = names(leaf).unwrap_or_default();
        if connected.client_names.len() != 1 {
            return failed(format!(
                "the client's certificate has {} URI names",
                connected.client_names.len()
            ));
        }
    }
    serve(shared, stream, connected).await;
}

/// Keeps a connection open and silent until the other side gives up or the server goes down.
async fn hold(socket: TcpStream) {
    let mut sink = [0; 1024];
    loop {
        match socket.readable().await.and_then(|()| match socket.try_read(&mut sink) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(1),
            other => other,
        }) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
}

/// What a call may do to its connection.
pub(crate) enum Command {
    GoAway,
    Drop,
}

async fn serve<T>(shared: Arc<Shared>, io: T, connected: Connected)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let connection = connected.connection;
    let peer =
        Arc::new(Peer { connection, tls: connected.tls.is_some(), names: connected.client_names.clone() });
    shared.record.add(Event::Connected(connected));
    let error = calls(&shared, io, &peer).await.err().map(|error| error.to_string());
    shared.record.add(Event::Disconnected { connection, error });
}

async fn calls<T>(shared: &Arc<Shared>, io: T, peer: &Arc<Peer>) -> Result<(), h2::Error>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let (io, sever) = Severable::new(io);
    let mut connection = h2::server::Builder::new()
        // istiod's windows are the Go library's, which grow; one size that never stands in the way is enough.
        .initial_window_size(1 << 20)
        .initial_connection_window_size(1 << 22)
        // istiod's own limit.
        .max_concurrent_streams(100_000)
        .max_send_buffer_size(1 << 20)
        .handshake(io)
        .await?;
    let (commands, mut commanded) = mpsc::unbounded_channel();
    // Dropped with this future, and with it every call of the connection.
    let mut running = tokio::task::JoinSet::new();
    loop {
        let (request, respond) = tokio::select! {
            call = connection.accept() => match call {
                Some(call) => call?,
                None => return Ok(()),
            },
            Some(command) = commanded.recv() => match command {
                Command::GoAway => {
                    connection.graceful_shutdown();
                    continue;
                }
                Command::Drop => return Ok(()),
            },
            Some(_) = running.join_next() => continue,
        };
        let (head, body) = request.into_parts();
        let (requests, reply) = (Requests::new(body), Reply::new(respond));
        let (shared, peer) = (shared.clone(), peer.clone());
        running.spawn(call(shared, peer, head, requests, reply, commands.clone(), sever.clone()));
    }
}

async fn call(
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    head: http::request::Parts,
    requests: Requests,
    reply: Reply,
    commands: mpsc::UnboundedSender<Command>,
    sever: Sever,
) {
    let path = head.uri.path().to_owned();
    let form = Form::of(&path);
    let script = match path.as_str() {
        _ if form.is_some() => &shared.ca,
        SOTW | DELTA => &shared.ads,
        _ => {
            shared.record.add(Event::UnknownCall { path });
            let ours = head
                .headers
                .get("content-type")
                .is_some_and(|t| t.as_bytes().starts_with(b"application/grpc"));
            let _ = if ours {
                reply.end(&Status::new(Code::Unimplemented, "unknown service"))
            } else {
                reply.http(StatusCode::NOT_FOUND)
            };
            return;
        }
    };
    let faults = script.take();
    for fault in &faults {
        let command = match fault {
            Fault::GoAway => Command::GoAway,
            Fault::Drop => Command::Drop,
            Fault::Sever(after) => {
                // Here and not by a command, which would race with the answer.
                sever.after(*after);
                continue;
            }
            _ => continue,
        };
        let _ = commands.send(command);
    }
    let ended = match form {
        Some(form) => crate::ca::serve(&shared, form, &peer, head, requests, reply, faults).await,
        None => crate::ads::serve(&shared, &peer, head, requests, reply, faults, commands).await,
    };
    if let Err(error) = ended {
        tracing::debug!(path, %error, "call ended early");
    }
}

/// Headers in order, values that are not text escaped.
pub(crate) fn pairs(headers: &HeaderMap) -> Vec<(String, String)> {
    let text = |value: &http::HeaderValue| match value.to_str() {
        Ok(text) => text.to_owned(),
        Err(_) => value.as_bytes().escape_ascii().to_string(),
    };
    headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}
