//! One run at a time in a network namespace: of two at once each takes the other's half for what was there before, and puts it back.
//!
//! Who runs has an abstract socket. Such names are the network namespace's: so it needs no path that all containers of a pod
//! see, it holds for whoever shares the namespace, and it ends with the process that has it. Not a lock on the namespace's own
//! file: in CNI mode that is the one that the programs themselves lock.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::error::Error;
use super::exec::Ending;

const NAME: &str = "pilot-agent istio-iptables";
/// A run takes milliseconds, and one that waits for legacy programs' lock 30 s. Whoever is in the pod can have the name as long
/// as it likes, so nobody is waited for longer.
const LIMIT: Duration = Duration::from_secs(40);
/// Between two tries: nobody tells when a name is free.
const LOOK: Duration = Duration::from_millis(20);

/// No other run is under way until it is dropped; or it cannot be known, or has taken too long.
#[derive(Debug)]
pub(super) struct Alone(
    #[cfg_attr(not(test), expect(dead_code, reason = "held, and let go of when dropped"))]
    Option<UnixDatagram>,
);

/// Waits for another run to end.
///
/// # Errors
/// When the process is asked to end meanwhile.
pub(super) async fn begin(ending: &Ending) -> Result<Alone, Error> {
    wait(NAME, ending, LIMIT).await
}

async fn wait(name: &str, ending: &Ending, limit: Duration) -> Result<Alone, Error> {
    let until = Instant::now() + limit;
    let mut said = false;
    loop {
        let reason = match taken(name) {
            Ok(socket) => return Ok(Alone(Some(socket))),
            Err(e) if e.kind() != io::ErrorKind::AddrInUse => e.to_string(),
            Err(_) if ending.asked() => return Err(Error::AskedToEnd),
            Err(_) if Instant::now() < until => {
                if !said {
                    tracing::info!("another run of istio-iptables is under way here: waiting for its end");
                    said = true;
                }
                sleep(LOOK).await;
                continue;
            }
            Err(_) => format!("it has not ended within {limit:?}"),
        };
        tracing::warn!(
            "another run of istio-iptables may be under way here ({reason}): not waiting for its end"
        );
        return Ok(Alone(None));
    }
}

fn taken(name: &str) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    // One of this test's.
    fn name(test: &str) -> String {
        format!("pilot-agent {test} {}", std::process::id())
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_waits_for_another_and_no_longer_than_its_limit() {
        let name = name("waits");
        let mine = async || wait(&name, &Ending::unwatched(), LIMIT).await.unwrap();
        let other = taken(&name).unwrap();
        let (alone, ()) = tokio::join!(mine(), async {
            sleep(LIMIT / 2).await;
            drop(other);
        });
        assert!(alone.0.is_some());
        assert!(taken(&name).is_err(), "it is held");
        drop(alone);
        let _other = taken(&name).unwrap();
        let began = Instant::now();
        assert!(mine().await.0.is_none());
        assert!((LIMIT..LIMIT * 2).contains(&began.elapsed()));
    }

    #[tokio::test]
    async fn who_is_asked_to_end_waits_for_nobody() {
        let name = name("ends");
        let _other = taken(&name).unwrap();
        let ended = wait(&name, &Ending::at_once(), LIMIT).await;
        assert!(matches!(ended, Err(Error::AskedToEnd)), "{ended:?}");
    }
}
