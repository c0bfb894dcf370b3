//! One run at a time in a network namespace: of two at once each takes the other's half for what was there before, and puts it back.
//!
//! Who runs has an abstract socket. Such names are the network namespace's: so it needs no path that all containers of a pod
//! see, it holds for whoever shares the namespace, and it ends with the process that has it. Not a lock on the namespace's own
//! file: in CNI mode that is the one that the programs themselves lock.
//!
//! Any user may take the name, and keep a machine's rules from being removed by that. So the kernel is asked who listens there:
//! only root and this process's own user are waited for. Nobody accepts, being connected to is enough.

use std::io::{self, Read as _};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::time::{Instant, sleep};

use super::error::Error;
use super::exec::Ending;

const NAME: &str = "pilot-agent istio-iptables";
/// A run takes milliseconds. Below the 30 s that the unit gives `vm clean`: root's run may hang, too, and rules that nobody
/// serves must go all the same.
const LIMIT: Duration = Duration::from_secs(20);
/// Between two tries: nobody tells when a name is free.
const LOOK: Duration = Duration::from_millis(20);
/// So often it may not show who has the name, two seconds in all: a run that has just begun does not listen yet, but whoever
/// never does, or has let others fill its queue, is none.
const TRIES: u32 = 100;

/// No other run is under way until it is dropped; or it cannot be known, or is not to be waited for.
#[derive(Debug)]
pub(super) struct Alone(
    #[cfg_attr(not(test), expect(dead_code, reason = "held, and let go of when dropped"))]
    Option<UnixListener>,
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
    let mut holder = Holder::default();
    let mut said = false;
    loop {
        let reason = match taken(name) {
            Ok(socket) => return Ok(Alone(Some(socket))),
            Err(e) if e.kind() != io::ErrorKind::AddrInUse => e.to_string(),
            Err(_) if ending.asked() => return Err(Error::AskedToEnd),
            Err(_) if Instant::now() >= until => format!("it has not ended within {limit:?}"),
            Err(_) => match holder.stranger(name) {
                Some(why) => why,
                None => {
                    if !said {
                        tracing::info!(
                            "another run of istio-iptables is under way here: waiting for its end"
                        );
                        said = true;
                    }
                    sleep(LOOK).await;
                    continue;
                }
            },
        };
        tracing::warn!(
            "another run of istio-iptables may be under way here ({reason}): not waiting for its end"
        );
        return Ok(Alone(None));
    }
}

fn taken(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Who has the name.
#[derive(Debug, Default)]
struct Holder {
    /// To one that is waited for, as long as it has the name: each connection takes a place that nobody gives back.
    ours: Option<UnixStream>,
    unknown: u32,
}

impl Holder {
    /// Why it is none that is waited for.
    fn stranger(&mut self, name: &str) -> Option<String> {
        if self.ours.as_ref().is_some_and(lasts) {
            return None;
        }
        self.ours = None;
        match asked(name) {
            Ok((stream, uid)) if uid == 0 || uid == rustix::process::geteuid().as_raw() => {
                self.ours = Some(stream);
                None
            }
            Ok((_, uid)) => Some(format!("user {uid} has its name, and is not root")),
            Err(_) if self.unknown < TRIES => {
                self.unknown += 1;
                None
            }
            Err(e) => Some(format!("its name is taken, and it does not show by whom: {e}")),
        }
    }
}

// Nothing is ever sent: it is the end, or there is nothing to read yet.
fn lasts(mut stream: &UnixStream) -> bool {
    stream.read(&mut [0]).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
}

// A connection, and the user that began to listen there. Connecting may wait for room in the queue, but not here.
fn asked(name: &str) -> io::Result<(UnixStream, u32)> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    let uid = getsockopt(&socket, PeerCredentials)?.uid();
    Ok((socket.into(), uid))
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

    // Who goes on without waiting has not the name.
    async fn goes_on(name: &str) {
        let alone = wait(name, &Ending::unwatched(), LIMIT * 1000).await.unwrap();
        assert!(alone.0.is_none(), "it was free");
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_only_has_the_name_is_not_waited_for() {
        use rustix::net::{bind, listen};
        let name = name("strangers");
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let socket =
            || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let silent = socket();
        bind(&silent, &address).unwrap();
        goes_on(&name).await;

        listen(&silent, 0).unwrap();
        let full = asked(&name).unwrap();
        assert!(asked(&name).is_err());
        goes_on(&name).await;
        drop((silent, full));

        if rustix::process::geteuid().is_root() {
            let other = std::thread::scope(|scope| {
                let listening = scope.spawn(|| {
                    rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65534)).unwrap();
                    taken(&name).unwrap()
                });
                listening.join().unwrap()
            });
            assert_eq!(
                Holder::default().stranger(&name).unwrap(),
                "user 65534 has its name, and is not root"
            );
            goes_on(&name).await;
            drop(other);
        }
        assert!(taken(&name).is_ok());
    }

    // A queue without an end would be needed for one that asked anew each time.
    #[test]
    fn one_that_is_waited_for_is_asked_once_and_the_next_one_anew() {
        let name = name("once");
        let other = taken(&name).unwrap();
        let mut holder = Holder::default();
        for _ in 0..10_000 {
            assert_eq!(holder.stranger(&name), None);
        }
        assert_eq!(holder.unknown, 0);
        drop(other);
        let _next = taken(&name).unwrap();
        assert_eq!(holder.stranger(&name), None);
        assert!(holder.unknown == 0 && holder.ours.as_ref().is_some_and(lasts));
    }

    #[tokio::test]
    async fn who_is_asked_to_end_waits_for_nobody() {
        let name = name("ends");
        let _other = taken(&name).unwrap();
        let ended = wait(&name, &Ending::at_once(), LIMIT).await;
        assert!(matches!(ended, Err(Error::AskedToEnd)), "{ended:?}");
    }
}
