//! Recovery and hot restart with a scripted Envoy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use pilot_agent::testing::envoy::{Exit, Reason, RunState, Supervisor};

use super::fake::{Admin, DRAIN_NOW, LONG, Scene, eventually, file};

// Each start appends its epoch argument, or "x", to a file.
const NOTES: &str =
    "e=x; while [ $# -gt 0 ]; do [ $1 = --restart-epoch ] && e=$2; shift; done; echo $e >> $D/starts\n";

fn starts(scene: &Scene) -> Vec<String> {
    let text = std::fs::read_to_string(scene.path("starts")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Runs the supervisor while `act` happens; it ends with status 0.
async fn ends_well(supervisor: Supervisor, act: impl Future<Output = ()>) {
    let both = async { tokio::join!(supervisor.run(), act) };
    let (outcome, ()) = tokio::time::timeout(LONG, both).await.unwrap();
    assert_eq!(outcome.exit_code, 0);
}

#[tokio::test]
async fn without_recovery_nothing_is_tried_again() {
    let scene = Scene::new(&format!("{NOTES}exit 1"));
    assert_eq!(scene.run().await.exit_code, 1);
    assert_eq!(starts(&scene), ["x"]);
}

#[tokio::test]
async fn recovery_starts_again_and_shows_it() {
    let mut scene = Scene::new(&format!("{NOTES}[ $(wc -l < $D/starts) -lt 3 ] && exit 7; exec sleep 1000"));
    scene.config.restart.recovery = true;
    let (supervisor, handle) = scene.supervisor();
    let mut states = handle.watch();
    let look = async {
        let mut recovering = 0;
        while recovering < 2 {
            states.changed().await.unwrap();
            recovering += u32::from(*states.borrow_and_update() == RunState::Recovering);
        }
        eventually("the third start", || (starts(&scene).len() == 3).then_some(())).await;
        assert!(scene.path("conf/envoy-rev.json").exists());
        handle.quit();
    };
    let both = async { tokio::join!(supervisor.run(), look) };
    let (outcome, ()) = tokio::time::timeout(LONG, both).await.unwrap();
    assert_eq!(outcome.exit_code, 0);
    scene.assert_clean();
}

#[tokio::test]
async fn lack_of_memory_is_tried_once_more() {
    let mut scene = Scene::new(&format!("{NOTES}kill -KILL $$"));
    scene.config.restart.recovery = true;
    let outcome = scene.run().await;
    assert_eq!(outcome.exit_code, 137);
    assert_eq!(outcome.exit, Some(Exit::Signal { signal: 9, out_of_memory: false }));
    assert_eq!(starts(&scene).len(), 2);
    scene.assert_clean();
}

#[tokio::test]
async fn a_stop_while_waiting_to_try_again_ends_at_once() {
    let mut scene = Scene::new(&format!("{NOTES}exit 1"));
    scene.config.restart.recovery = true;
    let (supervisor, handle) = scene.supervisor();
    let mut states = handle.watch();
    let stop = async {
        states.wait_for(|s| *s == RunState::Recovering).await.unwrap();
        handle.quit();
    };
    let both = async { tokio::join!(supervisor.run(), stop) };
    let (outcome, ()) = tokio::time::timeout(LONG, both).await.unwrap();
    assert_eq!(outcome.exit_code, 0);
    scene.assert_clean();
}

/// An admin port that shows the newest epoch that the scripted Envoys noted as live.
async fn live_admin(starts: std::path::PathBuf) -> Admin {
    Admin::start(move |_, _| {
        let text = std::fs::read_to_string(&starts).unwrap_or_default();
        let newest = text.lines().last().unwrap_or("0").to_owned();
        Some(format!("{{\"state\": \"LIVE\", \"command_line_options\": {{\"restart_epoch\": {newest}}}}}"))
    })
    .await
}

#[tokio::test]
async fn a_changed_configuration_starts_the_next_epoch_and_an_equal_one_does_not() {
    // The second and later epochs end their predecessor, as Envoy does.
    let mut scene = Scene::new(&format!(
        "{NOTES}echo $$ > $D/pid.$e; echo 42 > $D/conf/envoy-rev0.json.base-id; p=$((e-1)); \
         [ -f $D/pid.$p ] && kill -TERM $(cat $D/pid.$p); exec sleep 1000"
    ));
    let admin = live_admin(scene.path("starts")).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.hot_restart = true;
    let content = Arc::new(AtomicU32::new(0));
    let shown = content.clone();
    let (supervisor, handle) = scene.with_text(move || shown.load(Ordering::SeqCst).to_string().into_bytes());
    let act = async {
        eventually("epoch 0", || (starts(&scene) == ["0"]).then_some(())).await;
        handle.reload(false);
        content.store(1, Ordering::SeqCst);
        handle.reload(false);
        eventually("epoch 1", || (starts(&scene) == ["0", "1"]).then_some(())).await;
        assert_eq!(std::fs::read_to_string(scene.path("conf/envoy-rev1.json")).unwrap(), "1");
        eventually("epoch 0's file is gone", || (!scene.path("conf/envoy-rev0.json").exists()).then_some(()))
            .await;
        handle.reload(false);
        handle.reload(true);
        eventually("epoch 2", || (starts(&scene) == ["0", "1", "2"]).then_some(())).await;
        handle.quit();
    };
    ends_well(supervisor, act).await;
    scene.assert_clean();
}

#[tokio::test]
async fn an_epoch_that_waits_goes_on_waiting_while_istiod_is_away() {
    let mut scene = Scene::new(&format!("echo $$ > $D/pid.$(ls $D/conf | wc -l)\n{NOTES}exec sleep 1000"));
    let admin = live_admin(scene.path("starts")).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.hot_restart = true;
    let away = Arc::new(AtomicBool::new(false));
    let (supervisor, handle) = scene.supervisor();
    let is_away = away.clone();
    let supervisor = supervisor.with_upstream(move || is_away.load(Ordering::SeqCst));
    let is_asked_twice = async |what: &str| {
        let asked = admin.seen().len();
        eventually(what, || (admin.seen().len() > asked + 1).then_some(())).await;
    };
    let act = async {
        let first = file(scene.path("pid.1")).await;
        handle.reload(true);
        eventually("epoch 1", || (starts(&scene) == ["0", "1"]).then_some(())).await;
        handle.reload(true);
        is_asked_twice("epoch 2 waits for the end of epoch 0").await;
        away.store(true, Ordering::SeqCst);
        let first = rustix::process::Pid::from_raw(first.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(first, rustix::process::Signal::TERM).unwrap();
        eventually("epoch 0's file is gone", || (!scene.path("conf/envoy-rev0.json").exists()).then_some(()))
            .await;
        is_asked_twice("epoch 2 waits").await;
        assert_eq!(starts(&scene), ["0", "1"]);
        away.store(false, Ordering::SeqCst);
        eventually("epoch 2", || (starts(&scene) == ["0", "1", "2"]).then_some(())).await;
        handle.quit();
    };
    ends_well(supervisor, act).await;
    scene.assert_clean();
}

#[tokio::test]
async fn a_failing_epoch_leaves_the_running_one() {
    let mut scene = Scene::new(&format!("{NOTES}[ $e = 0 ] || exit 1; exec sleep 1000"));
    let admin = live_admin(scene.path("starts")).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.hot_restart = true;
    let (supervisor, handle) = scene.supervisor();
    let act = async {
        eventually("epoch 0", || (starts(&scene) == ["0"]).then_some(())).await;
        handle.reload(true);
        eventually("epoch 1", || (starts(&scene) == ["0", "1"]).then_some(())).await;
        eventually("epoch 1's file is gone", || (!scene.path("conf/envoy-rev1.json").exists()).then_some(()))
            .await;
        assert!(scene.path("conf/envoy-rev0.json").exists(), "epoch 0 lives on");
        handle.quit();
    };
    ends_well(supervisor, act).await;
    scene.assert_clean();
}

#[tokio::test]
async fn a_changed_file_starts_an_epoch_after_the_batch() {
    let mut scene = Scene::new(&format!("{NOTES}exec sleep 1000"));
    let admin = live_admin(scene.path("starts")).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.hot_restart = true;
    let key = scene.path("key.pem");
    std::fs::write(&key, "one").unwrap();
    scene.config.restart.watched = vec![key.clone()];
    let (supervisor, handle) = scene.supervisor();
    let act = async {
        eventually("epoch 0", || (starts(&scene) == ["0"]).then_some(())).await;
        std::fs::write(&key, "two").unwrap();
        eventually("epoch 1", || (starts(&scene) == ["0", "1"]).then_some(())).await;
        handle.quit();
    };
    ends_well(supervisor, act).await;
    scene.assert_clean();
}

#[tokio::test]
async fn a_configuration_that_is_put_back_ends_the_trouble_of_its_epoch() {
    let mut scene = Scene::new(&format!("{NOTES}[ $e = 0 ] || exit 1; exec sleep 1000"));
    let admin = live_admin(scene.path("starts")).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.hot_restart = true;
    let content = Arc::new(AtomicU32::new(0));
    let shown = content.clone();
    let (supervisor, handle) = scene.with_text(move || shown.load(Ordering::SeqCst).to_string().into_bytes());
    let trouble = supervisor.trouble();
    let kind = || format!("{:?}", trouble.kind());
    let act = async {
        eventually("epoch 0", || (starts(&scene) == ["0"]).then_some(())).await;
        content.store(1, Ordering::SeqCst);
        handle.reload(false);
        eventually("epoch 1 has failed", || (kind() == "Some(EnvoyCrashed)").then_some(())).await;
        eventually("epoch 0 is the newest", || {
            (handle.state() == RunState::Running { epoch: 0 }).then_some(())
        })
        .await;
        content.store(0, Ordering::SeqCst);
        handle.reload(false);
        eventually("it is over", || (kind() == "None").then_some(())).await;
        assert_eq!(starts(&scene), ["0", "1"]);
        handle.quit();
    };
    ends_well(supervisor, act).await;
    scene.assert_clean();
}

#[tokio::test]
async fn one_that_was_started_with_a_changed_configuration_is_not_replaced_for_it() {
    let mut scene = Scene::new(&format!("{NOTES}[ $(wc -l < $D/starts) = 1 ] && exit 1; exec sleep 1000"));
    let admin = live_admin(scene.path("starts")).await;
    scene.config.admin.port = admin.port;
    (scene.config.restart.hot_restart, scene.config.restart.recovery) = (true, true);
    let (content, looks) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (shown, looked) = (content.clone(), looks.clone());
    let (supervisor, handle) = scene.with_text(move || {
        looked.fetch_add(1, Ordering::SeqCst);
        shown.load(Ordering::SeqCst).to_string().into_bytes()
    });
    content.store(1, Ordering::SeqCst);
    let act = async {
        eventually("the second start", || (starts(&scene) == ["0", "0"]).then_some(())).await;
        assert_eq!(std::fs::read_to_string(scene.path("conf/envoy-rev0.json")).unwrap(), "1");
        for look in [3, 4] {
            handle.reload(false);
            eventually("it is compared", || (looks.load(Ordering::SeqCst) == look).then_some(())).await;
        }
        assert!(admin.seen().is_empty(), "nobody is asked to make room for another");
        content.store(2, Ordering::SeqCst);
        handle.reload(false);
        eventually("epoch 1", || (starts(&scene) == ["0", "0", "1"]).then_some(())).await;
        assert_eq!(std::fs::read_to_string(scene.path("conf/envoy-rev1.json")).unwrap(), "2");
        handle.quit();
    };
    ends_well(supervisor, act).await;
    scene.assert_clean();
}

#[tokio::test]
async fn a_port_that_was_taken_once_is_not_why_a_later_one_ends() {
    // The first one finds its port taken; the next epoch of the second ends for a reason of its own.
    let mut scene = Scene::new(&format!(
        "{NOTES}[ $(wc -l < $D/starts) = 1 ] && exit 1; [ $e = 0 ] || kill -SEGV $$; exec sleep 1000"
    ));
    let admin = live_admin(scene.path("starts")).await;
    scene.config.admin.port = admin.port;
    (scene.config.restart.hot_restart, scene.config.restart.recovery) = (true, true);
    let (supervisor, handle) = scene.supervisor();
    let trouble = supervisor.trouble();
    let kind = || format!("{:?}", trouble.kind());
    let act = async {
        eventually("epoch 0 once more", || (starts(&scene).len() == 2).then_some(())).await;
        assert_eq!(kind(), "Some(ConfigInvalid)", "the port is one of this process");
        handle.reload(true);
        eventually("a fresh start", || (starts(&scene).len() == 4).then_some(())).await;
        assert_eq!(kind(), "Some(EnvoyCrashed)");
        handle.quit();
    };
    ends_well(supervisor, act).await;
    scene.assert_clean();
}

/// As [`live_admin`], and live only when `live` says so.
async fn late_admin(starts: std::path::PathBuf, live: Arc<AtomicBool>) -> Admin {
    Admin::start(move |_, _| {
        let text = std::fs::read_to_string(&starts).unwrap_or_default();
        let newest = text.lines().last().unwrap_or("0").to_owned();
        let state = if live.load(Ordering::SeqCst) { "LIVE" } else { "INITIALIZING" };
        Some(format!("{{\"state\": \"{state}\", \"command_line_options\": {{\"restart_epoch\": {newest}}}}}"))
    })
    .await
}

#[tokio::test]
async fn another_binary_has_its_time_however_late_it_can_be_started() {
    const LIMIT: Duration = Duration::from_secs(3);
    let mut scene = Scene::new(&format!("{NOTES}exec sleep 1000"));
    let live = Arc::new(AtomicBool::new(false));
    let admin = late_admin(scene.path("starts"), live.clone()).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.hot_restart = true;
    // A disk that is slow when it matters.
    let (held, polls) = (Arc::new(AtomicBool::new(false)), Duration::from_millis(10));
    let slow = held.clone();
    let (supervisor, handle) = scene.with_text(move || {
        while slow.load(Ordering::SeqCst) {
            std::thread::sleep(polls);
        }
        b"{}".to_vec()
    });
    let binary = scene.config.binary.clone();
    let act = async {
        eventually("epoch 0", || (starts(&scene) == ["0"]).then_some(())).await;
        let meanwhile = async {
            // Twice a second: its limit is over when it can be started.
            eventually("the one before is asked", || (admin.seen().len() > 7).then_some(())).await;
            held.store(true, Ordering::SeqCst);
            live.store(true, Ordering::SeqCst);
            let asked = admin.seen().len();
            eventually("it is asked again and again", || (admin.seen().len() > asked + 3).then_some(()))
                .await;
            assert_eq!(starts(&scene), ["0"]);
            held.store(false, Ordering::SeqCst);
        };
        let (replaced, ()) = tokio::join!(handle.replace(binary, LIMIT), meanwhile);
        assert_eq!(replaced, Ok(1));
        handle.quit();
    };
    ends_well(supervisor, act).await;
    scene.assert_clean();
}

#[tokio::test]
async fn whoever_takes_the_place_of_a_drained_one_is_drained() {
    let mut scene = Scene::new(&format!("{NOTES}echo $$ > $D/pid.$(wc -l < $D/starts); exec sleep 1000"));
    let live = Arc::new(AtomicBool::new(true));
    // Without hot restart there is one number only.
    let admin = late_admin(scene.path("none"), live.clone()).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.recovery = true;
    let (supervisor, handle) = scene.supervisor();
    let drains = || admin.seen().iter().filter(|line| *line == DRAIN_NOW).count();
    let act = async {
        let first = file(scene.path("pid.1")).await;
        handle.drain_now().await;
        live.store(false, Ordering::SeqCst);
        let first = rustix::process::Pid::from_raw(first.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(first, rustix::process::Signal::SEGV).unwrap();
        file(scene.path("pid.2")).await;
        let asked = admin.seen().len();
        eventually("it is asked whether it is live", || (admin.seen().len() > asked + 1).then_some(())).await;
        assert_eq!(drains(), 1, "it has no listeners yet");
        live.store(true, Ordering::SeqCst);
        eventually("it is drained", || (drains() == 2).then_some(())).await;
        handle.stop(Reason::Signal("terminated"));
    };
    ends_well(supervisor, act).await;
    assert_eq!(drains(), 2);
    scene.assert_clean();
}

#[tokio::test]
async fn the_limit_of_a_drained_one_ends_the_wait_for_the_next() {
    let mut scene = Scene::new(&format!(
        "{NOTES}[ $(wc -l < $D/starts) = 1 ] || exit 1; echo $$ > $D/pid; exec sleep 1000"
    ));
    let admin = live_admin(scene.path("none")).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.recovery = true;
    // Between the third start, 600 ms after the crash, and the fourth, 800 ms after that.
    scene.config.drain.drained_limit = Some(Duration::from_secs(1));
    let (supervisor, handle) = scene.supervisor();
    let mut states = handle.watch();
    let act = async {
        let first = file(scene.path("pid")).await;
        handle.drain_now().await;
        let first = rustix::process::Pid::from_raw(first.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(first, rustix::process::Signal::SEGV).unwrap();
        states.wait_for(|s| matches!(s, RunState::Stopping(_))).await.unwrap();
        starts(&scene).len()
    };
    let both = async { tokio::join!(supervisor.run(), act) };
    let (outcome, started) = tokio::time::timeout(LONG, both).await.unwrap();
    assert_eq!((outcome.exit_code, outcome.reason.contains("DRAINED_ENVOY_LIMIT")), (0, true), "{outcome:?}");
    assert_eq!(starts(&scene).len(), started, "none is started when the end has begun");
    scene.assert_clean();
}

#[tokio::test]
async fn whoever_is_about_to_take_over_from_a_drained_one_is_drained() {
    let mut scene = Scene::new(&format!("{NOTES}exec sleep 1000"));
    let admin = live_admin(scene.path("starts")).await;
    scene.config.admin.port = admin.port;
    scene.config.restart.hot_restart = true;
    let (supervisor, handle) = scene.supervisor();
    let drains = || admin.seen().iter().filter(|line| *line == DRAIN_NOW).count();
    let act = async {
        eventually("epoch 0", || (starts(&scene) == ["0"]).then_some(())).await;
        handle.reload(true);
        eventually("epoch 1", || (starts(&scene) == ["0", "1"]).then_some(())).await;
        // Whoever of them answered.
        handle.drain_now().await;
        eventually("the newest is drained once it is live", || (drains() == 2).then_some(())).await;
        handle.stop(Reason::Signal("terminated"));
    };
    ends_well(supervisor, act).await;
    assert_eq!(drains(), 2);
    scene.assert_clean();
}
