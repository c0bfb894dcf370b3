//! The ADS server on the unix socket, and what its streams share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{Request, Response, StatusCode};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tonic::Status;

use super::hold::{Due, Hold};
use super::memory::Memory;
use super::meters::{self, Meters};
use super::own::{Own, Queue};
use super::protocol::Protocol;
use super::reply::Reply;
use super::state::{Snapshot, State};
use super::tap::{Convert, Tap};
use super::trouble::Troubles;
use super::upstream::{FRAME_BUDGET, Upstream};
use super::{Config, Parts, keepalive, protocol, reflection, session, trouble, types};
use crate::base::seldom::Seldom;
use crate::base::tasks::{Set, Stop, TaskResult};
use crate::base::uds;
use crate::istiod::auth::{CallHeaders, TokenSource, root_cause};
use crate::net::accept::{Acceptor, Came};
use crate::net::authority;
use crate::net::clients::{Client, Clients, HANDSHAKE};
use crate::net::grpc::{self, Refused};
use crate::net::io::Tracked;
use crate::trouble::Report;

/// Flow-control window towards Envoy, in bytes. Requests are small; large ones pass through in pieces.
const WINDOW: u32 = 64 * 1024;
/// Bytes of responses queued inside the HTTP/2 library at most.
const SEND_BUFFER: usize = 128 * 1024;
/// Largest header list accepted; a larger one ends its stream.
const HEADER_LIST: u32 = 384 * 1024;
/// Streams that stand side by side: each target of a proxyless client has one.
const SIDE_BY_SIDE: usize = 64;
/// How long streams may take to tell Envoy that the agent stops.
const GOODBYE: Duration = Duration::from_secs(1);
/// Whoever opens streams by the thousand must not fill the log with them.
static OVERLAPPING: Seldom = Seldom::new(60);

/// What all streams share.
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) upstream: Arc<dyn Upstream>,
    pub(super) tokens: Arc<dyn TokenSource>,
    pub(super) headers: CallHeaders,
    pub(super) taps: Vec<Arc<dyn Tap>>,
    pub(super) convert: Option<Arc<dyn Convert>>,
    pub(super) wake: watch::Receiver<u64>,
    pub(super) meters: Meters,
    pub(super) state: Arc<State>,
    /// The last good configuration, where it is kept.
    pub(super) memory: Option<Arc<Memory>>,
    pub(super) troubles: Troubles,
    /// The version Envoy last named for extension configs; outlives streams, as in the Go agent.
    pub(super) ecds_version: Mutex<String>,
    hold: Mutex<Hold>,
    // The newest report: `Some(None)` is healthy.
    health: Mutex<Option<Option<String>>>,
    // In the order in which they were opened.
    registered: Mutex<Vec<Registered>>,
    next_id: AtomicU64,
}

struct Registered {
    id: u64,
    protocol: Protocol,
    queue: Arc<Queue>,
    stop: Stop,
    // Of a client that is no Envoy, whose streams may stand side by side.
    proxyless: bool,
}

impl Shared {
    /// Notes a stream; gives its ID, its stop, and whether there is an older one.
    pub(super) fn register(&self, protocol: Protocol, queue: &Arc<Queue>, stop: &Stop) -> (u64, Stop, bool) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mine = stop.child_token();
        let stop = mine.clone();
        let new = Registered { id, protocol, queue: queue.clone(), stop, proxyless: false };
        let mut all = self.registered.lock().expect("no panic holds this lock");
        let overlaps = !all.is_empty();
        all.push(new);
        self.state.stream_opened(id, protocol);
        (id, mine, overlaps)
    }

    /// A stream turns out to be of a client that is no Envoy, or not. Envoy has one: the older ones are told
    /// to end.
    pub(super) fn settle(&self, id: u64, proxyless: bool) {
        let mut all = self.registered.lock().expect("no panic holds this lock");
        if proxyless {
            all.iter_mut().filter(|r| r.id == id).for_each(|r| r.proxyless = true);
            let mut open = all.iter().filter(|r| r.proxyless && !r.stop.is_cancelled());
            let oldest = open.next().filter(|_| open.count() >= SIDE_BY_SIDE);
            if let Some(oldest) = oldest {
                if let Some(more) = OVERLAPPING.may() {
                    tracing::warn!(target: "xdsproxy", "more than {SIDE_BY_SIDE} streams of proxyless clients: closing the oldest{more}");
                }
                oldest.stop.cancel();
            }
            return;
        }
        for older in all.iter().filter(|r| r.id < id && !r.proxyless && !r.stop.is_cancelled()) {
            if let Some(more) = OVERLAPPING.may() {
                tracing::warn!(target: "xdsproxy", "registered overlapping stream; closing previous{more}");
            }
            older.stop.cancel();
        }
    }

    /// Forgets a stream.
    pub(super) fn unregister(&self, id: u64) {
        let mut all = self.registered.lock().expect("no panic holds this lock");
        all.retain(|r| r.id != id);
        self.state.stream_closed(id);
        if let Some(left) = all.last().filter(|left| left.id < id) {
            self.state.stream_opened(left.id, left.protocol);
        }
    }

    /// Whether another stream is open beside this one, which has a way of its own.
    pub(super) fn has_others(&self, id: u64) -> bool {
        let all = self.registered.lock().expect("no panic holds this lock");
        all.iter().any(|r| r.id != id && !r.stop.is_cancelled())
    }

    /// Whether a stream that is opened now is held instead of failed.
    pub(super) fn holds(&self) -> bool {
        !self.config.hold.is_zero() && self.hold.lock().expect("no panic holds this lock").failures() > 0
    }

    pub(super) fn due(&self) -> Option<Due> {
        self.hold.lock().expect("no panic holds this lock").due()
    }

    /// Counts a failed attempt and gives the delay until the next.
    pub(super) fn failed(&self, status: &Status, report: Report) -> Duration {
        self.troubles.failed(root_cause(report, &*self.tokens));
        let (delay, failures) = {
            let mut hold = self.hold.lock().expect("no panic holds this lock");
            (hold.failed(status), hold.failures())
        };
        let next = u64::try_from(delay.as_millis()).ok();
        self.state.upstream_failed(failures, status.message().to_owned(), next);
        delay
    }

    /// Istiod's first message on a stream has come.
    pub(super) fn came_alive(&self) {
        self.hold.lock().expect("no panic holds this lock").reset();
        self.state.upstream_live();
        self.troubles.answered();
    }

    /// Istiod ended a stream in a way that trying again in silence does not mend.
    pub(super) fn answered_badly(&self, status: &Status) {
        self.troubles.failed(root_cause(trouble::ended(self.upstream.address(), status), &*self.tokens));
        self.hold.lock().expect("no panic holds this lock").reset();
        self.state.upstream_down(Some(status.message().to_owned()));
    }

    /// The agent's own requests, which follow Envoy's first one for listeners.
    pub(super) fn own(&self, protocol: Protocol) -> Vec<Own> {
        let of = |type_url| Own { type_url, frame: protocol.initial(type_url), health: false };
        let taps = self.taps.iter().map(|tap| of(tap.type_url()));
        taps.chain(self.last_health(protocol)).collect()
    }

    /// The newest health report, for a new stream.
    fn last_health(&self, protocol: Protocol) -> Option<Own> {
        let health = self.health.lock().expect("no panic holds this lock");
        health.as_ref().map(|unhealthy| report(protocol, unhealthy.as_deref()))
    }

    fn set_health(&self, unhealthy: Option<String>) {
        let all = self.registered.lock().expect("no panic holds this lock");
        // The workload's own, if it has one.
        if let Some(stream) = all.iter().rev().find(|r| !r.proxyless).or(all.last()) {
            stream.queue.put(report(stream.protocol, unhealthy.as_deref()));
        }
        *self.health.lock().expect("no panic holds this lock") = Some(unhealthy);
    }
}

fn report(protocol: Protocol, unhealthy: Option<&str>) -> Own {
    Own { type_url: types::HEALTH, frame: protocol.health(unhealthy), health: true }
}

/// The server.
pub struct Server(Arc<Shared>);

/// What other parts may ask and tell. Cheap to clone.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    /// How things stand, for `/debug/agentz`.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.0.state.snapshot()
    }

    /// The last good configuration for a successor in this process, where it is kept and whole.
    #[must_use]
    pub(crate) fn kept(&self) -> Option<Vec<u8>> {
        self.0.memory.as_ref()?.kept()
    }

    /// Reports the application's health to istiod: `None` is healthy. Kept, and repeated on each new
    /// stream.
    pub fn report_health(&self, unhealthy: Option<String>) {
        self.0.set_health(unhealthy);
    }
}

impl Server {
    /// Puts the parts together; nothing runs yet.
    #[must_use]
    pub fn new(config: Config, parts: Parts) -> Self {
        let meters = Meters::new(&parts.metrics);
        let state = Arc::new(State::new(parts.clock.clone(), parts.upstream.address().to_owned()));
        meters::export(&parts.metrics, &state);
        let memory = config.replay.clone().map(|of| {
            Arc::new(Memory::new(of, &parts.metrics, parts.clock.clone(), parts.trouble.sibling()))
        });
        Self(Arc::new(Shared {
            config,
            upstream: parts.upstream,
            tokens: parts.tokens,
            headers: parts.headers,
            taps: parts.taps,
            convert: parts.convert,
            wake: parts.wake,
            meters,
            state,
            memory,
            troubles: Troubles::new(parts.trouble),
            ecds_version: Mutex::default(),
            hold: Mutex::default(),
            health: Mutex::default(),
            registered: Mutex::default(),
            next_id: AtomicU64::new(1),
        }))
    }

    /// A handle for other parts.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle(self.0.clone())
    }

    /// What keeps the last good configuration, to be run until its stop; `None` where it is not kept. `owner` tells for
    /// whom it is: what is kept for another one is not used.
    #[must_use]
    pub fn keeper(&self, owner: String, stop: Stop) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.0.memory.clone().map(|memory| memory.keep(owner, stop))
    }

    /// Binds the socket of the configuration.
    ///
    /// # Errors
    /// When it cannot be bound; the error names the path.
    pub fn bind(&self) -> Result<uds::Bound, uds::Error> {
        uds::bind(&self.0.config.socket)
    }

    /// Serves until `stop`; then streams end and connections are closed.
    ///
    /// # Errors
    /// When the socket itself fails; the agent ends in order then.
    pub async fn serve(self, listener: UnixListener, stop: Stop) -> TaskResult {
        let mut connections = Set::new("xds connection");
        let clients = Clients::default();
        let mut acceptor = Acceptor::new("xds");
        loop {
            tokio::select! {
                came = acceptor.next(&listener) => match came {
                    Ok(Came::In(socket, _)) => {
                        if let Some(client) = clients.welcome(&socket) {
                            let work = connection(self.0.clone(), socket, client.clone(), stop.clone());
                            client.progress.served_by(connections.spawn(work));
                        }
                    }
                    Ok(Came::Last(socket)) => clients.refuse(socket),
                    Err(error) => return Err(format!("the XDS socket failed: {error}").into()),
                },
                () = connections.ended() => {}
                () = stop.cancelled() => break,
            }
        }
        let _ = tokio::time::timeout(GOODBYE * 2, connections.all_ended()).await;
        Ok(())
    }
}

// One connection: its HTTP/2 is driven here, its streams are tasks that end with it.
async fn connection(shared: Arc<Shared>, socket: UnixStream, client: Arc<Client>, stop: Stop) {
    let (io, reads) = Tracked::new(authority::Rewriter::new(socket));
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
        () = stop.cancelled() => return,
    };
    let mut http2 = match opened {
        Ok(Ok(http2)) => http2,
        Ok(Err(error)) => {
            tracing::debug!(target: "xdsproxy", "a client of the XDS socket does not speak HTTP/2: {error}");
            return;
        }
        Err(_) => return,
    };
    let mut streams = Set::new("xds stream");
    let ping = http2.ping_pong();
    let mut dead = std::pin::pin!(keepalive::watch(ping, &reads, shared.config.keepalive));
    loop {
        tokio::select! {
            biased;
            accepted = http2.accept() => match accepted {
                Some(Ok((request, respond))) => {
                    let (using, work) = (client.stream(), dispatch(shared.clone(), request, respond, stop.clone()));
                    streams.spawn(async move {
                        let _using = using;
                        work.await;
                    });
                }
                Some(Err(error)) => {
                    tracing::debug!(target: "xdsproxy", "a connection of the XDS socket ended: {error}");
                    break;
                }
                None => break,
            },
            () = streams.ended() => {}
            () = &mut dead => {
                tracing::warn!(target: "xdsproxy", "Envoy has not answered a ping for {:?}: closing its connection",
                    shared.config.keepalive.timeout);
                return;
            }
            () = stop.cancelled() => {
                let farewell = async {
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
                };
                let _ = tokio::time::timeout(GOODBYE, farewell).await;
                return;
            }
        }
    }
    // The connection is gone; its streams see that and end. They are joined so that their upstream
    // connections are closed in order.
    let _ = tokio::time::timeout(GOODBYE * 2, streams.all_ended()).await;
}

async fn dispatch(
    shared: Arc<Shared>,
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
    if let Some(protocol) = Protocol::of(path) {
        session::serve(shared, protocol, request.into_body(), respond, until, stop).await;
    } else if reflection::is(path) {
        reflection::serve(request.into_body(), respond, until, stop).await;
    } else {
        let serves = |service: &str| service == protocol::SERVICE || reflection::serves(service);
        Reply::new(respond).finish(&grpc::unknown(path, serves));
    }
}
