//! The trial of a new program: it is started beside this one with what it would be handed, and says whether it could.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::{Error, Heir, Program, words};
use crate::agent::dry_run::dry_run_within;
use crate::base::handover::{self, Parcel};
use crate::config::Config;
use crate::config::parts;
use crate::envoy::validate;

/// The first argument that selects it.
pub(crate) const ARGUMENT: &str = "__take-over";
/// What the last line says, before the version. The number is of what is handed over: another one is another form.
const CAN: &str = "takes over 1 ";

/// Has `file`, which lies at `path`, say whether it could take over.
pub(super) async fn tried(
    path: PathBuf,
    file: OwnedFd,
    parcel: Parcel,
    limit: Duration,
) -> Result<Program, Error> {
    let shown = path.display().to_string();
    let stdin = handover::pack(&parcel).map_err(Error::Parcel)?;
    drop(parcel);
    // The child has the same descriptors until it is another program.
    let program = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut command = Command::new(program);
    {
        let mut words = words();
        if let Some(name) = words.next() {
            command.arg0(name);
        }
        command.arg(ARGUMENT).args(words).stdin(Stdio::from(stdin));
    }
    let told = validate::told(command, limit).await;
    let told = told.map_err(|source| Error::NotStarted { program: shown.clone(), source })?;
    let Some((status, said, complaint)) = told else {
        return Err(Error::TrialLate { program: shown, limit });
    };
    let version = said.lines().last().and_then(|line| line.strip_prefix(CAN));
    match version {
        Some(version) if status.success() => {
            let version = version.to_owned();
            Ok(Program { file, path, version })
        }
        _ => {
            let why = validate::reason(&complaint);
            let silent = "it does not say why: is it a pilot-agent that knows upgrades?";
            let why = if why.is_empty() { silent.to_owned() } else { why };
            Err(Error::TrialFailed { program: shown, status, why })
        }
    }
}

/// The new program's side: whether it could go on with `heir` and this configuration. Nothing is bound or changed.
///
/// # Errors
/// Why it could not.
pub(crate) async fn rehearse(config: &Config, heir: &Heir) -> Result<String, parts::Error> {
    heir.readable().map_err(|e| parts::Error::new(Error::Unreadable(e).to_string()))?;
    // Its end, and what is said of it, have to be in time: who is killed leaves its Envoy behind.
    let limit = config.upgrade.as_ref().map(|upgrade| upgrade.limit * 2 / 3);
    dry_run_within(config, limit).await?;
    Ok(format!("{CAN}{}", crate::base::build_info::VERSION))
}
