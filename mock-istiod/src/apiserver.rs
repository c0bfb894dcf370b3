//! A Kubernetes API server as far as secrets of one namespace go: list and watch by a field selector, with TLS, a
//! bearer token, resource versions and bookmarks, and with what goes wrong there.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::server::ServerConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::pki::Authority;

/// What happens to a request in place of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApiFault {
    /// This status.
    Status(u16),
    /// No answer.
    Hang,
    /// Something that is no JSON.
    Garbage,
    /// A watch: half of its first event, then the end of the connection.
    Cut,
    /// A watch: an event that says that its version is known no more.
    Gone,
    /// The answer comes in pieces of some bytes, with a pause before each.
    Slow,
}

#[derive(Default)]
struct State {
    version: u64,
    secrets: BTreeMap<String, (u64, Value)>,
    /// Version, kind, name, object.
    events: Vec<(u64, &'static str, String, Value)>,
    token: String,
    /// How often the server was restarted.
    restarts: u64,
    faults: VecDeque<ApiFault>,
    asked: Vec<String>,
}

struct Shared {
    state: Mutex<State>,
    changed: watch::Sender<u64>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The server; it ends when dropped.
pub struct ApiServer {
    shared: Arc<Shared>,
    port: u16,
    _tasks: JoinSet<()>,
}

impl ApiServer {
    /// Serves on a free port of localhost with a certificate of `authority` for that name.
    ///
    /// # Panics
    /// When there is no port, or the certificate cannot be used.
    pub async fn start(authority: &Authority, token: &str) -> Self {
        let (chain, key) = authority.server(&["localhost".to_owned()]);
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has both versions")
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .expect("our own certificate");
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let state = State { version: 1, token: token.to_owned(), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: watch::channel(1).0 });
        let mut tasks = JoinSet::new();
        let served = shared.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let (acceptor, shared) = (acceptor.clone(), served.clone());
                connections.spawn(async move {
                    if let Ok(stream) = acceptor.accept(socket).await {
                        let _ = serve(stream, &shared).await;
                    }
                });
            }
        });
        Self { shared, port, _tasks: tasks }
    }

    /// Where it listens.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Makes or changes a secret.
    pub fn put(&self, name: &str, fields: &[(&str, &[u8])]) {
        let data: serde_json::Map<String, Value> = fields
            .iter()
            .map(|(field, value)| ((*field).to_owned(), STANDARD.encode(value).into()))
            .collect();
        let mut state = self.shared.state();
        state.version += 1;
        let version = state.version;
        let object = json!({
            "kind": "Secret",
            "metadata": { "name": name, "resourceVersion": version.to_string() },
            "data": data,
        });
        let known = state.secrets.insert(name.to_owned(), (version, object.clone())).is_some();
        let kind = if known { "MODIFIED" } else { "ADDED" };
        state.events.push((version, kind, name.to_owned(), object));
        drop(state);
        self.shared.changed.send_replace(version);
    }

    /// Deletes a secret.
    pub fn delete(&self, name: &str) {
        let mut state = self.shared.state();
        if let Some((_, mut object)) = state.secrets.remove(name) {
            state.version += 1;
            let version = state.version;
            object["metadata"]["resourceVersion"] = version.to_string().into();
            state.events.push((version, "DELETED", name.to_owned(), object));
            drop(state);
            self.shared.changed.send_replace(version);
        }
    }

    /// What happens to the next requests, in this order.
    pub fn next(&self, faults: impl IntoIterator<Item = ApiFault>) {
        self.shared.state().faults.extend(faults);
    }

    /// How many faults are still to come.
    #[must_use]
    pub fn faults_left(&self) -> usize {
        self.shared.state().faults.len()
    }

    /// From now on only this token is good.
    pub fn rotate(&self, token: &str) {
        token.clone_into(&mut self.shared.state().token);
    }

    /// Ends every watch, as a server that restarts.
    pub fn restart(&self) {
        let mut state = self.shared.state();
        state.restarts += 1;
        let version = state.version;
        drop(state);
        self.shared.changed.send_replace(version);
    }

    /// The version of all secrets together.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.shared.state().version
    }

    /// How often secrets were listed.
    #[must_use]
    pub fn lists(&self) -> usize {
        self.shared.state().asked.iter().filter(|target| !target.contains("watch=true")).count()
    }

    /// The targets that were asked for.
    #[must_use]
    pub fn asked(&self) -> Vec<String> {
        self.shared.state().asked.clone()
    }
}

/// One request: whom it is of, and what it asks for.
struct Request {
    target: String,
    bearer: Option<String>,
}

impl Request {
    /// None where the client leaves before it has said it.
    async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            if head.len() > 64 << 10 || stream.read_buf(&mut head).await? == 0 {
                return Ok(None);
            }
        }
        let head = String::from_utf8_lossy(&head);
        let target = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let bearer = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("authorization").then(|| value.trim().to_owned())
        });
        Ok(Some(Self { target, bearer }))
    }

    fn parameter(&self, name: &str) -> Option<&str> {
        let query = self.target.split_once('?').map_or("", |(_, query)| query);
        query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }

    /// The secret that it is about.
    fn name(&self) -> &str {
        let selector = self.parameter("fieldSelector").unwrap_or_default();
        selector.strip_prefix("metadata.name%3D").unwrap_or_default()
    }
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, shared: &Shared) -> io::Result<()> {
    let Some(request) = Request::read(&mut stream).await? else { return Ok(()) };
    let (fault, authorized) = {
        let mut state = shared.state();
        state.asked.push(request.target.clone());
        let authorized = request.bearer == Some(format!("Bearer {}", state.token));
        (state.faults.pop_front(), authorized)
    };
    match fault {
        Some(ApiFault::Status(status)) => return answer(&mut stream, status, b"{\"kind\":\"Status\"}").await,
        Some(ApiFault::Hang) => std::future::pending().await,
        Some(ApiFault::Garbage) => return answer(&mut stream, 200, b"<html>\n").await,
        _ => {}
    }
    if !authorized {
        return answer(&mut stream, 401, b"{}").await;
    }
    if request.parameter("watch").is_none() {
        return list(&mut stream, shared, request.name(), fault).await;
    }
    let from = request.parameter("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or(0);
    follow(&mut stream, shared, request.name(), from, fault).await
}

async fn list<S>(stream: &mut S, shared: &Shared, name: &str, fault: Option<ApiFault>) -> io::Result<()>
where
    S: AsyncWrite + Unpin,
{
    let body = {
        let state = shared.state();
        let items: Vec<&Value> = state.secrets.get(name).map(|(_, object)| object).into_iter().collect();
        json!({ "metadata": { "resourceVersion": state.version.to_string() }, "items": items }).to_string()
    };
    if fault == Some(ApiFault::Slow) {
        drip(stream, head(200, body.len()).as_bytes()).await?;
        return drip(stream, body.as_bytes()).await;
    }
    answer(stream, 200, body.as_bytes()).await
}

/// A watch: what happens to the secret after version `from`, and a bookmark for every version.
async fn follow<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    shared: &Shared,
    name: &str,
    mut from: u64,
    fault: Option<ApiFault>,
) -> io::Result<()> {
    let mut changed = shared.changed.subscribe();
    changed.borrow_and_update();
    let restarts = shared.state().restarts;
    stream
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
        .await?;
    if fault == Some(ApiFault::Gone) {
        return event(stream, &json!({ "type": "ERROR", "object": { "kind": "Status", "code": 410 } })).await;
    }
    loop {
        let (due, version): (Vec<_>, u64) = {
            let state = shared.state();
            let due = state.events.iter().filter(|(version, _, of, _)| *version > from && of == name);
            (due.cloned().collect(), state.version)
        };
        for (_, kind, _, object) in due {
            let text = json!({ "type": kind, "object": object }).to_string();
            if fault == Some(ApiFault::Cut) {
                stream.write_all(&text.as_bytes()[..text.len() / 2]).await?;
                return stream.flush().await;
            }
            if fault == Some(ApiFault::Slow) {
                drip(stream, text.as_bytes()).await?;
            } else {
                stream.write_all(text.as_bytes()).await?;
            }
            stream.write_all(b"\n").await?;
        }
        from = version;
        let bookmark = json!({ "metadata": { "resourceVersion": version.to_string() } });
        event(stream, &json!({ "type": "BOOKMARK", "object": bookmark })).await?;
        let mut byte = [0; 1];
        tokio::select! {
            news = changed.changed() => if news.is_err() || shared.state().restarts != restarts { return Ok(()) },
            // The client has gone.
            _ = stream.read(&mut byte) => return Ok(()),
            () = tokio::time::sleep(Duration::from_secs(300)) => return Ok(()),
        }
    }
}

/// Slowly, in about two dozen pieces.
async fn drip<S: AsyncWrite + Unpin>(stream: &mut S, bytes: &[u8]) -> io::Result<()> {
    for piece in bytes.chunks(bytes.len() / 24 + 1) {
        stream.write_all(piece).await?;
        stream.flush().await?;
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    Ok(())
}

async fn event<S: AsyncWrite + Unpin>(stream: &mut S, event: &Value) -> io::Result<()> {
    stream.write_all(format!("{event}\n").as_bytes()).await?;
    stream.flush().await
}

async fn answer<S: AsyncWrite + Unpin>(stream: &mut S, status: u16, body: &[u8]) -> io::Result<()> {
    stream.write_all(head(status, body.len()).as_bytes()).await?;
    stream.write_all(body).await?;
    stream.flush().await?;
    stream.shutdown().await
}

fn head(status: u16, length: usize) -> String {
    format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n")
}
