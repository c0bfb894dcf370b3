//! The next Envoy takes over from the one that serves, or does not come to take anything away.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mock_istiod::{Fault, MockIstiod};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

use crate::support::mesh::Loop;
use crate::support::{Envoy, TestAgent, envoy_bin, eventually, http};

async fn is_live(agent: &TestAgent, epoch: u32) {
    eventually("the new epoch is live", || async {
        let reply = http::get(agent.ports().admin, "/server_info").await.ok()?;
        let info: Value = serde_json::from_slice(&reply.body).ok()?;
        (info["state"] == "LIVE" && info["command_line_options"]["restart_epoch"] == epoch).then_some(())
    })
    .await;
}

// Whether a socket that takes connections is the process's.
fn listens(pid: Pid) -> bool {
    let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_pid()));
    let tables =
        ["net/tcp", "net/tcp6"].map(|table| std::fs::read_to_string(proc.join(table)).unwrap_or_default());
    let rows =
        tables.iter().flat_map(|table| table.lines()).map(|row| row.split_whitespace().collect::<Vec<_>>());
    // The state of one that listens, and its inode.
    let listening: Vec<_> =
        rows.filter(|row| row.get(3) == Some(&"0A")).map(|row| format!("socket:[{}]", row[9])).collect();
    let open = std::fs::read_dir(proc.join("fd")).into_iter().flatten().flatten();
    open.filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .any(|link| listening.iter().any(|one| link.as_os_str() == one.as_str()))
}

#[tokio::test]
async fn hot_restarts_under_traffic_fail_no_request() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts().start();
    agent.wait_ready().await;
    eventually("traffic", || async { mesh.ask(&mock).await.ok() }).await;
    let halt = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (mock, halt) = (mock.clone(), halt.clone());
        clients.spawn(async move {
            let mut answered = 0_u32;
            while !halt.load(Ordering::SeqCst) {
                mesh.ask(&mock).await.expect("no request fails");
                answered += 1;
            }
            answered
        });
    }
    for epoch in 1..=5 {
        assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
        is_live(&agent, epoch).await;
    }
    // None ends that of the one before it, which lives on for a minute and would come again.
    assert_eq!(mock.record().ads_streams().len(), 6, "a stream for each epoch");
    assert!(!agent.log().contains("overlapping stream"), "{}", agent.log().text());
    halt.store(true, Ordering::SeqCst);
    let answered: u32 = clients.join_all().await.into_iter().sum();
    assert!(answered > 100, "{answered} requests");
    eprintln!("{answered} requests over 5 hot restarts, none failed");
    let log = agent.stop().await;
    assert!(log.contains("epoch 5 takes over"), "{log}");
}

async fn state(agent: &TestAgent) -> Option<(String, u64)> {
    let reply = http::get(agent.ports().admin, "/server_info").await.ok()?;
    let info: Value = serde_json::from_slice(&reply.body).ok()?;
    Some((info["state"].as_str()?.to_owned(), info["command_line_options"]["restart_epoch"].as_u64()?))
}

// It has the admin port long before it has a configuration.
#[tokio::test]
async fn the_one_that_serves_is_ready_until_its_successor_is() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let mut agent = TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts().start();
    agent.wait_ready().await;
    eventually("traffic", || async { mesh.ask(&mock).await.ok() }).await;
    mock.ads().always(vec![Fault::Delay(Duration::from_secs(4))]);
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    // Not asked before: what the one before has said would be known.
    eventually("it has the admin port", || async { state(&agent).await.filter(|(_, epoch)| *epoch == 1) })
        .await;
    let mut asked = 0;
    while state(&agent).await.is_none_or(|(state, _)| state != "LIVE") {
        assert!(agent.get("/healthz/ready").await.expect("an answer").status.is_success());
        asked += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(asked > 0, "it was live at once");
    mesh.ask(&mock).await.expect("the one before, or the new one, serves");
    mock.ads().clear();
    // From here on it speaks for itself.
    agent.wait_log("Envoy epoch 0 exited").await;
    assert!(agent.get("/healthz/ready").await.expect("an answer").status.is_success());
    agent.stop().await;
}

// What it has left has closed its listeners, and would be ready for ever though nobody serves.
#[tokio::test]
async fn an_epoch_that_ends_after_it_took_over_is_envoys_end() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    for (recovers, signal) in [(false, Signal::SEGV), (false, Signal::TERM), (true, Signal::SEGV)] {
        let agent = TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts();
        let mut agent = agent.env("ENVOY_RECOVERY", recovers.to_string()).start();
        agent.wait_ready().await;
        let first = agent.envoy_pid().await;
        assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
        is_live(&agent, 1).await;
        let of_envoy = agent.processes().into_iter().filter(|(_, name)| name.starts_with("envoy"));
        let (second, _) = of_envoy.into_iter().find(|(pid, _)| *pid != first).expect("the new one");
        eventually("the one before drains", || async { mesh.ask(&mock).await.ok() }).await;
        // It is live some moments before it has the other one close its listeners.
        eventually("the one before has closed its listeners", async || (!listens(first)).then_some(())).await;
        rustix::process::kill_process(second, signal).unwrap();
        if recovers {
            agent.wait_log("killed for a fresh start").await;
            is_live(&agent, 0).await;
            agent.stop().await;
            continue;
        }
        let status = agent.wait_exit().await.code();
        assert_eq!(status, Some(if signal == Signal::SEGV { 139 } else { 0 }), "{}", agent.log().text());
        agent.assert_clean().await;
    }
}

// That an epoch has not left its mark may also mean that it never came to set it.
#[tokio::test]
async fn one_that_serves_without_an_admin_port_outlives_an_epoch_that_ends_at_once() {
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with().istiod(&mock).hot_restarts();
    let real = envoy_bin();
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *'--restart-epoch 1 '*) exit 3;; esac\nexec {} \"$@\"\n",
        real.display()
    );
    let own = json!({"node": {"id": "a", "cluster": "b"}}).to_string();
    let builder = builder.file_mode("mine", script, 0o755).file("my.json", own);
    let builder = builder.envoy(Envoy::Binary("./mine".into())).proxy_config("customConfigFile", "my.json");
    let mut agent = builder.start();
    agent.wait_log("Envoy command: [").await;
    let base_id = agent.path("my.json.base-id");
    eventually("Envoy runs", || async { base_id.exists().then_some(()) }).await;
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    agent.wait_log("Envoy epoch 1 exited with error: exit status 3").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    agent.assert_running();
    assert!(!agent.log().contains("Envoy epoch 0"), "{}", agent.log().text());
    agent.stop().await;
}

// It is refused late, when it has taken the admin port.
#[tokio::test]
async fn the_admin_port_comes_back_with_the_configuration() {
    for recovers in [false, true] {
        let mock = MockIstiod::start().await;
        let builder = TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts();
        let builder = builder.env("ENVOY_RECOVERY", recovers.to_string());
        let of = |port: u16| json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
        let admin = builder.ports().admin;
        let unknown =
            json!({"name": "nope", "typed_config": {"@type": "type.googleapis.com/google.protobuf.Struct"}});
        let listener = json!({"name": "l", "address": of(0), "filter_chains": [{"filters": [unknown]}]});
        let text = |listeners: Value| {
            json!({"node": {"id": "a", "cluster": "b"}, "admin": {"address": of(admin)},
                   "static_resources": {"listeners": listeners}})
            .to_string()
        };
        let mut agent =
            builder.file("my.json", text(json!([]))).proxy_config("customConfigFile", "my.json").start();
        is_live(&agent, 0).await;
        agent.put("my.json", text(json!([listener])));
        agent.wait_log("Envoy epoch 1 exited").await;
        agent.put("my.json", text(json!([])));
        eventually("one with the good configuration has the port", || async {
            state(&agent).await.filter(|(state, epoch)| state == "LIVE" && *epoch > 0)
        })
        .await;
        assert!(!agent.log().contains("Envoy epoch 0 exited"), "{}", agent.log().text());
        agent.stop().await;
    }
}

async fn troubles(agent: &TestAgent) -> Vec<String> {
    let page: Value =
        serde_json::from_slice(&agent.get("/debug/agentz").await.expect("an answer").body).unwrap();
    let all = page["troubles"].as_array().expect("troubles").iter();
    all.map(|trouble| trouble["kind"].as_str().expect("a kind").to_owned()).collect()
}

#[tokio::test]
async fn an_epoch_whose_bootstrap_is_refused_says_so_and_nothing_of_the_one_that_lives_on() {
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts();
    let address = json!({"socket_address": {"address": "127.0.0.1", "port_value": builder.ports().admin}});
    let bootstrap = json!({"node": {"id": "a", "cluster": "b"}, "admin": {"address": address}}).to_string();
    let refused = json!({"static_resources": {"clusters": 5}}).to_string();
    let mut agent = builder.file("my.json", bootstrap).proxy_config("customConfigFile", "my.json").start();
    is_live(&agent, 0).await;
    let first = agent.envoy_pid().await;
    agent.put("my.json", refused);
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    eventually("Envoy's reason", || async {
        troubles(&agent).await.contains(&"BootstrapRejected".to_owned()).then_some(())
    })
    .await;
    let page = agent.get("/debug/agentz").await.expect("an answer").text();
    assert!(page.contains("Running { epoch: 0 }"), "{page}");
    rustix::process::kill_process(first, rustix::process::Signal::SEGV).unwrap();
    assert_eq!(agent.wait_exit().await.code(), Some(139));
    let log = agent.log().text();
    assert_eq!(log.matches("Envoy refuses its bootstrap").count(), 1, "{log}");
    let last = log.rsplit_once("Envoy refuses its bootstrap").expect("it was said").1;
    assert!(last.contains("EnvoyCrashed"), "{last}");
}

// A full disk, or a program that is being replaced, when a certificate has changed.
#[tokio::test]
async fn with_recovery_too_an_epoch_that_is_refused_leaves_the_one_that_serves() {
    let mock = MockIstiod::start().await;
    let builder =
        TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts().env("ENVOY_RECOVERY", "true");
    let address = json!({"socket_address": {"address": "127.0.0.1", "port_value": builder.ports().admin}});
    let of =
        |id: &str| json!({"node": {"id": id, "cluster": "b"}, "admin": {"address": address}}).to_string();
    let refused = json!({"static_resources": {"clusters": 5}}).to_string();
    let mut agent = builder.file("my.json", of("a")).proxy_config("customConfigFile", "my.json").start();
    is_live(&agent, 0).await;
    let first = agent.envoy_pid().await;
    agent.put("my.json", refused);
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    agent.wait_log("Envoy epoch 1 exited").await;
    eventually("it is told", || async {
        troubles(&agent)
            .await
            .iter()
            .any(|kind| kind == "EnvoyCrashed" || kind == "BootstrapRejected")
            .then_some(())
    })
    .await;
    agent.put("my.json", of("c"));
    eventually("the next one takes over", || async { state(&agent).await.filter(|(_, epoch)| *epoch > 0) })
        .await;
    assert!(!agent.log().text().contains("Envoy epoch 0 exited"), "{first:?} ended early");
    agent.wait_log("Envoy epoch 0 exited").await;
    agent.stop().await;
}

#[tokio::test]
async fn an_epoch_that_cannot_be_started_leaves_the_one_that_serves_and_is_tried_again() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let agent = TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts();
    let mut agent = agent.env("ENVOY_RECOVERY", "true").start();
    agent.wait_ready().await;
    eventually("traffic", || async { mesh.ask(&mock).await.ok() }).await;
    // Nothing can be written under the name of its file.
    let file = agent.path("etc/istio/proxy/envoy-rev1.json");
    std::fs::create_dir(&file).unwrap();
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    agent.wait_log("its next epoch is tried again in 400ms").await;
    mesh.ask(&mock).await.expect("the one before serves on");
    assert!(!agent.log().contains("was killed by the agent"), "{}", agent.log().text());
    std::fs::remove_dir(&file).unwrap();
    is_live(&agent, 1).await;
    mesh.ask(&mock).await.expect("it serves");
    // Though the one before has ended meanwhile.
    agent.wait_log("over: EnvoyNotStarted").await;
    let log = agent.stop().await;
    assert!(!log.contains("for a fresh start"), "{log}");
}

async fn shows_waiting(agent: &TestAgent, waiting: f64) {
    eventually("it is shown whether one waits", async || {
        (agent.metric("istio_agent_envoy_hot_restart_waiting").await == Some(waiting)).then_some(())
    })
    .await;
}

// It would not be ready, though the one before serves.
#[tokio::test]
async fn no_epoch_takes_over_while_it_would_have_no_configuration() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let agent = TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts();
    let mut agent = agent.env("METRICS_DETAILS", "true").start();
    agent.wait_ready().await;
    eventually("traffic", || async { mesh.ask(&mock).await.ok() }).await;
    mock.down().await;
    agent.wait_log("so Envoy's stream is held while the agent dials").await;
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    agent.wait_log("its next epoch waits until istiod is back").await;
    shows_waiting(&agent, 1.0).await;
    assert!(agent.get("/healthz/ready").await.expect("an answer").status.is_success());
    mesh.ask(&mock).await.expect("the one before serves on");
    mock.up().await.unwrap();
    agent.wait_log("epoch 1 takes over").await;
    is_live(&agent, 1).await;
    shows_waiting(&agent, 0.0).await;
    mesh.ask(&mock).await.expect("it serves");
    let log = agent.stop().await;
    assert!(!log.contains("epoch 2"), "one was asked for: {log}");
}

/// The `--config-yaml` of the newest Envoy.
fn over(agent: &TestAgent) -> String {
    let log = agent.log().text();
    let line = log.lines().rfind(|line| line.contains("Envoy command: [")).unwrap_or_default();
    line.split("--config-yaml ").nth(1).unwrap_or_default().split(' ').next().unwrap_or_default().to_owned()
}

// Ten seconds after the first change, since more may follow it.
#[tokio::test]
async fn what_the_configuration_is_made_from_is_watched_and_read_anew() {
    let mock = MockIstiod::start().await;
    let agent = || TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts();
    let mut overridden =
        agent().file("o.yaml", "flags_path: /one").env("ISTIO_BOOTSTRAP_OVERRIDE", "o.yaml").start();
    overridden.wait_ready().await;
    let template = |id: &str, port: u16| {
        let admin = format!(
            r#"{{"address": {{"socket_address": {{"address": "127.0.0.1", "port_value": {port}}}}}}}"#
        );
        format!(r#"{{"node": {{"id": "{id}", "cluster": "c"}}, "admin": {admin}}}"#)
    };
    let own = agent().proxy_config("customConfigFile", "own.json");
    let text = template("one", own.ports().admin);
    let mut own = own.file("own.json", text).start();
    let templated = agent().env("ISTIO_BOOTSTRAP", "t.json");
    let text = template("one", templated.ports().admin);
    let mut templated = templated.file("t.json", text).start();
    for agent in [&mut own, &mut templated] {
        agent.wait_log("Envoy command: [").await;
        let admin = agent.ports().admin;
        eventually("Envoy serves", async || http::get(admin, "/server_info").await.ok()).await;
    }
    overridden.put("o.yaml", "flags_path: /two");
    own.put("own.json", template("two", own.ports().admin));
    templated.put("t.json", template("two", templated.ports().admin));
    for agent in [&mut overridden, &mut own, &mut templated] {
        agent.wait_log("epoch 1 takes over").await;
    }
    overridden.wait_log("--restart-epoch 1 ").await;
    assert_eq!(over(&overridden), r#"{"flags_path":"/two"}"#, "{}", overridden.log().text());
    // One that cannot be read takes nothing away.
    overridden.put("o.yaml", "flags_path: [");
    assert_eq!(overridden.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    overridden.wait_log("--restart-epoch 2 ").await;
    assert_eq!(over(&overridden), r#"{"flags_path":"/two"}"#);
    overridden.wait_log("what was read before stays in use").await;
    std::fs::remove_file(own.path("own.json")).unwrap();
    assert_eq!(own.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    own.wait_log("the changed configuration is not applied, Envoy goes on with the last one").await;
    assert!(!own.log().contains("epoch 2 takes over"), "{}", own.log().text());
    for agent in [overridden, own, templated] {
        agent.stop().await;
    }
}
