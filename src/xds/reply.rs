//! The downstream answer of one stream: nothing, then headers, then bytes, then a status.
//!
//! As with a Go server the headers go out with the first bytes, so a stream that fails before is told
//! in headers alone, and a held stream has told Envoy nothing yet.

use std::task::{Context, Poll};

use bytes::Bytes;
use h2::SendStream;
use h2::server::SendResponse;
use tonic::Status;

use super::end_status;
use crate::net::grpc;

enum Phase {
    Waiting(SendResponse<Bytes>),
    Open(SendStream<Bytes>),
}

/// See the module.
pub(super) struct Reply(Phase);

impl AsMut<SendStream<Bytes>> for Reply {
    fn as_mut(&mut self) -> &mut SendStream<Bytes> {
        match &mut self.0 {
            Phase::Open(stream) => stream,
            Phase::Waiting(_) => unreachable!("bytes are sent after `open`"),
        }
    }
}

impl Reply {
    pub(super) fn new(respond: SendResponse<Bytes>) -> Self {
        Self(Phase::Waiting(respond))
    }

    /// Sends the headers, if that has not been done.
    pub(super) fn open(&mut self) -> Result<(), h2::Error> {
        if let Phase::Waiting(respond) = &mut self.0 {
            let stream = respond.send_response(grpc::answer(()), false)?;
            self.0 = Phase::Open(stream);
        }
        Ok(())
    }

    /// Ready when Envoy has given the stream up.
    pub(super) fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let reset = match &mut self.0 {
            Phase::Waiting(respond) => respond.poll_reset(cx),
            Phase::Open(stream) => stream.poll_reset(cx),
        };
        reset.map(|result| match result {
            Ok(_) => Status::cancelled("context canceled"),
            Err(error) => end_status::of_downstream(&error),
        })
    }

    /// Ends the answer. Nobody may be left to hear it, so there is no error.
    pub(super) fn finish(mut self, status: &Status) {
        let trailers = grpc::trailers(status);
        match &mut self.0 {
            Phase::Waiting(respond) => {
                let mut response = grpc::answer(());
                response.headers_mut().extend(trailers);
                let _ = respond.send_response(response, true);
            }
            Phase::Open(stream) => {
                let _ = stream.send_trailers(trailers);
            }
        }
    }
}
