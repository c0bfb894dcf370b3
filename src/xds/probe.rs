//! Would istiod take a stream of ours? For a diagnosis, beside a relay or without one.
//!
//! Opens a stream as the relay does, token and headers included, and asks for nothing: istiod authenticates before
//! it reads the first request, so it refuses at once or is silent. Nothing is registered there by that. A ping tells
//! silence from a server that hangs.

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::FutureExt;
use h2::Ping;
use tokio::time::{Instant, sleep_until};
use tonic::Status;

use super::upstream::{self, Answer, Link, Upstream};
use super::{Protocol, end_status, trouble};
use crate::istiod::auth::{CallHeaders, TokenSource};

/// After the ping's answer istiod has so long to refuse; it does so within milliseconds.
const QUIET: Duration = Duration::from_millis(700);

/// A stream that was not refused.
#[derive(Debug)]
pub(crate) struct Taken {
    /// Who answered.
    pub peer: SocketAddr,
    /// How long the answer to a ping took.
    pub ping: Duration,
    /// The server's own time, if it said one (HTTP `Date`).
    pub date: Option<String>,
}

/// Why a stream cannot be had.
#[derive(Debug)]
pub(crate) enum Refused {
    /// It was opened, and ended with this.
    Ended(Status),
    /// No stream was opened.
    Unopened(Status),
    /// The server takes connections and answers no ping within the limit.
    Silent,
}

/// What to do about istiod's refusal; empty: nothing more than about any.
pub(crate) fn hint(status: &Status) -> &'static str {
    trouble::refusal_hint(status)
}

/// Opens a stream and waits for istiod's reaction, for `limit` at most.
///
/// # Errors
/// See [`Refused`].
pub(crate) async fn probe(
    upstream: &dyn Upstream,
    tokens: &dyn TokenSource,
    headers: &CallHeaders,
    limit: Duration,
) -> Result<Taken, Refused> {
    let end = Instant::now() + limit;
    let opened =
        tokio::time::timeout_at(end, upstream::open(upstream, tokens, headers, Protocol::Delta, &|_| {}))
            .await;
    let link = opened.map_err(|_| Refused::Silent)?.map_err(|e| Refused::Unopened(e.status))?;
    let Link { mut driver, sink: _sink, response, ping, peer, .. } = link;
    let date = Cell::new(None);
    let mut ended = std::pin::pin!(end_of(response, &date));
    let started = Instant::now();
    let pinged = async {
        match ping {
            Some(mut ping) => ping.ping(Ping::opaque()).await.map(drop),
            None => std::future::pending().await,
        }
    };
    let mut pinged = std::pin::pin!(pinged);
    let (mut answered, mut until) = (None, end);
    loop {
        tokio::select! {
            biased;
            status = &mut ended => return Err(Refused::Ended(said(status))),
            done = &mut pinged, if answered.is_none() => {
                done.map_err(|e| Refused::Ended(end_status::of_upstream(&e).0))?;
                answered = Some(started.elapsed());
                until = end.min(Instant::now() + QUIET);
            }
            closed = &mut driver => {
                // A status that came with the end of the connection says more than that.
                let status = match ((&mut ended).now_or_never(), closed) {
                    (Some(Ok(status)), _) => status,
                    (_, Err(e)) => said(Err(e)),
                    (_, Ok(())) => Status::unavailable("the server closed the connection"),
                };
                return Err(Refused::Ended(status));
            }
            () = sleep_until(until) => {
                let ping = answered.ok_or(Refused::Silent)?;
                return Ok(Taken { peer, ping, date: date.take() });
            }
        }
    }
}

fn said(status: Result<Status, h2::Error>) -> Status {
    status.unwrap_or_else(|e| end_status::of_upstream(&e).0)
}

/// How the server ends the stream; messages, if it sends any, are passed over.
async fn end_of(response: Answer, date: &Cell<Option<String>>) -> Result<Status, h2::Error> {
    let head = response.await?;
    let text = |name| head.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    date.set(text(http::header::DATE));
    if let Some(status) = end_status::of_trailers(head.headers()) {
        return Ok(status);
    }
    if head.status() != http::StatusCode::OK {
        return Ok(end_status::of_http(head.status(), text(http::header::CONTENT_TYPE).as_deref()));
    }
    let mut body = head.into_body();
    while let Some(chunk) = body.data().await {
        // What is not released stops the server soon enough.
        drop(chunk?);
    }
    let status = body.trailers().await?.as_ref().and_then(end_status::of_trailers);
    Ok(status.unwrap_or_else(|| Status::unknown("the stream ended without a status")))
}
