//! The body of a call's answer: messages as they come, then the status.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::HeaderMap;
use http_body::{Body, Frame};
use tonic::Status;

use crate::net::grpc;

/// A stream's next message with its frame, or its end; and what comes after it.
pub(super) type Turn = BoxFuture<'static, (Option<Result<Pieces, Status>>, Box<dyn Talk>)>;

/// A message with its frame, in pieces, of which there is one at least.
pub(super) type Pieces = VecDeque<Bytes>;

/// Whoever has the messages of a stream.
pub(super) trait Talk: Send {
    fn turn(self: Box<Self>) -> Turn;
}

/// See the module. The connection pulls at it, so a stream costs no task of its own.
pub(super) struct Answers(State);

enum State {
    Over,
    /// Pieces of a message, and who has the next one.
    Rest(Pieces, Option<Box<dyn Talk>>),
    Last(HeaderMap),
    Talk(Turn),
}

impl Answers {
    /// No message and no status: it was told in the headers.
    pub(super) fn nothing() -> Self {
        Self(State::Over)
    }

    /// One message with its frame, and all is well.
    pub(super) fn one(message: Pieces) -> Self {
        Self(State::Rest(message, None))
    }

    pub(super) fn many(talk: Box<dyn Talk>) -> Self {
        Self(State::Talk(talk.turn()))
    }
}

// The first piece, and what is after it.
fn piece(mut pieces: Pieces, talk: Option<Box<dyn Talk>>) -> (State, Option<Frame<Bytes>>) {
    let first = pieces.pop_front().unwrap_or_default();
    let next = match talk {
        talk if !pieces.is_empty() => State::Rest(pieces, talk),
        Some(talk) => State::Talk(talk.turn()),
        None => State::Last(grpc::trailers(&Status::ok(""))),
    };
    (next, Some(Frame::data(first)))
}

impl Body for Answers {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let (next, frame) = match &mut self.0 {
            State::Talk(turn) => match ready!(turn.as_mut().poll(cx)) {
                (Some(Ok(message)), talk) => piece(message, Some(talk)),
                (Some(Err(status)), _) => (State::Over, Some(Frame::trailers(grpc::trailers(&status)))),
                (None, _) => (State::Over, Some(Frame::trailers(grpc::trailers(&Status::ok(""))))),
            },
            State::Rest(pieces, talk) => piece(std::mem::take(pieces), talk.take()),
            State::Last(trailers) => (State::Over, Some(Frame::trailers(std::mem::take(trailers)))),
            State::Over => (State::Over, None),
        };
        self.0 = next;
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.0, State::Over)
    }
}
