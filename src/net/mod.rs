//! Networking that every part shares: one accept loop, one small HTTP client, one gRPC codec.
//!
//! | file | is about |
//! |---|---|
//! | `grpc` | statuses, codes, frames, and what a gRPC server looks at first |
//! | `io` | when a connection was last read from |
//! | `accept` | accepting: back-off, a reserve descriptor, one log line per change |
//! | `authority_rewriter` | rewrites an `:authority` that the HTTP/2 library would refuse |
//! | `clients` | who is on a unix socket, and how many may be |
//! | `datagram` | a UDP socket whose answers come from the address that was asked |
//! | `fair` | slots that no client has all of, and who is next |
//! | `framing` | how an answer's head is put, and where its body ends, as Go's client takes it |
//! | `frame` | numbers of HTTP/2's frames |
//! | `hop` | fields of a connection in answers of HTTP/2, which Go's client passes over |
//! | `http` | one request over one plain connection, its answer read whole |
//! | `interim` | a connection on which answers before the one that counts come slowly |
//! | `kept` | a unix socket that is bound again when its file is removed |
//! | `listen` | opens ports, on all addresses of both families where all are meant |
//! | `own` | which clients are the agent's own Envoy |
//! | `paced` | work of many connections, a piece a round while they keep the thread busy |
//! | `percent` | percent-encoding, with Go's strictness |
//! | `places` | a bound of connections, and who makes room at the bound |
//! | `proxy` | HTTP proxies: whom they are for, and tunnels through them |
//! | `progress` | what a connection is doing, as far as that decides who makes room |
//! | `served` | a unix socket with its connections: bound, accepted from, bound again |
//! | `streams` | a bound of streams over all connections of a socket |
//! | `unix` | a connection on a unix socket that wakes only for what is waited for |
//! | `timer` | the timer for HTTP/2, whose long waits end together with others |
//!
//! It promises that a listener is never stuck: whoever comes gets a place as long as somebody else has one that
//! is worth less, and a process without descriptors refuses instead of looking away. It knows nothing of Istio,
//! and uses `base` only.

pub(crate) mod accept;
pub(crate) mod authority_rewriter;
pub(crate) mod clients;
pub(crate) mod datagram;
pub(crate) mod fair;
mod frame;
pub(crate) mod framing;
pub(crate) mod grpc;
mod hop;
pub(crate) mod http;
pub(crate) mod interim;
pub(crate) mod io;
pub(crate) mod kept;
pub(crate) mod listen;
pub(crate) mod own;
pub(crate) mod paced;
pub(crate) mod percent;
pub(crate) mod places;
pub(crate) mod progress;
pub(crate) mod proxy;
pub(crate) mod served;
pub(crate) mod streams;
pub(crate) mod timer;
pub(crate) mod unix;

/// What bytes reach first.
#[cfg(debug_assertions)]
pub mod fuzz {
    use bytes::Bytes;
    use http::{HeaderMap, HeaderName, HeaderValue, Method};
    use percent_encoding::percent_decode;
    use tonic::Status;

    use super::authority_rewriter::block::plain;
    use super::grpc;
    use super::hop::Fields;

    /// Headers of a call or of its end, by pairs, and a body: each is read or refused, and what is written can be
    /// read again.
    pub fn call(fields: &[(&[u8], &[u8])], body: &[u8]) {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
                headers.append(name, value);
            }
        }
        let _ = grpc::admitted(&Method::POST, &headers);
        let _ = grpc::status_in(&headers);
        let _ = grpc::unframed(Bytes::copy_from_slice(body));
        let framed = grpc::framed(body).expect("shorter than 4 GiB");
        assert_eq!(grpc::unframed(framed).as_deref(), Ok(body));
        let text = String::from_utf8_lossy(body);
        let said = grpc::message(&text);
        assert_eq!(percent_decode(said.as_bytes()).decode_utf8_lossy(), text);
        let told = grpc::status_in(&grpc::trailers(&Status::internal(text.clone()))).expect("a status");
        assert_eq!(told.message(), text);
        let _ = grpc::unknown(&text, |service| service == "a.B");
    }

    /// A header block of an answer in HTTP/2, cut at each `cut` bytes: another reader finds the same fields in what
    /// becomes of it, but for names of the connection's own, however it was cut.
    pub fn block(block: &[u8], cut: usize) {
        let Ok(length) = u16::try_from(block.len()) else { return };
        let [high, low] = length.to_be_bytes();
        let frame = [&[0, high, low, 1, 4, 0, 0, 0, 1], block].concat();
        let (mut whole, mut pieces) = (frame.clone(), frame.clone());
        Fields::default().pass(&mut whole);
        let mut fields = Fields::default();
        pieces.chunks_mut(cut.max(1)).for_each(|piece| fields.pass(piece));
        assert_eq!(whole, pieces);
        let (head, renamed) = whole.split_at(9);
        assert_eq!(head, &frame[..9]);
        let fields = |block: &[u8]| fluke_hpack::Decoder::new().decode(&plain(block).ok()?).ok();
        let Some(before) = fields(block) else { return };
        let after = fields(renamed).expect("it could be read before");
        assert_eq!(before.len(), after.len());
        for ((name, value), (new, same)) in before.iter().zip(&after) {
            assert_eq!(value, same);
            assert!(name == new || OF_A_CONNECTION.contains(&name.as_slice()), "{}", name.escape_ascii());
            assert_eq!(name.len(), new.len());
        }
    }

    const OF_A_CONNECTION: [&[u8]; 5] =
        [b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"];
}
