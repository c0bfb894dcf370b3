//! Each part's own configuration, made from the [`Sources`]. One file a part; no part reads a setting
//! itself, and [`super::Config`] holds what results.

pub(crate) mod ca;
pub(crate) mod capture;
pub(crate) mod dns;
pub(crate) mod envoy;
pub(crate) mod files;
pub(crate) mod gateway;
pub(crate) mod health;
pub(crate) mod identity;
pub(crate) mod iptables;
pub(crate) mod istiod;
pub(crate) mod memory;
pub(crate) mod ports;
pub(crate) mod status;
pub(crate) mod sts;
pub(crate) mod upgrade;
pub(crate) mod wasm;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Sources;
use crate::config::env::{Settings, var};
use crate::trouble::{Kind, Report};
use crate::xds;

/// Why a part cannot be set up: an ordinary error (255) or a fatal one of the Go agent (1).
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Error {
    /// One line: input, value, reason, remedy.
    pub text: String,
    /// The exit status the agent ends with.
    pub exit_code: u8,
    /// The file that is missing, if that is all: who needs it, too, need not say so again.
    pub missing: Option<PathBuf>,
    /// What it is.
    pub kind: Kind,
}

impl Error {
    /// Ends the agent with 255.
    #[must_use]
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), exit_code: 255, missing: None, kind: Kind::ConfigInvalid }
    }

    /// A root certificate that is not there.
    pub(crate) fn no_root(text: impl Into<String>) -> Self {
        Self::new(text).of(Kind::RootMissing)
    }

    /// Of this kind; without it is a value that is refused.
    #[must_use]
    pub(crate) fn of(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// With what was being done before the text.
    pub(crate) fn after(mut self, what: &str) -> Self {
        self.text = format!("{what}: {}", self.text);
        self
    }

    /// As a trouble, which is the last thing said.
    #[must_use]
    pub(crate) fn report(&self) -> Report {
        Report::new(self.kind, self.text.clone())
    }

    /// Ends the agent with 1.
    #[must_use]
    pub(crate) fn fatal(text: impl Into<String>) -> Self {
        Self { exit_code: 1, ..Self::new(text) }
    }

    /// A file that is not there; ends the agent with 255.
    #[must_use]
    pub(crate) fn missing(text: impl Into<String>, path: PathBuf) -> Self {
        Self { missing: Some(path), ..Self::new(text) }
    }
}

/// `path` hung off `root` as [`Sources::path`] does.
pub(super) fn at(root: &Path, path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    if root.as_os_str().is_empty() || root == Path::new(".") { path.to_owned() } else { root.join(path) }
}

impl Sources {
    /// `path` as the agent uses it: relative ones hang off the root, which is the working directory.
    #[must_use]
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        at(&self.root, path)
    }

    /// Exists and is a regular file, symbolic links followed.
    pub(crate) fn is_file(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).is_file()
    }

    /// Span of a ProxyConfig duration; `None` when unset, zero for negative ones.
    pub(crate) fn span(duration: Option<&pbjson_types::Duration>) -> Option<Duration> {
        duration.map(|d| {
            let seconds = u64::try_from(d.seconds).unwrap_or(0);
            let nanos = if d.seconds < 0 { 0 } else { u32::try_from(d.nanos).unwrap_or(0) };
            Duration::new(seconds, nanos)
        })
    }

    /// `configPath`, cleaned.
    #[must_use]
    pub(crate) fn config_path(&self) -> PathBuf {
        self.path(crate::base::path::clean(&self.mesh.proxy.config_path))
    }
}

/// Where the last good configuration is kept (`XDS_REPLAY`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Nowhere.
    Off,
    /// By this process.
    Memory,
    /// In a file as well.
    Disk,
}

/// No place where configuration can be kept.
#[derive(Debug, thiserror::Error)]
#[error("XDS_REPLAY is {0:?}: it is off, memory or disk")]
pub(crate) struct UnknownPlace(String);

/// `XDS_REPLAY`.
///
/// # Errors
/// When it is none of them.
pub(crate) fn replay(text: &str) -> Result<Kept, UnknownPlace> {
    match text {
        "" | "off" => Ok(Kept::Off),
        "memory" => Ok(Kept::Memory),
        "disk" => Ok(Kept::Disk),
        other => Err(UnknownPlace(other.to_owned())),
    }
}

/// The longest `XDS_RECONNECT_SPREAD`: what is pushed meanwhile comes that late.
const SPREAD_MAX: Duration = Duration::from_secs(600);

/// `XDS_RECONNECT_SPREAD`, and what is wrong with it; `None`: each agent comes back within seconds.
#[must_use]
pub(crate) fn spread(s: &Settings) -> (Option<Duration>, Option<String>) {
    let value = s.signed(var::XDS_RECONNECT_SPREAD);
    if value.span.is_zero() {
        return (None, None);
    }
    let name = var::XDS_RECONNECT_SPREAD.name();
    let text = s.env().get(name).unwrap_or_default();
    let bad = |used| {
        Some(format!(
            "Invalid environment variable value `{text}` for {name}, expecting 0s to 10m, defaulting to {used}"
        ))
    };
    if s.duration(var::XDS_HOLD_TIMEOUT).is_zero() {
        return (
            None,
            Some(format!("{name}={text} has no effect with XDS_HOLD_TIMEOUT=0, which holds no stream")),
        );
    }
    if value.span > SPREAD_MAX {
        return (Some(SPREAD_MAX), bad("10m"));
    }
    (Some(value.span), None)
}

/// `XDS_REPLAY_DIR`.
#[must_use]
pub(crate) fn replay_dir(config: &Sources) -> PathBuf {
    match config.settings.some_text(var::XDS_REPLAY_DIR) {
        Some(dir) => config.path(dir),
        None => config.config_path().join("last-good"),
    }
}

/// Pings to istiod and on the local sockets: one a second at most, as the Go library has it.
#[must_use]
pub(crate) fn keepalive(s: &Settings) -> xds::Keepalive {
    let interval = s.duration(var::GRPC_KEEPALIVE_INTERVAL);
    let floor = if interval.is_zero() { interval } else { Duration::from_secs(1) };
    xds::Keepalive { interval: interval.max(floor), timeout: s.duration(var::GRPC_KEEPALIVE_TIMEOUT) }
}

/// The relay, whose way to istiod is this.
#[must_use]
pub(crate) fn xds(config: &Sources, way: &istiod::Upstream, file_mounted: bool) -> xds::Config {
    let s = &config.settings;
    let mut out = xds::Config::new(config.config_path().join("XDS"));
    let streams = u32::try_from(s.int(var::ISTIO_GPRC_MAXSTREAMS)).unwrap_or_default();
    // The Go library takes 0 for no bound.
    out.max_streams = if streams == 0 { out.max_streams } else { streams };
    out.max_request = u64::try_from(s.int(var::ISTIO_GPRC_MAXRECVMSGSIZE)).unwrap_or(out.max_request);
    out.keepalive = keepalive(s);
    out.needs_token = !file_mounted && way.shows_no_certificate();
    out.expects_envoy = envoy::presence(config).is_ok_and(|presence| presence == envoy::Presence::External);
    out.hold = s.duration(var::XDS_HOLD_TIMEOUT);
    out.spread = spread(s).0;
    // An unknown word has ended the start.
    let kept = replay(s.text(var::XDS_REPLAY)).unwrap_or(Kept::Off);
    out.replay = (kept != Kept::Off).then(|| xds::Replay {
        after: s.duration(var::XDS_REPLAY_AFTER),
        most: usize::try_from(s.int(var::XDS_REPLAY_MAX_BYTES)).unwrap_or_default(),
        disk: (kept == Kept::Disk).then(|| xds::Disk {
            file: replay_dir(config).join("config"),
            max_age: s.duration(var::XDS_REPLAY_MAX_AGE),
        }),
        left: None,
    });
    out.max_age = Some(s.duration(var::XDS_STREAM_MAX_AGE)).filter(|d| !d.is_zero());
    out.stall = Some(s.duration(var::XDS_STALL_TIMEOUT)).filter(|d| !d.is_zero());
    out
}
