//! One run at a time in a network namespace: of two at once each takes the other's half for what was there before, and puts it back.
//!
//! The lock is on the namespace's own file. So it needs no path that all containers of a pod see, it holds for whoever shares
//! the namespace, and it ends with the process that has it.

use std::fs::{File, TryLockError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::error::Error;
use super::exec::Ending;

const NAMESPACE: &str = "/proc/self/ns/net";
/// A run takes milliseconds, and one that waits for legacy programs' lock 30 s. Whoever is in the pod can hold the lock as long
/// as it likes, so nobody is waited for longer.
const LIMIT: Duration = Duration::from_secs(40);
/// Between two tries: the system's own wait has no end.
const LOOK: Duration = Duration::from_millis(20);

/// No other run is under way until it is dropped; or it cannot be known, or has taken too long.
#[derive(Debug)]
pub(super) struct Alone(
    #[cfg_attr(not(test), expect(dead_code, reason = "held, and let go of when dropped"))] Option<File>,
);

/// Waits for another run to end.
///
/// # Errors
/// When the process is asked to end meanwhile.
pub(super) async fn begin(ending: &Ending) -> Result<Alone, Error> {
    match File::open(NAMESPACE) {
        Ok(file) => wait(file, ending, LIMIT).await,
        Err(reason) => {
            tracing::warn!(
                "{NAMESPACE} cannot be opened ({reason}): another run at the same time is not seen"
            );
            Ok(Alone(None))
        }
    }
}

async fn wait(file: File, ending: &Ending, limit: Duration) -> Result<Alone, Error> {
    let until = Instant::now() + limit;
    let mut said = false;
    loop {
        let reason = match file.try_lock() {
            Ok(()) => return Ok(Alone(Some(file))),
            Err(TryLockError::WouldBlock) if ending.asked() => return Err(Error::AskedToEnd),
            Err(TryLockError::WouldBlock) if Instant::now() < until => {
                if !said {
                    tracing::info!("another run of istio-iptables is under way here: waiting for its end");
                    said = true;
                }
                sleep(LOOK).await;
                continue;
            }
            Err(TryLockError::WouldBlock) => format!("it has not ended within {limit:?}"),
            Err(TryLockError::Error(reason)) => reason.to_string(),
        };
        tracing::warn!(
            "another run of istio-iptables may be under way here ({reason}): not waiting for its end"
        );
        return Ok(Alone(None));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn locked(path: &Path) -> File {
        let file = File::open(path).unwrap();
        file.try_lock().unwrap();
        file
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_waits_for_another_and_no_longer_than_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("namespace");
        std::fs::write(&path, "").unwrap();
        let mine = async || wait(File::open(&path).unwrap(), &Ending::unwatched(), LIMIT).await.unwrap();
        let other = locked(&path);
        let (alone, ()) = tokio::join!(mine(), async {
            sleep(LIMIT / 2).await;
            drop(other);
        });
        assert!(alone.0.is_some());
        assert!(File::open(&path).unwrap().try_lock().is_err(), "it is held");
        drop(alone);
        let _other = locked(&path);
        let began = Instant::now();
        assert!(mine().await.0.is_none());
        assert!((LIMIT..LIMIT * 2).contains(&began.elapsed()));
    }

    #[tokio::test]
    async fn who_is_asked_to_end_waits_for_nobody() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let _other = locked(file.path());
        let ended = wait(File::open(file.path()).unwrap(), &Ending::at_once(), LIMIT).await;
        assert!(matches!(ended, Err(Error::AskedToEnd)), "{ended:?}");
    }
}
