//! The listener, its connections, and which service a call belongs to.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ads::{DELTA, SOTW};
use crate::auth::Peer;
use crate::fault::Fault;
use crate::google::Form;
use crate::grpc::{Code, Status};
use crate::pki::names;
use crate::record::{Connected, Event};
use crate::reply::{Reply, Requests};
use crate::sever::{Sever, Severable};
use crate::shared::{Command, Shared};

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
