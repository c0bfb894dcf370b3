//! The questions: the agent's document, whether it is ready, and Envoy's own word.

use std::time::Duration;

use serde_json::Value;

use crate::base::error::chain;
use crate::envoy::port;
use crate::fetch::{self, Get};
use crate::trouble::Kind;

/// The agent answers from memory, and asks an Envoy that may hang for up to 3 s.
const LIMIT: Duration = Duration::from_secs(5);
/// A status document is longer than this only with thousands of rejections.
const MOST: usize = 8 << 20;

/// What came back.
#[derive(Debug)]
pub(crate) struct Answers {
    /// `/debug/agentz`.
    pub agentz: Value,
    /// Readiness, or what is missing.
    pub ready: Result<(), Error>,
    /// `/server_info` of Envoy's admin port, or why there is none.
    pub envoy: Result<Value, Error>,
    /// Capture rules, one line a set; empty where they cannot be read.
    pub capture: Vec<String>,
}

/// Why something is not known. `held` names who holds a port, where it can be told.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The agent runs none.
    #[error("no Envoy is started")]
    NoEnvoy,
    /// Envoy takes the connection and says nothing.
    #[error("Envoy's admin port {0} is silent")]
    EnvoySilent(u16),
    /// Envoy refuses.
    #[error("Envoy's admin port {admin} answers {status}")]
    EnvoyStatus { admin: u16, status: u16 },
    /// Somebody else has Envoy's port.
    #[error("port {port}{held} is no Envoy's admin port")]
    NoAdmin { port: u16, held: String },
    /// The status port takes the connection and says nothing.
    #[error("port {port}{held} gives no answer within {} s", LIMIT.as_secs())]
    Silent { port: u16, held: String },
    /// No answer about readiness.
    #[error("port {0} gives no answer")]
    ReadySilent(u16),
    /// Somebody else has the status port.
    #[error("port {port}{held} does not answer as this agent does")]
    Strange { port: u16, held: String },
    /// In its own words, where that is all that it can say.
    #[error("the agent on port {0} has no file descriptor left")]
    NoFiles(u16),
    /// As before, by the status.
    #[error("port {port}{held} does not answer as this agent does: status {status}")]
    Status { port: u16, held: String, status: u16 },
    /// In the agent's own words.
    #[error("{0}")]
    NotReady(String),
    /// The exchange itself.
    #[error("{}", chain(.0))]
    Fetch(#[from] fetch::Error),
}

impl Error {
    /// What to do where no agent could be asked.
    #[must_use]
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::NoFiles(_) => Kind::OpenFiles.hint(),
            _ => {
                "is the agent running, and is this its status port (--port)? pilot-agent doctor looks for the cause"
            }
        }
    }
}

/// Asks the agent on `port` and the Envoy whose admin port is `admin`.
///
/// # Errors
/// When no agent answers; why.
pub(crate) async fn gather(port: u16, admin: Option<u16>, capture: Vec<String>) -> Result<Answers, Error> {
    let agentz = agentz(port).await?;
    let (ready, envoy) = tokio::join!(ready(port), async {
        match admin {
            Some(admin) => within(server_info(admin), || Error::EnvoySilent(admin)).await,
            None => Err(Error::NoEnvoy),
        }
    });
    Ok(Answers { agentz, ready, envoy, capture })
}

/// The status document of the agent on this port of this machine.
///
/// # Errors
/// Why there is none.
pub(crate) async fn agentz(port: u16) -> Result<Value, Error> {
    let silent = || Error::Silent { port, held: held(port) };
    within(status_document(port), silent).await
}

async fn status_document(port: u16) -> Result<Value, Error> {
    let (status, text) = get(&format!("http://localhost:{port}/debug/agentz")).await?;
    if status == 503 && text.ends_with(b"no file descriptor left") {
        return Err(Error::NoFiles(port));
    }
    if status != 200 {
        return Err(Error::Status { port, held: held(port), status });
    }
    let strange = || Error::Strange { port, held: held(port) };
    let document: Value = serde_json::from_slice(&text).map_err(|_| strange())?;
    if document["version"].is_string() { Ok(document) } else { Err(strange()) }
}

async fn ready(port: u16) -> Result<(), Error> {
    let silent = || Error::ReadySilent(port);
    let ask = async {
        let (status, text) = get(&format!("http://localhost:{port}/healthz/ready?verbose")).await?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        if status == 200 { Ok(()) } else { Err(Error::NotReady(text)) }
    };
    within(ask, silent).await
}

async fn server_info(admin: u16) -> Result<Value, Error> {
    let (status, text) = get(&format!("http://localhost:{admin}/server_info")).await?;
    if status != 200 {
        return Err(Error::EnvoyStatus { admin, status });
    }
    serde_json::from_slice(&text).map_err(|_| Error::NoAdmin { port: admin, held: held(admin) })
}

async fn within<T>(
    ask: impl Future<Output = Result<T, Error>>,
    late: impl FnOnce() -> Error,
) -> Result<T, Error> {
    tokio::time::timeout(LIMIT, ask).await.unwrap_or_else(|_| Err(late()))
}

async fn get(url: &str) -> Result<(u16, Vec<u8>), Error> {
    let mut reply = Get::new(url)?.keep(None).send().await?;
    let status = reply.status().as_u16();
    Ok((status, reply.bytes(MOST).await?))
}

/// Who is behind a port that answers strangely.
fn held(port: u16) -> String {
    port::holder(port).map(|holder| format!(", held by {holder},")).unwrap_or_default()
}
