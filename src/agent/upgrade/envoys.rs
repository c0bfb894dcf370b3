//! Another Envoy in the place of the one that runs (`pilot-agent upgrade --envoy`): looked at first, then started as
//! the next epoch of a hot restart.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::envoy::validate::{self, Verdict};
use crate::envoy::{Config, Handle, Kept, launch};

/// How long an Envoy may take to say what it is.
const ANSWER: Duration = Duration::from_secs(10);

/// Replaces it; gives what serves now.
pub(super) async fn replace(
    path: PathBuf,
    process: Config,
    kept: Kept,
    handle: Handle,
    limit: Duration,
) -> Result<String, String> {
    let shown = path.display().to_string();
    if !handle.hot_restarts() {
        return Err("hot restart is off: set ENVOY_HOT_RESTART=true".to_owned());
    }
    launch::runnable(Path::new(&path)).map_err(|e| format!("{shown}: {e}"))?;
    let args: Vec<OsString> =
        kept.epochs.last().into_iter().flat_map(|e| e.args.iter().map(Into::into)).collect();
    match validate::again(&shown, &args, &process.extra_env, process.user, limit).await {
        Verdict::Accepted => {}
        Verdict::Refused { status, reason } => {
            return Err(format!("{shown} refuses the present bootstrap ({status}): {reason}"));
        }
        Verdict::NotStarted(error) => return Err(format!("{shown} cannot be started: {error}")),
        Verdict::Late | Verdict::TooLong => {
            return Err(format!("{shown} has not judged the present bootstrap within {limit:?}"));
        }
    }
    // Two that share no form of hot restart would end each other.
    let of = |binary: String| async move {
        let asked = validate::hot_restart_version(&binary, ANSWER).await;
        asked.map_err(|e| format!("{binary} does not say its form of hot restart: {e}"))
    };
    let (old, new) = (of(kept.binary.clone()).await?, of(shown.clone()).await?);
    if old != new {
        return Err(format!(
            "hot restart of {shown} is {new}, that of {} is {old}: only a restart replaces it",
            kept.binary
        ));
    }
    let version = validate::version(&shown, ANSWER).await.unwrap_or_else(|_| "of unknown version".to_owned());
    let epoch = handle.replace(shown.clone(), limit).await?;
    Ok(format!("{shown} ({version}) serves as epoch {epoch}"))
}
