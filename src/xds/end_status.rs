//! How a leg ended: the gRPC status that the other side is told, and the class that is counted.

use std::future::poll_fn;
use std::io;

use futures_util::FutureExt;
use h2::RecvStream;
use http::HeaderMap;
use tonic::{Code, Status};

use crate::net;

/// Whether an end is worth a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Clean, or one of the ends that happen all the time (cancelled, connection age).
    Expected,
    /// Everything else.
    Unexpected,
}

impl Class {
    /// The value of the metrics' label `type`.
    #[must_use]
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Expected => "cancelled",
            Self::Unexpected => "error",
        }
    }
}

/// Texts with which Go servers and proxies end a stream in the normal course of things.
const EXPECTED_UNAVAILABLE: [&str; 3] =
    ["client disconnected", "error reading from server: EOF", "transport is closing"];
const EXPECTED: [&str; 2] =
    ["stream terminated by RST_STREAM with error code: NO_ERROR", "received prior goaway: code: NO_ERROR"];

/// The class of a status that came from the other side.
#[must_use]
pub(super) fn class(status: &Status) -> Class {
    let text = status.message();
    let expected = match status.code() {
        Code::Ok | Code::Cancelled | Code::DeadlineExceeded => true,
        Code::Unavailable => EXPECTED_UNAVAILABLE.iter().any(|t| text.contains(t)),
        _ => false,
    } || EXPECTED.iter().any(|t| text.contains(t));
    if expected { Class::Expected } else { Class::Unexpected }
}

/// The status in trailers (or in the headers of an answer without a body).
#[must_use]
pub(super) fn of_trailers(headers: &HeaderMap) -> Option<Status> {
    net::grpc::status_in(headers)
}

/// The status of an answer that ended with its headers, also where the connection broke right behind them.
#[must_use]
pub(super) fn of_head(headers: &HeaderMap, body: &mut RecvStream) -> Option<Status> {
    let status = of_trailers(headers)?;
    let broke = |body: &mut RecvStream| poll_fn(|cx| body.poll_data(cx)).now_or_never().is_some();
    (body.is_end_stream() || status.code() != Code::Ok && broke(body)).then_some(status)
}

/// The status of an answer that is not gRPC (the mapping is gRPC's own).
#[must_use]
pub(super) fn of_http(status: http::StatusCode, content_type: Option<&str>) -> Status {
    let code = net::grpc::code_of_http(status);
    let kind = content_type.unwrap_or("missing");
    Status::new(
        code,
        format!("unexpected HTTP status code received from server: {status}; content-type: {kind}"),
    )
}

/// How an HTTP/2 error of the upstream leg is told and counted.
#[must_use]
pub(super) fn of_upstream(error: &h2::Error) -> (Status, Class) {
    if let Some(error) = error.get_io() {
        return of_io(error);
    }
    let reason = error.reason().unwrap_or(h2::Reason::INTERNAL_ERROR);
    let name = name(reason);
    if error.is_reset() && error.is_remote() {
        let text = format!("stream terminated by RST_STREAM with error code: {name}");
        let status = Status::new(net::grpc::code_of_reset(reason), text);
        let class = class(&status);
        return (status, class);
    }
    if error.is_go_away() && error.is_remote() {
        let text = format!("connection error: received prior goaway: code: {name}, debug data: {error}");
        let status = Status::unavailable(text);
        let class = class(&status);
        return (status, class);
    }
    (Status::unavailable(format!("connection error: {error}")), Class::Unexpected)
}

/// Whether the server has sent the stream away unseen: by a reset that says so, or with all that it has not begun.
#[must_use]
pub(super) fn is_untouched(error: &h2::Error) -> bool {
    let word = if error.is_go_away() { h2::Reason::NO_ERROR } else { h2::Reason::REFUSED_STREAM };
    error.is_remote() && error.reason() == Some(word)
}

fn of_io(error: &io::Error) -> (Status, Class) {
    use io::ErrorKind::{BrokenPipe, NotConnected, UnexpectedEof};
    // The end of the connection is seen as a broken pipe by streams that are still open.
    if matches!(error.kind(), UnexpectedEof | BrokenPipe | NotConnected) {
        (Status::unavailable("error reading from server: EOF"), Class::Expected)
    } else {
        (Status::unavailable(format!("error reading from server: {error}")), Class::Unexpected)
    }
}

/// How an HTTP/2 error of the downstream leg is counted; there is nobody left to tell.
#[must_use]
pub(super) fn of_downstream(error: &h2::Error) -> Status {
    if error.is_library() && error.reason().is_some_and(|r| r != h2::Reason::NO_ERROR) {
        return Status::internal(format!("Envoy's connection broke the HTTP/2 protocol: {error}"));
    }
    Status::cancelled("context canceled")
}

fn name(reason: h2::Reason) -> String {
    match reason {
        h2::Reason::NO_ERROR => "NO_ERROR".to_owned(),
        h2::Reason::CANCEL => "CANCEL".to_owned(),
        h2::Reason::REFUSED_STREAM => "REFUSED_STREAM".to_owned(),
        h2::Reason::ENHANCE_YOUR_CALM => "ENHANCE_YOUR_CALM".to_owned(),
        h2::Reason::PROTOCOL_ERROR => "PROTOCOL_ERROR".to_owned(),
        h2::Reason::INTERNAL_ERROR => "INTERNAL_ERROR".to_owned(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_the_go_agents() {
        let unavailable = |t: &str| class(&Status::unavailable(t));
        assert_eq!(class(&Status::ok("")), Class::Expected);
        assert_eq!(class(&Status::cancelled("x")), Class::Expected);
        assert_eq!(class(&Status::deadline_exceeded("x")), Class::Expected);
        assert_eq!(unavailable("transport is closing"), Class::Expected);
        assert_eq!(unavailable("max connection age"), Class::Unexpected);
        assert_eq!(unavailable("connection reset by peer"), Class::Unexpected);
        assert_eq!(class(&Status::internal("transport is closing")), Class::Unexpected);
        assert_eq!(
            class(&Status::internal("stream terminated by RST_STREAM with error code: NO_ERROR")),
            Class::Expected
        );
        assert_eq!(class(&Status::unauthenticated("bad token")), Class::Unexpected);
    }

    #[test]
    fn a_reset_is_no_clean_end_and_an_eof_is() {
        let class_of = |kind| of_io(&io::Error::from(kind)).1;
        assert_eq!(class_of(io::ErrorKind::ConnectionReset), Class::Unexpected);
        assert_eq!(class_of(io::ErrorKind::UnexpectedEof), Class::Expected);
    }
}
