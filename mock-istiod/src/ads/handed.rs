//! A stream in a test's hands: two channels in the place of a server.

use std::convert::Infallible;

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse};
use h2::Reason;
use prost::Message;
use tokio::sync::mpsc;

use super::request;
use crate::grpc::{Code, Status, frame};
use crate::record::{AdsOpened, AdsRequest, Event};
use crate::reply::{Gone, Reply, Requests};
use crate::server::{Command, Shared};

/// A stream that a test serves itself.
#[derive(Debug)]
pub struct AdsStream {
    /// How it was opened.
    pub opened: AdsOpened,
    /// Its requests in order. The channel holds one: a test that does not read makes the client's sending block,
    /// as a busy istiod would.
    pub requests: mpsc::Receiver<AdsRequest>,
    /// What goes back. Dropping it ends the stream with OK.
    pub responses: Responses,
}

/// The writing half of a stream in a test's hands.
#[derive(Debug, Clone)]
pub struct Responses(mpsc::Sender<Out>);

#[derive(Debug)]
enum Out {
    Headers,
    Bytes(Bytes),
    End(Status),
    Reset(u32),
    GoAway,
    Drop,
}

/// The stream is gone.
#[derive(Debug, thiserror::Error)]
#[error("the stream has ended")]
pub struct Ended;

impl Responses {
    async fn send(&self, out: Out) -> Result<(), Ended> {
        self.0.send(out).await.map_err(|_| Ended)
    }

    /// Sends the response headers now, before any response.
    ///
    /// # Errors
    /// [`Ended`] if nobody is there, as for every method here.
    pub async fn headers(&self) -> Result<(), Ended> {
        self.send(Out::Headers).await
    }

    /// One message, whatever its bytes.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn message(&self, message: &[u8]) -> Result<(), Ended> {
        self.send(Out::Bytes(frame(message))).await
    }

    /// A state-of-the-world response.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn sotw(&self, response: &DiscoveryResponse) -> Result<(), Ended> {
        self.message(&response.encode_to_vec()).await
    }

    /// An incremental response.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn delta(&self, response: &DeltaDiscoveryResponse) -> Result<(), Ended> {
        self.message(&response.encode_to_vec()).await
    }

    /// Bytes of the body as they are: frames made beforehand, or a part of one.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn raw(&self, bytes: Bytes) -> Result<(), Ended> {
        self.send(Out::Bytes(bytes)).await
    }

    /// Ends the stream with a status.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn end(&self, status: Status) -> Result<(), Ended> {
        self.send(Out::End(status)).await
    }

    /// Resets the stream with an HTTP/2 error code.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn reset(&self, reason: u32) -> Result<(), Ended> {
        self.send(Out::Reset(reason)).await
    }

    /// Tells the connection to go away; the stream may go on.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn go_away(&self) -> Result<(), Ended> {
        self.send(Out::GoAway).await
    }

    /// Drops the connection.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn drop_connection(&self) -> Result<(), Ended> {
        self.send(Out::Drop).await
    }
}

/// Carries a stream between the wire and a test's channels.
pub(super) async fn carry(
    shared: &Shared,
    opened: AdsOpened,
    taker: mpsc::UnboundedSender<AdsStream>,
    mut requests: Requests,
    reply: &mut Reply,
    commands: &mpsc::UnboundedSender<Command>,
) -> Result<Option<Status>, Gone> {
    let (to_test, from_client) = mpsc::channel(1);
    let (from_test, mut to_client) = mpsc::channel(4);
    let (stream, delta) = (opened.stream, opened.delta);
    if taker.send(AdsStream { opened, requests: from_client, responses: Responses(from_test) }).is_err() {
        return Ok(Some(Status::new(Code::Unavailable, "the test no longer takes streams")));
    }
    let reading = async {
        while let Some(raw) = requests.next().await? {
            let request = read(stream, delta, &raw)?;
            shared.record.add(Event::AdsRequest(request.clone()));
            if to_test.send(request).await.is_err() {
                // The test dropped its receiver; what still comes is only recorded.
                while let Some(raw) = requests.next().await? {
                    shared.record.add(Event::AdsRequest(read(stream, delta, &raw)?));
                }
                break;
            }
        }
        drop(to_test);
        // The client has finished sending; the test decides how the stream ends.
        std::future::pending::<Result<Infallible, Gone>>().await
    };
    let writing = async {
        while let Some(out) = to_client.recv().await {
            match out {
                Out::Headers => {
                    reply.headers()?;
                }
                Out::Bytes(bytes) => reply.bytes(bytes).await?,
                Out::End(status) => return Ok(Some(status)),
                Out::Reset(reason) => {
                    reply.reset(Reason::from(reason));
                    return Ok(None);
                }
                Out::GoAway => drop(commands.send(Command::GoAway)),
                Out::Drop => drop(commands.send(Command::Drop)),
            }
        }
        Ok(Some(Status::ok()))
    };
    tokio::select! {
        read = reading => match read {
            Ok(never) => match never {},
            Err(gone) => Err(gone),
        },
        written = writing => written,
    }
}

fn read(stream: u64, delta: bool, raw: &Bytes) -> Result<AdsRequest, Gone> {
    request::decode(stream, delta, raw).map(|(request, _)| request).map_err(|status| {
        tracing::warn!(?status, "a request that does not decode");
        Gone::from(h2::Error::from(Reason::PROTOCOL_ERROR))
    })
}
