//! Channels between parts that do not know each other: the trust bundle from istiod's config to the secret
//! manager, the name table to the DNS server, and changed token and root files to streams that are held and to requests to
//! the CA that fail.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::Instant;

use super::dns::{Last, NameTables};
use super::stages::Stages;
use super::upgrade::Heir;
use crate::base::disk::Watching;
use crate::base::files::Watches;
use crate::config::Config;
use crate::dns;
use crate::istiod::RootFiles;
use crate::secrets;
use crate::xds::{self, Tap, TrustBundle};

/// A burst of file events counts once.
const QUIET: Duration = Duration::from_millis(50);
/// Between two wakes, however often files change: what is hurried by them is a dial and a request to the CA.
const APART: Duration = Duration::from_secs(1);
/// Between two tries to watch what could not be watched.
const AGAIN: Duration = Duration::from_secs(60);

/// The near ends, to be handed to the parts; the far ends are served by [`Wires::spawn`].
pub(super) struct Wires {
    /// Types the relay hands to the agent.
    pub taps: Vec<Arc<dyn Tap>>,
    /// Changes when trying again makes sense at once.
    pub wake: watch::Receiver<u64>,
    /// The name table, when there is a DNS server.
    pub names: Option<dns::Current>,
    /// The same as bytes, for a successor.
    pub last_names: Last,
    taking_over: Option<BoxFuture<'static, ()>>,
    waker: watch::Sender<u64>,
    bundle: Option<watch::Receiver<Vec<String>>>,
}

impl Wires {
    /// Makes the channels, with what a predecessor has handed over in them.
    pub(super) fn new(config: &Config, heir: Option<&Heir>) -> Self {
        let (waker, wake) = watch::channel(0);
        let mut taps: Vec<Arc<dyn Tap>> = Vec::new();
        // Its place in the list is its place among the agent's own requests: the name table first.
        let (mut last_names, mut taking_over) = (Last::default(), None);
        let names = config.dns.as_ref().map(|dns| {
            let (tap, names, last) = NameTables::tap(dns.scope.clone());
            taps.push(tap.clone());
            last_names = last;
            taking_over = heir.map(|heir| tap.take_over(heir.names()).boxed());
            names
        });
        let mut bundle = None;
        if config.trust_bundle {
            let (tap, news) = TrustBundle::tap(heir.map(Heir::bundle).unwrap_or_default());
            taps.push(tap);
            bundle = Some(news);
        }
        Self { taps, wake, names, last_names, taking_over, waker, bundle }
    }

    /// Waits until what a predecessor has handed over was read.
    pub(super) async fn taken_over(&mut self) {
        if let Some(taking_over) = self.taking_over.take() {
            taking_over.await;
        }
    }

    /// Starts what moves things along the channels.
    ///
    /// `roots`: their files are followed.
    pub(super) fn spawn(
        self,
        stages: &Stages,
        config: &Config,
        roots: &RootFiles,
        secrets: &secrets::Handle,
        xds: &xds::Handle,
        watches: &Watches,
    ) {
        if let Some(mut bundle) = self.bundle {
            let secrets = secrets.clone();
            let stop = stages.secrets.token();
            stages.secrets.lasting("trust bundle", async move {
                loop {
                    tokio::select! {
                        () = stop.cancelled() => return,
                        changed = bundle.changed() => if changed.is_err() { return },
                    }
                    let entries = bundle.borrow_and_update().clone();
                    secrets.update_trust_bundle(entries);
                }
            });
        }
        let mut watching = Watching::new(watches, QUIET);
        let token = super::tokens::followed(&config.identity.tokens);
        let paths = token.into_iter().chain(roots.files()).collect::<std::collections::BTreeSet<PathBuf>>();
        let (waker, roots, secrets, xds) = (self.waker, roots.clone(), secrets.clone(), xds.clone());
        let stop = stages.xds.token();
        stages.xds.lasting("token and root files", async move {
            watching.set(paths).await;
            let mut pace = Pace::default();
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = watching.news() => {
                        tokio::select! {
                            () = stop.cancelled() => return,
                            () = pace.turn() => {}
                        }
                        waker.send_modify(|n| *n = n.wrapping_add(1));
                        secrets.mended();
                        let looks = async {
                            roots.look().await;
                            xds.token_changed().await;
                        };
                        // A disk that hangs holds them up for seconds.
                        tokio::select! {
                            () = stop.cancelled() => return,
                            () = looks => {}
                        }
                    }
                    () = tokio::time::sleep(AGAIN), if watching.blind() => {}
                }
                watching.refresh().await;
            }
        });
    }
}

/// Keeps wakes apart: the first one is at once, and one that is held back comes.
#[derive(Debug, Default)]
struct Pace(Option<Instant>);

impl Pace {
    async fn turn(&mut self) {
        if let Some(last) = self.0 {
            tokio::time::sleep_until(last + APART).await;
        }
        self.0 = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn files_that_change_without_a_pause_wake_once_a_second() {
        let (mut pace, began) = (Pace::default(), Instant::now());
        pace.turn().await;
        assert_eq!(began.elapsed(), Duration::ZERO, "the first is not held back");
        tokio::time::sleep(APART * 5).await;
        pace.turn().await;
        assert_eq!(began.elapsed(), APART * 5, "nor is one that comes after a while");
        for wakes in 1..=30 {
            tokio::time::sleep(QUIET).await;
            pace.turn().await;
            assert_eq!(began.elapsed(), APART * (5 + wakes));
        }
    }
}
