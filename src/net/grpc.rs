//! gRPC's own words over HTTP/2: statuses in headers and trailers, codes of HTTP statuses, message frames, and
//! what a server looks at before it looks at a call. Pure.
//!
//! Why not tonic's reader of statuses: it panics on details that are no base64, and an answer's headers come
//! from outside.

pub(crate) mod messages;

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use bytes::{BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, percent_encode};
use tokio::time::Instant;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use crate::base::quote::shown;

/// Frame of a message: flag and length.
pub(crate) const FRAME: usize = 5;

/// Largest list of headers, or of trailers, that is read of istiod or a CA, as the library of the Go agent would take
/// 16 MiB: statuses with details are a few KiB.
pub(crate) const HEADERS: u32 = 256 * 1024;

/// With which a server says when it may be tried again (gRPC's proposal A6).
pub(crate) const PUSHBACK: &str = "grpc-retry-pushback-ms";

/// The status in headers or trailers, with its details and the delay before another try; `None` where there is none. Binary metadata that is no
/// base64 makes it Internal, in the words of Go's client.
pub(crate) fn status_in(headers: &HeaderMap) -> Option<Status> {
    headers.get("grpc-status").map(|code| status(headers, Code::from_bytes(code.as_bytes())))
}

/// As [`status_in`], of what ends an answer: without a status of its own it is Unknown, as in Go's client.
pub(crate) fn status_at_end(headers: &HeaderMap) -> Status {
    status_in(headers).unwrap_or_else(|| status(headers, Code::Unknown))
}

fn status(headers: &HeaderMap, code: Code) -> Status {
    if let Err((name, why)) = binary(headers) {
        return Status::internal(format!("transport: malformed {name}: {why}"));
    }
    let message = headers.get("grpc-message").map(HeaderValue::as_bytes).unwrap_or_default();
    let message = percent_decode(message).decode_utf8_lossy();
    let details = headers.get("grpc-status-details-bin").and_then(|v| decoded(v).ok()).unwrap_or_default();
    let mut status = Status::with_details(code, message, details.into());
    let pushback = headers.get(PUSHBACK).and_then(|v| MetadataValue::try_from(v.as_bytes()).ok());
    if let Some(value) = pushback {
        status.metadata_mut().insert(PUSHBACK, value);
    }
    status
}

/// What the gRPC specification says must be encoded in a status' text: what is not printable ASCII, and `%`.
const MUST: &AsciiSet = &CONTROLS.add(b'%');

/// A status' text as a header. Envoy logs it as it comes, so it stays as readable as it can.
pub(crate) fn message(text: &str) -> HeaderValue {
    let text = percent_encode(text.as_bytes(), MUST).to_string();
    HeaderValue::from_maybe_shared(text.into_bytes()).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// A status as trailers.
pub(crate) fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        // Details that no header can carry; the code can always be sent.
        trailers.insert("grpc-status", HeaderValue::from(status.code() as i32));
    }
    // Said to the agent, which dials istiod.
    trailers.remove(PUSHBACK);
    // The library encodes more than it must.
    if !status.message().is_empty() {
        trailers.insert("grpc-message", message(status.message()));
    }
    trailers
}

/// The head of an answer.
pub(crate) fn answer<B>(body: B) -> Response<B> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// A binary value that cannot be read, in the words of Go's library.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("illegal base64 data at input byte {0}")]
struct BadBase64(usize);

// The first binary value that cannot be read.
fn binary(headers: &HeaderMap) -> Result<(), (String, BadBase64)> {
    for (name, value) in headers.iter().filter(|(name, _)| name.as_str().ends_with("-bin")) {
        // Several values may stand in one field.
        for part in value.as_bytes().split(|b| *b == b',') {
            decode_part(part).map_err(|why| (shown(name.as_str()).into_owned(), why))?;
        }
    }
    Ok(())
}

fn decoded(value: &HeaderValue) -> Result<Vec<u8>, BadBase64> {
    decode_part(value.as_bytes())
}

// As Go's library: padded where the length allows it, else not.
fn decode_part(part: &[u8]) -> Result<Vec<u8>, BadBase64> {
    let part = part.trim_ascii();
    let engine = if part.len().is_multiple_of(4) { &STANDARD } else { &STANDARD_NO_PAD };
    engine.decode(part).map_err(|error| {
        let at = match error {
            base64::DecodeError::InvalidByte(at, _) | base64::DecodeError::InvalidLastSymbol(at, _) => at,
            _ => part.len(),
        };
        BadBase64(at)
    })
}

/// gRPC's table from HTTP statuses to codes.
pub(crate) fn code_of_http(status: StatusCode) -> Code {
    match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502..=504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

/// gRPC's table from HTTP/2 errors to codes.
pub(crate) fn code_of_reset(reason: h2::Reason) -> Code {
    match reason {
        h2::Reason::REFUSED_STREAM => Code::Unavailable,
        h2::Reason::CANCEL => Code::Cancelled,
        h2::Reason::ENHANCE_YOUR_CALM | h2::Reason::FLOW_CONTROL_ERROR => Code::ResourceExhausted,
        h2::Reason::INADEQUATE_SECURITY => Code::PermissionDenied,
        _ => Code::Internal,
    }
}

/// A message with its frame; `None` above 4 GiB.
pub(crate) fn framed(message: &[u8]) -> Option<Bytes> {
    let mut framed = BytesMut::with_capacity(FRAME + message.len());
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).ok()?);
    framed.put(message);
    Some(framed.freeze())
}

/// The one message of an answer.
///
/// # Errors
/// When it is not exactly one, or compressed.
pub(crate) fn unframed(mut bytes: Bytes) -> Result<Bytes, &'static str> {
    if bytes.len() < FRAME {
        return Err("it is too short");
    }
    let frame = bytes.split_to(FRAME);
    if frame[0] != 0 {
        return Err("it is compressed, which was not offered");
    }
    let length = u32::from_be_bytes([frame[1], frame[2], frame[3], frame[4]]);
    if bytes.len() as u64 != u64::from(length) {
        return Err("its length does not fit");
    }
    Ok(bytes)
}

/// Why a request is no call.
#[derive(Debug)]
pub(crate) enum Refused {
    /// It is not gRPC: an HTTP status, with nothing else.
    Http(StatusCode),
    /// It is, and gets this status in headers alone.
    Grpc(Status),
}

/// Whether these are headers of gRPC: its own type, maybe with the name of a format (`+proto`) or parameters. Not
/// `application/grpc-web`, which is another protocol.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let rest = kind.strip_prefix(b"application/grpc".as_slice());
    rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// What every server looks at first: the time until which a call may last, `None` without a bound.
///
/// # Errors
/// When it is no call; the answers are those of Go's server.
pub(crate) fn admitted(method: &Method, headers: &HeaderMap) -> Result<Option<Instant>, Refused> {
    if method != Method::POST {
        return Err(Refused::Http(StatusCode::METHOD_NOT_ALLOWED));
    }
    if !is_grpc(headers) {
        return Err(Refused::Http(StatusCode::UNSUPPORTED_MEDIA_TYPE));
    }
    if let Err((name, why)) = binary(headers) {
        let value = headers.get(&name).map(|v| String::from_utf8_lossy(v.as_bytes())).unwrap_or_default();
        let text = format!("malformed binary metadata {:?} in header {name:?}: {why}", shown(&value));
        return Err(Refused::Grpc(Status::internal(text)));
    }
    let Some(value) = headers.get("grpc-timeout") else { return Ok(None) };
    let Some(timeout) = value.to_str().ok().and_then(timeout) else {
        let value = String::from_utf8_lossy(value.as_bytes());
        let text = format!("malformed grpc-timeout: {:?}", shown(&value));
        return Err(Refused::Grpc(Status::internal(text)));
    };
    // Beyond what a clock can count is no bound.
    Ok(Instant::now().checked_add(timeout))
}

/// Whether the messages of a call come as they are: we offer no compression.
///
/// # Errors
/// The words of Go's server otherwise.
pub(crate) fn uncompressed(headers: &HeaderMap) -> Result<(), Status> {
    match headers.get("grpc-encoding").filter(|value| *value != "identity") {
        None => Ok(()),
        Some(value) => {
            let name = String::from_utf8_lossy(value.as_bytes());
            Err(Status::unimplemented(format!(
                "grpc: Decompressor is not installed for grpc-encoding {:?}",
                shown(&name)
            )))
        }
    }
}

/// Digits of a timeout that gRPC allows.
const DIGITS: usize = 8;

fn timeout(value: &str) -> Option<Duration> {
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > DIGITS || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    })
}

/// What a client is told whose time is over.
pub(crate) fn exceeded() -> Status {
    Status::deadline_exceeded("context deadline exceeded")
}

/// Returns when the time is over.
pub(crate) async fn over(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The status for a path that nobody serves, in the words of Go's server.
pub(crate) fn unknown(path: &str, serves: impl Fn(&str) -> bool) -> Status {
    let name = path.strip_prefix('/').unwrap_or(path);
    Status::unimplemented(match name.rsplit_once('/') {
        None => format!("malformed method name: {:?}", shown(name)),
        Some((service, method)) if serves(service) => {
            format!("unknown method {} for service {service}", shown(method))
        }
        Some((service, _)) => format!("unknown service {}", shown(service)),
    })
}

#[cfg(test)]
mod tests;
