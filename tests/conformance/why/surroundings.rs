//! `doctor` and the start where the surroundings are narrow: another user, a read-only root, a full disk.

use serde_json::Value;

use crate::support::{MockIstiod, SmallDisk, TestAgent, root_for};

fn find<'a>(json: &'a Value, check: &str) -> &'a Value {
    let all = json["checks"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().find(|c| c["check"] == check).unwrap_or(&Value::Null)
}

#[tokio::test]
async fn doctor_without_an_agent_judges_as_another_user() {
    if !root_for("another user") {
        return;
    }
    let mock = MockIstiod::start().await;
    // Nothing is started: the builder's environment and directory are what matters.
    let scene = TestAgent::with().istiod(&mock).env("CLOUD_PLATFORM", "none").owner(1337).scene();
    let doctor = scene.run_as(1337, &["doctor", "--sign"]).await;
    assert_eq!(doctor.code, Some(0), "{}{}", doctor.stdout, doctor.stderr);
    assert!(doctor.stdout.contains("spiffe://cluster.local/ns/ns/sa/sa"), "{}", doctor.stdout);
    // Somebody else's token.
    let scene = TestAgent::with().istiod(&mock).env("CLOUD_PLATFORM", "none").owner(0).scene();
    let json = scene.run_as(1337, &["doctor", "--json"]).await.json();
    assert_eq!(find(&json, "token")["kind"], "TokenUnreadable", "{json}");
}

#[tokio::test]
async fn doctor_tells_that_the_ca_issues_another_identity_than_was_asked_for() {
    let mock = MockIstiod::start().await;
    let scene = TestAgent::with()
        .istiod(&mock)
        .env("CLOUD_PLATFORM", "none")
        .env("TRUST_DOMAIN", "other.example")
        .scene();
    let said = scene.run(&["doctor", "--sign", "--json"]).await;
    let json = said.json();
    let sign = find(&json, "sign");
    assert_eq!((sign["state"].as_str(), said.code), (Some("warn"), Some(0)), "{json}");
    for identity in ["spiffe://cluster.local/ns/ns/sa/sa", "spiffe://other.example/ns/ns/sa/sa"] {
        assert!(sign["detail"].as_str().is_some_and(|m| m.contains(identity)), "{json}");
    }
}

/// Envoy itself aborts, over an assertion, with 24; or ends with 1.
#[tokio::test]
async fn an_envoy_that_may_open_too_few_files_is_told_so() {
    let mock = MockIstiod::start().await;
    let words = ["sh", "-c", "ulimit -n 40 && exec \"$@\"", "sh"].map(ToOwned::to_owned);
    for status in [134, 1] {
        let ends = serde_json::json!({"after": 0.0, "status": status});
        let mut agent = TestAgent::with().istiod(&mock).before(&words).fake("exit", ends).start();
        assert_eq!(agent.wait_exit().await.code(), Some(status));
        let log = agent.log().text();
        let last = log.lines().last().unwrap_or_default();
        assert!(
            last.contains("verdict: OpenFiles; raise the limit of open files, which is 40 here"),
            "{log}"
        );
    }
}

/// As the injector has it: the image read-only, a writable volume where the agent writes, user 1337, no capabilities.
#[tokio::test]
async fn doctor_works_in_a_read_only_root_as_the_proxys_user() {
    if !root_for("a mount namespace") {
        return;
    }
    let mock = MockIstiod::start().await;
    let scene = TestAgent::with().istiod(&mock).env("CLOUD_PLATFORM", "none").owner(1337).scene();
    for words in [&["doctor", "--sign"][..], &["doctor", "--sign", "--json"]] {
        let said = scene.run_read_only(1337, &["etc", "var"], words).await;
        assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    }
    // Without the volumes a start cannot work, and this is said.
    let said = scene.run_read_only(1337, &[], &["doctor", "--json"]).await;
    assert_eq!(said.json()["verdict"]["kind"], "DiskReadOnly", "{}{}", said.stdout, said.stderr);
}

#[tokio::test]
async fn a_start_on_a_full_disk_is_refused_with_its_cause() {
    if !root_for("a disk of a few kilobytes") {
        return;
    }
    let mock = MockIstiod::start().await;
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let disk = SmallDisk::mount(&dir.path().join("etc/istio/proxy"));
    disk.fill();
    let mut agent = TestAgent::with().istiod(&mock).start_in(dir);
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    agent.wait_log("verdict: DiskFull; free space").await;
    let json = agent.run(&["doctor", "--json"]).await.json();
    assert_eq!(json["verdict"]["kind"], "DiskFull", "{json}");
}

/// One process of this user there may be, and that is the agent.
const ALONE: &str = "touch agent && mount --bind \"$1\" agent && shift && \
    exec prlimit --nproc=1 setpriv --reuid=61235 --regid=61235 --clear-groups ./agent \"$@\"";

#[tokio::test]
async fn a_start_that_ends_for_want_of_processes_does_not_say_that_it_is_tried_again() {
    if !root_for("another user than root") {
        return;
    }
    let mock = MockIstiod::start().await;
    let before = ["unshare", "--mount", "sh", "-c", ALONE, "sh"].map(ToOwned::to_owned);
    let mut agent = TestAgent::with().istiod(&mock).before(&before).owner(61_235).start();
    assert_eq!(agent.wait_exit().await.code(), Some(1));
    agent.wait_log("; verdict: Processes").await;
    let log = agent.log().text();
    let mut ends = log.lines().filter(|line| line.contains("\tEnvoy was not started")).peekable();
    assert!(ends.peek().is_some(), "{log}");
    for line in ends {
        assert!(line.ends_with(", and start the agent again"), "{line}");
    }
}

#[tokio::test]
async fn flags_that_cannot_be_read_end_with_the_verdict() {
    for flag in ["--concurrency=abc", "--log_output_level=loud"] {
        let mut agent = TestAgent::with().arg(flag).start();
        assert_eq!(agent.wait_exit().await.code(), Some(255));
        agent.wait_log("; verdict: ConfigInvalid; ").await;
    }
}

#[tokio::test]
async fn a_refused_start_says_nothing_but_json_where_that_is_asked_for() {
    for args in [&["proxy", "sidecar", "--log_as_json"][..], &["proxy", "nonsense", "--log_as_json"]] {
        let mut agent = TestAgent::with().args(args).start();
        assert!(!agent.wait_exit().await.success());
        agent.wait_log("verdict: ").await;
        for line in agent.log().text().lines() {
            let line: Value =
                serde_json::from_str(line).unwrap_or_else(|e| panic!("{line:?} is no JSON: {e}"));
            assert!(line["level"].is_string() && line["msg"].is_string(), "{line}");
        }
    }
}
