//! The aggregated discovery service: a stream is served from the folder's resources, or handed to a test.

pub mod delta;
mod handed;
mod request;
mod session;
pub mod sotw;

use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::sync::mpsc;

use self::session::Session;
use crate::auth::{Peer, authenticate};
use crate::fault::Fault;
use crate::grpc::{Code, Status};
use crate::record::{AdsOpened, AdsResponse, Event};
use crate::reply::{Gone, Reply, Requests, Spoil};
use crate::resources::View;
use crate::shared::{Command, Shared};
pub use crate::stream::{AdsStream, Ended, Responses};

/// The state-of-the-world method's path.
pub const SOTW: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
/// The incremental method's path.
pub const DELTA: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";

/// A response ready to go.
pub struct Answer {
    /// For the record.
    pub summary: AdsResponse,
    /// The message.
    pub message: Vec<u8>,
}

pub(crate) async fn serve(
    shared: &Shared,
    peer: &Peer,
    head: http::request::Parts,
    requests: Requests,
    mut reply: Reply,
    faults: Vec<Fault>,
    commands: mpsc::UnboundedSender<Command>,
) -> Result<(), Gone> {
    let stream = shared.next_stream.fetch_add(1, Ordering::Relaxed) + 1;
    let identity = authenticate(peer, &head.headers, &shared.trust_domain);
    let opened = AdsOpened {
        stream,
        connection: peer.connection,
        delta: head.uri.path() == DELTA,
        authority: head.uri.authority().map(ToString::to_string).unwrap_or_default(),
        headers: crate::shared::pairs(&head.headers),
        identity: identity.as_ref().ok().and_then(|names| names.first().cloned()),
    };
    shared.record.add(Event::AdsOpened(opened.clone()));
    let ended = |how: String| shared.record.add(Event::AdsEnded { stream, how });

    for fault in &faults {
        match fault {
            Fault::Delay(time) => tokio::time::sleep(*time).await,
            Fault::HalfOpen => {
                reply.closed().await;
                ended("the client gave up on the half-open stream".to_owned());
                return Ok(());
            }
            Fault::Refuse(code, message) => {
                let status = Status::new(*code, message.clone());
                ended(format!("{status:?}"));
                return reply.end(&status);
            }
            _ => {}
        }
    }
    if let Err(status) = admitted(shared).await {
        ended(format!("{status:?}"));
        return reply.end(&status);
    }
    // Without TLS istiod takes anybody on ADS.
    let must = shared.ads_auth.load(Ordering::Relaxed) && (peer.tls || shared.plaintext_auth);
    if let (true, Err(reason)) = (must, &identity) {
        tracing::info!(%reason, "stream refused");
        let status = Status::new(Code::Unauthenticated, "authentication failure");
        ended(format!("{status:?}"));
        return reply.end(&status);
    }
    reply.spoil(Spoil::from(&faults));
    if shared.eager_headers.load(Ordering::Relaxed) {
        reply.headers()?;
    }

    let taker = shared.takers.get();
    let result = match taker {
        Some(taker) => handed::carry(shared, opened, taker, requests, &mut reply, &commands).await,
        None => {
            let identities = if must { identity.ok() } else { None };
            let mut session = Session { shared, stream, identities, view: View::default(), node: None };
            session.run(opened.delta, requests, &mut reply).await
        }
    };
    match result {
        Ok(Some(status)) => {
            ended(format!("{status:?}"));
            reply.end(&status)
        }
        Ok(None) => {
            ended("reset by the script".to_owned());
            Ok(())
        }
        Err(gone) => {
            ended(gone.to_string());
            Err(gone)
        }
    }
}

/// Waits for the stream's turn; the status if there is none.
async fn admitted(shared: &Shared) -> Result<(), Status> {
    let turn = shared.admission.turn(Instant::now());
    let wait = turn.ok_or_else(|| Status::new(Code::ResourceExhausted, "request rate limit exceeded"))?;
    if !wait.is_zero() {
        tokio::time::sleep(wait).await;
    }
    Ok(())
}

/// Types in the order in which a change is pushed.
fn ordered<'a>(types: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut types: Vec<String> = types.cloned().collect();
    types.sort_by_cached_key(|type_url| (order(type_url), type_url.clone()));
    types
}

/// Istiod's order: what is referred to comes before what refers.
fn order(type_url: &str) -> usize {
    const ORDER: [&str; 5] = [
        crate::resources::CLUSTER,
        crate::resources::ENDPOINTS,
        crate::resources::LISTENER,
        crate::resources::ROUTES,
        crate::resources::SECRET,
    ];
    ORDER.iter().position(|known| *known == type_url).unwrap_or(ORDER.len())
}

/// A nonce nobody has seen.
fn nonce() -> String {
    format!("{:016x}", rand::random::<u64>())
}
