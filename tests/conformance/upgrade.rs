//! The agent is replaced by another program while its Envoy runs on (`AGENT_UPGRADE`).

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;

use super::end_to_end::Traffic;
use crate::support::agent::{Builder, SDS};
use crate::support::client::secret_request;
use crate::support::mesh::Loop;
use crate::support::{Envoy, MockIstiod, TestAgent, agent_bin, envoy_bin, eventually, variable};

const DONE: &str = "has taken over from version";

fn builder(mock: &MockIstiod) -> Builder {
    TestAgent::with().istiod(mock).env("AGENT_UPGRADE", "true").env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
}

// `UPGRADES=50` makes a long run of the test with a real Envoy.

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

fn memory(agent: &TestAgent) -> String {
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid().as_raw_nonzero())).unwrap();
    status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or_default().to_owned()
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
        // It never ends and says a lot.
        ("/usr/bin/yes".into(), "take over"),
    ]
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
async fn a_real_envoy_serves_throughout() {
    let mock = Arc::new(MockIstiod::start().await);
    mock.set_ttl(Some(Duration::from_secs(60)));
    let mesh = Loop::serve(&mock);
    let mut agent = builder(&mock).env("XDS_REPLAY", "memory").envoy(Envoy::Real).start();
    agent.wait_ready().await;
    let envoy = agent.envoy_pid().await;
    let traffic = Traffic::start(&mock, mesh);
    traffic.goes_on(20).await;
    let upgrades = variable("UPGRADES").and_then(|n| n.to_str()?.parse().ok()).unwrap_or(4);
    for n in 1..=upgrades {
        let said = agent.run(&["upgrade"]).await;
        assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
        assert!(ready(&agent).await, "after upgrade {n}");
        if n % 10 == 0 {
            eprintln!("upgrade {n}: {} descriptors, {}", descriptors(&agent), memory(&agent));
        }
        traffic.goes_on(20).await;
        let value = format!("push {n}");
        mesh.push(&mock, &value);
        eventually("what is pushed takes effect", || async {
            traffic.assert_unharmed();
            (mesh.ask(&mock).await.ok()?.headers.get("x-config")? == value.as_str()).then_some(())
        })
        .await;
    }
    assert_eq!(agent.envoy_pid().await, envoy);
    drop(traffic);
    agent.stop().await;
}
#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_is_replaced_under_traffic_and_one_that_fails_is_not() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = builder(&mock)
        .env("ENVOY_HOT_RESTART", "true")
        .env("ENVOY_PARENT_SHUTDOWN_DURATION", "3s")
        .proxy_config("drainDuration", "1s")
        .envoy(Envoy::Real)
        .start();
    agent.wait_ready().await;
    let envoy = agent.envoy_pid().await;
    let traffic = Traffic::start(&mock, mesh);
    traffic.goes_on(20).await;
    let dir = tempfile::tempdir().unwrap();
    let real = envoy_bin().to_str().unwrap().to_owned();
    // Good at everything but serving.
    let failing = dir.path().join("failing");
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *validate*|*version) exec {real} \"$@\";; esac\necho no >&2\nexit 3\n"
    );
    std::fs::write(&failing, script).unwrap();
    std::fs::set_permissions(&failing, std::fs::Permissions::from_mode(0o755)).unwrap();
    let said = agent.run(&["upgrade", "--envoy", failing.to_str().unwrap()]).await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stdout.contains("exit status 3"), "{said:?}");
    traffic.goes_on(20).await;
    for (binary, expected) in [("/bin/true", "hot restart"), ("/no/such/envoy", "No such file")] {
        let said = agent.run(&["upgrade", "--envoy", binary]).await;
        assert_eq!(said.code, Some(1), "{said:?}");
        assert!(said.stdout.contains(expected), "{said:?}");
    }
    let newer = dir.path().join("envoy");
    std::os::unix::fs::symlink(&real, &newer).unwrap();
    let said = eventually("the epoch before is gone and another can come", || async {
        let said = agent.run(&["upgrade", "--envoy", newer.to_str().unwrap()]).await;
        (!said.stdout.contains("still being replaced") && !said.stdout.contains("is being replaced"))
            .then_some(said)
    })
    .await;
    assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
    traffic.goes_on(20).await;
    eventually("the Envoy of the start is gone", || async {
        agent.processes().iter().all(|(pid, _)| *pid != envoy).then_some(())
    })
    .await;
    // The next agent knows it.
    let said = agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(ready(&agent).await);
    traffic.goes_on(20).await;
    drop(traffic);
    agent.stop().await;
}
