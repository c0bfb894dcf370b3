//! Every way to end: Envoy by itself, signals, drains, quits; with an admin port that helps or does not.

use std::time::Duration;

use pilot_agent::testing::envoy::{Outcome, Reason, drain};

use super::fake::{Admin, DRAIN, DRAIN_NOW, LONG, Scene, eventually, file, runs};

const SLEEPS: &str = "echo $$ > $D/pid.new; mv $D/pid.new $D/pid; exec sleep 1000";
const TERM: Reason = Reason::Signal("terminated");

/// Runs until Envoy is there, does `act`, and gives how it ended.
async fn after_start<F: Future<Output = ()>>(
    scene: &Scene,
    act: impl FnOnce(pilot_agent::testing::envoy::Handle) -> F,
) -> Outcome {
    let (supervisor, handle) = scene.supervisor();
    let acting = async {
        let pid = file(scene.path("pid")).await;
        act(handle).await;
        pid
    };
    let both = async { tokio::join!(supervisor.run(), acting) };
    let (outcome, pid) = tokio::time::timeout(LONG, both).await.expect("it ends");
    assert!(!runs(&pid), "Envoy is gone before the agent is");
    scene.assert_clean();
    outcome
}

#[tokio::test]
async fn envoys_own_end_is_the_agents() {
    for (script, code, text) in [
        ("exit 0", 0, "exit status 0"),
        ("exit 3", 3, "exit status 3"),
        ("exit 255", 255, "exit status 255"),
        ("kill -KILL $$", 137, "signal: killed"),
        ("kill -SEGV $$", 139, "signal: segmentation fault"),
        ("kill -ABRT $$", 134, "signal: aborted"),
        ("kill -TERM $$", 0, "signal: terminated"),
    ] {
        let mut scene = Scene::new(script);
        let outcome = scene.run().await;
        assert_eq!(outcome.exit_code, code, "{script}");
        assert!(outcome.reason.contains(text), "{outcome:?}");
        scene.assert_clean();
        scene.config.always_zero = true;
        assert_eq!(scene.run().await.exit_code, 0, "{script}");
    }
}

#[tokio::test]
async fn an_admin_port_that_the_agent_has_is_no_other_process() {
    let admin = Admin::start(|_, _| None).await;
    let mut scene = Scene::new("exit 1");
    scene.config.admin.port = admin.port;
    let outcome = scene.run().await;
    assert_eq!(outcome.exit_code, 1);
    // Listened on by this process, which is the agent's here.
    let port = format!("admin port {} is one that this agent listens on: two settings name", admin.port);
    assert!(outcome.reason.contains(&port), "{outcome:?}");
    assert!(admin.seen().is_empty(), "nobody is spoken to");
}

#[tokio::test]
async fn a_signal_drains_first() {
    let admin = Admin::start(|_, _| Some("OK\n".into())).await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    let outcome = after_start(&scene, |h| async move { h.stop(TERM) }).await;
    assert_eq!((outcome.exit_code, outcome.reason.as_str()), (0, "received signal: terminated"));
    assert_eq!(admin.seen(), [DRAIN]);
}

#[tokio::test]
async fn an_envoy_that_ends_during_the_drain_ends_it() {
    let admin = Admin::start(|_, _| Some("OK\n".into())).await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    scene.config.drain.termination_drain = LONG * 10;
    let pid = scene.path("pid");
    let outcome = after_start(&scene, |h| async move {
        h.stop(TERM);
        eventually("the drain", || (!admin.seen().is_empty()).then_some(())).await;
        let pid = std::fs::read_to_string(pid).unwrap();
        let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    })
    .await;
    assert_eq!(outcome.exit_code, 0);
}

#[tokio::test]
async fn an_admin_port_that_never_answers_or_is_not_there_does_not_hold_it_up() {
    let admin = Admin::start(|_, _| None).await;
    for port in [admin.port, 1] {
        let mut scene = Scene::new(SLEEPS);
        scene.config.admin.port = port;
        let outcome = after_start(&scene, |h| async move { h.stop(TERM) }).await;
        assert_eq!(outcome.exit_code, 0);
    }
    assert_eq!(admin.seen(), [DRAIN]);
}

#[tokio::test]
async fn quit_kills_without_a_drain() {
    let admin = Admin::start(|_, _| Some("OK\n".into())).await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    scene.config.drain.termination_drain = LONG * 10;
    let outcome = after_start(&scene, |h| async move { h.quit() }).await;
    assert_eq!((outcome.exit_code, outcome.reason.as_str()), (0, "/quitquitquit called"));
    assert!(admin.seen().is_empty());
}

#[tokio::test]
async fn a_drain_now_replaces_the_drain_at_the_end() {
    let admin = Admin::start(|_, _| Some("OK\n".into())).await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    scene.config.drain.termination_drain = LONG * 10;
    let outcome = after_start(&scene, |h| async move {
        h.drain_now().await;
        h.drain_now().await;
        h.stop(TERM);
    })
    .await;
    assert_eq!(outcome.exit_code, 0);
    assert_eq!(admin.seen(), [DRAIN_NOW, DRAIN_NOW]);
}

#[tokio::test]
async fn a_second_signal_changes_nothing() {
    let admin = Admin::start(|_, _| Some("OK\n".into())).await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    let outcome = after_start(&scene, |h| async move {
        h.stop(TERM);
        h.stop(Reason::Signal("interrupt"));
        h.quit();
    })
    .await;
    assert_eq!(outcome.reason, "received signal: terminated");
    assert_eq!(admin.seen(), [DRAIN]);
}

#[tokio::test]
async fn exit_on_zero_counts_down() {
    let admin = Admin::start(|line, nth| {
        let open = 2usize.saturating_sub(nth);
        Some(if line.starts_with("GET") {
            format!("listener.0.0.0.0_80.downstream_cx_active: {open}\n")
        } else {
            "OK\n".into()
        })
    })
    .await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    scene.config.drain.exit_on_zero = Some(drain::ExitOnZero { minimum: Duration::ZERO, cap: None });
    let outcome = after_start(&scene, |h| async move { h.stop(TERM) }).await;
    assert_eq!(outcome.exit_code, 0);
    let poll = "GET /stats?usedonly&filter=downstream_cx_active$";
    assert_eq!(admin.seen(), [DRAIN, poll, poll, poll]);
}

#[tokio::test]
async fn a_cap_ends_an_exit_on_zero_that_would_not() {
    let admin = Admin::start(|_, _| Some("listener.0.0.0.0_80.downstream_cx_active: 1\n".into())).await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    let cap = Some(Duration::from_secs(2));
    scene.config.drain.exit_on_zero = Some(drain::ExitOnZero { minimum: Duration::ZERO, cap });
    let outcome = after_start(&scene, |h| async move { h.stop(TERM) }).await;
    assert_eq!(outcome.exit_code, 0);
}

#[tokio::test]
async fn another_envoy_that_comes_when_the_end_has_begun_is_refused() {
    let admin = Admin::start(|_, _| Some("listener.0.0.0.0_80.downstream_cx_active: 1\n".into())).await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    scene.config.restart.hot_restart = true;
    scene.config.drain.exit_on_zero = Some(drain::ExitOnZero { minimum: Duration::ZERO, cap: None });
    let (supervisor, handle) = scene.supervisor();
    let acting = async {
        let pid = file(scene.path("pid")).await;
        handle.stop(TERM);
        eventually("it drains", || admin.seen().contains(&DRAIN.to_owned()).then_some(())).await;
        let refused = handle.replace(scene.config.binary.clone(), Duration::from_secs(600)).await;
        assert_eq!(refused.unwrap_err().to_string(), "the agent is stopping");
        // Connections are open: the drain ends only with Envoy.
        let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let refused = handle.replace(scene.config.binary.clone(), Duration::from_secs(600)).await;
        assert_eq!(refused.unwrap_err().to_string(), "the agent is stopping");
    };
    let both = async { tokio::join!(supervisor.run(), acting) };
    tokio::time::timeout(LONG, both).await.expect("it ends");
    scene.assert_clean();
}

#[tokio::test]
async fn what_a_wrapper_started_goes_with_it() {
    let script = "sleep 1000 & echo $! > $D/child.new; mv $D/child.new $D/child; echo $$ > $D/pid.new; \
                  mv $D/pid.new $D/pid; wait";
    for own_group in [false, true] {
        let mut scene = Scene::new(script);
        scene.config.own_group = own_group;
        after_start(&scene, |h| async move { h.quit() }).await;
        let child = std::fs::read_to_string(scene.path("child")).unwrap();
        eventually("the wrapper's child is gone", || (!runs(&child)).then_some(())).await;
    }
}

// A wrapper whose Envoy is another process.
const WRAPS: &str = r#"cat > $D/inner.new <<'END'
#!/bin/sh
cd $(dirname $0)
echo $$ >> inners
sleep 1000
END
chmod +x $D/inner.new; mv $D/inner.new $D/inner; echo $$ > $D/wrapper; $D/inner "$@"; exit 0"#;

#[tokio::test]
async fn what_a_wrapper_started_goes_when_the_wrapper_is_killed() {
    for recovery in [false, true] {
        let mut scene = Scene::new(WRAPS);
        scene.config.restart.recovery = recovery;
        let inners = || std::fs::read_to_string(scene.path("inners")).unwrap_or_default();
        let (supervisor, handle) = scene.supervisor();
        let act = async {
            let inner = file(scene.path("inners")).await;
            let wrapper = file(scene.path("wrapper")).await;
            let wrapper = rustix::process::Pid::from_raw(wrapper.trim().parse().unwrap()).unwrap();
            rustix::process::kill_process(wrapper, rustix::process::Signal::KILL).unwrap();
            if recovery {
                eventually("the next one", || (inners().lines().count() == 2).then_some(())).await;
                assert!(!runs(&inner), "it is gone before the next one is started");
                handle.quit();
            }
        };
        let both = async { tokio::join!(supervisor.run(), act) };
        let (outcome, ()) = tokio::time::timeout(LONG, both).await.expect("it ends");
        assert_eq!(outcome.exit_code, if recovery { 0 } else { 137 });
        let left: Vec<_> = inners().lines().filter(|pid| runs(pid)).map(str::to_owned).collect();
        assert!(left.is_empty(), "they outlive the agent: {left:?}");
        scene.assert_clean();
    }
}

#[tokio::test]
async fn a_failure_of_the_agent_drains_and_is_not_success() {
    let admin = Admin::start(|_, _| Some("OK\n".into())).await;
    let mut scene = Scene::new(SLEEPS);
    scene.config.admin.port = admin.port;
    let outcome =
        after_start(&scene, |h| async move { h.stop(Reason::Failure("task sds failed: x".into())) }).await;
    assert_eq!((outcome.exit_code, outcome.reason.as_str()), (1, "task sds failed: x"));
    assert_eq!(admin.seen(), [DRAIN]);
}
