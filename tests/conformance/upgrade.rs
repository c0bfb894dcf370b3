//! The agent is replaced by another program while its Envoy runs on (`AGENT_UPGRADE`).

mod envoys;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use rustix::process::Signal;
use tokio::task::JoinSet;

use super::ads::{World, ask, request};
use super::dns;
use super::end_to_end::Traffic;
use crate::support::agent::{Builder, SDS};
use crate::support::client::secret_request;
use crate::support::mesh::Loop;
use crate::support::{
    Envoy, MockIstiod, SmallDisk, TestAgent, agent_bin, eventually, free_port, http, root_for, variable,
};

const DONE: &str = "has taken over from version";

fn builder(mock: &MockIstiod) -> Builder {
    TestAgent::with().istiod(mock).env("AGENT_UPGRADE", "true").env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
}

/// The secret that an Envoy is given now, as bytes.
async fn certificate(agent: &mut TestAgent) -> Vec<u8> {
    let client = agent.client(SDS).await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap().resources[0].value.clone()
}

fn descriptors(agent: &TestAgent) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", agent.pid().as_raw_nonzero())).unwrap().count()
}

fn times(agent: &TestAgent, part: &str) -> usize {
    agent.log().text().matches(part).count()
}

async fn ready(agent: &TestAgent) -> bool {
    agent.get("/healthz/ready").await.is_ok_and(|reply| reply.status.is_success())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_is_replaced_and_nothing_else_is() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    let (envoy, before) = (agent.envoy_pid().await, certificate(&mut agent).await);
    let processes = agent.processes().len();
    let open = descriptors(&agent);
    for n in 1..=4 {
        if n % 2 == 0 {
            agent.signal(Signal::USR2);
        } else {
            let said = agent.run(&["upgrade", "--binary", agent_bin().to_str().unwrap()]).await;
            assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
            assert!(said.stdout.lines().last().unwrap().starts_with("done: version "), "{said:?}");
        }
        eventually("the new program serves", || async { (times(&agent, DONE) == n).then_some(()) }).await;
        assert!(ready(&agent).await, "after upgrade {n}");
        assert_eq!(agent.envoy_pid().await, envoy);
        assert_eq!(certificate(&mut agent).await, before);
    }
    agent.assert_running();
    let words = std::fs::read(format!("/proc/{}/cmdline", agent.pid().as_raw_nonzero())).unwrap();
    assert!(!String::from_utf8_lossy(&words).contains("__"), "called as before");
    assert_eq!(mock.record().signed().len(), 1, "no other certificate was asked for");
    eventually("nothing is left behind", || async {
        (agent.processes().len() == processes && descriptors(&agent) <= open + 2).then_some(())
    })
    .await;
    assert!(agent.fake_notes().iter().all(|note| note["signal"].is_null()), "Envoy was left alone");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn envoys_own_end_is_seen_by_the_new_program() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    assert_eq!(agent.run(&["upgrade"]).await.code, Some(0));
    rustix::process::kill_process(agent.envoy_pid().await, Signal::KILL).unwrap();
    assert_eq!(agent.wait_exit().await.code(), Some(137));
    agent.wait_log("signal: killed").await;
    agent.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_successor_leaves_no_envoy() {
    for envoy in [Envoy::Fake, Envoy::Real] {
        let mock = MockIstiod::start().await;
        let mut agent = builder(&mock).envoy(envoy).start();
        agent.envoy_pid().await;
        assert_eq!(agent.run(&["upgrade"]).await.code, Some(0));
        agent.signal(Signal::KILL);
        agent.wait_exit().await;
        eventually("no process is left", || async { agent.processes().is_empty().then_some(()) }).await;
    }
}

/// Programs that cannot take over, each with what is said of it.
fn unfit(dir: &Path) -> Vec<(PathBuf, &'static str)> {
    let put = |name: &str, content: &[u8], mode: u32| {
        let path = dir.join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let agent = std::fs::read(agent_bin()).unwrap();
    let mut foreign = agent[..4096].to_vec();
    foreign[18] ^= 0xff;
    vec![
        (dir.join("missing"), "No such file"),
        (put("plain", &agent[..4096], 0o644), "ermission denied"),
        (put("script", b"#!/bin/sh\nexec sleep 600\n", 0o755), "no program for this machine"),
        (put("foreign", &foreign, 0o755), "another processor"),
        (put("torn", &agent[..4096], 0o755), "cannot"),
        ("/bin/true".into(), "take over"),
        // It crashes at once.
        (crashing(dir), "take over"),
        // It never ends and says a lot.
        ("/usr/bin/yes".into(), "take over"),
    ]
}

fn crashing(dir: &Path) -> PathBuf {
    let (source, built) = (dir.join("crashing.c"), dir.join("crashing"));
    std::fs::write(&source, "#include <stdlib.h>\nint main(void) { abort(); }\n").unwrap();
    let output = std::process::Command::new("cc").arg("-o").arg(&built).arg(source).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    built
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_cannot_take_over_changes_nothing() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).env("AGENT_UPGRADE_TIMEOUT", "3s").start();
    agent.wait_ready().await;
    let (envoy, before) = (agent.envoy_pid().await, certificate(&mut agent).await);
    let dir = tempfile::tempdir().unwrap();
    for (binary, expected) in unfit(dir.path()) {
        let said = agent.run(&["upgrade", "--binary", binary.to_str().unwrap()]).await;
        assert_eq!(said.code, Some(1), "{said:?}");
        let last = said.stdout.lines().last().unwrap_or_default();
        assert!(last.starts_with("failed: ") && last.contains(expected), "{said:?}");
        assert!(last.contains("; is it a ") || last.contains("; name a file "), "what to do: {said:?}");
        assert!(ready(&agent).await);
    }
    assert_eq!(agent.envoy_pid().await, envoy);
    assert_eq!(certificate(&mut agent).await, before);
    assert_eq!(times(&agent, DONE), 0);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_is_silent_is_given_up() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).env("AGENT_UPGRADE_TIMEOUT", "1s").start();
    agent.wait_ready().await;
    let dir = tempfile::tempdir().unwrap();
    let silent = wrapper(dir.path(), "/bin/sleep", "600", "600");
    let said = agent.run(&["upgrade", "--binary", silent.to_str().unwrap()]).await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stdout.contains("AGENT_UPGRADE_TIMEOUT"), "{said:?}");
    assert!(ready(&agent).await);
    agent.stop().await;
}

/// A program of its own, made by the C compiler that the crypto crate needs too.
fn wrapper(dir: &Path, agent: &str, extra: &str, on_trial: &str) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/wrapper.c");
    let built = dir.join("wrapper");
    let text = |name: &str, value: &str| format!("-D{name}=\"{value}\"");
    let output = std::process::Command::new("cc")
        .args([text("AGENT", agent), text("EXTRA", extra), text("ON_TRIAL", on_trial)])
        .arg("-o")
        .arg(&built)
        .arg(source)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    built
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_fails_before_it_serves_gives_back() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    let (envoy, before) = (agent.envoy_pid().await, certificate(&mut agent).await);
    let dir = tempfile::tempdir().unwrap();
    let failing = wrapper(dir.path(), agent_bin().to_str().unwrap(), "--concurrency=many", "");
    for _ in 0..2 {
        let said = agent.run(&["upgrade", "--binary", failing.to_str().unwrap()]).await;
        assert_eq!(said.code, Some(1), "{said:?}\n{}", agent.log().text());
        assert!(said.stdout.contains("many") && said.stdout.contains("goes on"), "{said:?}");
        assert!(ready(&agent).await);
        assert_eq!(agent.envoy_pid().await, envoy);
        assert_eq!(certificate(&mut agent).await, before);
    }
    // The one that came back can be replaced as before.
    let said = agent.run(&["upgrade", "--binary", agent_bin().to_str().unwrap()]).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(mock.record().signed().len(), 1);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_that_comes_meanwhile_ends_the_agent_in_order() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    let mut command = agent.spawn(&["upgrade"]);
    agent.wait_log("takes over; Envoy goes on").await;
    agent.stop().await;
    command.wait().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_that_comes_to_a_program_that_fails_ends_the_one_that_comes_back() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    // Whoever starts waits for what another server says here, for a second.
    let place = agent.path("var/run/secrets/credential-uds/socket");
    std::fs::create_dir_all(place.parent().unwrap()).unwrap();
    let silent = tokio::net::UnixListener::bind(&place).unwrap();
    let mut command = agent.spawn(&["upgrade"]);
    drop(silent.accept().await.expect("the trial asks"));
    let _held = silent.accept().await.expect("the new program asks");
    // It is to be removed then, which fails.
    std::fs::remove_file(&place).unwrap();
    agent.signal(Signal::TERM);
    assert_eq!(agent.wait_exit().await.code(), Some(0), "{}", agent.log().text());
    command.wait().await.unwrap();
    agent.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_the_same_time_are_one_after_the_other_or_refused() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    let (one, two) = tokio::join!(agent.run(&["upgrade"]), agent.run(&["upgrade"]));
    assert!(one.code == Some(0) || two.code == Some(0), "{one:?} {two:?}");
    agent.assert_running();
    assert!(ready(&agent).await);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_socket_is_where_it_is_looked_for() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    let path = agent.path("etc/istio/proxy/UPGRADE");
    let is_there = || async { std::fs::metadata(&path).ok().map(|meta| meta.permissions().mode() & 0o777) };
    std::fs::remove_file(&path).unwrap();
    assert_eq!(eventually("it is bound again", is_there).await, 0o600);
    assert_eq!(agent.run(&["upgrade"]).await.code, Some(0), "{}", agent.log().text());
    std::fs::remove_file(&path).unwrap();
    eventually("the new program binds it again", is_there).await;
    // Another agent in this folder keeps it while it lives.
    let others = agent.path("etc/istio/proxy/other");
    let other = std::os::unix::net::UnixListener::bind(&others).unwrap();
    std::fs::rename(&others, &path).unwrap();
    agent.wait_log("UPGRADE now belongs to another server; leaving it alone").await;
    drop(other);
    eventually("it is bound again", async || (agent.run(&["upgrade"]).await.code == Some(0)).then_some(()))
        .await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn none_while_envoy_drains() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    agent.post("/drain").await.unwrap();
    let said = agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stdout.contains("Envoy drains"), "{said:?}");
    agent.stop().await;
}

// It would be passed over, and what lies in the usual place be executed.
#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_is_named_without_its_flag_is_refused() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    agent.wait_ready().await;
    let said = agent.run(&["upgrade", "/opt/new/pilot-agent"]).await;
    assert_eq!(said.code, Some(255), "{said:?}");
    assert!(said.stderr.contains("--binary"), "{said:?}");
    assert_eq!(times(&agent, DONE), 0);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_switch_there_is_no_way_to_it() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.wait_ready().await;
    assert!(!agent.path("etc/istio/proxy/UPGRADE").exists());
    agent.signal(Signal::USR2);
    let said = agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(255), "{said:?}");
    assert!(said.stderr.contains("AGENT_UPGRADE"), "{said:?}");
    assert!(ready(&agent).await);
    assert_eq!(times(&agent, DONE), 0);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_socket_of_a_virtual_machine_is_found_by_its_files() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).proxy_config("configPath", "./conf").start();
    agent.wait_ready().await;
    let files = tempfile::tempdir().unwrap();
    let cluster = files.path().join("cluster.env");
    let config = serde_json::json!({ "configPath": agent.path("conf") });
    std::fs::write(&cluster, format!("PROXY_CONFIG='{config}'\n")).unwrap();
    let upgrade = |cluster: &Path| {
        let mut command = tokio::process::Command::new(agent_bin());
        command.arg("upgrade").current_dir(files.path()).env_clear().env("ISTIO_CLUSTER_CONFIG", cluster);
        async move { command.output().await.unwrap() }
    };
    let said = upgrade(Path::new("/no/such/file")).await;
    assert!(String::from_utf8_lossy(&said.stderr).contains("etc/istio/proxy/UPGRADE: No such"), "{said:?}");
    let said = upgrade(&cluster).await;
    assert!(said.status.success(), "{said:?}");
    agent.stop().await;
}

/// How much later `after` follows in the log on each line with `before`.
fn later(log: &str, before: &str, after: &str) -> Vec<Duration> {
    // 2026-11-22T11:47:13.044773Z
    let at = |line: &str| -> Option<Duration> {
        let mut numbers = line.get(11..26)?.split(':').map(|text| text.parse::<f64>().ok());
        let (hours, minutes) = (numbers.next()??, numbers.next()??);
        Some(Duration::from_secs_f64((hours * 60.0 + minutes) * 60.0 + numbers.next()??))
    };
    let (mut began, mut out) = (None, Vec::new());
    for line in log.lines() {
        if line.contains(before) {
            began = at(line);
        } else if line.contains(after) {
            let took = began.take().and_then(|began| at(line)?.checked_sub(began));
            out.extend(took);
        }
    }
    out.sort();
    out
}

/// Asks for readiness twenty times a second until told to stop, on a connection of its own each time; gives what went
/// wrong.
async fn readiness(port: u16, halt: Arc<AtomicBool>) -> (u64, Vec<String>) {
    let (mut asked, mut failed) = (0, Vec::new());
    while !halt.load(Ordering::Relaxed) {
        asked += 1;
        match http::get(port, "/healthz/ready").await {
            Ok(reply) if reply.status.is_success() => {}
            Ok(reply) => failed.push(format!("{} {:?}", reply.status, reply.headers.get("x-not-ready"))),
            Err(error) => failed.push(error),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    (asked, failed)
}

/// Asks for a name of the mesh until told to stop; each question is answered.
async fn names(port: u16, halt: Arc<AtomicBool>) -> u64 {
    let client = dns::Client::to(port).await;
    let mut asked = 0_u16;
    while !halt.load(Ordering::Relaxed) {
        let reply = client.ask(&dns::query(asked, "shop.ns.svc.cluster.local", dns::A)).await;
        assert!(reply.starts_with(&asked.to_be_bytes()) && reply.ends_with(&[10, 0, 0, 1]), "{reply:?}");
        asked = asked.wrapping_add(1);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    u64::from(asked)
}

// `UPGRADES=50` makes it a long run.
#[tokio::test(flavor = "multi_thread")]
async fn a_real_envoy_serves_throughout() {
    let mock = Arc::new(MockIstiod::start().await);
    mock.set_ttl(Some(Duration::from_secs(60)));
    let mesh = Loop::serve(&mock);
    // A certificate every two seconds.
    let mut builder = builder(&mock)
        .env("XDS_REPLAY", "memory")
        .env("SECRET_TTL", "60s")
        .env("SECRET_GRACE_PERIOD_RATIO", "0.967")
        .env("SECRET_GRACE_PERIOD_RATIO_JITTER", "0")
        .envoy(Envoy::Real);
    let port = root_for("a resolv.conf of its own").then(free_port);
    if let Some(port) = port {
        builder = dns::serving(builder, port, "nameserver 127.53.0.250\n");
    }
    let mut agent = builder.start();
    agent.wait_ready().await;
    let envoy = agent.envoy_pid().await;
    let traffic = Traffic::start(&mock, mesh);
    traffic.goes_on(20).await;
    let halt = Arc::new(AtomicBool::new(false));
    let (mut asking, mut resolving) = (JoinSet::new(), JoinSet::new());
    asking.spawn(readiness(agent.ports().status, halt.clone()));
    if let Some(port) = port {
        resolving.spawn(names(port, halt.clone()));
    }
    let upgrades = variable("UPGRADES").and_then(|n| n.to_str()?.parse().ok()).unwrap_or(4);
    let mut open = 0;
    for n in 1..=upgrades {
        let said = agent.run(&["upgrade"]).await;
        assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
        if n % 10 == 0 {
            eprintln!("upgrade {n}: {} descriptors, {} kB", descriptors(&agent), agent.memory("VmRSS"));
        }
        traffic.goes_on(20).await;
        let value = format!("push {n}");
        mesh.push(&mock, &value);
        eventually("what is pushed takes effect", || async {
            traffic.assert_unharmed();
            (mesh.ask(&mock).await.ok()?.headers.get("x-config")? == value.as_str()).then_some(())
        })
        .await;
        if n == 1 {
            open = descriptors(&agent);
        }
    }
    eventually("certificates rotate", || async { (mock.record().signed().len() >= 3).then_some(()) }).await;
    eventually("no descriptor is left over", || async { (descriptors(&agent) <= open + 3).then_some(()) })
        .await;
    traffic.goes_on(20).await;
    halt.store(true, Ordering::Relaxed);
    let (asked, failed) = asking.join_next().await.unwrap().unwrap();
    let resolved: u64 = resolving.join_all().await.into_iter().sum();
    let log = agent.log().text();
    let back = later(&log, "takes over; Envoy goes on", "connected to upstream XDS server");
    assert_eq!(back.len(), upgrades, "Envoy's stream is opened again");
    eprintln!(
        "{upgrades} upgrades, {} certificates: {} requests, {asked} of readiness ({} failed), {resolved} names; Envoy's \
         stream is back after {:.0?} (p50), {:.0?} at most",
        mock.record().signed().len(),
        traffic.answered(),
        failed.len(),
        back[back.len() / 2],
        back[back.len() - 1],
    );
    assert!(failed.is_empty(), "{:?}", &failed[..failed.len().min(3)]);
    assert_eq!(agent.envoy_pid().await, envoy);
    assert_eq!(
        log.matches("the certificate stays in use").count(),
        upgrades,
        "each went on with the last one's"
    );
    drop(traffic);
    agent.stop().await;
}

#[derive(Clone, PartialEq, prost::Message)]
struct PushedConfig {
    #[prost(string, repeated, tag = "34")]
    ca_certificates_pem: Vec<String>,
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_mesh_trusts_is_known_to_the_next_program() {
    let other = MockIstiod::start().await;
    let mut world =
        World::with(|b| b.env("PROXY_CONFIG_XDS_AGENT", "true").env("AGENT_UPGRADE", "true")).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask("type.googleapis.com/envoy.config.listener.v3.Listener"));
    let config = "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig";
    while request(&mut istiod).await.type_url != config {}
    let bundle = other.root_pem();
    let value = PushedConfig { ca_certificates_pem: vec![bundle.clone()] }.encode_to_vec();
    let push = DiscoveryResponse {
        type_url: config.to_owned(),
        nonce: "1".to_owned(),
        version_info: "1".to_owned(),
        resources: vec![Any { type_url: config.to_owned(), value }],
        ..Default::default()
    };
    istiod.responses.sotw(&push).await.unwrap();
    assert!(request(&mut istiod).await.is_ack());
    let middle = bundle.lines().nth(3).unwrap().to_owned();
    let trusted = async |agent: &mut TestAgent| {
        let client = agent.client(SDS).await;
        let mut stream = client.stream_secrets();
        stream.send(&secret_request("ROOTCA"));
        loop {
            let value = stream.next().await.unwrap().resources[0].value.clone();
            if value.windows(middle.len()).any(|part| part == middle.as_bytes()) {
                return value;
            }
        }
    };
    let before = trusted(&mut world.agent).await;
    drop((envoy, istiod));
    world.mock.down().await;
    let said = world.agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(trusted(&mut world.agent).await, before);
    world.agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_keeps_nobody_from_taking_over() {
    if !root_for("a disk of a few kilobytes") {
        return;
    }
    let mock = MockIstiod::start().await;
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let disk = SmallDisk::mount(&dir.path().join("etc/istio/proxy"));
    let mut agent = builder(&mock).start_in(dir);
    agent.wait_ready().await;
    let (envoy, before) = (agent.envoy_pid().await, certificate(&mut agent).await);
    disk.fill();
    for _ in 0..2 {
        let said = agent.run(&["upgrade"]).await;
        assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
        assert!(ready(&agent).await);
    }
    assert_eq!(agent.envoy_pid().await, envoy);
    assert_eq!(certificate(&mut agent).await, before);
    assert!(agent.log().contains("the one from before stays"), "{}", agent.log().text());
    agent.stop().await;
}
