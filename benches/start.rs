//! How soon, and how much when nothing happens.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mock_istiod::MockIstiod;

use crate::agent::{Agent, Setup};
use crate::proc::Part;
use crate::table::{Row, Value};

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// As many more runs of what takes a few milliseconds: one that the machine held up for as long must not decide.
const SHORT: usize = 5;

type Measured = Vec<Option<Value>>;

fn row(what: &str, values: Measured, target: &'static str) -> Row {
    let mut values = values.into_iter();
    let ours = values.next().flatten();
    Row { what: what.to_owned(), ours, peer: values.next().flatten(), wire: None, direct: None, target }
}

/// Sockets, certificates by key type, readiness with a real Envoy.
pub(crate) async fn starts(
    binaries: &[PathBuf],
    envoy: Option<&Path>,
    runs: usize,
) -> Result<Vec<Row>, String> {
    let istiod = MockIstiod::start().await;
    let ecdsa = vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned())];
    let mut rows = Vec::new();
    let [times, cpus] = sockets(binaries, runs * SHORT, &istiod, &ecdsa).await?;
    rows.push(row("both sockets accept", times, "≤ 5"));
    rows.push(row("both sockets accept, agent CPU (ms)", cpus, "–"));
    for (name, env, target) in [
        ("first certificate, P-256", ecdsa.clone(), "≤ 10"),
        ("first certificate, RSA-2048", vec![], "≤ peer"),
    ] {
        let mut values = Vec::new();
        for binary in binaries {
            let setup = Setup { binary, envoy: None, env: env.clone() };
            // RSA keys take a random time; the median needs more runs.
            let runs = runs * if env.is_empty() { 3 } else { SHORT };
            values.push(repeat(runs, &setup, &istiod, Step::Certificate).await?);
        }
        rows.push(row(name, values, target));
    }
    if let Some(envoy) = envoy {
        let mut values = Vec::new();
        for binary in binaries {
            let setup = Setup { binary, envoy: Some(envoy), env: ecdsa.clone() };
            values.push(repeat(runs.min(5), &setup, &istiod, Step::Ready).await?);
        }
        rows.push(row("Envoy ready", values, "–"));
    }
    Ok(rows)
}

#[derive(Clone, Copy)]
enum Step {
    Certificate,
    Ready,
}

/// In turns, so that what else the machine does meets all of them.
async fn sockets(
    binaries: &[PathBuf],
    runs: usize,
    istiod: &MockIstiod,
    env: &[(&'static str, String)],
) -> Result<[Measured; 2], String> {
    let (mut times, mut cpus) = (vec![Vec::new(); binaries.len()], vec![Vec::new(); binaries.len()]);
    for _ in 0..runs {
        for (n, binary) in binaries.iter().enumerate() {
            let agent = Agent::start(&Setup { binary, envoy: None, env: env.to_vec() }, istiod);
            let agent = agent.map_err(|e| e.to_string())?;
            times[n].push(ms(agent.sockets().await.map_err(|e| e.to_string())?));
            cpus[n].push(ms(agent.proc().cpu()));
        }
    }
    Ok([times, cpus].map(|all| all.into_iter().map(Value::of).collect()))
}

async fn repeat(
    runs: usize,
    setup: &Setup<'_>,
    istiod: &MockIstiod,
    step: Step,
) -> Result<Option<Value>, String> {
    let mut times = Vec::new();
    for _ in 0..runs {
        let agent = Agent::start(setup, istiod).map_err(|e| e.to_string())?;
        let took = match step {
            Step::Certificate => agent.certificate().await,
            Step::Ready => agent.ready().await,
        };
        times.push(ms(took.map_err(|e| e.to_string())?));
    }
    Ok(Value::of(times))
}

/// Memory 10 s after readiness, with a real Envoy connected where there is one; of several agents each, one after the
/// other.
pub(crate) async fn idle(
    binaries: &[PathBuf],
    envoy: Option<&Path>,
    runs: usize,
) -> Result<Vec<Row>, String> {
    let istiod = MockIstiod::start().await;
    let none = || vec![Vec::new(); binaries.len()];
    let (mut rss, mut anon, mut threads) = (none(), none(), none());
    let mut parts = Part::ALL.map(|_| none());
    for run in 1..=runs {
        for (n, binary) in binaries.iter().enumerate() {
            let agent =
                Agent::start(&Setup { binary, envoy, env: vec![] }, &istiod).map_err(|e| e.to_string())?;
            agent.certificate().await.map_err(|e| e.to_string())?;
            if envoy.is_some() {
                agent.ready().await.map_err(|e| e.to_string())?;
            }
            eprint!("\r  run {run} of {runs}: waiting 10 s ");
            tokio::time::sleep(Duration::from_secs(10)).await;
            let memory = agent.proc().memory();
            #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
            let mb = |bytes: u64| bytes as f64 / 1e6;
            rss[n].push(mb(memory.rss));
            anon[n].push(mb(memory.anon));
            for (part, bytes) in parts.iter_mut().zip(agent.proc().parts()) {
                part[n].push(mb(bytes));
            }
            threads[n].push(f64::from(u32::try_from(agent.proc().threads()).unwrap_or(0)));
        }
    }
    eprintln!();
    let of = |all: Vec<Vec<f64>>| all.into_iter().map(Value::of).collect();
    let mut rows = vec![
        row("resident", of(rss), "≤ 8"),
        row("anonymous", of(anon), "≤ 3"),
        row("threads", of(threads), "–"),
    ];
    let of_parts = Part::ALL.iter().zip(parts);
    rows.extend(of_parts.map(|((_, what), all)| row(&format!("resident: {what}"), of(all), "–")));
    Ok(rows)
}
