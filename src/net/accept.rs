//! The accept loop of every listener, with back-off.
//!
//! `accept` fails mostly because the process has run out of file descriptors. A loop that retries at once burns a core
//! and fills the log; a loop that only waits leaves its clients in the kernel's queue. An [`Acceptor`] keeps one
//! descriptor in reserve: it accepts the next client with it, hands that client over to be refused, and tells the owner
//! to close a connection. After other failures it backs off, from 5 ms to 1 s, doubling (as Go's HTTP and gRPC servers
//! do). It logs the first failure, one line a minute while it lasts, and the recovery.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use futures_util::FutureExt;
use prometheus::{IntCounterVec, Opts};
use rustix::io::Errno;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream, unix};
use tokio::time::Instant;

use crate::base::errno::no_descriptor;

const FIRST: Duration = Duration::from_millis(5);
const LAST: Duration = Duration::from_secs(1);
/// Without a failure for so long it is over.
const OVER: Duration = Duration::from_secs(10);
/// Between two lines of the log while it lasts.
const REMIND: Duration = Duration::from_secs(60);

static FAILURES: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let opts = Opts::new("accept_failures_total", "Connections that could not be accepted, by listener.");
    IntCounterVec::new(opts, &["listener"]).expect("a constant name")
});

/// What is counted here, for the registry.
pub(crate) fn failures() -> IntCounterVec {
    FAILURES.clone()
}

/// Something that accepts.
pub(crate) trait Listener {
    type Io;
    type Peer;
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Io, Self::Peer)>> + Send;
}

impl Listener for TcpListener {
    type Io = TcpStream;
    type Peer = SocketAddr;
    fn accept(&self) -> impl Future<Output = io::Result<(TcpStream, SocketAddr)>> + Send {
        TcpListener::accept(self)
    }
}

impl Listener for UnixListener {
    type Io = UnixStream;
    type Peer = unix::SocketAddr;
    fn accept(&self) -> impl Future<Output = io::Result<(UnixStream, unix::SocketAddr)>> + Send {
        UnixListener::accept(self)
    }
}

/// Who came.
#[derive(Debug)]
pub(crate) enum Came<I, P> {
    /// A client.
    In(I, P),
    /// A client that has the last descriptor: say a word if one is short, drop it, and make room.
    Last(I),
}

/// Accepts for one listener.
#[derive(Debug)]
pub(crate) struct Acceptor {
    name: &'static str,
    reserve: Option<File>,
    pause: Duration,
    until: Option<Instant>,
    failing: Option<Failing>,
}

#[derive(Debug)]
struct Failing {
    times: u64,
    told: Instant,
    last: Instant,
}

impl Acceptor {
    /// `name` is for the log and the metric: `status`, `sds`.
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, reserve: spare(), pause: Duration::ZERO, until: None, failing: None }
    }

    /// The next client. Nothing is lost when it is given up before its end.
    ///
    /// # Errors
    /// When the socket itself is gone; all else passes and is waited for.
    pub(crate) async fn next<L: Listener>(&mut self, listener: &L) -> io::Result<Came<L::Io, L::Peer>> {
        loop {
            if let Some(until) = self.until {
                tokio::time::sleep_until(until).await;
                self.until = None;
            }
            if self.reserve.is_none() {
                self.reserve = spare();
            }
            match listener.accept().await {
                Ok((io, peer)) => {
                    self.recovered();
                    return Ok(Came::In(io, peer));
                }
                Err(error) if fatal(&error) => return Err(error),
                Err(error) => {
                    self.failed(&error);
                    // Nobody else runs between giving the reserve up and accepting with it.
                    if no_descriptor(&error)
                        && self.reserve.take().is_some()
                        && let Some(Ok((io, _))) = listener.accept().now_or_never()
                    {
                        return Ok(Came::Last(io));
                    }
                    self.pause = (self.pause * 2).clamp(FIRST, LAST);
                    self.until = Some(Instant::now() + self.pause);
                }
            }
        }
    }

    fn failed(&mut self, error: &io::Error) {
        FAILURES.with_label_values(&[self.name]).inc();
        let now = Instant::now();
        let failing = self.failing.get_or_insert(Failing { times: 0, told: now, last: now });
        failing.times += 1;
        failing.last = now;
        if failing.times > 1 && now.duration_since(failing.told) < REMIND {
            return;
        }
        failing.told = now;
        let hint = match no_descriptor(error) {
            true => ": new clients are refused until some are closed; is the limit (ulimit -n) too low?",
            false => "",
        };
        tracing::warn!(
            "the {} listener cannot accept ({} times so far): {error}{hint}",
            self.name,
            failing.times
        );
    }

    fn recovered(&mut self) {
        self.pause = Duration::ZERO;
        // One that got in between many that did not is not the end of it.
        if let Some(failing) = self.failing.take_if(|f| f.last.elapsed() >= OVER) {
            tracing::info!("the {} listener accepts again after {} failures", self.name, failing.times);
        }
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// The socket itself is gone.
fn fatal(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::BADF | Errno::INVAL | Errno::NOTSOCK))
}

/// Connections that one listener may hold: `most`, or an eighth of the descriptors where that is less, so
/// that floods on all of them leave enough for the agent itself; 4 at least.
pub(crate) fn bound(most: usize) -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let limit = limit.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    most.min(limit / 8).max(4)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    // Answers from a list; then it is silent.
    struct Script(Mutex<Vec<io::Result<()>>>);

    impl Listener for Script {
        type Io = ();
        type Peer = ();
        async fn accept(&self) -> io::Result<((), ())> {
            let next = self.0.lock().unwrap().pop();
            match next {
                Some(result) => result.map(|()| ((), ())),
                None => std::future::pending().await,
            }
        }
    }

    fn script(codes: &[i32]) -> Script {
        let of = |code: &i32| if *code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(*code)) };
        Script(Mutex::new(codes.iter().rev().map(of).collect()))
    }

    #[tokio::test(start_paused = true)]
    async fn without_descriptors_the_reserve_serves_and_else_it_waits() {
        let mut acceptor = Acceptor::new("test");
        let listener = script(&[24, 0, 24, 24, 0, 103, 0, 22]);
        assert!(matches!(acceptor.next(&listener).await, Ok(Came::Last(()))));
        let start = Instant::now();
        assert!(matches!(acceptor.next(&listener).await, Ok(Came::In((), ()))), "after a pause");
        assert_eq!(start.elapsed(), FIRST);
        assert!(
            matches!(acceptor.next(&listener).await, Ok(Came::In((), ()))),
            "one aborted client is nothing"
        );
        assert_eq!(acceptor.next(&listener).await.unwrap_err().raw_os_error(), Some(22));
    }

    #[test]
    fn a_bound_leaves_descriptors_for_others() {
        assert!((4..=512).contains(&bound(512)));
        assert_eq!(bound(1), 4);
    }
}
