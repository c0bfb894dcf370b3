//! Envoy's life: start, watch, hot restart, drain, stop.
//!
//! Promises:
//! - Envoy never outlives the agent: the child carries a parent-death signal ([`launch`]), a [`guard`] stands by
//!   where that is not enough, and whoever drops a [`supervisor::Supervisor`] kills it. What an earlier agent
//!   has left behind is ended before the first Envoy starts (`stale`).
//! - Envoy's death is never reported as success ([`Outcome::exit_code`]).
//! - Every wait has an end: each phase of a stop has a deadline in the pure machine of [`drain`], each
//!   request to the admin port one of its own ([`admin`]).
//! - The generated bootstrap file is gone when the agent is, whatever the way.
//!
//! What decides is pure and tested without processes ([`command`], [`drain`], [`restart`]); what acts
//! is thin ([`process`], [`launch`], [`admin`], [`supervisor`]). Uses only what every part may use.
//!
//! | file | is about |
//! |---|---|
//! | `command`, `launch`, `process` | arguments, the last steps before execution, one process |
//! | `supervisor` | the loop: starts, ends, epochs, drains, replacements |
//! | `drain`, `restart` | pure: how Envoy is stopped, and which epoch should run |
//! | `admin` | the requests to Envoy's admin port |
//! | `guard`, `stale`, `kin`, `adopted` | no orphans: Envoys of a dead, earlier or replaced agent |
//! | `validate`, `port`, `kernel`, `shared` | a judged bootstrap, who holds a port, what the kernel tells, shared memory of epochs |

pub(crate) mod admin;
mod adopted;
pub(crate) mod command;
pub(crate) mod drain;
pub(crate) mod guard;
mod kept;
pub(crate) mod kernel;
mod kin;
pub(crate) mod launch;
pub(crate) mod port;
pub(crate) mod process;
pub(crate) mod restart;
mod shared;
mod stale;
pub(crate) mod supervisor;
pub(crate) mod validate;

use std::path::PathBuf;
use std::time::Duration;

pub(crate) use kept::Kept;
pub use process::Exit;
pub use supervisor::{Handle, NotReplaced, RunState, Supervisor};

/// Everything needed to run one Envoy.
#[derive(Debug, Clone)]
pub struct Config {
    /// Envoy's binary: a path, or a bare name that is looked for along PATH.
    pub binary: String,
    /// The program that becomes Envoy: this binary, which knows [`launch::ARGUMENT`].
    pub launcher: PathBuf,
    /// Envoy's arguments, without the configuration file and the epoch.
    pub arguments: command::Options,
    /// Variables that Envoy gets beside the agent's whole environment.
    pub extra_env: Vec<(String, String)>,
    /// User and group that Envoy runs as instead of the agent's; supplementary groups are cleared.
    pub user: Option<(u32, u32)>,
    /// `ENVOY_OWN_PROCESS_GROUP` (ours, default false): Envoy leads a process group of its own. The Go
    /// agent leaves it in the agent's, so that a terminal's Ctrl-C reaches both, and scripts rely on it.
    pub own_group: bool,
    /// Where Envoy's configuration is.
    pub file: ConfigFile,
    /// Envoy's admin port.
    pub admin: admin::Config,
    /// How to stop.
    pub drain: drain::Config,
    /// What to do when the configuration changes or Envoy dies.
    pub restart: restart::Config,
    /// `ENVOY_EXIT_ALWAYS_ZERO` (ours, default false): end with 0 whatever became of Envoy, as the Go
    /// agent does.
    pub always_zero: bool,
}

/// Which file Envoy is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigFile {
    /// The user's own; never written, never removed.
    Custom(PathBuf),
    /// Written from [`Bootstrap::render`] and removed when Envoy has ended. With hot restart the epoch
    /// goes before the extension (`envoy-rev.json` becomes `envoy-rev0.json`).
    Generated(PathBuf),
}

/// The text of a generated bootstrap; asked again for each epoch.
pub trait Bootstrap: Send {
    /// The file's content as of now.
    ///
    /// # Errors
    /// When an input is unusable; at start this ends the agent, later the running Envoy stays.
    fn render(&mut self) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>>;

    /// What Envoy puts over it as of now ([`command::Options::override_json`]); `known` is what it was.
    fn over(&mut self, known: Option<String>) -> Option<String> {
        known
    }
}

impl<F> Bootstrap for F
where
    F: FnMut() -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> + Send,
{
    fn render(&mut self) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
        self()
    }
}

/// Why Envoy was not even tried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bootstrap could not be made.
    #[error("failed to generate the Envoy bootstrap")]
    Render(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The bootstrap could not be written.
    #[error("failed to write the Envoy bootstrap {path}")]
    Write {
        /// The file, or the folder that could not be made.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// No binary is named.
    #[error(
        "binaryPath of the proxy config is empty: set it to Envoy's path, or leave it out for /usr/local/bin/envoy"
    )]
    NoBinary,
}

/// Why the agent stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// A signal, by its description as Go prints it (`terminated`, `interrupt`, `hangup`, `quit`).
    Signal(&'static str),
    /// `POST /quitquitquit`.
    Quit,
    /// `/drain` was called, and then nobody ended Envoy for too long.
    Drained,
    /// A part of the agent failed: which and why.
    Failure(String),
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Signal(name) => write!(f, "received signal: {name}"),
            Self::Quit => f.write_str("/quitquitquit called"),
            Self::Drained => f.write_str("Envoy was drained and nobody ended it (DRAINED_ENVOY_LIMIT)"),
            Self::Failure(why) => f.write_str(why),
        }
    }
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The exit status that the agent should end with, 0..=255.
    pub exit_code: u8,
    /// One line: who ended, when and why.
    pub reason: String,
    /// What Envoy ended with, if it ever ran.
    pub exit: Option<Exit>,
    /// How long Envoy ran, from its (last) start.
    pub ran: Duration,
    /// What was cut off with it, where that was counted; empty: nothing.
    pub cut: String,
}
