//! A stream that a test serves itself: two channels in the place of a server.

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse};
use prost::Message;
use tokio::sync::mpsc;

use crate::grpc::{Status, frame};
use crate::record::{AdsOpened, AdsRequest};

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

/// What a test has the wire carry.
#[derive(Debug)]
pub(crate) enum Out {
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
    /// The half, and where what it is told comes out.
    pub(crate) fn new() -> (Self, mpsc::Receiver<Out>) {
        let (from_test, to_client) = mpsc::channel(4);
        (Self(from_test), to_client)
    }

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
