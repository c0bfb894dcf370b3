//! Why the API server cannot be asked.

use std::io;
use std::path::PathBuf;

use crate::base::error::chain;
use crate::fetch;

/// Why the API server cannot be asked. A secret's content is in none.
#[derive(Debug, thiserror::Error)]
pub(in crate::gateway) enum Error {
    /// The version that was asked for is known no more.
    #[error("410")]
    Gone,
    #[error(
        "not allowed to {verb} secrets in namespace {namespace}: give the gateway's service account a Role with the \
         verbs get, list and watch on secrets there"
    )]
    Forbidden { verb: &'static str, namespace: String },
    #[error("API server {base}: {why}")]
    Broken { base: String, why: Why },
}

/// What is wrong between the server and the agent.
#[derive(Debug, thiserror::Error)]
pub(in crate::gateway) enum Why {
    #[error("{}", chain(.0))]
    Fetch(#[source] fetch::Error),
    #[error("{0}")]
    Disk(io::Error),
    // What the library says may repeat a part of it.
    #[error("its list cannot be read")]
    List,
    #[error("an event cannot be read")]
    Event,
    #[error("an event is longer than 4 MiB")]
    Long,
    #[error("an event is not whole within 30 s")]
    Slow,
    #[error("no answer within 30 s")]
    Silent,
    #[error("the watch ended with code {0}")]
    Watch(u16),
    #[error("cannot read its CA {}: {source}", path.display())]
    Ca { path: PathBuf, source: io::Error },
    #[error("cannot read the token {}: {source}", path.display())]
    Token { path: PathBuf, source: io::Error },
    #[error("{} holds no token", .0.display())]
    NoToken(PathBuf),
    #[error("its CA {} holds no certificate", .0.display())]
    NoCa(PathBuf),
    #[error("it refuses the service account's token (401); it is read again for the next try")]
    Unauthorized,
    #[error("HTTP status {0}")]
    Status(u16),
}
