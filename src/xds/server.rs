//! The ADS server on the unix socket: its connections, and whose stream is whose.

use std::future::poll_fn;
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{Request, Response, StatusCode};

use super::protocol::Protocol;
use super::reply::Reply;
use super::shared::Shared;
use super::state::Snapshot;
use super::{Config, Parts, keepalive, protocol, reflection, session};
use crate::base::error::chain;
use crate::base::seldom::Seldom;
use crate::base::tasks::{Set, Stop};
use crate::base::uds;
use crate::net::authority_rewriter::AuthorityRewriter;
use crate::net::clients::{Client, HANDSHAKE};
use crate::net::grpc::{self, Refused};
use crate::net::io::{Reads, Tracked, tracked};
use crate::net::served::{News, Serve, Socket};
use crate::net::unix;
use crate::trouble::{Kind, Report};

/// Flow-control window towards Envoy, in bytes. Requests are small; large ones pass through in pieces.
const WINDOW: u32 = 64 * 1024;
/// What small DATA frames of one connection that nobody has read yet may weigh together, where each weighs what it lacks
/// to 256 bytes. A window full of frames of 86 bytes stays below; Envoy's shortest request (a type, a version and a
/// nonce) is longer. A byte a frame, it is 160 kB of memory; above it the connection is ended.
const FRAME_BUDGET: usize = 128 * 1024;
/// Bytes of responses queued inside the HTTP/2 library at most.
const SEND_BUFFER: usize = 128 * 1024;
/// Largest header list accepted; a larger one ends its stream.
const HEADER_LIST: u32 = 384 * 1024;
/// Streams on the socket: Envoy has one, proxyless clients have 64, and those that are held or replaced come and go.
const STREAMS: usize = 2048;
/// How long streams may take to tell Envoy that the agent stops.
const GOODBYE: Duration = Duration::from_secs(1);
/// Whoever may remove the socket, or answers no ping, may do so without pause.
static SOCKET: Seldom = Seldom::new(60);
static SILENT: Seldom = Seldom::new(10);

/// The server.
pub struct Server(Arc<Shared>);

/// What other parts may ask and tell. Cheap to clone.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    /// How things stand, for `/debug/agentz`.
    #[must_use]
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.0.state.snapshot()
    }

    /// The token's file has changed: what was wrong with it may be over, though istiod, which is silent, has no part in that.
    pub(crate) async fn token_changed(&self) {
        self.0.tokens.look().await;
        if self.0.tokens.trouble().is_none() {
            self.0.troubles.token_is_good();
        }
    }

    /// The last good configuration for a successor in this process, where it is kept and whole.
    #[must_use]
    pub(crate) fn kept(&self) -> Option<Vec<u8>> {
        self.0.memory.as_ref()?.kept()
    }

    /// The extension configs of the last good configuration, as they came in responses; none where it is not kept.
    ///
    /// # Errors
    /// When they cannot be read.
    pub(crate) async fn extensions(&self) -> std::io::Result<Vec<Bytes>> {
        match &self.0.memory {
            Some(memory) => memory.clone().extensions().await,
            None => Ok(Vec::new()),
        }
    }

    /// What keeps the last good configuration.
    #[cfg(test)]
    pub(super) fn memory(&self) -> Option<Arc<super::memory::Memory>> {
        self.0.memory.clone()
    }

    /// What its streams share.
    #[cfg(test)]
    pub(super) fn shared(&self) -> Arc<Shared> {
        self.0.clone()
    }

    /// Whether a new Envoy would have to wait for its configuration: istiod has failed the workload last, which has no
    /// stream that lives, and nothing that could stand in is kept.
    #[must_use]
    pub(crate) fn is_away(&self) -> bool {
        let kept = || self.0.memory.as_ref().is_some_and(|memory| memory.is_whole());
        self.0.has_failed() && !self.0.is_live() && !kept()
    }

    /// Reports the application's health to istiod: `None` is healthy. Kept, and repeated on each new
    /// stream.
    pub(crate) fn report_health(&self, unhealthy: Option<String>) {
        self.0.set_health(unhealthy);
    }
}

impl Server {
    /// Puts the parts together; nothing runs yet.
    #[must_use]
    pub fn new(config: Config, parts: Parts) -> Self {
        Self(Arc::new(Shared::new(config, parts)))
    }

    /// A handle for other parts.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle(self.0.clone())
    }

    /// What keeps the last good configuration, to be run until its stop; `None` where it is not kept. `owner` tells for
    /// whom it is: what is kept for another one is not used.
    #[must_use]
    pub(crate) fn keeper<O: Future<Output = String> + Send>(
        &self,
        owner: O,
        stop: Stop,
    ) -> Option<impl Future<Output = ()> + Send + use<O>> {
        let memory = self.0.memory.clone()?;
        Some(async move { memory.keep(owner.await, stop).await })
    }

    /// Gives memory back when configuration has passed, until its stop.
    pub(crate) fn tidy(&self, stop: Stop) -> impl Future<Output = ()> + Send + use<> {
        let shared = self.0.clone();
        async move { shared.passing.give_back(stop).await }
    }

    /// Binds the socket of the configuration.
    ///
    /// # Errors
    /// When it cannot be bound; the error names the path.
    pub fn bind(&self) -> Result<uds::Bound, uds::Error> {
        uds::bind(&self.0.config.socket)
    }

    /// Serves until `stop`; then streams end and connections are closed. A socket that is missing is bound again.
    pub async fn serve(self, bound: uds::Bound, stop: Stop) {
        let (path, watches) = (self.0.config.socket.clone(), self.0.config.watches.clone());
        let one = One { shared: self.0, stop: stop.clone() };
        let socket = Socket::new(one, (path, uds::SHARED), &watches, STREAMS, ["xds", "xds connection"]);
        socket.run(Some(bound), &stop, GOODBYE * 2).await;
    }
}

struct One {
    shared: Arc<Shared>,
    stop: Stop,
}

impl Serve for One {
    fn connection(&self, io: unix::Stream, client: Arc<Client>) -> impl Future<Output = ()> + Send + 'static {
        connection(self.shared.clone(), io, client, self.stop.clone())
    }

    fn tell(&self, path: &Path, news: &News) {
        let trouble = || self.shared.socket_trouble.lock().expect("no panic holds this lock");
        match news {
            News::Unbound(error) => {
                let kind = Kind::of_chain(error).unwrap_or(Kind::SocketFolder);
                let report =
                    Report::new(kind, format!("the socket of Envoy's configuration: {}", chain(error)));
                trouble().report(report.about(path.display().to_string()));
            }
            News::Listening => {
                if let Some(more) = SOCKET.may() {
                    tracing::info!(target: "xdsproxy", "{}{more}", news.of(path));
                }
                trouble().end();
            }
            _ => {
                if let Some(more) = SOCKET.may() {
                    tracing::warn!(target: "xdsproxy", "{}{more}", news.of(path));
                }
            }
        }
    }
}

// HTTP/2 as it is spoken on the socket.
type Http2 = h2::server::Connection<Tracked<AuthorityRewriter<unix::Stream>>, Bytes>;

// One connection: its HTTP/2 is driven here, its streams are tasks that end with it.
async fn connection(shared: Arc<Shared>, socket: unix::Stream, client: Arc<Client>, stop: Stop) {
    let Some((mut http2, reads)) = handshake(&shared, socket, &stop).await else { return };
    let mut streams = Set::new("xds stream");
    let ping = http2.ping_pong();
    let mut dead = std::pin::pin!(keepalive::watch(ping, &reads, shared.config.keepalive.downstream()));
    'open: loop {
        tokio::select! {
            biased;
            // First: each call takes so much of a turn that those which ended would never be joined, and held.
            () = streams.ended() => {}
            accepted = http2.accept() => {
                // A turn that is used up reads no more, but what it has read is begun: calls left behind would be held,
                // and the next turn reads before it begins one.
                let mut next = Poll::Ready(accepted);
                while let Poll::Ready(call) = next {
                    match call {
                        Some(Ok((request, respond))) => begin(&shared, &client, &mut streams, request, respond, &stop),
                        Some(Err(error)) => {
                            tracing::debug!(target: "xdsproxy", "a connection of the XDS socket ended: {error}");
                            break 'open;
                        }
                        None => break 'open,
                    }
                    next = poll_fn(|cx| Poll::Ready(http2.poll_accept(cx))).await;
                }
            }
            () = &mut dead => {
                if let Some(more) = SILENT.may() {
                    tracing::warn!(target: "xdsproxy", "Envoy has not answered a ping for {:?}: closing its \
                        connection{more}", shared.config.keepalive.downstream().timeout);
                }
                return;
            }
            () = stop.cancelled() => {
                let _ = tokio::time::timeout(GOODBYE, farewell(&mut http2, &mut streams)).await;
                return;
            }
        }
    }
    // The connection is gone; its streams see that and end. They are joined so that their upstream
    // connections are closed in order.
    let _ = tokio::time::timeout(GOODBYE * 2, streams.all_ended()).await;
}

// One call: a stream of its own, as far as its client may have another.
fn begin(
    shared: &Arc<Shared>,
    client: &Arc<Client>,
    streams: &mut Set,
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    stop: &Stop,
) {
    let using = match client.stream() {
        Ok(using) => using,
        Err(status) => return Reply::new(respond).finish(&status),
    };
    let work = dispatch(shared.clone(), client.own, request, respond, stop.clone());
    streams.spawn(async move {
        let _using = using;
        work.await;
    });
}

// None where the client does not speak HTTP/2, or the agent stops before it does.
async fn handshake(shared: &Shared, socket: unix::Stream, stop: &Stop) -> Option<(Http2, Reads)> {
    let (io, reads) = tracked(AuthorityRewriter::new(socket));
    let handshake = h2::server::Builder::new()
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_concurrent_streams(shared.config.max_streams)
        .max_send_buffer_size(SEND_BUFFER)
        .max_header_list_size(HEADER_LIST)
        .data_frame_budget(FRAME_BUDGET)
        .handshake::<_, Bytes>(io);
    let opened = tokio::select! {
        opened = tokio::time::timeout(HANDSHAKE, handshake) => opened,
        () = stop.cancelled() => return None,
    };
    match opened {
        Ok(Ok(http2)) => Some((http2, reads)),
        Ok(Err(error)) => {
            tracing::debug!(target: "xdsproxy", "a client of the XDS socket does not speak HTTP/2: {error}");
            None
        }
        Err(_) => None,
    }
}

// Streams end by themselves when the agent stops; once the last one has, so does the connection.
async fn farewell(http2: &mut Http2, streams: &mut Set) {
    let mut closing = false;
    loop {
        if streams.is_empty() && !closing {
            closing = true;
            http2.graceful_shutdown();
        }
        tokio::select! {
            more = http2.accept() => if !matches!(more, Some(Ok(_))) { break },
            () = streams.ended() => {}
        }
    }
}

async fn dispatch(
    shared: Arc<Shared>,
    own: Option<u64>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    stop: Stop,
) {
    let plain = |status: StatusCode| {
        let mut response = Response::new(());
        *response.status_mut() = status;
        response
    };
    let until = match grpc::admitted(request.method(), request.headers()) {
        Ok(until) => until,
        Err(Refused::Http(status)) => {
            let _ = respond.send_response(plain(status), true);
            return;
        }
        Err(Refused::Grpc(status)) => return Reply::new(respond).finish(&status),
    };
    let path = request.uri().path();
    // On the heap: a call that is refused takes no room for a session.
    if let Some(protocol) = Protocol::of(path) {
        Box::pin(session::serve(shared, protocol, own, request.into_body(), respond, until, stop)).await;
    } else if reflection::is(path) {
        Box::pin(reflection::serve(request.into_body(), respond, until, stop)).await;
    } else {
        let serves = |service: &str| service == protocol::SERVICE || reflection::serves(service);
        Reply::new(respond).finish(&grpc::unknown(path, serves));
    }
}
