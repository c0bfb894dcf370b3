//! Everything the server was sent, and how it answered.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokio::sync::watch;

use crate::grpc::{Code, Status};

/// What happened, in order.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A client connected (after the TLS handshake, if there is one).
    Connected(Connected),
    /// A connection ended; the reason, if it did not end well.
    Disconnected {
        /// Its number.
        connection: u64,
        /// Why, if it was an error.
        error: Option<String>,
    },
    /// A TLS handshake failed.
    HandshakeFailed {
        /// Its number.
        connection: u64,
        /// Why.
        error: String,
    },
    /// The certificate service was called and has answered.
    CaCall(CaCall),
    /// An ADS stream was opened.
    AdsOpened(AdsOpened),
    /// An ADS stream received a request.
    AdsRequest(AdsRequest),
    /// A response was handed to an ADS stream by the folder's server.
    AdsResponse(AdsResponse),
    /// An ADS stream ended.
    AdsEnded {
        /// Its number.
        stream: u64,
        /// The status sent, or why there was none.
        how: String,
    },
    /// A call of anything else.
    UnknownCall {
        /// The path.
        path: String,
    },
}

/// A connection.
#[derive(Debug, Clone, Serialize)]
pub struct Connected {
    /// Counted from 1.
    pub connection: u64,
    /// Where it came from.
    pub peer: String,
    /// The server name that the client asked for.
    pub sni: Option<String>,
    /// The protocol agreed on by ALPN.
    pub alpn: Option<String>,
    /// The TLS version, as in `TLSv1_3`.
    pub tls: Option<String>,
    /// The URI names of the client's certificate.
    pub client_names: Vec<String>,
}

/// One call of `CreateCertificate`.
#[derive(Debug, Clone, Serialize)]
pub struct CaCall {
    /// The connection it came on.
    pub connection: u64,
    /// `:authority`.
    pub authority: String,
    /// Headers in order, without the pseudo-headers.
    pub headers: Vec<(String, String)>,
    /// Who called, as far as could be told.
    pub identity: Option<String>,
    /// The request, PEM.
    pub csr: String,
    /// Seconds asked for.
    pub validity_seconds: i64,
    /// The request's `metadata`, as JSON.
    pub metadata: serde_json::Value,
    /// How it ended.
    pub status: Status,
    /// What was sent.
    pub chain: Vec<String>,
    /// When the request was complete.
    #[serde(serialize_with = "millis")]
    pub received: SystemTime,
    /// End of the certificate's validity, if one was signed.
    #[serde(serialize_with = "maybe_millis")]
    pub not_after: Option<SystemTime>,
}

/// An ADS stream.
#[derive(Debug, Clone, Serialize)]
pub struct AdsOpened {
    /// Counted from 1.
    pub stream: u64,
    /// The connection it came on.
    pub connection: u64,
    /// `StreamAggregatedResources` is false, `DeltaAggregatedResources` true.
    pub delta: bool,
    /// `:authority`.
    pub authority: String,
    /// Headers in order, without the pseudo-headers.
    pub headers: Vec<(String, String)>,
    /// Who called, as far as could be told.
    pub identity: Option<String>,
}

/// One request on an ADS stream; fields of the other protocol are empty.
#[derive(Debug, Clone, Serialize)]
pub struct AdsRequest {
    /// The stream.
    pub stream: u64,
    /// `node.id`.
    pub node: Option<String>,
    /// `type_url`.
    pub type_url: String,
    /// SotW: `version_info`.
    pub version: String,
    /// `response_nonce`.
    pub nonce: String,
    /// SotW: `resource_names`; delta: `resource_names_subscribe`.
    pub names: Vec<String>,
    /// Delta: `resource_names_unsubscribe`.
    pub unsubscribe: Vec<String>,
    /// Delta: the names in `initial_resource_versions`.
    pub initial: Vec<String>,
    /// Code and text of `error_detail`: the answer was refused (NACK).
    pub nack: Option<(i32, String)>,
    /// The request's bytes.
    #[serde(skip)]
    pub raw: bytes::Bytes,
}

impl AdsRequest {
    /// It accepts the answer with its nonce.
    #[must_use]
    pub fn is_ack(&self) -> bool {
        !self.nonce.is_empty() && self.nack.is_none()
    }
}

/// One response of the folder's server.
#[derive(Debug, Clone, Serialize)]
pub struct AdsResponse {
    /// The stream.
    pub stream: u64,
    /// `type_url`.
    pub type_url: String,
    /// SotW: `version_info`; delta: `system_version_info`.
    pub version: String,
    /// `nonce`.
    pub nonce: String,
    /// How many resources.
    pub resources: usize,
    /// Delta: `removed_resources`.
    pub removed: Vec<String>,
}

/// An event with its time.
#[derive(Debug, Clone, Serialize)]
pub struct Entry {
    /// When.
    #[serde(serialize_with = "millis", rename = "at_ms")]
    pub at: SystemTime,
    /// What.
    #[serde(flatten)]
    pub event: Event,
}

fn millis<S: serde::Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    serializer.serialize_u64(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn maybe_millis<S: serde::Serializer>(at: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => millis(at, serializer),
        None => serializer.serialize_none(),
    }
}

/// The record. Cheap to clone; it grows for as long as the server runs, unless [`Record::off`] was called (long
/// measurements).
#[derive(Clone)]
pub struct Record {
    entries: Arc<Mutex<Vec<Entry>>>,
    length: watch::Sender<usize>,
    on: Arc<std::sync::atomic::AtomicBool>,
    sink: Arc<Mutex<Option<std::fs::File>>>,
}

/// A wait that was not fulfilled in time.
#[derive(Debug, thiserror::Error)]
#[error("not seen within {0:?}: {1}")]
pub struct NotSeen(Duration, String);

impl Default for Record {
    fn default() -> Self {
        Self {
            entries: Arc::default(),
            length: watch::Sender::new(0),
            on: Arc::new(true.into()),
            sink: Arc::default(),
        }
    }
}

impl Record {
    pub(crate) fn add(&self, event: Event) {
        if !self.on.load(std::sync::atomic::Ordering::Relaxed) {
            return;
        }
        tracing::debug!(?event);
        let entry = Entry { at: SystemTime::now(), event };
        if let Some(file) = self.sink.lock().expect("no panic holds this lock").as_mut() {
            use std::io::Write;
            let line = serde_json::to_string(&entry).expect("events are plain JSON");
            // A full disk must not stop the server; the lines are a convenience.
            let _ = writeln!(file, "{line}");
        }
        let mut entries = self.entries.lock().expect("no panic holds this lock");
        entries.push(entry);
        self.length.send_replace(entries.len());
    }

    /// From here on nothing is kept.
    pub fn off(&self) {
        self.on.store(false, std::sync::atomic::Ordering::Relaxed);
    }

    /// Every event is also written to `file` as one line of JSON.
    pub fn write_to(&self, file: std::fs::File) {
        *self.sink.lock().expect("no panic holds this lock") = Some(file);
    }

    /// All entries so far.
    #[must_use]
    pub fn entries(&self) -> Vec<Entry> {
        self.entries.lock().expect("no panic holds this lock").clone()
    }

    /// How many entries there are: a mark for [`Record::since`].
    #[must_use]
    pub fn len(&self) -> usize {
        *self.length.borrow()
    }

    /// Nothing has happened yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entries after the first `mark`.
    #[must_use]
    pub fn since(&self, mark: usize) -> Vec<Entry> {
        self.entries.lock().expect("no panic holds this lock").iter().skip(mark).cloned().collect()
    }

    /// The calls of the certificate service.
    #[must_use]
    pub fn ca_calls(&self) -> Vec<CaCall> {
        self.pick(|event| match event {
            Event::CaCall(call) => Some(call.clone()),
            _ => None,
        })
    }

    /// Those calls that were given a certificate.
    #[must_use]
    pub fn signed(&self) -> Vec<CaCall> {
        self.ca_calls().into_iter().filter(|call| call.status.code == Code::Ok).collect()
    }

    /// The ADS streams.
    #[must_use]
    pub fn ads_streams(&self) -> Vec<AdsOpened> {
        self.pick(|event| match event {
            Event::AdsOpened(opened) => Some(opened.clone()),
            _ => None,
        })
    }

    /// The ADS requests.
    #[must_use]
    pub fn ads_requests(&self) -> Vec<AdsRequest> {
        self.pick(|event| match event {
            Event::AdsRequest(request) => Some(request.clone()),
            _ => None,
        })
    }

    /// The connections.
    #[must_use]
    pub fn connections(&self) -> Vec<Connected> {
        self.pick(|event| match event {
            Event::Connected(connected) => Some(connected.clone()),
            _ => None,
        })
    }

    fn pick<T>(&self, choose: impl Fn(&Event) -> Option<T>) -> Vec<T> {
        let entries = self.entries.lock().expect("no panic holds this lock");
        entries.iter().filter_map(|entry| choose(&entry.event)).collect()
    }

    /// Waits until `look` finds something; looks again after every event.
    ///
    /// # Errors
    /// [`NotSeen`] with `what` after `limit`.
    pub async fn wait<T>(
        &self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut(&Self) -> Option<T>,
    ) -> Result<T, NotSeen> {
        let mut changes = self.length.subscribe();
        let seen = async {
            loop {
                changes.borrow_and_update();
                if let Some(found) = look(self) {
                    return found;
                }
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        tokio::time::timeout(limit, seen).await.map_err(|_| NotSeen(limit, what.to_owned()))
    }
}
