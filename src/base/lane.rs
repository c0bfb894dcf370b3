//! Work that may stand still for as long as it likes: name look-ups and reading files.
//!
//! Such a call has no deadline and cannot be cancelled: whoever gives up waiting leaves a thread behind. So each
//! purpose has a lane of its own with a bound of threads; the rest waits its turn without one, and gives up when its
//! own deadline says so. A resolver that hangs stalls who asks it for names and nobody else, and a thousand streams
//! that ask and go leave as many threads as the lane has and never more.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use tokio::sync::Semaphore;

/// Look-ups of names. Istiod, an application's host, a registry and a resolver's own name are asked for at once by
/// an agent that is busy; more only come up when the resolver does not answer.
static NAMES: Lane = Lane::new("name look-ups", 8);

/// A bound for one purpose.
pub struct Lane {
    purpose: &'static str,
    places: Semaphore,
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
    pub const fn new(purpose: &'static str, most: usize) -> Self {
        Self { purpose, places: Semaphore::const_new(most) }
    }

    /// Does `job` on a thread, when there is one. Dropping the future gives the job up, not its thread.
    ///
    /// # Errors
    /// When the job panicked or the runtime is ending.
    pub async fn run<T: Send + 'static>(
        &'static self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let place = self.places.acquire().await.map_err(io::Error::other)?;
        let done = tokio::task::spawn_blocking(move || {
            // Given back when the thread is free, whoever still waits.
            let _place = place;
            job()
        });
        done.await.map_err(|e| io::Error::other(format!("{}: {e}", self.purpose)))
    }
}

/// The addresses of `host`; a literal needs no thread.
///
/// # Errors
/// The resolver's.
pub async fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let host = host.to_owned();
    NAMES.run(move || (host.as_str(), port).to_socket_addrs().map(Iterator::collect)).await?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

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

    #[tokio::test]
    async fn names_and_literals_are_looked_up() {
        assert_eq!(look_up("::1", 7).await.unwrap(), ["[::1]:7".parse().unwrap()]);
        assert!(look_up("localhost", 7).await.unwrap().iter().all(|a| a.ip().is_loopback() && a.port() == 7));
        assert!(look_up("no such name", 7).await.is_err());
    }
}
