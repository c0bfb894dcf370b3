//! Epochs of Envoy and `upgrade --envoy`: under traffic, with binaries that fail, and across a change of the agent.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::process::{Pid, Signal};

use super::{builder, ready, times};
use crate::end_to_end::Traffic;
use crate::support::agent::Builder;
use crate::support::mesh::Loop;
use crate::support::{Envoy, MockIstiod, TestAgent, envoy_bin, eventually, http};

const PROVED: &str = "a new configuration waits until Envoy's next epoch";

fn hot(mock: &MockIstiod, lives_on: &str) -> Builder {
    builder(mock)
        .env("ENVOY_HOT_RESTART", "true")
        .env("ENVOY_PARENT_SHUTDOWN_DURATION", lives_on)
        .proxy_config("drainDuration", "1s")
        .envoy(Envoy::Real)
}

/// An Envoy that is good at everything but serving, for which it does this.
fn odd(dir: &Path, name: &str, serving: &str) -> PathBuf {
    let path = dir.join(name);
    let real = envoy_bin();
    let real = real.display();
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *validate*|*version) exec {real} \"$@\";; esac\n{serving}\nexec {real} \"$@\"\n"
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn until(file: &Path) -> String {
    format!("while [ ! -e {} ]; do sleep 0.05; done", file.display())
}

/// Asks until no earlier epoch is in the way any more.
async fn replaced(agent: &TestAgent, binary: &Path) -> crate::support::commands::Said {
    eventually("the epoch before is gone and another can come", || async {
        let said = agent.run(&["upgrade", "--envoy", binary.to_str().unwrap()]).await;
        (!said.stdout.contains("being replaced")).then_some(said)
    })
    .await
}

async fn live(agent: &TestAgent, epoch: u32) {
    eventually("the epoch is live", || async {
        let reply = http::get(agent.ports().admin, "/server_info").await.ok()?;
        let info: serde_json::Value = serde_json::from_slice(&reply.body).ok()?;
        (info["state"] == "LIVE" && info["command_line_options"]["restart_epoch"] == epoch).then_some(())
    })
    .await;
}

fn envoys(agent: &TestAgent) -> Vec<Pid> {
    agent.processes().into_iter().filter(|(_, name)| name.starts_with("envoy")).map(|(pid, _)| pid).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_is_replaced_under_traffic_and_one_that_fails_is_not() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = hot(&mock, "3s").start();
    agent.wait_ready().await;
    let envoy = agent.envoy_pid().await;
    let traffic = Traffic::start(&mock, mesh);
    traffic.goes_on(20).await;
    let dir = tempfile::tempdir().unwrap();
    let failing = odd(dir.path(), "failing", "echo no >&2; exit 3");
    let said = agent.run(&["upgrade", "--envoy", failing.to_str().unwrap()]).await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stdout.contains("exit status 3"), "{said:?}");
    traffic.goes_on(20).await;
    for (binary, expected) in [("/bin/true", "hot restart"), ("/no/such/envoy", "No such file")] {
        let said = agent.run(&["upgrade", "--envoy", binary]).await;
        assert_eq!(said.code, Some(1), "{said:?}");
        assert!(said.stdout.contains(expected), "{said:?}");
    }
    // A configuration that changes while the new one has not shown yet that it serves comes after it.
    let slow = odd(dir.path(), "slow", &until(&dir.path().join("go")));
    let (said, ()) = tokio::join!(replaced(&agent, &slow), async {
        eventually("it has to show that it serves", || async {
            agent.log().contains("slow takes Envoy's place as epoch 1").then_some(())
        })
        .await;
        assert_eq!(agent.post("/debug/hot_restart").await.unwrap().text(), "OK");
        eventually("the configuration waits", || async { agent.log().contains(PROVED).then_some(()) }).await;
        std::fs::write(dir.path().join("go"), "").unwrap();
    });
    assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
    assert!(said.stdout.contains("serves as epoch 1"), "{said:?}");
    live(&agent, 2).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_that_never_becomes_live_is_given_up_and_the_one_before_comes_back() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = hot(&mock, "3s").env("AGENT_UPGRADE_TIMEOUT", "4s").start();
    agent.wait_ready().await;
    let traffic = Traffic::start(&mock, mesh);
    traffic.goes_on(20).await;
    let envoy = agent.envoy_pid().await;
    let dir = tempfile::tempdir().unwrap();
    let late = |binary: PathBuf| {
        let agent = &agent;
        async move {
            let said = eventually("it is started", || async {
                let said = agent.run(&["upgrade", "--envoy", binary.to_str().unwrap()]).await;
                // A machine under load may not come to start it.
                said.stdout.contains("epoch 1").then_some(said)
            })
            .await;
            assert_eq!(said.code, Some(1), "{said:?}");
            assert!(said.stdout.contains("not live within 4s"), "{said:?}");
        }
    };
    // It hangs before it is an Envoy: nothing has changed for the one before.
    late(odd(dir.path(), "hanging", "exec sleep 600")).await;
    traffic.goes_on(20).await;
    live(&agent, 0).await;
    // It takes the admin port and then waits for an istiod that is away: the one before serves without that port, and
    // its binary takes it back as the next epoch.
    let slow = odd(dir.path(), "slow", &until(&dir.path().join("go")));
    let ((), ()) = tokio::join!(late(slow), async {
        eventually("it is started", || async {
            agent.log().contains("slow takes Envoy's place").then_some(())
        })
        .await;
        mock.down().await;
        std::fs::write(dir.path().join("go"), "").unwrap();
    });
    eventually("it comes back", || async {
        agent.log().contains("another epoch takes it back").then_some(())
    })
    .await;
    // With an istiod that is known to be away none is tried.
    let newer = dir.path().join("envoy");
    std::os::unix::fs::symlink(envoy_bin(), &newer).unwrap();
    eventually("it is refused", || async {
        let said = agent.run(&["upgrade", "--envoy", newer.to_str().unwrap()]).await;
        assert_eq!(said.code, Some(1), "{said:?}");
        said.stdout.contains("istiod is away").then_some(())
    })
    .await;
    traffic.goes_on(20).await;
    assert!(envoys(&agent).contains(&envoy));
    mock.up().await.unwrap();
    live(&agent, 1).await;
    agent.wait_ready().await;
    traffic.goes_on(20).await;
    // All is as it was: the next one can come.
    let said = replaced(&agent, &newer).await;
    assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
    traffic.goes_on(20).await;
    drop(traffic);
    agent.stop().await;
}

// Changes are looked at ten seconds after the first; what the new program finds then is not what runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_hot_restart_that_is_due_comes_after_an_upgrade_of_the_agent() {
    let mock = MockIstiod::start().await;
    let agent = hot(&mock, "3s").env("ENVOY_RESTART_ON_FILES", "cert.pem").file("cert.pem", "one");
    let mut agent = agent.env("METRICS_DETAILS", "true").start();
    agent.wait_ready().await;
    // Nothing is due.
    assert_eq!(agent.run(&["upgrade"]).await.code, Some(0));
    // A change before the file is watched is seen later.
    let mut number = 0;
    eventually("a change is seen", || {
        number += 1;
        agent.put("cert.pem", format!("{number}"));
        let asked = agent.get("/stats/prometheus");
        async { asked.await.ok()?.text().contains("istio_agent_envoy_hot_restart_waiting 1").then_some(()) }
    })
    .await;
    let said = agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
    live(&agent, 1).await;
    assert_eq!(times(&agent, "takes over"), 3, "{}", agent.log().text());
    agent.stop().await;
}

// The trial ends it, before it is itself given up.
#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_that_judges_no_bootstrap_is_told_and_not_left_behind() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    let (mute, real) = (dir.path().join("mute"), envoy_bin());
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *validate*) exec sleep 600;; esac\nexec {} \"$@\"\n",
        real.display()
    );
    std::fs::write(&mute, script).unwrap();
    std::fs::set_permissions(&mute, std::fs::Permissions::from_mode(0o755)).unwrap();
    let agent = builder(&mock).envoy(Envoy::Binary(mute)).env("AGENT_UPGRADE_TIMEOUT", "6s");
    let mut agent = agent.start();
    agent.wait_ready().await;
    let processes = agent.processes().len();
    let said = agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stdout.contains("mute has not judged the bootstrap within 4s"), "{said:?}");
    eventually("nobody is left", || async { (agent.processes().len() == processes).then_some(()) }).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_epoch_that_waits_for_istiod_is_in_nobodys_way() {
    let mock = MockIstiod::start().await;
    let mut agent = hot(&mock, "6s").start();
    agent.wait_ready().await;
    assert_eq!(agent.post("/debug/hot_restart").await.unwrap().text(), "OK");
    live(&agent, 1).await;
    assert_eq!(agent.post("/debug/hot_restart").await.unwrap().text(), "OK");
    agent.wait_log("epoch 2 takes over").await;
    mock.down().await;
    agent.wait_log("epoch 2 waits until istiod is back").await;
    let said = agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
    // It waits under the new program, too.
    eventually("it waits again", || async {
        (times(&agent, "waits until istiod is back") == 2).then_some(())
    })
    .await;
    mock.up().await.unwrap();
    live(&agent, 2).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_epochs_live_on_across_an_upgrade_of_the_agent() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = hot(&mock, "6s").start();
    agent.wait_ready().await;
    let traffic = Traffic::start(&mock, mesh);
    traffic.goes_on(20).await;
    let mut epoch = 0;
    // On a machine under load the older one may be gone before.
    let both = loop {
        epoch += 1;
        assert_eq!(agent.post("/debug/hot_restart").await.unwrap().text(), "OK");
        live(&agent, epoch).await;
        let both = envoys(&agent);
        let said = agent.run(&["upgrade"]).await;
        assert_eq!(said.code, Some(0), "{said:?}\n{}", agent.log().text());
        if both.len() == 2 && envoys(&agent) == both {
            break both;
        }
        assert!(epoch < 10, "{}", agent.log().text());
    };
    assert!(ready(&agent).await);
    let ended = times(&agent, "exited normally");
    eventually("the new agent sees the end of the older one", || async {
        traffic.assert_unharmed();
        (times(&agent, "exited normally") > ended && envoys(&agent).len() == 1).then_some(())
    })
    .await;
    assert!(both.contains(&envoys(&agent)[0]));
    // What comes next finds the one that was adopted.
    assert_eq!(agent.post("/debug/hot_restart").await.unwrap().text(), "OK");
    live(&agent, epoch + 1).await;
    traffic.goes_on(20).await;
    drop(traffic);
    agent.signal(Signal::KILL);
    agent.wait_exit().await;
    eventually("no Envoy is left", || async { agent.processes().is_empty().then_some(()) }).await;
}
