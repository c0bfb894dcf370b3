//! What Envoy says of itself on its admin port, and what it means. The judgement is pure.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::base::error::chain;
use crate::fetch;
use crate::trouble::{Kind, Report};

/// Why Envoy is not ready, in the Go agent's words where it has some.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotReady {
    /// There is no process.
    #[error("Envoy is not running")]
    NotRunning,
    /// Another process than the one that was asked.
    #[error("Envoy has just been started again")]
    Restarted,
    /// The agent is stopping; why.
    #[error("server is terminated: {0}")]
    Terminated(String),
    /// Neither clusters nor listeners.
    #[error("config not received from XDS server (is Istiod running?): {0}")]
    NoConfig(String),
    /// Envoy has refused some of it.
    #[error("config received from XDS server, but was rejected: {0}")]
    Rejected(String),
    /// Clusters without listeners, or the other way round.
    #[error("config not fully received from XDS server: {0}")]
    Partial(String),
    /// A stat that is not there yet, and what is.
    #[error("failed to get readiness stats: {name} is not yet updated: {shown}")]
    NotUpdated {
        /// The stat.
        name: &'static str,
        /// The answer's beginning.
        shown: String,
    },
    /// Live, and takes no connections.
    #[error("workers have not yet started")]
    Workers,
    /// Not live.
    #[error("server is not live, current state is: {0}")]
    State(&'static str),
    /// Stats that cannot be read.
    #[error("{}", joined(.0))]
    Stats(Vec<BadStat>),
    /// The admin port refuses.
    #[error("failed to get readiness stats from Envoy's admin at {admin}: {}", chain(.source))]
    Admin {
        /// Where.
        admin: SocketAddr,
        /// Why.
        source: fetch::Error,
    },
    /// The admin port says nothing.
    #[error("Envoy's admin at {admin} did not answer within {limit:?}")]
    Silent {
        /// Where.
        admin: SocketAddr,
        /// For how long it was waited.
        limit: Duration,
    },
}

impl NotReady {
    /// As a trouble.
    pub(super) fn report(&self) -> Report {
        let kind = match self {
            Self::NotRunning => Kind::EnvoyNotStarted,
            Self::Terminated(_) => Kind::Terminating,
            Self::NoConfig(_) => Kind::NoConfig,
            Self::Rejected(_) => Kind::ConfigRejected,
            Self::Partial(_) => Kind::NoListeners,
            Self::Restarted | Self::NotUpdated { .. } | Self::Workers | Self::State(_) => {
                Kind::EnvoyNotInitialised
            }
            // Where nothing is left to ask it with, Envoy is not what is wrong.
            Self::Admin { source, .. } => Kind::of_chain(source).unwrap_or(Kind::EnvoyAdminSilent),
            Self::Stats(_) | Self::Silent { .. } => Kind::EnvoyAdminSilent,
        };
        Report::new(kind, self.to_string())
    }
}

/// A line of Envoy's stats that cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadStat {
    #[error("envoy stat {name} missing separator. line:{line}")]
    Separator { name: &'static str, line: String },
    #[error("failed parsing Envoy stat {name} (error: a sign) line: {line}")]
    Sign { name: &'static str, line: String },
    #[error("failed parsing Envoy stat {name} (error: {source}) line: {line}")]
    Number { name: &'static str, line: String, source: std::num::ParseIntError },
}

fn joined(errors: &[BadStat]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A question to the admin port.
struct Question {
    path: &'static str,
    limit: Duration,
}

/// Has config arrived? The counters are Envoy's; limits and filters are those of the Go agent.
const CONFIG: Question = Question {
    path: r"/stats?usedonly&filter=^(cluster_manager\.cds|listener_manager\.lds)\.(update_success|update_rejected)$",
    limit: Duration::from_secs(1),
};
/// Is Envoy live?
const SERVING: Question = Question {
    path: r"/stats?usedonly&filter=^(server\.state|listener_manager\.workers_started)",
    limit: Duration::from_secs(3),
};

/// Envoy's answers are a few lines; more is no answer to our question.
const LIMIT: usize = 1 << 20;

/// Envoy's readiness; what has once been yes is not asked again until [`Envoy::forget`], but for one whose process nobody here
/// sees.
#[derive(Debug)]
pub(crate) struct Envoy {
    admin: SocketAddr,
    unseen: bool,
    configured: AtomicBool,
    live: AtomicBool,
}

impl Envoy {
    /// The Envoy whose admin interface is at `admin`.
    #[must_use]
    pub(crate) fn new(admin: SocketAddr) -> Self {
        Self { admin, unseen: false, configured: AtomicBool::new(false), live: AtomicBool::new(false) }
    }

    /// The one at `admin` that somebody else starts and ends (`ENVOY_EXTERNAL`): it is asked each time.
    #[must_use]
    pub(crate) fn external(admin: SocketAddr) -> Self {
        Self { unseen: true, ..Self::new(admin) }
    }

    /// Its process has gone: the next one must prove itself.
    pub(crate) fn forget(&self) {
        self.configured.store(false, Relaxed);
        self.live.store(false, Relaxed);
    }

    /// Whether it has received clusters and listeners.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) async fn configured(&self) -> Result<(), NotReady> {
        if self.unseen || !self.configured.load(Relaxed) {
            config_state(&ask(self.admin, CONFIG).await?)?;
            self.configured.store(true, Relaxed);
        }
        Ok(())
    }

    /// Whether it is live and its workers run; `true` when that is news.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) async fn live(&self) -> Result<bool, NotReady> {
        if !self.unseen && self.live.load(Relaxed) {
            return Ok(false);
        }
        serving_state(&ask(self.admin, SERVING).await?)?;
        Ok(!self.live.swap(true, Relaxed))
    }
}

/// For how long a person's question waits.
const STILL: Duration = Duration::from_secs(2);
/// What it is.
const INFO: Question = Question { path: "/server_info", limit: STILL };

impl Envoy {
    /// Whether it is live now, whatever it has said before; `Ok` where it never was, which is told elsewhere.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) async fn still_live(&self) -> Result<(), NotReady> {
        if !self.live.load(Relaxed) {
            return Ok(());
        }
        serving_state(&ask(self.admin, Question { limit: STILL, ..SERVING }).await?)
    }

    /// Version, state and uptime, as it tells them; null where it does not.
    pub(crate) async fn info(&self) -> serde_json::Value {
        let text = ask(self.admin, INFO).await.unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }
}

async fn ask(admin: SocketAddr, question: Question) -> Result<String, NotReady> {
    let url = format!("http://{admin}{}", question.path);
    let text = async {
        let mut reply = fetch::Get::new(&url)?.send().await?;
        if reply.status() != 200 {
            return Err(fetch::Error::Status(reply.status()));
        }
        reply.text(LIMIT).await
    };
    match tokio::time::timeout(question.limit, text).await {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(source)) => Err(NotReady::Admin { admin, source }),
        Err(_) => Err(NotReady::Silent { admin, limit: question.limit }),
    }
}

/// The value of a stat: that of the first line that starts with its name; `None` when there is no such
/// line. "Starts with" is literal: `a.b_total: 0` before `a.b: 1` hides it, in the Go agent too.
fn stat(text: &str, name: &'static str) -> Result<Option<u64>, BadStat> {
    let Some(line) = text.split('\n').find(|line| line.starts_with(name)) else { return Ok(None) };
    let line = line.trim_end_matches('\r');
    let mut parts = line.split(':');
    let (Some(_), Some(value), None) = (parts.next(), parts.next(), parts.next()) else {
        return Err(BadStat::Separator { name, line: line.to_owned() });
    };
    match value.trim().parse::<u64>() {
        // `parse` takes a plus sign, the Go agent does not.
        Ok(value) if !line.contains('+') => Ok(Some(value)),
        Ok(_) => Err(BadStat::Sign { name, line: line.to_owned() }),
        Err(source) => Err(BadStat::Number { name, line: line.to_owned(), source }),
    }
}

fn stats<const N: usize>(text: &str, names: [&'static str; N]) -> Result<[u64; N], NotReady> {
    let mut values = [0; N];
    let mut errors = Vec::new();
    for (value, name) in values.iter_mut().zip(names) {
        match stat(text, name) {
            Ok(found) => *value = found.unwrap_or(0),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(values) } else { Err(NotReady::Stats(errors)) }
}

/// Whether Envoy has received clusters and listeners.
///
/// # Errors
/// What is missing.
fn config_state(text: &str) -> Result<(), NotReady> {
    let [cds, cds_rejected, lds, lds_rejected] = stats(
        text,
        [
            "cluster_manager.cds.update_success",
            "cluster_manager.cds.update_rejected",
            "listener_manager.lds.update_success",
            "listener_manager.lds.update_rejected",
        ],
    )?;
    let summary = format!(
        "cds updates: {cds} successful, {cds_rejected} rejected; lds updates: {lds} successful, {lds_rejected} rejected"
    );
    match (cds, lds) {
        (1.., 1..) => Ok(()),
        (0, 0) => Err(NotReady::NoConfig(summary)),
        _ if cds_rejected > 0 || lds_rejected > 0 => Err(NotReady::Rejected(summary)),
        _ => Err(NotReady::Partial(summary)),
    }
}

/// Whether Envoy is live and its workers have started.
///
/// # Errors
/// What is missing.
fn serving_state(text: &str) -> Result<(), NotReady> {
    for name in ["server.state", "listener_manager.workers_started"] {
        if !text.contains(name) {
            let shown: String = text.chars().take(200).collect();
            return Err(NotReady::NotUpdated { name, shown });
        }
    }
    let [state, workers] = stats(text, ["server.state", "listener_manager.workers_started"])?;
    let name = match state {
        0 if workers == 1 => return Ok(()),
        0 => return Err(NotReady::Workers),
        1 => "DRAINING",
        2 => "PRE_INITIALIZING",
        3 => "INITIALIZING",
        _ => "UNKNOWN",
    };
    Err(NotReady::State(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> String {
        config_state(text).err().map(|why| why.to_string()).unwrap_or_default()
    }

    #[test]
    fn config_needs_both_and_says_which_is_missing() {
        let both = "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n";
        assert_eq!(config(both), "");
        assert_eq!(config(&both.replace('\n', "\r\n")), "");
        assert_eq!(
            config("cluster_manager.cds.update_success:1\nother\nlistener_manager.lds.update_success:  7"),
            ""
        );
        assert!(
            config("")
                .starts_with("config not received from XDS server (is Istiod running?): cds updates: 0 ")
        );
        let rejected = "cluster_manager.cds.update_rejected: 2";
        assert!(config(rejected).starts_with("config not received"), "even with rejections");
        let half = "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_rejected: 3";
        assert_eq!(
            config(half),
            "config received from XDS server, but was rejected: cds updates: 1 successful, 0 rejected; lds updates: 0 successful, 3 rejected"
        );
        assert!(config("cluster_manager.cds.update_success: 1").starts_with("config not fully received"));
    }

    #[test]
    fn lines_that_cannot_be_read_are_not_ready() {
        for bad in [
            "cluster_manager.cds.update_success 1",
            "cluster_manager.cds.update_success: 1: 2",
            "cluster_manager.cds.update_success: x",
            "cluster_manager.cds.update_success: -1",
            "cluster_manager.cds.update_success: +1",
            "cluster_manager.cds.update_success: 99999999999999999999999",
            "cluster_manager.cds.update_success:",
        ] {
            let text = format!("{bad}\nlistener_manager.lds.update_success: 1\n");
            assert!(config(&text).contains("cluster_manager.cds.update_success"), "{bad}");
        }
        let hidden = "cluster_manager.cds.update_success_total: 0\ncluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1";
        assert!(config(hidden).starts_with("config not fully received"));
    }

    #[test]
    fn serving_needs_state_and_workers() {
        let say = |text: &str| serving_state(text).err().map(|why| why.to_string()).unwrap_or_default();
        assert_eq!(say("server.state: 0\nlistener_manager.workers_started: 1\n"), "");
        assert_eq!(
            say("server.state: 0\nlistener_manager.workers_started: 2\n"),
            "workers have not yet started"
        );
        assert_eq!(
            say("server.state: 0\nlistener_manager.workers_started: 0\n"),
            "workers have not yet started"
        );
        for (state, name) in [(1, "DRAINING"), (2, "PRE_INITIALIZING"), (3, "INITIALIZING"), (9, "UNKNOWN")] {
            let text = format!("server.state: {state}\nlistener_manager.workers_started: 1\n");
            assert_eq!(say(&text), format!("server is not live, current state is: {name}"));
        }
        assert!(say("").contains("server.state is not yet updated"));
        assert!(say("server.state: 0").contains("listener_manager.workers_started is not yet updated"));
    }
}
