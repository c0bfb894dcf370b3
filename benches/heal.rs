//! How soon a configuration pushed after an outage is in a real Envoy: istiod away for a while, or the
//! token bad for a while. Takes minutes, so it runs only when it is named (`--only heal`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mock_istiod::jwt::{Expiry, Token};
use mock_istiod::net::free_port;
use mock_istiod::{MockIstiod, Set, json};
use tokio::task::JoinSet;

use crate::agent::{Agent, LIMIT, Setup, header};
use crate::table::{Row, Value};

/// Agents at a time: more of them would measure the machine.
const AT_ONCE: usize = 5;
/// Envoy's own back-off reaches 30 s.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
enum Cause {
    Istiod,
    Token,
}

const OUTAGES: [(Cause, u64, &str); 4] = [
    (Cause::Istiod, 5, "istiod away for 5 s"),
    (Cause::Istiod, 25, "istiod away for 25 s"),
    (Cause::Istiod, 60, "istiod away for 60 s"),
    (Cause::Token, 25, "token bad for 25 s"),
];

/// A sidecar that speaks to itself; answers carry the configuration's name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mesh {
    /// Plain HTTP.
    pub outbound: u16,
    inbound: u16,
}

impl Mesh {
    /// With ports of its own.
    pub(crate) fn new() -> Self {
        Self { outbound: free_port(), inbound: free_port() }
    }

    /// Changes what istiod serves.
    pub(crate) fn push(self, istiod: &MockIstiod, value: &str) -> Result<(), String> {
        let text = include_str!("../tests/support/loop.yaml")
            .replace("\"{{outbound}}\"", &self.outbound.to_string())
            .replace("\"{{inbound}}\"", &self.inbound.to_string())
            .replace("\"{{app}}\"", "9")
            .replace("{{identity}}", &istiod.identity("default", "bench"))
            .replace("{{config}}", value);
        let common = json::parse(&text).map_err(|e| e.to_string())?;
        istiod.resources().replace(Set { common, ..Set::default() });
        Ok(())
    }

    /// Waits until an answer names it; gives how long that took.
    pub(crate) async fn shows(self, value: &str, patience: Duration) -> Result<Duration, String> {
        let since = Instant::now();
        while header(self.outbound, "/", "x-config").await.as_deref() != Some(value) {
            if since.elapsed() > patience {
                return Err(format!("configuration {value:?} is not in effect after {patience:?}"));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(since.elapsed())
    }
}

/// One row per outage, in seconds.
pub(crate) async fn outages(binaries: &[PathBuf], envoy: &Path, runs: usize) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for (cause, seconds, what) in OUTAGES {
        let mut measured = Vec::new();
        for binary in binaries {
            eprintln!("  {what}, {}", binary.display());
            measured.push(Value::of(repeat(binary, envoy, cause, seconds, runs).await?));
        }
        let mut measured = measured.into_iter();
        rows.push(Row {
            what: what.to_owned(),
            ours: measured.next().flatten(),
            peer: measured.next().flatten(),
            wire: None,
            direct: None,
            target: "≤ 2, worst ≤ 6",
        });
    }
    Ok(rows)
}

async fn repeat(
    binary: &Path,
    envoy: &Path,
    cause: Cause,
    seconds: u64,
    runs: usize,
) -> Result<Vec<f64>, String> {
    let mut took = Vec::new();
    while took.len() < runs {
        let mut group = JoinSet::new();
        for _ in 0..AT_ONCE.min(runs - took.len()) {
            let (binary, envoy) = (binary.to_owned(), envoy.to_owned());
            group.spawn(async move { run(&binary, &envoy, cause, Duration::from_secs(seconds)).await });
        }
        for one in group.join_all().await {
            took.push(one?.as_secs_f64());
        }
    }
    Ok(took)
}

async fn run(binary: &Path, envoy: &Path, cause: Cause, outage: Duration) -> Result<Duration, String> {
    let istiod = Arc::new(MockIstiod::start().await);
    let mesh = Mesh::new();
    mesh.push(&istiod, "one")?;
    let agent = Agent::start(&Setup { binary, envoy: Some(envoy), env: vec![] }, &istiod).map_err(said)?;
    agent.ready().await.map_err(said)?;
    mesh.shows("one", LIMIT).await?;
    if let Cause::Token = cause {
        let expires = Expiry::Ago(Duration::from_secs(60));
        agent.put_token(&Token { expires, ..Token::of("default", "bench") }.sign()).map_err(said)?;
    }
    istiod.down().await;
    if let Cause::Token = cause {
        istiod.up().await.map_err(said)?;
    }
    tokio::time::sleep(outage).await;
    mesh.push(&istiod, "two")?;
    match cause {
        Cause::Istiod => istiod.up().await.map_err(said)?,
        Cause::Token => agent.put_token(&istiod.mint("default", "bench")).map_err(said)?,
    }
    mesh.shows("two", PATIENCE).await.map_err(|e| format!("{e}\n{}", agent.log()))
}

/// An error as text.
pub(crate) fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}
