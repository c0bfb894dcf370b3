//! The body of a call's answer: messages as they come, then the status.

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
pub(super) type Turn = BoxFuture<'static, (Option<Result<Bytes, Status>>, Box<dyn Talk>)>;

/// Whoever has the messages of a stream.
pub(super) trait Talk: Send {
    fn turn(self: Box<Self>) -> Turn;
}

/// See the module. The connection pulls at it, so a stream costs no task of its own.
pub(super) struct Answers(State);

enum State {
    Over,
    One(Bytes),
    Last(HeaderMap),
    Talk(Turn),
}

impl Answers {
    /// No message and no status: it was told in the headers.
    pub(super) fn nothing() -> Self {
        Self(State::Over)
    }

    /// One message with its frame, and all is well.
    pub(super) fn one(message: Bytes) -> Self {
        Self(State::One(message))
    }

    pub(super) fn many(talk: Box<dyn Talk>) -> Self {
        Self(State::Talk(talk.turn()))
    }
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
                (Some(Ok(message)), talk) => (State::Talk(talk.turn()), Some(Frame::data(message))),
                (Some(Err(status)), _) => (State::Over, Some(Frame::trailers(grpc::trailers(&status)))),
                (None, _) => (State::Over, Some(Frame::trailers(grpc::trailers(&Status::ok(""))))),
            },
            State::One(message) => {
                let message = std::mem::take(message);
                (State::Last(grpc::trailers(&Status::ok(""))), Some(Frame::data(message)))
            }
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
