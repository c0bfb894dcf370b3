//! Why an upgrade is not made. The agent, and its Envoy, go on as before.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use crate::envoy::NotReplaced;

/// Why nobody takes over; whoever asked is told in these words.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A new Envoy would start without configuration.
    #[error(
        "istiod is away, and another Envoy would have no configuration until it is back \
         (with XDS_REPLAY it has the last one)"
    )]
    IstiodAway,
    /// Nothing can be replaced.
    #[error("this agent runs no Envoy")]
    NoEnvoy,
    /// Envoy is busy, or did not come to serve.
    #[error(transparent)]
    Envoy(#[from] NotReplaced),
    /// The program's file.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why it cannot be used.
        source: io::Error,
    },
    /// What the successor needs cannot be collected.
    #[error("nothing can be handed over: {0}")]
    Parcel(#[source] io::Error),
    /// The successor was not given anything.
    #[error("nothing is handed over: this is for the running agent alone")]
    NothingGiven,
    /// What was given is of no use.
    #[error("what is handed over cannot be read: {0}")]
    Unreadable(#[source] io::Error),
    /// A program that is to be looked at.
    #[error("{program} cannot be started: {source}")]
    NotStarted {
        /// Its path.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// The trial took too long.
    #[error("{program} has not shown within {limit:?} that it can take over (AGENT_UPGRADE_TIMEOUT)")]
    TrialLate {
        /// Its path.
        program: String,
        /// `AGENT_UPGRADE_TIMEOUT`.
        limit: Duration,
    },
    /// The trial said no.
    #[error("{program} cannot take over ({status}): {why}")]
    TrialFailed {
        /// Its path.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// Its own reason.
        why: String,
    },
    /// Another Envoy does not take the configuration.
    #[error("{envoy} refuses the present bootstrap ({status}): {reason}")]
    BootstrapRefused {
        /// Its path.
        envoy: String,
        /// How it ended.
        status: ExitStatus,
        /// Its own reason.
        reason: String,
    },
    /// Another Envoy says nothing.
    #[error("{envoy} has not judged the present bootstrap within {limit:?}")]
    BootstrapLate {
        /// Its path.
        envoy: String,
        /// `AGENT_UPGRADE_TIMEOUT`.
        limit: Duration,
    },
    /// An Envoy does not say whether it could.
    #[error("{envoy} does not say its form of hot restart: {source}")]
    FormUnknown {
        /// Its path.
        envoy: String,
        /// Why.
        source: io::Error,
    },
    /// Two Envoys that cannot share memory.
    #[error("hot restart of {new} is {new_form}, that of {old} is {old_form}: only a restart replaces it")]
    FormDiffers {
        /// The one that was to take over.
        new: String,
        /// What it speaks.
        new_form: String,
        /// The one that runs.
        old: String,
        /// What it speaks.
        old_form: String,
    },
    /// The kernel does not say who asks.
    #[error("nobody knows who asks: {0}")]
    PeerUnknown(#[source] io::Error),
    /// Somebody who may not.
    #[error("user {user} (process {process}) asks for it")]
    NotAllowed {
        /// Its id.
        user: u32,
        /// 0 when the kernel does not say.
        process: i32,
    },
}

impl Error {
    /// What to do.
    #[must_use]
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::IstiodAway => "ask again when istiod is back, or set XDS_REPLAY=memory",
            Self::NoEnvoy => {
                "--binary replaces the agent; the Envoy of somebody else is replaced by whoever started it"
            }
            Self::Envoy(_) => {
                "ask again when Envoy is ready and nothing else is under way; the log of the agent says more"
            }
            Self::File { .. } => "name a file that is there and that the agent's user may read and execute",
            Self::Parcel(_) | Self::Unreadable(_) => {
                "look at limits of memory and open files of the agent; a restart needs none of this"
            }
            Self::NothingGiven => {
                "start the agent with the command proxy, and ask it with the command upgrade"
            }
            Self::NotStarted { .. } => {
                "is it a program for this processor and C library, and executable for the agent's user?"
            }
            Self::TrialLate { .. } => "is it a pilot-agent? On a slow machine raise AGENT_UPGRADE_TIMEOUT",
            Self::TrialFailed { .. } => {
                "is it a pilot-agent that knows upgrades and takes this configuration? PROGRAM proxy --dry-run shows what it refuses"
            }
            Self::BootstrapRefused { .. } => {
                "take an Envoy that knows what the bootstrap names; pilot-agent proxy --dry-run shows the bootstrap"
            }
            Self::BootstrapLate { .. } | Self::FormUnknown { .. } => {
                "is it an Envoy? On a slow machine raise AGENT_UPGRADE_TIMEOUT"
            }
            Self::FormDiffers { .. } => "restart the agent with this Envoy in binaryPath of the proxy config",
            Self::PeerUnknown(_) | Self::NotAllowed { .. } => "ask as root or as the agent's user",
        }
    }
}
