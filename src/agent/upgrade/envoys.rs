//! Another Envoy in the place of the one that runs (`pilot-agent upgrade --envoy`): looked at first, then started as
//! the next epoch of a hot restart.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use super::Error;
use crate::envoy::validate::{self, Verdict};
use crate::envoy::{Config, Handle, Kept, NotReplaced, launch};

/// How long an Envoy may take to say what it is.
const ANSWER: Duration = Duration::from_secs(10);

/// Replaces it; gives what serves now.
pub(super) async fn replace(
    path: PathBuf,
    process: Config,
    kept: Kept,
    handle: Handle,
    limit: Duration,
) -> Result<String, Error> {
    let shown = path.display().to_string();
    if !handle.hot_restarts() {
        return Err(NotReplaced::Off.into());
    }
    let program = path.clone();
    let looked = launch::beside(move || launch::runnable(&program)).await;
    looked.map_err(|source| Error::File { path: path.clone(), source })?;
    let args: Vec<OsString> =
        kept.epochs.last().into_iter().flat_map(|e| e.args.iter().map(Into::into)).collect();
    match validate::again(&shown, &args, &process.extra_env, process.user, limit).await {
        Verdict::Accepted => {}
        Verdict::Refused { status, reason } => {
            return Err(Error::BootstrapRefused { envoy: shown, status, reason });
        }
        Verdict::NotStarted(source) => return Err(Error::NotStarted { program: shown, source }),
        Verdict::Late | Verdict::TooLong => {
            return Err(Error::BootstrapLate { envoy: shown, limit });
        }
    }
    // Two that share no form of hot restart would end each other.
    let of = |binary: String| async move {
        let asked = validate::hot_restart_version(&binary, ANSWER).await;
        asked.map_err(|source| Error::FormUnknown { envoy: binary, source })
    };
    let (old, new) = (of(kept.binary.clone()).await?, of(shown.clone()).await?);
    if old != new {
        return Err(Error::FormDiffers { new: shown, new_form: new, old: kept.binary, old_form: old });
    }
    let version = validate::version(&shown, ANSWER).await.unwrap_or_else(|_| "of unknown version".to_owned());
    let epoch = handle.replace(shown.clone(), limit).await?;
    Ok(format!("{shown} ({version}) serves as epoch {epoch}"))
}
