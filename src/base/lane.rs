//! Blocking calls that may never return: name look-ups, file reads, and the start of a program.
//!
//! Such a call has no deadline and cannot be cancelled: a caller that gives up leaves a thread behind. So each purpose
//! has a lane of its own with a limited number of threads. Other callers queue without a thread and give up at their own
//! deadline. A resolver that hangs stalls only those who ask it for names, and a thousand streams that give up leave no
//! more threads than the lane has.
//!
//! The runtime's own pool is not used: it panics where the system gives it no thread, which is so whenever an
//! application has used up its pod's limit of processes, and it keeps threads that have nothing to do.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::sync::Semaphore;
use tokio::sync::oneshot::{Receiver, channel};

use super::errno::no_descriptor;
use super::handover::{block_signals, unblock_signals};
use super::tasks::guarded;
use super::{hosts, open_files, spare};

/// Look-ups of the names that the proxy hangs on: istiod's, a CA's, an API server's, a resolver's own. What modules,
/// applications and callers of the token service name has lanes of its own: a resolver may answer for the cluster and be
/// silent about the world.
pub(crate) static NAMES: Lane = Lane::new("name look-ups", 8);

/// The system gives no thread.
#[derive(Debug, thiserror::Error)]
#[error("no thread for {purpose}: {why}")]
pub(crate) struct NoThread {
    purpose: String,
    why: io::Error,
}

impl NoThread {
    fn of(purpose: &str, why: io::Error) -> io::Error {
        io::Error::new(why.kind(), Self { purpose: purpose.to_owned(), why })
    }
}

/// Begins `job` on a thread of its own, or on the [`spare`] one. Its result will arrive; nothing does when it panics.
///
/// # Errors
/// When the system gives no thread.
pub(crate) fn begin<T: Send + 'static>(
    purpose: &str,
    job: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Receiver<T>> {
    let (done, answer) = channel();
    let named = purpose.to_owned();
    #[cfg(test)]
    let counted = under_way::Counted::new();
    let job = move || {
        #[cfg(test)]
        let _counted = counted;
        if let Ok(result) = guarded(&named, job) {
            // Whoever asked may be gone.
            drop(done.send(result));
        }
    };
    let begun = spare::start(purpose, Box::new(job)).map_err(|why| NoThread::of(purpose, why))?;
    // A paused clock must stand still meanwhile, as it does for the runtime's own threads.
    #[cfg(test)]
    if let (Some(begun), Ok(runtime)) = (begun, tokio::runtime::Handle::try_current()) {
        runtime.spawn_blocking(|| begun.join());
    }
    #[cfg(not(test))]
    drop(begun);
    Ok(answer)
}

/// Tests that drive the clock by hand let no work in a thread fall behind.
#[cfg(test)]
pub(crate) mod under_way {
    use std::sync::Arc;
    use std::time::Duration;

    thread_local! {
        // Everything that this thread, which is a test's runtime, has begun holds one.
        static JOBS: Arc<()> = Arc::default();
    }

    pub(super) struct Counted {
        _job: Arc<()>,
    }

    impl Counted {
        pub(super) fn new() -> Self {
            Self { _job: JOBS.with(Arc::clone) }
        }
    }

    /// Waits, in real time, until no more than `hanging` of what was begun on this thread is under way, nor what comes
    /// of the rest.
    pub(crate) async fn but(hanging: usize) {
        let runtime = tokio::runtime::Handle::current();
        for _ in 0..10_000 {
            let _ = runtime.spawn_blocking(|| std::thread::sleep(Duration::from_millis(1))).await;
            // Whoever waited for a job may begin the next one as soon as it runs.
            for _ in 0..30 {
                tokio::task::yield_now().await;
            }
            if JOBS.with(Arc::strong_count) <= 1 + hanging {
                return;
            }
        }
        panic!("work in a thread does not end");
    }
}

#[cfg(test)]
pub(crate) use super::spare::scarce;

/// Does `job` on a thread and waits for it here, on this one, but no longer than `limit`: for files that go when their
/// owner does, at the end of a process. Where there is no thread it is done in place.
pub(crate) fn briefly(purpose: &str, limit: Duration, job: impl FnOnce() + Send + 'static) {
    let (done, end) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::Builder::new().name(purpose.to_owned());
    let begun = thread.spawn(move || {
        let _done = done;
        job();
    });
    if begun.is_ok() {
        // It ends with the channel's other end.
        let _ = end.recv_timeout(limit);
    }
}

/// A bound for one purpose.
pub(crate) struct Lane {
    purpose: &'static str,
    places: Semaphore,
    #[cfg(test)]
    most: usize,
}

// Tests run beside each other, each on a thread of its own, and many with a clock that leaps over every wait: what one
// does must not take another's turn.
#[cfg(test)]
thread_local! {
    static OWN: std::cell::RefCell<std::collections::HashMap<*const Lane, &'static Semaphore>> = std::cell::RefCell::default();
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free = self.places.available_permits();
        f.debug_struct("Lane").field("purpose", &self.purpose).field("free", &free).finish()
    }
}

impl Lane {
    /// At most `most` threads at once.
    #[must_use]
    pub(crate) const fn new(purpose: &'static str, most: usize) -> Self {
        Self {
            purpose,
            places: Semaphore::const_new(most),
            #[cfg(test)]
            most,
        }
    }

    #[cfg(not(test))]
    fn places(&'static self) -> &'static Semaphore {
        &self.places
    }

    #[cfg(test)]
    fn places(&'static self) -> &'static Semaphore {
        let made = || &*Box::leak(Box::new(Semaphore::new(self.most)));
        OWN.with_borrow_mut(|own| *own.entry(std::ptr::from_ref(self)).or_insert_with(made))
    }

    /// Does `job` on a thread, when there is one. Dropping the future gives the job up, not its thread.
    ///
    /// # Errors
    /// When the job panicked or the system gives no thread.
    pub(crate) async fn run<T: Send + 'static>(
        &'static self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let place = self.places().acquire().await.map_err(io::Error::other)?;
        let done = begin(self.purpose, move || {
            // Given back when the thread is free, whoever still waits.
            let _place = place;
            job()
        })?;
        done.await.map_err(|_| io::Error::other(format!("{}: its thread panicked", self.purpose)))
    }

    /// As [`Lane::run`], waited for so long at most.
    ///
    /// # Errors
    /// Also when the time is over, which has [`io::ErrorKind::TimedOut`].
    pub(crate) async fn within<T: Send + 'static>(
        &'static self,
        limit: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let late =
            |_| io::Error::new(io::ErrorKind::TimedOut, format!("{}: none within {limit:?}", self.purpose));
        tokio::time::timeout(limit, self.run(job)).await.map_err(late)?
    }

    /// Starts a program, which the caller waits for no longer than `limit`. To start one means to wait until the kernel
    /// has read it from its disk. One that comes later is ended, if the command says so.
    ///
    /// # Errors
    /// The system's; that the disk does not answer, which has [`io::ErrorKind::TimedOut`].
    pub(crate) async fn spawn(&'static self, limit: Duration, mut command: Command) -> io::Result<Child> {
        let runtime = tokio::runtime::Handle::current();
        let start = move || {
            let _inside = runtime.enter();
            // It would inherit what this thread has blocked.
            unblock_signals();
            let child = command.spawn();
            block_signals();
            let child = child?;
            open_files::give_back(child.id());
            Ok(child)
        };
        self.within(limit, start).await?
    }

    /// The addresses of `host`; a literal needs no thread.
    ///
    /// # Errors
    /// The resolver's; the system's where no descriptor is left for it.
    pub(crate) async fn look_up(&'static self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        if let Some((ip, scope)) = zoned(host) {
            return Ok(vec![SocketAddrV6::new(ip, port, 0, scope).into()]);
        }
        let host = host.to_owned();
        self.run(move || resolve(&host, port)).await?
    }
}

// The resolver's addresses, but for what it knows otherwise than the Go agent.
fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    if is_number(host) {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "no such host (an IPv4 address is four decimal numbers)",
        ));
    }
    let listed = hosts::of_absolute(Path::new(hosts::FILE), host);
    if !listed.is_empty() {
        return Ok(listed.into_iter().map(|ip| SocketAddr::new(ip, port)).collect());
    }
    (host, port).to_socket_addrs().map(Iterator::collect).map_err(cause)
}

/// Whether the C library takes a text for an IPv4 address that nobody else does: `0x7f.1`, `127.1`, `2130706433`,
/// `0177.0.0.1`. Who looks whether a name is an address inside would be passed by.
fn is_number(host: &str) -> bool {
    let parts: Vec<&str> = host.split('.').collect();
    let number = |part: &&str| {
        let (digits, radix) = match part.strip_prefix('0') {
            Some(rest) if rest.starts_with(['x', 'X']) => (&rest[1..], 16),
            Some(rest) if !rest.is_empty() => (rest, 8),
            _ => (*part, 10),
        };
        !digits.starts_with('+') && u32::from_str_radix(digits, radix).is_ok()
    };
    parts.len() <= 4 && parts.iter().all(number)
}

/// An IPv6 address with a zone, which is an interface's number or name: `fe80::1%2`, `fe80::1%eth0`.
fn zoned(host: &str) -> Option<(Ipv6Addr, u32)> {
    let (address, zone) = host.split_once('%')?;
    let address = address.parse().ok()?;
    let index = zone.parse().ok().or_else(|| {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
        rustix::net::netdevice::name_to_index(&socket, zone).ok()
    });
    Some((address, index?))
}

/// Why there is no answer of [`look_up_here`].
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// The system gives no thread.
    Thread(io::Error),
    /// It takes longer.
    Late,
    /// The resolver's.
    LookUp(io::Error),
}

/// The resolver's addresses, waited for here, on this thread, and no longer than `limit`: for who has nothing else to do.
/// The resolver cannot be cancelled; its thread may outlive the limit.
///
/// # Errors
/// [`NoAnswer`].
pub(crate) fn look_up_here(host: &str, port: u16, limit: Duration) -> Result<Vec<SocketAddr>, NoAnswer> {
    let (found, wait) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name("look-up".to_owned());
    let host = host.to_owned();
    let look = move || drop(found.send(resolve(&host, port)));
    thread.spawn(look).map_err(NoAnswer::Thread)?;
    wait.recv_timeout(limit).map_err(|_| NoAnswer::Late)?.map_err(NoAnswer::LookUp)
}

/// Why there are no addresses. The resolver calls a name unknown where it could open neither its files nor a socket, and
/// does not say so.
fn cause(said: io::Error) -> io::Error {
    std::fs::File::open("/").err().filter(no_descriptor).unwrap_or(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use nix::sys::signal::Signal;

    #[tokio::test]
    async fn who_gives_up_leaves_no_more_threads_than_the_lane_has() {
        static LANE: Lane = Lane::new("test", 2);
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        let mut held = Vec::new();
        for _ in 0..50 {
            let (let_go, hold) = channel::<()>();
            held.push(let_go);
            let job = LANE.run(move || {
                BEGUN.fetch_add(1, Ordering::Relaxed);
                let _ = hold.recv();
            });
            let _ = tokio::time::timeout(Duration::from_millis(1), job).await;
        }
        assert!(BEGUN.load(Ordering::Relaxed) <= 2);
        drop(held);
        assert_eq!(LANE.run(|| 7).await.unwrap(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn a_paused_clock_waits_for_a_thread() {
        let slow = || std::thread::sleep(Duration::from_millis(50));
        assert!(tokio::time::timeout(Duration::from_secs(1), begin("test", slow).unwrap()).await.is_ok());
    }

    #[tokio::test]
    async fn a_program_begins_with_no_signal_blocked() {
        static LANE: Lane = Lane::new("test", 1);
        let mut command = Command::new("grep");
        command.args(["SigBlk", "/proc/self/status"]).stdout(std::process::Stdio::piped());
        let child = LANE.spawn(Duration::from_secs(60), command).await.unwrap();
        let said = String::from_utf8(child.wait_with_output().await.unwrap().stdout).unwrap();
        let mask = u64::from_str_radix(said.trim_start_matches("SigBlk:").trim(), 16).unwrap();
        // Whoever runs the tests may block others.
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR2] {
            assert_eq!(mask >> (signal as i32 - 1) & 1, 0, "{signal}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_test_takes_the_turns_of_another() {
        static LANE: Lane = Lane::new("test", 1);
        let (let_go, hold) = channel::<()>();
        let (begun, begin) = channel();
        let other = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let job = move || {
                begun.send(()).unwrap();
                let _ = hold.recv();
            };
            runtime.block_on(LANE.run(job))
        });
        begin.recv().unwrap();
        assert_eq!(LANE.within(Duration::from_secs(1), || 7).await.unwrap(), 7);
        drop(let_go);
        other.join().unwrap().unwrap();
    }

    #[tokio::test]
    async fn names_and_literals_are_looked_up() {
        assert_eq!(NAMES.look_up("::1", 7).await.unwrap(), ["[::1]:7".parse().unwrap()]);
        for zone in ["fe80::1%1", "fe80::1%lo"] {
            assert_eq!(NAMES.look_up(zone, 7).await.unwrap(), ["[fe80::1%1]:7".parse().unwrap()]);
        }
        assert!(
            NAMES
                .look_up("localhost", 7)
                .await
                .unwrap()
                .iter()
                .all(|a| a.ip().is_loopback() && a.port() == 7)
        );
        assert!(NAMES.look_up("no such name", 7).await.is_err());
    }

    #[tokio::test]
    async fn numbers_of_the_c_library_are_no_addresses() {
        for number in ["0x7f.1", "0X7F000001", "127.1", "2130706433", "0177.0.0.1", "127.0.0.01", "1", "0"] {
            let error = NAMES.look_up(number, 7).await.expect_err(number);
            assert!(error.to_string().starts_with("no such host"), "{number}: {error}");
            assert!(look_up_here(number, 7, Duration::from_secs(20)).is_err(), "{number}");
        }
        let literal = look_up_here("127.0.0.1", 7, Duration::from_secs(20)).unwrap();
        assert_eq!(literal, ["127.0.0.1:7".parse().unwrap()]);
        for name in ["", "a.1", "0x", "0x.1", "08", "1.2.3.4.5", "127.1.", "+1", "4294967296", "-1"] {
            assert!(!is_number(name), "{name}");
        }
    }
}
