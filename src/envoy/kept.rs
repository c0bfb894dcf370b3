//! What a new version of the agent, in the same process, must know of the Envoys that run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The Envoys, and what stands beside them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// Those that run, the oldest first.
    pub epochs: Vec<Epoch>,
    /// The program, which may be another one than at the start.
    pub binary: String,
    /// What the epochs find each other by.
    pub base_id: Option<u32>,
    /// Whether another epoch was to come: what is found at the start of the successor is not what runs.
    #[serde(default)]
    pub due: bool,
    /// The process of the guard; its line is handed over as [`GUARD`].
    pub guard: Option<i32>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Epoch {
    /// `--restart-epoch`.
    pub number: u32,
    /// Its process.
    pub pid: i32,
    /// Whether it leads a process group.
    pub own_group: bool,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its configuration file, if that was written for it.
    pub file: Option<PathBuf>,
    /// When it was started, in milliseconds since 1970.
    pub started: u64,
}

/// Under what the guard's line is handed over.
pub(super) const GUARD: &str = "guard of Envoy";
