//! `/stats/prometheus` and `/metrics`: the agent's metrics, Envoy's and the application's, in this order.
//!
//! No part waits for another to succeed: the applications are asked all at once, when Envoy's head is there
//! or is late. Their bodies pass through in pieces, one part after the other; while one is sent the next
//! waits in its socket, so memory does not depend on how much there is. Each part has the scraper's limit
//! for itself, counted only while we wait for that part: an application that hangs uses up its own time, a
//! slow reader nobody's. The limit of a part is a little shorter than the scraper's, so that what the others
//! said still arrives in time; what was waited for before a part was asked is taken off it.
//!
//! Several applications are another matter: which format the whole has depends on all of them, and one that
//! fails or is longer than `LONGEST_OF_SEVERAL` is left out whole, as the Go agent does since 1.31. So their
//! bodies are read before the first byte is sent, all at once and within the scraper's limit. Because they are held, one
//! scrape at a time has them; one whose limit goes by meanwhile has the other parts.
//!
//! A part that fails is left out, counted, and told in the log with its reason; one that breaks off is
//! ended at its last whole line, so that what follows stays readable.

mod buffers;
pub(crate) mod config;
pub(crate) mod lines;
mod merge;
mod part;
mod turns;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderValue, StatusCode, header};

pub use config::parse_annotations;
pub(crate) use config::{Error as AnnotationError, Target, parse_1_30, parse_either};
#[cfg(debug_assertions)]
pub use lines::Lines;

use super::accept::{Media, rewrite};
use super::own::{Own, encode};
use crate::base::metrics::Metrics;
use crate::base::quote::{cut, shown};
use crate::base::seldom::Seldom;
use crate::serve::respond::{Answer, Body, error, page};
use crate::serve::{self, ConnState};
use part::{Failure, Part, Reason};
pub(super) use turns::{Turn, Turns};

/// Prometheus asks every few seconds; more lines than this about parts that are missing or cut say nothing new.
static LOST: Seldom = Seldom::new(60);
/// Longest cause in a line.
const CAUSE: usize = 1024;
/// Nor more about a header that anybody may send.
static LIMITS: Seldom = Seldom::new(10);

/// What is merged.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// `ENVOY_PROMETHEUS_PORT` (15090) on localhost; `None` with Envoy disabled or
    /// `PILOT_AGENT_MERGE_ENVOY_STATS=false`.
    pub envoy_port: Option<u16>,
    /// The application's endpoints, in the order they are merged; from [`parse_annotations`].
    pub targets: Vec<Target>,
    /// `METRICS_LOCALHOST_ACCESS_ONLY`.
    pub local_only: bool,
    /// Most bytes of one part that are passed on (after decompression); the rest is cut and a line says
    /// so. `None`: all.
    pub limit: Option<u64>,
    /// Whether families that the Go agent does not have are exported, and each cut part ends with a
    /// line that says why.
    pub details: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { envoy_port: Some(15090), targets: Vec::new(), local_only: false, limit: None, details: false }
    }
}

/// Merges metrics.
pub(super) struct Merger {
    config: Config,
    status_port: u16,
    own: Own,
    metrics: Metrics,
    turns: Turns,
    /// Of several applications, for those scrapes that have a turn.
    several: Option<Turns>,
    /// The last failure of each part, for `/debug/agentz`.
    failures: Mutex<BTreeMap<String, (u64, String)>>,
}

/// Prometheus' own name for the time it gives a scrape, in seconds.
const LIMIT: &str = "x-prometheus-scrape-timeout-seconds";
/// What is taken off the limit of a part: a tenth, and at most this.
const HEAD_START: Duration = Duration::from_millis(500);

/// The applications are asked once Envoy's head is there, as in the Go agent, so that on a node of few cores
/// the two do not render their metrics against each other; but after this at the latest, or where the scraper
/// has a limit after a twentieth of that and a quarter of this, so that an Envoy that hangs costs the
/// application's part nothing. A head that comes sooner, or a refusal, is waited for and no longer.
const ENVOY_FIRST: Duration = Duration::from_secs(1);

/// Most bytes of one application's body where there are several (Istio 1.31's number)...
const LONGEST_OF_SEVERAL: u64 = 10 * 1024 * 1024;
/// ... and of all of them together: they are held until the last one is there.
const SEVERAL: u64 = 20 * 1024 * 1024;

impl Merger {
    pub(super) fn new(config: Config, status_port: u16, own: Own, metrics: Metrics) -> Self {
        let several = (config.targets.len() > 1).then(Turns::one);
        Self {
            turns: Turns::default(),
            several,
            config,
            status_port,
            own,
            metrics,
            failures: Mutex::default(),
        }
    }

    pub(super) fn local_only(&self) -> bool {
        self.config.local_only
    }

    /// The last failure of each part.
    pub(super) fn failures(&self) -> serde_json::Value {
        let failures = self.failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let shown = failures
            .iter()
            .map(|(part, (at, why))| (part.clone(), serde_json::json!({"unixSeconds": at, "why": why})));
        serde_json::Value::Object(shown.collect())
    }

    fn failed(&self, kind: &'static str, url: &str, failure: &Failure) {
        self.own.failures.with_label_values(&[kind]).inc();
        self.own.reasons.with_label_values(&[kind, failure.reason.label()]).inc();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        // What Envoy is asked is the scraper's word, and there are as many of those as anybody likes.
        let part = if kind == "envoy" { url.split('?').next().unwrap_or_default() } else { url };
        let mut failures = self.failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        failures.insert(format!("{kind} {part}"), (now, failure.to_string()));
    }

    /// The agent's own part.
    fn own_part(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8 * 1024);
        self.own.look();
        if let Err(error) = encode(&self.metrics, self.config.details, &mut out) {
            tracing::warn!("the agent's own metrics cannot be written whole: {error}");
            self.own.failures.with_label_values(&["agent"]).inc();
        }
        out
    }

    /// Asks Envoy and the applications, each for `limit` at most; the answers that are fit to be merged, in their order,
    /// and the turn that is kept while they are sent.
    async fn ask(
        &self,
        headers: &HeaderMap,
        query: Option<&str>,
        limit: Option<Duration>,
        of: &ConnState,
    ) -> (Option<Part>, Vec<Part>, Option<Turn>) {
        let (envoy_headers, app_headers) = (forwarded(headers, false), forwarded(headers, true));
        let envoy = async {
            let port = self.config.envoy_port?;
            let query = query.filter(|q| !q.is_empty()).map(|q| format!("?{q}")).unwrap_or_default();
            let url = format!("http://localhost:{port}/stats/prometheus{query}");
            self.head("envoy", &url, envoy_headers, limit).await
        };
        let apps = self.apps(&app_headers, limit, of);
        let mut envoy = std::pin::pin!(envoy);
        let first = limit.map_or(ENVOY_FIRST, |limit| (ENVOY_FIRST / 4).min(limit / 20));
        let early = tokio::time::timeout(first, &mut envoy).await;
        let (envoy, (apps, turn)) = match early {
            Ok(envoy) => (envoy, apps.await),
            Err(_) => futures_util::future::join(envoy, apps).await,
        };
        (envoy, apps, turn)
    }

    async fn apps(
        &self,
        headers: &HeaderMap,
        limit: Option<Duration>,
        of: &ConnState,
    ) -> (Vec<Part>, Option<Turn>) {
        let url = |target: &Target| format!("http://localhost:{}{}", target.port, target.path);
        let (turn, limit) = match &self.several {
            None => (None, limit),
            Some(turns) => match turns.take(of, limit).await {
                Some((turn, waited)) => (Some(turn), limit.map(|limit| limit.saturating_sub(waited))),
                None => {
                    let late =
                        Failure::new(Reason::Timeout, "another scrape of the applications took all its time");
                    for target in &self.config.targets {
                        self.missing("application", &url(target), &late);
                    }
                    return (Vec::new(), None);
                }
            },
        };
        let room = &AtomicU64::new(SEVERAL);
        let targets = self.config.targets.iter().map(|target| {
            let (url, headers, several) = (url(target), headers.clone(), self.several.is_some());
            async move {
                let part = self.head("application", &url, headers, limit).await?;
                if !several {
                    return Some(part);
                }
                let part = part.whole(LONGEST_OF_SEVERAL, room).await;
                part.map_err(|failure| self.missing("application", &url, &failure)).ok()
            }
        });
        let apps = futures_util::future::join_all(targets).await;
        let apps: Vec<Part> = apps.into_iter().flatten().collect();
        // The turn is for what is held of them.
        let turn = turn.filter(|_| !apps.is_empty());
        (apps, turn)
    }

    async fn head(
        &self,
        kind: &'static str,
        url: &str,
        headers: HeaderMap,
        limit: Option<Duration>,
    ) -> Option<Part> {
        match Part::ask(kind, url, headers, limit, self.status_port).await {
            Ok(part) => Some(part),
            Err(failure) => {
                self.missing(kind, url, &failure);
                None
            }
        }
    }

    fn missing(&self, kind: &'static str, url: &str, failure: &Failure) {
        let why = failure.to_string();
        let why = cut(&why, CAUSE);
        if let Some(more) = LOST.may_hold(why.len()) {
            tracing::warn!("no {kind} metrics in this scrape: {}: {why}{more}", shown(url));
        }
        self.failed(kind, url, failure);
    }
}

/// The scraper's limit; `None`: it named none that can be read.
fn limit(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(LIMIT)?.to_str().unwrap_or("");
    if text.is_empty() {
        return None;
    }
    match text.parse::<f64>() {
        Ok(seconds) if !seconds.is_nan() => {
            Some(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
        }
        _ => {
            if let Some(more) = LIMITS.may() {
                let text = cut(text, 100);
                tracing::warn!(
                    "the header {LIMIT} of a scrape is {text:?}, which is no number of seconds: the scrape has no \
                    deadline{more}"
                );
            }
            None
        }
    }
}

/// What of the scraper's headers goes on.
fn forwarded(headers: &HeaderMap, open_metrics: bool) -> HeaderMap {
    let mut out = HeaderMap::new();
    for name in [header::USER_AGENT, header::HeaderName::from_static(LIMIT)] {
        if let Some(value) = headers.get(&name).filter(|v| !v.is_empty()) {
            out.insert(name, value.clone());
        }
    }
    let accept = headers.get(header::ACCEPT).map_or("".into(), |v| String::from_utf8_lossy(v.as_bytes()));
    if let Ok(accept) = HeaderValue::from_str(&rewrite(&accept, open_metrics)) {
        out.insert(header::ACCEPT, accept);
    }
    out
}

fn is_open_metrics(part: &Part) -> bool {
    format(Some(part)).1
}

/// What the whole is where several applications answered: what they agree on, else plain text.
fn common_format(apps: &[Part]) -> (&'static str, bool) {
    let first = format(apps.first());
    if apps.iter().all(|app| format(Some(app)) == first) { first } else { format(None) }
}

/// What the whole is, which only the application's part decides.
fn format(app: Option<&Part>) -> (&'static str, bool) {
    let media = app.and_then(|app| app.content_type()).and_then(|kind| Media::parse(&kind));
    match media.as_ref().filter(|m| m.is_open_metrics()).map(|m| m.param("version")) {
        Some(Some("1.0.0")) => ("application/openmetrics-text; version=1.0.0; charset=utf-8", true),
        Some(None | Some("" | "0.0.1")) => {
            ("application/openmetrics-text; version=0.0.1; charset=utf-8", true)
        }
        _ => ("text/plain; version=0.0.4; charset=utf-8", false),
    }
}

pub(super) async fn answer(
    merger: &Arc<Merger>,
    conn: &ConnState,
    headers: &HeaderMap,
    query: Option<&str>,
) -> Answer {
    merger.own.scrapes.with_label_values::<&str>(&[]).inc();
    // One begins at a time, and one is put together.
    serve::turn(conn).await;
    let limit = limit(headers).map(|l| l.saturating_sub((l / 10).min(HEAD_START)));
    let Some((turn, waited)) = merger.turns.take(conn, limit).await else {
        return error(StatusCode::SERVICE_UNAVAILABLE, "too many scrapes at a time");
    };
    let limit = limit.map(|limit| limit.saturating_sub(waited));
    let (envoy, apps, held) = merger.ask(headers, query, limit, conn).await;
    let (kind, open_metrics) = common_format(&apps);
    let several = merger.several.is_some();
    let mut parts = Vec::with_capacity(apps.len() + 1);
    parts.extend(envoy.map(|part| part.strip_eof(open_metrics)));
    parts.extend(apps.into_iter().map(|app| app.strip_eof(several)));
    serve::turn(conn).await;
    let own = merger.own_part();
    let mut answer = page(StatusCode::OK, HeaderValue::from_static(kind), "");
    *answer.body_mut() = if parts.is_empty() {
        Body::whole(own)
    } else {
        let stream = merge::stream(own, parts, open_metrics, several, merger.clone());
        Body::stream(turns::during((turn, held), stream))
    };
    answer
}

#[cfg(test)]
mod tests;
