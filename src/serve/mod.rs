//! The HTTP/1.1 server that every port of ours stands on: the listener, its connections, and what bounds them.
//!
//! What is answered is a `Site`'s business. Malformed requests are answered here as Go's server answers
//! them, and what a client is still sending is read, so that no answer is lost to a reset. A site cannot be
//! locked out by any flood: connections, unfinished heads and waits are bounded, and at a bound the connection
//! that is worth least makes room.
//!
//! | file | is about |
//! |---|---|
//! | `server` | accepting, bounds, one connection's life |
//! | `watched` | a connection's bytes, seen going by |
//! | `left` | clients that have gone while their answer is being made |
//! | `rules`, `refusal` | what is refused before a site sees it |
//! | `path`, `respond` | what sites share: clean paths, bodies, usual answers |
//!
//! Knows nothing of Istio. Uses only what every part may use.

mod left;
pub(crate) mod path;
mod refusal;
pub(crate) mod respond;
mod rules;
mod server;
mod watched;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;

use self::respond::Answer;

pub(crate) use server::{listen, read_off, serve, turn};
pub(crate) use watched::ConnState;

/// What bytes reach first.
#[cfg(debug_assertions)]
pub mod fuzz {
    use super::path::{clean, segments};
    use super::refusal::{readable_preface, spelled_out};

    /// The first bytes of a connection, the path of a request, an answer that may be hyper's own refusal.
    pub fn head(bytes: &[u8]) {
        let mut read = bytes.to_vec();
        readable_preface(&mut read);
        assert_eq!(read.len(), bytes.len());
        let _ = spelled_out(bytes);
        let path = clean(&String::from_utf8_lossy(bytes));
        assert!(path.starts_with('/') && !path.contains("//"), "{path}");
        assert_eq!(clean(&path), path);
        assert!(path.split('/').all(|part| part != ".."), "{path}");
        let _ = segments(&path);
    }
}

/// What a server may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Connections at a time from this pod, and as many from elsewhere (half of them from one address). Each takes
    /// a descriptor and about 1 kB until its request is there.
    pub(crate) connections: usize,
    /// Of those, the ones with a request, about 12 kB each.
    pub(crate) asking: usize,
    /// How long a connection may be kept without a request, before the first one no longer than a head may take; `None`: as
    /// long as there is room.
    pub(crate) idle: Option<Duration>,
}

/// What a server is called.
#[derive(Debug)]
pub(crate) struct Names {
    /// In log lines.
    pub(crate) server: &'static str,
    /// In the metric of failures to accept.
    pub(crate) listener: &'static str,
    /// One of its connections, as a task.
    pub(crate) connection: &'static str,
    /// One of its requests, as work that may panic.
    pub(crate) request: &'static str,
}

/// What is served.
pub(crate) trait Site: Send + Sync + 'static {
    const NAMES: Names;
    /// Whether its answers vary by encoding: then so does the one that is given in a handler's place.
    const VARIES: bool = false;

    /// The answer to a request that can be meant. What is left of its body is read off afterwards, or the
    /// connection ends.
    fn answer(
        self: &Arc<Self>,
        request: &Request<()>,
        body: &mut Incoming,
        peer: SocketAddr,
        conn: &Arc<ConnState>,
    ) -> impl Future<Output = Answer> + Send;

    /// The answer for which [`ConnState::quit_after_answer`] was called is with the kernel, or its caller is gone.
    fn quit(&self) {}

    /// How many connections there are, whenever one has come.
    fn connections(&self, _now: usize) {}
}
