//! Two legs, two directions, one stream.
//!
//! [`exchange`] runs both directions of an open upstream stream as two futures of one task that know
//! nothing of each other's progress:
//!
//! * `down` takes istiod's bytes, judges each message ([`super::frames`]) and writes to Envoy. It alone
//!   writes downstream.
//! * `up` takes Envoy's bytes and the agent's own requests and writes to istiod. It alone writes upstream.
//!
//! **Why nothing can wedge.** The Go agent keeps an unbounded queue of requests, because with bounded
//! queues its response handler (wanting to enqueue an ACK) waited for its request sender, which waited
//! for istiod to read, which waited for the agent to take responses. Here the cycle is cut elsewhere:
//! the only thing `down` hands to `up` is the agent's own answers, through a queue whose `put` never waits
//! ([`super::own`]); everything else `down` waits for is Envoy reading, and everything `up` waits for is
//! istiod reading. Envoy's requests need no queue at all: while istiod does not read, they stay in Envoy
//! (HTTP/2 flow control), and responses go on flowing. So each direction stops only for its own reader,
//! and memory is bounded by the windows of both connections.
//!
//! **When one leg dies** the other is told at once, also when it is blocked: each side watches, besides
//! the bytes it moves, the reset of the stream that it reads from.

use std::pin::pin;
use std::time::Duration;

use tonic::Status;

use super::down::down;
use super::end_status::Class;
use super::ended::{Ended, Leg};
use super::inbox::{Inbox, UpEnd, up};
use super::keepalive;
use super::reply::Reply;
use super::stream::Stream;
use super::trouble;
use super::upstream::Link;
use crate::base::tasks::Stop;
use crate::net::grpc;

/// How long the reader's true status is waited for when the connection or the writer has failed already.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long the closing of a finished connection may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// Runs both directions until one leg ends, and closes the upstream connection.
pub(super) async fn exchange(
    stream: &Stream<'_>,
    inbox: &mut Inbox,
    reply: &mut Reply,
    link: Link,
    stop: &Stop,
) -> Ended {
    let Link { mut driver, sink, response, ping, reads, .. } = link;
    let ended = {
        let mut down = pin!(down(stream, reply, response));
        let mut up = pin!(up(stream, inbox, sink));
        let mut alive = pin!(keepalive::watch(ping, &reads, stream.shared.config.keepalive.upstream()));
        let mut settings = pin!(keepalive::first_word(&reads));
        let mut late = pin!(grpc::over(stream.until));
        let (mut driving, mut sending, mut speechless) = (true, true, true);
        let mut silent = pin!(tokio::time::sleep(trouble::SILENT));
        let mut settled = pin!(tokio::time::sleep(trouble::SETTLED));
        let (mut waits, mut young) = (true, true);
        // Set when the upstream has failed and only its reader may still know better.
        let mut verdict: Option<Ended> = None;
        let mut last_words = pin!(tokio::time::sleep(Duration::ZERO));
        loop {
            tokio::select! {
                biased;
                // First, so that everything the socket holds is moved in one go.
                result = &mut driver, if driving => {
                    driving = false;
                    let error = result.err();
                    verdict.get_or_insert_with(|| match &error {
                        Some(error) => Ended::istiod_failed(error),
                        None => Ended::istiod(Status::unavailable("error reading from server: EOF")),
                    });
                    last_words.as_mut().reset(tokio::time::Instant::now() + LAST_WORDS);
                }
                ended = &mut down => break ended,
                result = &mut up, if sending => match result {
                    UpEnd::Over(ended) => break ended,
                    UpEnd::Broken(error) => {
                        sending = false;
                        verdict.get_or_insert_with(|| Ended::istiod_failed(&error));
                        last_words.as_mut().reset(tokio::time::Instant::now() + LAST_WORDS);
                    }
                },
                () = &mut last_words, if verdict.is_some() => break verdict.take().expect("just seen"),
                () = &mut alive => break Ended::new(
                    Leg::Istiod,
                    Status::unavailable("keepalive ping failed to receive ACK within timeout"),
                    Class::Unexpected,
                ),
                heard = &mut settings, if speechless => {
                    speechless = false;
                    if !heard {
                        break Ended::new(
                            Leg::Istiod,
                            Status::unavailable("the server accepted the connection but does not speak HTTP/2"),
                            Class::Unexpected,
                        );
                    }
                }
                () = &mut silent, if waits => {
                    waits = stream.told_silent();
                    silent.as_mut().reset(tokio::time::Instant::now() + trouble::SILENT);
                }
                () = &mut settled, if young => {
                    young = false;
                    stream.settled();
                }
                () = &mut late => break Ended::envoy(grpc::exceeded()),
                () = stop.cancelled() => break Ended::new(Leg::Agent, Status::ok(""), Class::Expected),
            }
        }
    };
    // Dropping the stream's halves above has queued a reset (or the end was clean); the connection gets
    // a moment to say goodbye.
    let _ = tokio::time::timeout(FAREWELL, &mut driver).await;
    ended
}
