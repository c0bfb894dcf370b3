//! One part of a scrape: asked, answered, read in pieces.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use tokio::time::Instant;

use super::lines::Lines;
use crate::base::error::chain;
use crate::fetch::url::Url;
use crate::fetch::{self, Get, Reply};

/// A part that moves nothing for this long is given up where the scraper named no limit. Go would wait
/// for ever; nobody who scrapes does.
pub(super) const NO_LIMIT: Duration = Duration::from_secs(300);

/// A piece of a body that was read whole, in bytes.
const PIECE: usize = 48 * 1024;

/// Why a part failed, from a closed set: it is a label's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    Address,
    Recursion,
    Connect,
    Http,
    Status,
    Timeout,
    Cut,
    Limit,
}

impl Reason {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Recursion => "recursion",
            Self::Connect => "connect",
            Self::Http => "http",
            Self::Status => "status",
            Self::Timeout => "timeout",
            Self::Cut => "cut",
            Self::Limit => "limit",
        }
    }
}

/// A reason, and the details for a person.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) reason: Reason,
    what: String,
}

impl Failure {
    pub(super) fn new(reason: Reason, what: impl Into<String>) -> Self {
        Self { reason, what: what.into() }
    }

    fn head(error: &fetch::Error) -> Self {
        let reason = match error {
            fetch::Error::Url(_) => Reason::Address,
            fetch::Error::Connect { .. } | fetch::Error::Tls { .. } => Reason::Connect,
            _ => Reason::Http,
        };
        Self::new(reason, chain(error))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

pub(super) struct Part {
    pub(super) kind: &'static str,
    pub(super) url: String,
    reply: Reply,
    /// The body, where it was read before anything of it was passed on.
    gathered: Option<VecDeque<Vec<u8>>>,
    limit: Option<Duration>,
    /// Time spent waiting for this part and nothing else.
    spent: Duration,
    pub(super) lines: Lines,
    pub(super) bytes: u64,
}

impl Part {
    /// Asks for it and waits for a head that says 200.
    pub(super) async fn ask(
        kind: &'static str,
        url: &str,
        headers: HeaderMap,
        limit: Option<Duration>,
        status_port: u16,
    ) -> Result<Self, Failure> {
        let address = Url::parse(url).map_err(|e| Failure::new(Reason::Address, e.to_string()))?;
        if address.port() == status_port {
            return Err(Failure::new(
                Reason::Recursion,
                format!("port {status_port} is the agent's own: it would ask itself without end"),
            ));
        }
        if limit.is_some_and(|limit| limit.is_zero()) {
            return Err(Failure::new(Reason::Timeout, "the scraper's limit is zero"));
        }
        let begun = Instant::now();
        // Not into our own arms by a redirect either: then the redirect is the answer, and no 200.
        let get = Get::new(url)
            .map_err(|e| Failure::head(&e))?
            .headers(headers)
            .follow(move |_, next| next.port() != status_port);
        let reply = match tokio::time::timeout(limit.unwrap_or(NO_LIMIT), get.send()).await {
            Ok(reply) => reply.map_err(|e| Failure::head(&e))?,
            Err(_) => {
                let limit = limit.unwrap_or(NO_LIMIT);
                return Err(Failure::new(Reason::Timeout, format!("no answer within {limit:?}")));
            }
        };
        if reply.status() != StatusCode::OK {
            return Err(Failure::new(Reason::Status, format!("it answered {}", reply.status())));
        }
        Ok(Self {
            kind,
            url: url.to_owned(),
            reply,
            gathered: None,
            limit,
            spent: begun.elapsed(),
            lines: Lines::new(false),
            bytes: 0,
        })
    }

    pub(super) fn strip_eof(mut self, strip: bool) -> Self {
        self.lines = Lines::new(strip);
        self
    }

    pub(super) fn content_type(&self) -> Option<Cow<'_, str>> {
        self.reply.headers().get(header::CONTENT_TYPE).map(|kind| String::from_utf8_lossy(kind.as_bytes()))
    }

    /// Reads the whole body, so that nothing of it is passed on when it fails; at most `most` bytes, and what there is
    /// `room` for, which others take from, too.
    pub(super) async fn whole(mut self, most: u64, room: &AtomicU64) -> Result<Self, Failure> {
        let mut held = 0;
        let body = self.gather(most, room, &mut held).await;
        if body.is_err() {
            // For the others; what was read is gone.
            room.fetch_add(held, Relaxed);
        }
        self.gathered = Some(body?);
        Ok(self)
    }

    async fn gather(
        &mut self,
        most: u64,
        room: &AtomicU64,
        held: &mut u64,
    ) -> Result<VecDeque<Vec<u8>>, Failure> {
        let too_long = |why| Failure::new(Reason::Limit, why);
        let mut body = VecDeque::from([Vec::with_capacity(PIECE)]);
        while let Some(piece) = self.piece().await? {
            let length = piece.len() as u64;
            if *held + length > most {
                return Err(too_long(format!("it is longer than the {most} bytes allowed")));
            }
            room.try_update(Relaxed, Relaxed, |left| left.checked_sub(length)).map_err(|left| {
                too_long(format!("the metrics of all applications together leave it {} bytes", *held + left))
            })?;
            *held += length;
            // In pieces of our own: one that came may be as small as a byte, and a single buffer is copied as it grows.
            let mut rest = &piece[..];
            while let Some(last) = body.back_mut().filter(|_| !rest.is_empty()) {
                let (now, later) = rest.split_at(rest.len().min(PIECE - last.len()));
                last.extend_from_slice(now);
                rest = later;
                if last.len() == PIECE {
                    body.push_back(Vec::with_capacity(PIECE));
                }
            }
        }
        Ok(body)
    }

    /// The next piece; `None` at the proper end.
    pub(super) async fn piece(&mut self) -> Result<Option<Bytes>, Failure> {
        if let Some(gathered) = &mut self.gathered {
            return Ok(gathered.pop_front().filter(|piece| !piece.is_empty()).map(Bytes::from));
        }
        // A body may come in pieces of a byte, thousands to a read.
        tokio::task::coop::consume_budget().await;
        let left = self.limit.map_or(NO_LIMIT, |limit| limit.saturating_sub(self.spent));
        let begun = Instant::now();
        let piece = tokio::time::timeout(left, self.reply.piece()).await;
        self.spent += begun.elapsed();
        match piece {
            Ok(Ok(piece)) => Ok(piece),
            Ok(Err(error)) => Err(Failure::new(Reason::Cut, chain(&error))),
            Err(_) => Err(Failure::new(Reason::Timeout, "its body did not come to an end within the limit")),
        }
    }
}
