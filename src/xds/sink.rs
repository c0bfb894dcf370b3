//! Writes to a leg within its flow control, with a watchdog: a leg on which nothing moves is noticed.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, SendStream};
use tokio::time::Instant;

use super::ended::Leg;
use super::shared::Shared;
use crate::base::seldom::Seldom;

/// A leg that does not move for so long, although bytes wait to be written, is worth a warning (the Go
/// agent's figure for a slow write to Envoy).
const STALL_NOTICE: Duration = Duration::from_secs(10);

/// A client may read nothing on many streams, again and again.
static STALLS: Seldom = Seldom::new(60);
static MOVES: Seldom = Seldom::new(60);

/// What must move in that time at least: a reader that takes a byte now and then stands still.
const FLOOR: usize = 16 * 1024;

/// Why a write did not happen.
pub(super) enum Broken {
    Gone(h2::Error),
    Stalled(Duration),
}

/// Writes to one leg within its flow control, and notices when nothing moves.
pub(super) struct Sink<'a, S> {
    pub(super) stream: S,
    pub(super) leg: Leg,
    pub(super) shared: &'a Shared,
    pub(super) progress: Progress,
}

/// Of a leg, since [`FLOOR`] had moved last.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// For how long was waited.
    waited: Duration,
    /// Bytes that have moved meanwhile.
    pub(super) moved: usize,
    /// A stall was counted.
    noticed: bool,
}

impl<S: AsMut<SendStream<Bytes>>> Sink<'_, S> {
    pub(super) async fn send(&mut self, mut bytes: Bytes) -> Result<(), Broken> {
        while !bytes.is_empty() {
            let stream = self.stream.as_mut();
            stream.reserve_capacity(bytes.len());
            let room = match stream.capacity() {
                0 => self.room().await?,
                room => room,
            };
            let piece = bytes.split_to(room.min(bytes.len()));
            self.progress.moved += piece.len();
            self.stream.as_mut().send_data(piece, false).map_err(Broken::Gone)?;
        }
        Ok(())
    }

    // Waits for the reader. Only waiting counts, so that a large message to a slow reader is no stall.
    async fn room(&mut self) -> Result<usize, Broken> {
        let stream = self.stream.as_mut();
        let capacity = poll_fn(|cx| {
            loop {
                return match stream.poll_capacity(cx) {
                    Poll::Ready(Some(Ok(0))) => continue,
                    Poll::Ready(Some(Ok(room))) => Poll::Ready(Ok(room)),
                    Poll::Ready(Some(Err(error))) => Poll::Ready(Err(Broken::Gone(error))),
                    Poll::Ready(None) => Poll::Ready(Err(Broken::Gone(Reason::CANCEL.into()))),
                    Poll::Pending => Poll::Pending,
                };
            }
        });
        let what = "read nothing although data is pending";
        let done = self.progress.watched(self.shared, self.leg, what, capacity).await;
        done.unwrap_or_else(|limit| Err(Broken::Stalled(limit)))
    }
}

impl Progress {
    /// Waits for something that must move; an error once less than [`FLOOR`] has moved in all the time that is allowed.
    pub(super) async fn watched<T>(
        &mut self,
        shared: &Shared,
        leg: Leg,
        what: &str,
        wait: impl Future<Output = T>,
    ) -> Result<T, Duration> {
        let (limit, began) = (shared.config.stall, Instant::now());
        // A slow one may be waited for as long as it likes, in pieces.
        if self.moved >= FLOOR {
            *self = Self::default();
        }
        let left = limit.map(|limit| limit.saturating_sub(self.waited));
        let done = watched(shared, leg, what, left, &mut self.noticed, wait).await;
        self.waited += began.elapsed();
        done.map_err(|_| limit.unwrap_or_default())
    }
}

// Waits for something that must move, for `left` at most. A stall is counted and logged once; also one that ends the stream
// before that, unless a wait before this one was `noticed`.
pub(super) async fn watched<T>(
    shared: &Shared,
    leg: Leg,
    what: &str,
    left: Option<Duration>,
    noticed: &mut bool,
    wait: impl Future<Output = T>,
) -> Result<T, Duration> {
    let mut wait = pin!(wait);
    let notice = shared.config.stall.map_or(STALL_NOTICE, |l| l.min(STALL_NOTICE));
    let first = left.map_or(notice, |left| left.min(notice));
    let name = leg.name();
    match tokio::time::timeout(first, &mut wait).await {
        Ok(done) => return Ok(done),
        Err(_) if first < notice => {
            if !std::mem::replace(noticed, true) {
                shared.meters.stall(name);
                if let Some(more) = STALLS.may() {
                    tracing::warn!(target: "xdsproxy", "{name} has {what}; the stream ends{more}");
                }
            }
            return Err(first);
        }
        Err(_) => {}
    }
    let began = Instant::now();
    *noticed = true;
    shared.meters.stall(name);
    if let Some(more) = STALLS.may() {
        tracing::warn!(target: "xdsproxy", "for {notice:?} {name} has {what}; the stream goes on{more}");
    }
    let result = match left {
        None => Ok(wait.await),
        Some(left) => tokio::time::timeout(left.saturating_sub(notice), wait).await.map_err(|_| left),
    };
    if result.is_ok()
        && let Some(more) = MOVES.may()
    {
        tracing::info!(target: "xdsproxy", "{name} makes progress again after {:?}{more}", began.elapsed() + notice);
    }
    result
}
