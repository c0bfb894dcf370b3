//! The status server: scrapes, readiness, probes. Envoy is a stand-in and its ports are served from memory,
//! so that only the agent is measured.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mock_istiod::MockIstiod;
use tokio::task::JoinSet;

use crate::affinity::OneCore;
use crate::agent::{Agent, Setup};
use crate::table::{Row, Value};
use crate::web::{Answer, Caller, Web};

/// No coding of the content.
const PLAIN: &str = "identity";
/// The application whose metrics are merged.
const SERIES: usize = 100_000;
const PROBE: &str = "/app-health/app/livez";
/// Probes a second, by as many callers, for as long.
const RATE: u32 = 1000;
const CALLERS: u32 = 8;
const LONG: Duration = Duration::from_secs(60);

/// An agent, the application beside it, and Envoy's ports.
struct Pod {
    agent: Agent,
    app: Web,
    _envoy: [Web; 2],
}

impl Pod {
    async fn start(binary: &Path, istiod: &MockIstiod, scale: Scale) -> Result<Self, String> {
        let said = |e: std::io::Error| e.to_string();
        let app = Web::start(0, move |path| match path {
            "/metrics" => match scale {
                Scale::Application(series) => Answer::Series(series),
                Scale::Envoy => Answer::ok(&b"app_x 1\n".repeat(1000)),
            },
            _ => Answer::ok(b"ok"),
        });
        let app = app.await.map_err(said)?;
        let metrics = serde_json::json!({"scrape": "true", "port": app.port.to_string()});
        let probe =
            serde_json::json!({PROBE: {"httpGet": {"path": "/", "port": app.port}, "timeoutSeconds": 5}});
        let env = vec![
            ("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned()),
            ("ISTIO_PROMETHEUS_ANNOTATIONS", metrics.to_string()),
            ("ISTIO_KUBE_APP_PROBERS", probe.to_string()),
        ];
        let agent = Agent::start(&Setup { binary, envoy: None, env }, istiod).map_err(said)?;
        let stats = match scale {
            Scale::Application(_) => Answer::ok(&b"envoy_x{a=\"b\"} 1\n".repeat(200)),
            Scale::Envoy => Answer::ok(&b"envoy_big{a=\"b\"} 1\n".repeat(500_000)),
        };
        let stats = Web::start(agent.prometheus_port, move |_| stats.clone()).await.map_err(said)?;
        let envoy = [stats, admin(agent.admin_port).await.map_err(said)?];
        agent.certificate().await.map_err(said)?;
        agent.ready().await.map_err(said)?;
        // What the start leaves to do is over, and the memory it took is given back.
        tokio::time::sleep(Duration::from_secs(2)).await;
        Ok(Self { agent, app, _envoy: envoy })
    }

    async fn caller(&self) -> Result<Caller, String> {
        Caller::connect(self.agent.status_port).await.map_err(|e| e.to_string())
    }
}

/// Envoy's admin interface as far as readiness looks at it: configured and live.
pub(crate) async fn admin(port: u16) -> std::io::Result<Web> {
    let answer = |path: &str| {
        Answer::ok(if path.contains("cluster_manager") {
            b"cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n"
        } else {
            b"server.state: 0\nlistener_manager.workers_started: 1\n"
        })
    };
    Web::start(port, answer).await
}

/// Whose part of a scrape is the big one.
#[derive(Debug, Clone, Copy)]
enum Scale {
    /// The application's, of as many series.
    Application(usize),
    /// Envoy's.
    Envoy,
}

/// One scrape.
#[derive(Debug, Clone, Copy)]
struct Scrape {
    time: f64,
    bytes: f64,
    cpu: f64,
    peak: f64,
    direct: f64,
}

/// A row that grows by a column with each agent.
struct Growing {
    what: String,
    values: Vec<Option<Value>>,
    direct: Option<Value>,
    target: &'static str,
}

#[derive(Default)]
struct Rows(Vec<Growing>);

impl Rows {
    fn add(&mut self, what: &str, value: Option<Value>, direct: Option<Value>, target: &'static str) {
        match self.0.iter_mut().find(|row| row.what == what) {
            Some(row) => row.values.push(value),
            None => self.0.push(Growing { what: what.to_owned(), values: vec![value], direct, target }),
        }
    }

    fn done(self) -> Vec<Row> {
        let row = |row: Growing| {
            let mut values = row.values.into_iter();
            Row {
                what: row.what,
                ours: values.next().flatten(),
                peer: values.next().flatten(),
                wire: None,
                direct: row.direct,
                target: row.target,
            }
        };
        self.0.into_iter().map(row).collect()
    }
}

/// Everything of the status server.
pub(crate) async fn all(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    let istiod = MockIstiod::start().await;
    let mut rows = Rows::default();
    for binary in binaries {
        let pod = Pod::start(binary, &istiod, Scale::Application(SERIES)).await?;
        let scrapes = scrapes(&pod, runs, PLAIN).await?;
        let of = |f: fn(&Scrape) -> f64| Value::of(scrapes.iter().map(f).collect());
        rows.add(
            "100k series: scrape (ms; direct: the application alone)",
            of(|s| s.time),
            of(|s| s.direct),
            "≤ 1.2 × direct",
        );
        rows.add("100k series: agent CPU (ms/MB)", of(|s| s.cpu / s.bytes), None, "≤ peer");
        rows.add("100k series: peak over idle (MB)", of(|s| s.peak), None, "≤ 2");
        for (coding, target) in [("gzip", "≤ 20"), ("zstd", "–")] {
            let scrapes = self::scrapes(&pod, runs, coding).await?;
            let of = |f: fn(&Scrape) -> f64| Value::of(scrapes.iter().map(f).collect());
            rows.add(&format!("100k series in {coding}: agent CPU (ms)"), of(|s| s.cpu), None, target);
            rows.add(&format!("100k series in {coding}: size (MB)"), of(|s| s.bytes), None, "–");
        }
        requests(&pod, runs, &mut rows).await?;
        drop(pod);
        let pod = Pod::start(binary, &istiod, Scale::Envoy).await?;
        let scrapes = self::scrapes(&pod, runs, PLAIN).await?;
        let of = |f: fn(&Scrape) -> f64| Value::of(scrapes.iter().map(f).collect());
        rows.add("10 MB of Envoy's: MB/s", of(|s| s.bytes / s.time * 1e3), None, "≥ 82–98");
        rows.add("10 MB of Envoy's: agent CPU (ms)", of(|s| s.cpu), None, "≤ 14–20");
        rows.add("10 MB of Envoy's: peak over idle (MB)", of(|s| s.peak), None, "≤ 2");
        let held = OneCore::with(pod.agent.proc().id).map_err(|e| e.to_string())?;
        let scrapes = self::scrapes(&pod, runs, PLAIN).await?;
        let cpu = Value::of(scrapes.iter().map(|s| s.cpu).collect());
        rows.add("10 MB of Envoy's, client and Envoy on the agent's core: agent CPU (ms)", cpu, None, "≤ 4");
        drop((held, pod));
        steady(&Pod::start(binary, &istiod, Scale::Application(SERIES)).await?, &mut rows).await?;
    }
    Ok(rows.done())
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
async fn scrapes(pod: &Pod, runs: usize, coding: &str) -> Result<Vec<Scrape>, String> {
    let proc = pod.agent.proc();
    let idle = proc.memory().rss;
    let mut out = Vec::new();
    // Once unmeasured: the first scrape loads code from disk.
    for run in 0..=runs {
        let begin = Instant::now();
        let app = Caller::connect(pod.app.port).await.map_err(|e| e.to_string())?;
        app.fetch("/metrics", PLAIN).await.map_err(|e| format!("the application's metrics: {e}"))?;
        let direct = begin.elapsed().as_secs_f64() * 1e3;
        proc.reset_peak();
        let (cpu, begin) = (proc.cpu(), Instant::now());
        let scrape = pod.caller().await?.fetch("/stats/prometheus", coding).await;
        let bytes = scrape.map_err(|e| format!("scrape: {e}"))?;
        let time = begin.elapsed().as_secs_f64() * 1e3;
        let cpu = (proc.cpu() - cpu).as_secs_f64() * 1e3;
        let peak = proc.memory().peak.saturating_sub(idle) as f64 / 1e6;
        if run > 0 {
            out.push(Scrape { time, bytes: bytes as f64 / 1e6, cpu, peak, direct });
        }
    }
    Ok(out)
}

/// One scrape of an application with as many series, beside a small one of Envoy's: its time and the agent's CPU in ms,
/// its peak over idle in MB; the medians of three.
pub(crate) async fn scrape_of(binary: &Path, series: usize) -> Result<[f64; 3], String> {
    let istiod = MockIstiod::start().await;
    let pod = Pod::start(binary, &istiod, Scale::Application(series)).await?;
    let _held = OneCore::with(pod.agent.proc().id).map_err(|e| e.to_string())?;
    let mut scrapes = scrapes(&pod, 3, PLAIN).await?;
    let mut middle = |of: fn(&Scrape) -> f64| {
        scrapes.sort_by(|a, b| of(a).total_cmp(&of(b)));
        scrapes.get(1).map_or(f64::NAN, of)
    };
    Ok([middle(|s| s.time), middle(|s| s.cpu), middle(|s| s.peak)])
}

/// What is asked for, how often, and what is aimed for in µs.
struct Request {
    what: &'static str,
    path: &'static str,
    count: u32,
    /// On one connection.
    keep: bool,
    /// With everybody on the agent's core ([`crate::affinity`]).
    one_core: bool,
    p50: &'static str,
    cpu: &'static str,
}

const REQUESTS: [Request; 5] = [
    Request {
        what: "readiness, kept connection",
        path: "/healthz/ready",
        count: 3000,
        keep: true,
        one_core: false,
        p50: "–",
        cpu: "≤ 80",
    },
    Request {
        what: "readiness, new connection",
        path: "/healthz/ready",
        count: 2000,
        keep: false,
        one_core: false,
        p50: "–",
        cpu: "≤ 180",
    },
    Request {
        what: "HTTP probe",
        path: PROBE,
        count: 1500,
        keep: false,
        one_core: false,
        p50: "≤ 700",
        cpu: "≤ 500",
    },
    Request {
        what: "readiness, kept connection, client on the agent's core",
        path: "/healthz/ready",
        count: 3000,
        keep: true,
        one_core: true,
        p50: "–",
        cpu: "–",
    },
    Request {
        what: "HTTP probe, client and application on the agent's core",
        path: PROBE,
        count: 1500,
        keep: false,
        one_core: true,
        p50: "–",
        cpu: "–",
    },
];

/// How long each of its requests took and what CPU it cost, in µs.
async fn many(pod: &Pod, request: &Request) -> Result<(f64, f64), String> {
    let Request { path, count, keep, .. } = *request;
    let mut kept = if keep { Some(pod.caller().await?) } else { None };
    let mut times = Vec::new();
    let before = pod.agent.proc().cpu();
    for _ in 0..count {
        let begin = Instant::now();
        let status = match &mut kept {
            Some(caller) => caller.ask(path).await,
            None => pod.caller().await?.ask(path).await,
        };
        times.push(begin.elapsed().as_secs_f64() * 1e6);
        let status = status.map_err(|e| format!("{path}: {e}"))?;
        if status != 200 {
            return Err(format!("{path}: status {status}"));
        }
    }
    let cpu = (pod.agent.proc().cpu() - before).as_secs_f64() * 1e6 / f64::from(count);
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], cpu))
}

async fn requests(pod: &Pod, runs: usize, rows: &mut Rows) -> Result<(), String> {
    for request in &REQUESTS {
        let Request { what, one_core, p50, cpu, .. } = *request;
        let held = one_core.then(|| OneCore::with(pod.agent.proc().id)).transpose();
        let _held = held.map_err(|e| format!("{what}: {e}"))?;
        let mut measured = Vec::new();
        for _ in 0..runs {
            measured.push(many(pod, request).await?);
        }
        let (times, cpus) = measured.into_iter().unzip();
        rows.add(&format!("{what}: p50 (µs)"), Value::of(times), None, p50);
        rows.add(&format!("{what}: agent CPU (µs)"), Value::of(cpus), None, cpu);
    }
    Ok(())
}

// One of the callers; how many probes were good, and how many were not.
async fn steadily(port: u16, number: u32, until: Instant) -> (f64, f64) {
    tokio::time::sleep(Duration::from_millis(u64::from(number))).await;
    let mut tick = tokio::time::interval(Duration::from_secs(1) * CALLERS / RATE);
    let (mut good, mut bad) = (0.0, 0.0);
    while Instant::now() < until {
        tick.tick().await;
        let status = match Caller::connect(port).await {
            Ok(mut caller) => caller.ask(PROBE).await,
            Err(error) => Err(error),
        };
        if matches!(status, Ok(200)) {
            good += 1.0;
        } else {
            bad += 1.0;
        }
    }
    (good, bad)
}

/// Probes at a steady rate, on new connections, for a minute.
#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
async fn steady(pod: &Pod, rows: &mut Rows) -> Result<(), String> {
    eprintln!("  {RATE} probes/s for {LONG:?}");
    let begin = Instant::now();
    let mut callers = JoinSet::new();
    for number in 0..CALLERS {
        callers.spawn(steadily(pod.agent.status_port, number, begin + LONG));
    }
    // The first seconds warm up; what comes after must be flat.
    let warm = Duration::from_secs(5);
    tokio::time::sleep(warm).await;
    let early = pod.agent.proc().memory().rss as f64 / 1e6;
    tokio::time::sleep(LONG - warm - Duration::from_secs(1)).await;
    let late = pod.agent.proc().memory().rss as f64 / 1e6;
    let calls = callers.join_all().await;
    let (good, bad) = calls.iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let seconds = begin.elapsed().as_secs_f64();
    for (what, value, target) in [
        ("1,000 probes/s for a minute: good per second", good / seconds, "≥ 990"),
        ("1,000 probes/s for a minute: failed", bad, "0"),
        ("1,000 probes/s for a minute: resident after 5 s (MB)", early, "–"),
        ("1,000 probes/s for a minute: resident at the end (MB)", late, "as after 5 s"),
    ] {
        rows.add(what, Value::of(vec![value]), None, target);
    }
    Ok(())
}
