//! Answers: their bodies, and the few shapes that all handlers share.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::Stream;
use http::{HeaderValue, Response, StatusCode, header};
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::ConnState;

pub(crate) const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// What an answer carries.
pub(crate) enum Content {
    /// Known whole.
    Whole(Bytes),
    /// Made while it is sent.
    Stream(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

/// A body that tells its connection when it is done with.
pub(crate) struct Body {
    pub(crate) content: Content,
    pub(crate) conn: Option<Arc<ConnState>>,
}

impl Body {
    pub(crate) fn empty() -> Self {
        Self::whole(Bytes::new())
    }

    pub(crate) fn whole(bytes: impl Into<Bytes>) -> Self {
        Self { content: Content::Whole(bytes.into()), conn: None }
    }

    pub(crate) fn stream(stream: impl Stream<Item = Bytes> + Send + 'static) -> Self {
        Self { content: Content::Stream(Box::pin(stream)), conn: None }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Some(conn) = &self.conn {
            conn.idle();
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.content {
            Content::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Content::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Content::Stream(stream) => {
                stream.as_mut().poll_next(cx).map(|next| next.map(|b| Ok(Frame::data(b))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, Content::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Stream(_) => SizeHint::default(),
        }
    }
}

/// The bytes, with something that is kept until the last of them are gone: a body is done with before the kernel has them.
pub(crate) fn with(bytes: Bytes, kept: impl Send + 'static) -> Bytes {
    Bytes::from_owner(With(bytes, kept))
}

struct With<K>(Bytes, K);

impl<K> AsRef<[u8]> for With<K> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

pub(crate) type Answer = Response<Body>;

/// A status without a body.
pub(crate) fn status(code: StatusCode) -> Answer {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = code;
    answer
}

/// A status with a body of the given type.
pub(crate) fn page(code: StatusCode, kind: HeaderValue, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Body::whole(body));
    *answer.status_mut() = code;
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

/// An error as Go's `http.Error` gives it: one line of text that browsers must not guess about.
pub(crate) fn error(code: StatusCode, line: &str) -> Answer {
    let mut answer = page(code, TEXT, format!("{line}\n"));
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

pub(crate) fn not_found() -> Answer {
    error(StatusCode::NOT_FOUND, "404 page not found")
}

pub(crate) fn redirect(to: &str) -> Answer {
    let mut answer = status(StatusCode::TEMPORARY_REDIRECT);
    match HeaderValue::from_str(to) {
        Ok(to) => {
            answer.headers_mut().insert(header::LOCATION, to);
            answer
        }
        Err(_) => not_found(),
    }
}
