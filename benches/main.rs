//! `make bench`: what the agent costs, side by side with another agent and with no agent at all.
//!
//! Every figure is the median of several runs with its range; a range wider than half the median is
//! marked noisy. The mock istiod and the clients run in this process, the agents in theirs, one at a
//! time; `PEER_AGENT=<path>` drives another agent's binary through the same runs.

mod ads;
mod affinity;
mod agent;
mod cgroup;
mod credentials;
mod density;
mod extremes;
mod flood;
mod growth;
mod heal;
mod iptables;
mod proc;
mod relay;
mod replay;
mod restart;
mod sds;
mod start;
mod status;
mod table;
mod web;
mod wire;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use table::Row;

/// The agent's memory limit unless one is named, in MB.
const MEMORY: u64 = 64;

/// Measures agents.
#[derive(Debug, Parser)]
struct Flags {
    /// The agent.
    #[arg(long)]
    agent: PathBuf,
    /// A real Envoy, for the time to readiness and idle memory; without it a stand-in that sleeps.
    #[arg(long)]
    envoy: Option<PathBuf>,
    /// Another agent to compare with.
    #[arg(long, env = "PEER_AGENT")]
    peer: Option<PathBuf>,
    /// Only sections whose name contains this: size, start, idle, relay, push, replay, status, sds,
    /// credentials, iptables; and, only when they are named in full since they take minutes: density, herd, growth, heal, flood, extremes.
    #[arg(long, default_value = "")]
    only: String,
    /// Runs of each measurement.
    #[arg(long, default_value_t = 7)]
    runs: usize,
    /// How long the flood lasts (120 s), agents idle (60 s), or istiod is away from a herd (30 s).
    #[arg(long)]
    seconds: Option<u64>,
    /// Memory that the agent and what it starts (but for a real Envoy) may have, in MB, by a control group around each;
    /// 0: no limit. 64 where this runs as root and groups can be made. The other agent has none.
    #[arg(long)]
    memory_limit: Option<u64>,
    /// How many agents are a herd.
    #[arg(long, default_value_t = 200)]
    agents: usize,
    /// One herd with this XDS_RECONNECT_SPREAD, in seconds; without --spread and --admit several, one after the other.
    #[arg(long)]
    spread: Option<u64>,
    /// One herd of whose streams istiod admits so many a second, as it does itself; 0: all.
    #[arg(long)]
    admit: Option<u32>,
    /// Where everything measured goes as JSON, beside what is printed.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("proxy") {
        return exit(wire::run().map_err(|e| e.to_string()));
    }
    let flags = Flags::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    exit(runtime.map_err(|e| e.to_string()).and_then(|r| r.block_on(run(&flags))))
}

fn exit(result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {e}");
            ExitCode::FAILURE
        }
    }
}

async fn run(flags: &Flags) -> Result<(), String> {
    // The agents run in scratch directories, so their paths must not depend on ours.
    let binaries = std::iter::once(&flags.agent)
        .chain(&flags.peer)
        .map(|path| std::fs::canonicalize(path).map_err(|e| format!("{}: {e}", path.display())))
        .collect::<Result<Vec<PathBuf>, String>>()?;
    let limited = limited(flags, &binaries[0])?;
    let (mut report, mut curves) = (table::Report::default(), Vec::new());
    let measured = sections(flags, &binaries, &mut report, &mut curves).await;
    let rows = if limited { cgroup::rows() } else { Ok(Vec::new()) };
    cgroup::end();
    // Whoever was killed has spoiled what was measured: the first cause first.
    let rows = rows.map_err(|killed| match &measured {
        Err(e) if !e.contains(&killed) => format!("{killed}; {e}"),
        Err(e) => e.clone(),
        Ok(()) => killed,
    })?;
    measured?;
    if report.is_empty() && curves.is_empty() {
        return Err(format!(
            "nothing was measured: does a section have the name --only {}? --help lists them",
            flags.only
        ));
    }
    if !rows.is_empty() {
        report.add("Control groups with a memory limit, one around each agent", &rows, false);
    }
    let Some(path) = &flags.json else { return Ok(()) };
    std::fs::write(path, format!("{:#}\n", report.json(&version(&binaries[0]), &curves)))
        .map_err(|e| format!("{}: {e}", path.display()))
}

/// Whether the agent gets a memory limit.
fn limited(flags: &Flags, binary: &Path) -> Result<bool, String> {
    let megabytes = flags.memory_limit.unwrap_or(MEMORY);
    if megabytes == 0 {
        return Ok(false);
    }
    match cgroup::limit(binary, megabytes) {
        Ok(()) => Ok(true),
        Err(why) if flags.memory_limit.is_some() => Err(format!("--memory-limit: {why}")),
        Err(why) => {
            eprintln!("bench: the agent's memory is not limited: {why}");
            Ok(false)
        }
    }
}

async fn sections(
    flags: &Flags,
    binaries: &[PathBuf],
    report: &mut table::Report,
    curves: &mut Vec<serde_json::Value>,
) -> Result<(), String> {
    usual(flags, binaries, report).await?;
    slow(flags, binaries, report, curves).await
}

/// Sections that are chosen by a part of their name; all of them without one.
async fn usual(flags: &Flags, binaries: &[PathBuf], report: &mut table::Report) -> Result<(), String> {
    let wanted = |name: &str| name.contains(&flags.only);
    let with_peer = flags.peer.is_some();
    if wanted("size") {
        add(report, "Size", &[size(binaries)], with_peer)?;
    }
    if wanted("start") {
        eprintln!("measuring start…");
        let rows = start::starts(binaries, flags.envoy.as_deref(), flags.runs).await?;
        add(report, "Start (ms since exec)", &rows, with_peer)?;
    }
    if wanted("idle") {
        eprintln!("measuring idle memory…");
        let rows = start::idle(binaries, flags.envoy.as_deref(), flags.runs.min(5)).await?;
        add(report, "Idle memory (MB, 10 s after ready)", &rows, with_peer)?;
    }
    if wanted("relay") {
        eprintln!("measuring the relay…");
        let rows = relay::bulk(binaries, flags.runs).await?;
        add(report, "Relay of configuration", &rows, with_peer)?;
    }
    if wanted("push") {
        eprintln!("measuring small pushes…");
        let rows = relay::pushes(binaries, flags.runs).await?;
        add(report, "Small delta pushes (µs)", &rows, with_peer)?;
    }
    if wanted("replay") {
        eprintln!("measuring the last good configuration…");
        let mut rows = replay::cost(&binaries[0], flags.runs).await?;
        if let Some(envoy) = &flags.envoy {
            rows.extend(replay::crashes(&binaries[0], envoy, flags.runs).await?);
        }
        add(report, "The last good configuration (XDS_REPLAY)", &rows, false)?;
    }
    if wanted("status") {
        eprintln!("measuring the status server…");
        let rows = status::all(binaries, flags.runs).await?;
        add(report, "Status server", &rows, with_peer)?;
    }
    if wanted("sds") {
        eprintln!("measuring 1,000 SDS streams…");
        let rows = sds::fan_out(binaries, flags.runs.min(3)).await?;
        add(report, "1,000 SDS streams at a renewal", &rows, with_peer)?;
    }
    if wanted("credentials") {
        eprintln!("measuring the token service and secrets of gateways…");
        let rows = credentials::all(binaries, flags.runs).await?;
        add(report, "Token service and secrets of gateways", &rows, false)?;
    }
    if wanted("iptables") {
        eprintln!("measuring istio-iptables…");
        match iptables::rows(binaries, flags.runs) {
            Ok(rows) => add(report, "istio-iptables", &rows, with_peer)?,
            Err(reason) => eprintln!("bench: istio-iptables is not measured: {reason}"),
        }
    }
    Ok(())
}

/// Sections that take minutes: only by their full name.
async fn slow(
    flags: &Flags,
    binaries: &[PathBuf],
    report: &mut table::Report,
    curves: &mut Vec<serde_json::Value>,
) -> Result<(), String> {
    let with_peer = flags.peer.is_some();
    if flags.only == "density" {
        let rows = density::nodes(binaries, flags.seconds.unwrap_or(60)).await?;
        add(report, "Many agents on one node, 1 MB of configuration each", &rows, with_peer)?;
    }
    if flags.only == "herd" {
        herds(flags, &binaries[0], report).await?;
    }
    if flags.only == "growth" {
        for curve in growth::curves(binaries).await? {
            curve.print();
            curves.push(curve.json());
        }
    }
    if flags.only == "heal" {
        let envoy = flags.envoy.as_deref().ok_or("--only heal needs --envoy")?;
        let rows = heal::outages(binaries, envoy, flags.runs).await?;
        add(report, "Time from the end of an outage to the new configuration (s)", &rows, with_peer)?;
    }
    if flags.only == "extremes" {
        let rows = extremes::all(binaries, flags.runs).await?;
        add(report, "Far ends", &rows, with_peer)?;
    }
    if flags.only == "flood" {
        let rows = flood::both_ways(binaries, Duration::from_secs(flags.seconds.unwrap_or(120))).await?;
        add(report, "Both sides write as fast as they may, both read slowly", &rows, with_peer)?;
    }
    Ok(())
}

/// One herd where its settings are named, else those that docs/SCALE.md compares with its model.
async fn herds(flags: &Flags, binary: &Path, report: &mut table::Report) -> Result<(), String> {
    let away = Duration::from_secs(flags.seconds.unwrap_or(30));
    let cases = match (flags.spread, flags.admit) {
        (None, None) => restart::CASES.to_vec(),
        (spread, admit) => vec![(spread, admit.unwrap_or(0))],
    };
    let mut rows = Vec::new();
    for (spread, admitted) in cases {
        eprintln!("  spread {spread:?} s, {admitted} a second admitted (0: all)");
        let outage = restart::Outage { agents: flags.agents, away, spread, admitted };
        let herd = restart::herd(binary, &outage).await?;
        rows.extend(herd.rows());
        report.herd(herd.json());
    }
    add(report, "Istiod restarts", &rows, false)
}

/// The end of a section: what was measured, unless a process was killed at its memory limit meanwhile.
fn add(report: &mut table::Report, title: &str, rows: &[Row], with_peer: bool) -> Result<(), String> {
    cgroup::held(title)?;
    report.add(title, rows, with_peer);
    Ok(())
}

/// Version and revision, as the agent says; empty for another agent.
fn version(binary: &Path) -> String {
    let said = std::process::Command::new(binary).arg("--version").output().map(|out| out.stdout);
    let said = String::from_utf8_lossy(&said.unwrap_or_default()).into_owned();
    let value = |name: &str| said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    match (value("version"), value("revision")) {
        (Some(version), Some(revision)) => format!("{version}, {}", revision.get(..12).unwrap_or(revision)),
        _ => String::new(),
    }
}

fn size(binaries: &[PathBuf]) -> Row {
    let of = |path: &PathBuf| {
        let bytes = std::fs::metadata(path).map(|m| m.len()).unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        table::Value::of(vec![bytes as f64 / 1e6])
    };
    Row {
        what: "binary as built (MB)".to_owned(),
        ours: binaries.first().and_then(of),
        peer: binaries.get(1).and_then(of),
        wire: None,
        direct: None,
        target: "≤ 12",
    }
}
