//! One secret, listed and then watched for as long as somebody follows it.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::error::Error;
use crate::base::backoff::{Backoff, Jitter, Policy};
use crate::gateway::answer::Object;

/// Between two watches at least.
pub(super) const PAUSE: Duration = Duration::from_secs(1);
/// What is never due.
const NEVER: Duration = Duration::from_secs(100 * 365 * 86_400);
/// A watch that lasted so long was accepted: an answer is waited for half as long.
const LIVED: Duration = Duration::from_secs(60);

/// What is known of a secret.
pub(in crate::gateway) enum Held {
    /// It does not exist.
    Absent,
    /// It cannot be asked for.
    Failed(Error),
    /// Its fields.
    Secret(Object),
}

/// How a watch ended.
pub(super) enum Ended {
    /// In order, or by a break: to be resumed.
    Resume,
    /// What it would be resumed from is gone.
    Stale,
}

/// How soon the server is asked again.
struct Pace(Backoff);

impl Pace {
    fn new() -> Self {
        let policy = Policy::new(PAUSE, Duration::from_secs(30), 2.0, Jitter::PlusMinus(0.2));
        Self(Backoff::new(policy.expect("bounds are in order")))
    }

    /// After a list that failed, or a watch that ended, either of which took so long. A list that succeeds says nothing
    /// of the watch that follows: where only that fails, the tries grow rarer all the same.
    fn after(&mut self, outcome: &Result<Ended, Error>, took: Duration) -> Duration {
        if took >= LIVED || matches!(outcome, Ok(Ended::Resume)) {
            self.0.reset();
        }
        match outcome {
            Ok(Ended::Resume) => PAUSE.saturating_sub(took),
            Ok(Ended::Stale) | Err(_) => self.0.next_delay(),
        }
    }
}

/// Who has the secrets.
pub(super) trait Server: Sync {
    /// What is known of the secret, and the version to watch it from.
    fn list(&self, secret: &str) -> impl Future<Output = Result<(Held, String), Error>> + Send;

    /// Watches it until that ends; `from` goes on with what was seen.
    fn follow(
        &self,
        secret: &str,
        from: &mut String,
        at: usize,
        tell: &mpsc::Sender<(usize, Held)>,
    ) -> impl Future<Output = Result<Ended, Error>> + Send;
}

/// Lists the secret and watches it, anew after `resync`, if that is not zero.
pub(super) async fn keep(
    server: &impl Server,
    resync: Duration,
    secret: &str,
    at: usize,
    tell: mpsc::Sender<(usize, Held)>,
) {
    let mut pace = Pace::new();
    let resync = if resync.is_zero() { NEVER } else { resync.max(PAUSE) };
    let mut version: Option<String> = None;
    let mut listed = Instant::now();
    loop {
        let due = listed.elapsed() >= resync;
        let began = Instant::now();
        let outcome = match version.take().filter(|_| !due) {
            None => match server.list(secret).await {
                Ok((held, from)) => {
                    listed = Instant::now();
                    version = Some(from);
                    if tell.send((at, held)).await.is_err() {
                        return;
                    }
                    continue;
                }
                Err(why) => Err(why),
            },
            Some(mut from) => {
                let left = resync.saturating_sub(listed.elapsed());
                // A watch may last longer than that.
                let ended = timeout(left, server.follow(secret, &mut from, at, &tell)).await;
                let ended = ended.unwrap_or(Ok(Ended::Resume));
                if !matches!(ended, Ok(Ended::Stale)) {
                    version = Some(from);
                }
                ended
            }
        };
        let pause = pace.after(&outcome, began.elapsed());
        if let Err(why) = outcome {
            if tell.send((at, Held::Failed(why))).await.is_err() {
                return;
            }
            // What is asked anew may be another server's; a list is never wrong.
            version = None;
        }
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    /// A server whose lists are in order, and each of whose watches ends in this way, after so many seconds.
    struct Scripted {
        ends: fn() -> Result<Ended, Error>,
        after: u64,
        lists: AtomicUsize,
    }

    impl Server for Scripted {
        async fn list(&self, _: &str) -> Result<(Held, String), Error> {
            self.lists.fetch_add(1, Relaxed);
            Ok((Held::Absent, "1".into()))
        }

        async fn follow(
            &self,
            _: &str,
            _: &mut String,
            _: usize,
            _: &mpsc::Sender<(usize, Held)>,
        ) -> Result<Ended, Error> {
            tokio::time::sleep(Duration::from_secs(self.after)).await;
            (self.ends)()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_listed_anew_in_time_though_a_watch_lasts_longer() {
        for (resync, expected) in [(0, 1..=1), (60, 60..=61), (1000, 4..=4), (7200, 1..=1)] {
            let server = Scripted { ends: || Ok(Ended::Resume), after: 300, lists: AtomicUsize::new(0) };
            let (tell, mut told) = mpsc::channel(8);
            let kept = keep(&server, Duration::from_secs(resync), "own", 0, tell);
            let heard = async { while told.recv().await.is_some() {} };
            let hour = Duration::from_secs(3600);
            assert!(timeout(hour, async { tokio::join!(kept, heard) }).await.is_err());
            let lists = server.lists.into_inner();
            assert!(expected.contains(&lists), "{lists} lists in an hour by {resync} s");
        }
        let server = Scripted { ends: || Ok(Ended::Resume), after: 300, lists: AtomicUsize::new(0) };
        let (tell, _told) = mpsc::channel(100);
        let kept = keep(&server, Duration::from_nanos(1), "own", 0, tell);
        assert!(timeout(Duration::from_secs(60), kept).await.is_err());
        assert!(server.lists.into_inner() <= 61, "not without a pause");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_is_refused_after_each_list_is_tried_ever_more_rarely() {
        let lists = async |ends, after| {
            let server = Scripted { ends, after, lists: AtomicUsize::new(0) };
            let (tell, mut told) = mpsc::channel(8);
            let kept = keep(&server, Duration::ZERO, "own", 0, tell);
            let heard = async { while told.recv().await.is_some() {} };
            let hour = Duration::from_secs(3600);
            assert!(timeout(hour, async { tokio::join!(kept, heard) }).await.is_err(), "it has ended");
            server.lists.into_inner()
        };
        let forbidden = || Err(Error::Forbidden { verb: "watch", namespace: "ns".into() });
        for refused in [|| Ok(Ended::Stale), forbidden] {
            let often = lists(refused, 0).await;
            assert!(
                (100..170).contains(&often),
                "{often} lists in an hour, the pauses between them are 30 s"
            );
        }
        // One that was accepted is taken up again soon.
        assert!(lists(|| Ok(Ended::Stale), 90).await >= 3600 / 92);
        assert_eq!(lists(|| Ok(Ended::Resume), 0).await, 1);
    }
}
