//! Writes to a leg within its flow control, with a watchdog: a leg on which nothing moves is noticed.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, SendStream};

use super::ended::Leg;
use super::server::Shared;

/// A leg that does not move for so long, although bytes wait to be written, is worth a warning (the Go
/// agent's figure for a slow write to Envoy).
const STALL_NOTICE: Duration = Duration::from_secs(10);

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
            self.stream.as_mut().send_data(piece, false).map_err(Broken::Gone)?;
        }
        Ok(())
    }

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
        let done = watched(self.shared, self.leg, "taken no byte although some wait", capacity).await;
        done.unwrap_or_else(|after| Err(Broken::Stalled(after)))
    }
}

// Waits for something that must move. A stall is counted and logged once; it ends the wait only if a
// limit is set.
pub(super) async fn watched<T>(
    shared: &Shared,
    leg: Leg,
    what: &str,
    wait: impl Future<Output = T>,
) -> Result<T, Duration> {
    let mut wait = pin!(wait);
    let limit = shared.config.stall;
    let notice = limit.map_or(STALL_NOTICE, |l| l.min(STALL_NOTICE));
    if let Ok(done) = tokio::time::timeout(notice, &mut wait).await {
        return Ok(done);
    }
    let began = tokio::time::Instant::now();
    let name = leg.name();
    shared.meters.stall(name);
    tracing::warn!(target: "xdsproxy", "for {notice:?} {name} has {what}; the stream goes on");
    let result = match limit {
        None => Ok(wait.await),
        Some(limit) => tokio::time::timeout(limit.saturating_sub(notice), wait).await.map_err(|_| limit),
    };
    if result.is_ok() {
        tracing::info!(target: "xdsproxy", "{name} moves again after {:?}", began.elapsed() + notice);
    }
    result
}
