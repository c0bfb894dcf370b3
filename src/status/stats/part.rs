//! One part of a scrape: asked, answered, read in pieces.

use std::collections::VecDeque;
use std::fmt;
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
    gathered: Option<VecDeque<Bytes>>,
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

    pub(super) fn content_type(&self) -> Option<&str> {
        self.reply.headers().get(header::CONTENT_TYPE)?.to_str().ok()
    }

    /// Reads the whole body, so that nothing of it is passed on when it fails; at most `most` bytes.
    pub(super) async fn whole(mut self, most: u64) -> Result<Self, Failure> {
        let (mut pieces, mut length) = (VecDeque::new(), 0);
        while let Some(piece) = self.piece().await? {
            length += piece.len() as u64;
            if length > most {
                return Err(Failure::new(
                    Reason::Limit,
                    format!("it is longer than the {most} bytes allowed"),
                ));
            }
            pieces.push_back(piece);
        }
        self.gathered = Some(pieces);
        Ok(self)
    }

    /// The next piece; `None` at the proper end.
    pub(super) async fn piece(&mut self) -> Result<Option<Bytes>, Failure> {
        if let Some(gathered) = &mut self.gathered {
            return Ok(gathered.pop_front());
        }
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
