//! Constant traffic, every answer checked.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::http::Client;

/// How many clients ask at once.
const CLIENTS: usize = 4;
/// How long each waits between its requests: the point is constancy, not load.
const PAUSE: Duration = Duration::from_millis(2);

/// The identities that every request must have travelled between.
#[derive(Debug, Clone)]
pub(crate) struct Ends {
    pub(crate) client: String,
    pub(crate) server: String,
}

/// What the requests came to.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) answered: u64,
    pub(crate) failed: u64,
    /// The first few reasons.
    pub(crate) reasons: Vec<String>,
    pub(crate) latencies: Vec<Duration>,
    /// The last value of `x-demo-config`, and when it was first seen.
    pub(crate) config: Option<(String, Instant)>,
}

/// Traffic that runs until [`Traffic::stop`].
pub(crate) struct Traffic {
    pub(crate) tally: Arc<Mutex<Tally>>,
    stop: CancellationToken,
    clients: JoinSet<()>,
}

impl Traffic {
    /// Asks `port` and expects the app to have seen both ends.
    pub(crate) fn start(port: u16, expected: Ends) -> Self {
        let (tally, stop) = (Arc::<Mutex<Tally>>::default(), CancellationToken::new());
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            clients.spawn(ask(port, expected.clone(), tally.clone(), stop.clone()));
        }
        Self { tally, stop, clients }
    }

    pub(crate) fn look<T>(&self, at: impl FnOnce(&Tally) -> T) -> T {
        at(&self.tally.lock().expect("no panic holds this lock"))
    }

    /// Lets each client finish its request.
    pub(crate) async fn stop(mut self) -> Tally {
        self.stop.cancel();
        while self.clients.join_next().await.is_some() {}
        std::mem::take(&mut *self.tally.lock().expect("no panic holds this lock"))
    }
}

async fn ask(port: u16, expected: Ends, tally: Arc<Mutex<Tally>>, stop: CancellationToken) {
    let mut client = None;
    while !stop.is_cancelled() {
        let started = Instant::now();
        let result = match &mut client {
            Some(client) => one(client, &expected).await,
            None => match Client::connect(port).await {
                Ok(connected) => one(client.insert(connected), &expected).await,
                Err(error) => Err(error),
            },
        };
        {
            let mut tally = tally.lock().expect("no panic holds this lock");
            match result {
                Ok(config) => {
                    tally.answered += 1;
                    tally.latencies.push(started.elapsed());
                    if config.is_some() && config != tally.config.as_ref().map(|(value, _)| value.clone()) {
                        tally.config = config.map(|value| (value, Instant::now()));
                    }
                }
                Err(reason) => {
                    tally.failed += 1;
                    if tally.reasons.len() < 5 {
                        tally.reasons.push(reason);
                    }
                    client = None;
                }
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn one(client: &mut Client, expected: &Ends) -> Result<Option<String>, String> {
    let reply = client.get("/").await?;
    if !reply.status.is_success() {
        return Err(format!("{}: {}", reply.status, reply.body.trim()));
    }
    // What Envoy passes on: `By=<itself>;Hash=<of the certificate>;URI=<peer>`.
    let field =
        |name: &str| reply.body.split(';').find_map(|field| field.strip_prefix(name)).unwrap_or_default();
    if field("By=") != expected.server || field("URI=") != expected.client {
        return Err(format!("the app was asked by {:?} and not by {expected:?}", reply.body));
    }
    Ok(reply.headers.get("x-demo-config").and_then(|value| value.to_str().ok()).map(ToOwned::to_owned))
}
