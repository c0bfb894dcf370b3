//! `doctor` by itself: what comes to no end, what a start refuses, what is not this agent's to judge, ports.

use std::net::UdpSocket;
use std::path::Path;
use std::time::Duration;

use mock_istiod::jwt::Expiry;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::servers;
use crate::support::agent::{Builder, ROOT, TOKEN};
use crate::support::commands::{Said, Scene};
use crate::support::{Envoy, MockIstiod, TestAgent, Token, free_port, root_for};

fn well(mock: &MockIstiod) -> Builder {
    TestAgent::with().istiod(mock).env("CLOUD_PLATFORM", "none")
}

/// The first of this name.
fn find<'a>(json: &'a Value, check: &str) -> &'a Value {
    let all = json["checks"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().find(|c| c["check"] == check).unwrap_or(&Value::Null)
}

fn state<'a>(json: &'a Value, check: &str) -> &'a str {
    find(json, check)["state"].as_str().unwrap_or_default()
}

/// What its last line says, and whether it came to this end.
fn ends(said: &Said, code: i32, verdict: &str) {
    let last = said.stdout.lines().last().unwrap_or_default();
    let good = said.code == Some(code) && last.starts_with(&format!("verdict: {verdict}"));
    assert!(good, "{verdict} is expected: {:?}\n{}{}", said.code, said.stdout, said.stderr);
}

/// A pipe into which nobody writes stands for a disk that does not answer.
fn pipe(path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let _ = std::fs::remove_file(path);
    let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

#[tokio::test]
async fn doctor_calls_nothing_healthy_that_came_to_no_end() {
    let mock = MockIstiod::start().await;
    let configuration = well(&mock).scene();
    pipe(&configuration.path("etc/istio/pod/annotations"));
    let template = well(&mock).proxy_config("proxyBootstrapTemplatePath", "template.json").scene();
    pipe(&template.path("template.json"));
    let (said, read, made) = tokio::join!(
        configuration.run(&["doctor"]),
        configuration.run(&["doctor", "--json"]),
        template.run(&["doctor"])
    );
    ends(&said, 1, "not finished: configuration");
    assert!(!said.stdout.contains("healthy"), "{}", said.stdout);
    let json = read.json();
    assert_eq!((&json["healthy"], &json["unfinished"]), (&json!(false), &json!(["configuration"])), "{json}");
    // What needs no configuration is looked at all the same.
    assert!(!["late", ""].contains(&state(&json, "limits")), "{json}");
    ends(
        &made,
        1,
        "ConfigInvalid: failed to generate bootstrap config: cannot read the template template.json: it is a pipe",
    );
    // To look whether it can be read is not to read it.
    assert!(!made.stdout.contains("late  files"), "{}", made.stdout);
}

#[tokio::test]
async fn doctor_ends_with_a_token_that_does_not_answer() {
    let mock = MockIstiod::start().await;
    let scene = well(&mock).scene();
    pipe(&scene.path(TOKEN));
    let (said, dry) = tokio::join!(scene.run(&["doctor", "--json"]), scene.run(&["proxy", "--dry-run"]));
    let json = said.json();
    assert_eq!(json["verdict"]["kind"], "TokenUnreadable", "{json}");
    assert_eq!((state(&json, "token"), state(&json, "connect"), state(&json, "ports")), ("fail", "ok", "ok"));
    assert!(dry.stderr.contains("token: ") && dry.stdout.contains("static_resources"), "{}", dry.stderr);
}

#[tokio::test]
async fn doctor_waits_for_no_name_as_long_as_a_start_does() {
    if !root_for("a resolv.conf of its own") {
        return;
    }
    let mock = MockIstiod::start().await;
    // It hears every question and answers none.
    let silent = UdpSocket::bind("127.0.53.77:53").expect("an address of this test's own");
    let scene = well(&mock)
        .proxy_config("statsdUdpAddress", "statsd.nowhere.test:9125")
        .file("resolv.conf", "nameserver 127.0.53.77\noptions timeout:30\n")
        .scene();
    let said = scene.run_with_resolver(&["doctor", "--json"]).await;
    drop(silent);
    let json = said.json();
    assert_eq!((said.code, state(&json, "configuration"), state(&json, "connect")), (Some(0), "ok", "ok"));
    assert!(said.stdout.contains("was not resolved within 3 s"), "{json}");
}

#[tokio::test]
async fn doctor_takes_a_machine_before_its_first_certificate_for_what_it_is() {
    let mock = MockIstiod::start().await;
    let machine = || {
        let root = mock.root_pem();
        well(&mock).env("PROV_CERT", "etc/certs").file("etc/certs/root-cert.pem", root).without_file(ROOT)
    };
    let with = |builder: Builder, ttl: Duration| {
        let pair = mock.issue(&mock.identity("ns", "sa"), ttl);
        builder.file("etc/certs/cert-chain.pem", pair.chain).file("etc/certs/key.pem", pair.key)
    };
    let run = async |builder: Builder| builder.scene().run(&["doctor", "--json"]).await.json();
    let first = run(machine()).await;
    assert_eq!((first["healthy"].clone(), state(&first, "certificates")), (true.into(), "warn"), "{first}");
    // Without a token nothing is left to show.
    let bare = run(machine().without_file(TOKEN)).await;
    assert_eq!(bare["verdict"]["kind"], "TokenMissing", "{bare}");
    let expired = run(with(machine().without_file(TOKEN), Duration::ZERO)).await;
    assert_eq!(expired["verdict"]["kind"], "TokenMissing", "{expired}");
    let known = run(with(machine().without_file(TOKEN), Duration::from_secs(3600))).await;
    assert_eq!((state(&known, "certificates"), state(&known, "token")), ("ok", "ok"), "{known}");
    // As an hour after its installation.
    let hour = Duration::from_secs(3600);
    let old = || machine().file(TOKEN, Token { expires: Expiry::Ago(hour), ..Token::of("ns", "sa") }.sign());
    let over = run(with(old(), hour)).await;
    assert_eq!((over["healthy"].clone(), state(&over, "token")), (true.into(), "ok"), "{over}");
    let nothing = run(with(old(), Duration::ZERO)).await;
    assert_eq!(nothing["verdict"]["kind"], "TokenExpired", "{nothing}");
}

#[tokio::test]
async fn doctor_judges_no_envoy_that_somebody_else_starts() {
    let mock = MockIstiod::start().await;
    let scene = well(&mock).env("ENVOY_EXTERNAL", "true").proxy_config("binaryPath", "/no/envoy").scene();
    let said = scene.run(&["doctor", "--json"]).await;
    assert_eq!((said.code, state(&said.json(), "envoy")), (Some(0), "skip"), "{}", said.stdout);
}

/// What Envoy says of it in a dry run and to `doctor`; nothing where it takes it.
async fn judged(builder: &Builder) -> String {
    let scene = builder.clone().scene();
    let (dry, said) = tokio::join!(scene.run(&["proxy", "sidecar", "--dry-run"]), scene.run(&["doctor"]));
    let accepts = dry.stderr.contains("accepts the bootstrap");
    assert_eq!((dry.code == Some(0), accepts), (accepts, !dry.stdout.is_empty()), "{}", dry.stderr);
    assert_eq!(accepts, said.code == Some(0), "{}{}", dry.stderr, said.stdout);
    assert!(accepts || said.stdout.contains("Envoy refuses the bootstrap"), "{}", said.stdout);
    if accepts { String::new() } else { dry.stderr }
}

#[tokio::test]
async fn what_would_be_started_is_what_a_dry_run_has_envoy_judge() {
    let mock = MockIstiod::start().await;
    let real = well(&mock).envoy(Envoy::Real);
    let own = |name: &str, text: &str| real.clone().file(name, text).proxy_config("customConfigFile", name);
    let over = |builder: Builder, text: &str| {
        builder.file("over.yaml", text).env("ISTIO_BOOTSTRAP_OVERRIDE", "over.yaml")
    };
    let (good, bad) = ("{static_resources: {}}", "{static_resources: {clusters: 5}}");
    let template = r#"{"node": {"id": "a", "cluster": "b"}, "static_resources": {}}"#;
    let yaml = real.clone().file("t.yaml", "node: {id: a, cluster: b}\n").env("ISTIO_BOOTSTRAP", "t.yaml");
    let misnamed =
        real.clone().file("t.tmpl", "node: {id: a, cluster: b}\n").env("ISTIO_BOOTSTRAP", "t.tmpl");
    for (builder, is_good) in [
        (own("own.json", template), true),
        (own("own.json", r#"{"static_resources": {"clusters": 5}}"#), false),
        (own("own.pb_text", "node { id: 'a' cluster: 'b' }"), true),
        (own("own.pb_text", "nodes { id: 'a' }"), false),
        (over(own("own.json", template), good), true),
        (over(own("own.json", template), bad), false),
        (over(real.clone(), good), true),
        (over(real.clone(), bad), false),
        (yaml.clone(), true),
        (over(yaml.clone(), good), true),
        (over(yaml, bad), false),
        // Written as `envoy-rev.json`.
        (misnamed.clone(), false),
        (over(misnamed, good), false),
    ] {
        let said = judged(&builder).await;
        assert_eq!(said.is_empty(), is_good, "{said}");
    }
    let dry = own("own.json", template).scene().run(&["proxy", "sidecar", "--dry-run"]).await;
    assert_eq!(dry.stdout, format!("{template}\n"));
    // Another binary, or none, has no say.
    for name in ["DISABLE_ENVOY", "ENVOY_EXTERNAL"] {
        let builder = over(well(&mock).envoy(Envoy::Binary("/bin/false".into())), bad).env(name, "true");
        let dry = builder.scene().run(&["proxy", "sidecar", "--dry-run"]).await;
        assert_eq!(dry.code, Some(0), "{}", dry.stderr);
        assert!(dry.stderr.contains("was not validated: ") && dry.stderr.contains(name));
    }
    // Nor has a template that the start does not read.
    let broken = |name: &str| {
        well(&mock).file("t.json", "{{ nothing").env("ISTIO_BOOTSTRAP", "t.json").env(name, "true").scene()
    };
    for (name, code) in [("DISABLE_ENVOY", 0), ("ENVOY_EXTERNAL", 255)] {
        let dry = broken(name).run(&["proxy", "sidecar", "--dry-run"]).await;
        assert_eq!(dry.code, Some(code), "{}", dry.stderr);
    }
}

/// A start that ends, and what `doctor` says of it beforehand.
async fn refused(builder: Builder, word: &str) -> Value {
    let said = builder.clone().scene().run(&["doctor", "--json"]).await;
    let json = said.json();
    assert_eq!((said.code, &json["verdict"]["kind"]), (Some(1), &json!("ConfigInvalid")), "{json}");
    assert!(find_word(&json, word), "{word}: {json}");
    let mut agent = builder.start();
    assert!(!agent.wait_exit().await.success());
    assert!(agent.log().contains(word), "{}", agent.log().text());
    json
}

fn find_word(json: &Value, word: &str) -> bool {
    let all = json["checks"].as_array().map(Vec::as_slice).unwrap_or_default();
    let says = |c: &Value| c["state"] == "fail" && c["detail"].as_str().is_some_and(|d| d.contains(word));
    all.iter().filter(|c| says(c)).count() == 1
}

/// No label is so long, so that no server is asked.
const LONG: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa:15053";

#[tokio::test]
async fn doctor_refuses_what_the_start_refuses() {
    let mock = MockIstiod::start().await;
    refused(well(&mock).env("SDS_CALLER_TOKENS", "true").env("WORKLOAD_SDS", "abc"), "WORKLOAD_SDS=abc")
        .await;
    let without = || well(&mock).env("DISABLE_ENVOY", "true");
    refused(without().env("ISTIO_META_DNS_CAPTURE", "maybe"), "DNS_CAPTURE").await;
    refused(well(&mock).env("ISTIO_META_DNS_CAPTURE", "maybe"), "DNS_CAPTURE").await;
    // Nor is anything bound before that is told.
    for (address, why) in [
        ("foo", "host:port"),
        ("127.0.0.1:99999", "host:port"),
        (
            "203.0.113.7:15053",
            "203.0.113.7:15053 (DNS_PROXY_ADDR): this machine has no such address; write one that it has",
        ),
    ] {
        let dns = well(&mock).env("ISTIO_META_DNS_CAPTURE", "true").env("DNS_PROXY_ADDR", address);
        refused(dns, why).await;
    }
    let other = || without().env("GCE_METADATA_HOST", "127.0.0.1:1");
    refused(without().env("WORKLOAD_IDENTITY_SOCKET_FILE", "a/b"), "must be a filename").await;
    let named = well(&mock).env("ISTIO_META_DNS_CAPTURE", "true").env("DNS_PROXY_ADDR", LONG);
    refused(named, LONG.trim_end_matches(":15053")).await;
    let exchange = || other().env("PLUGINS", "GoogleTokenExchange");
    refused(exchange(), "GKE_CLUSTER_URL").await;
    let json = exchange().scene().run(&["doctor", "--sign", "--json"]).await.json();
    assert_eq!(state(&json, "sign"), "fail", "{json}");
    // A setting that lacks is no missing root, and hides none.
    let vault = || well(&mock).env("CA_PROVIDER", "VaultCA");
    let json = refused(vault(), "needs VAULT_ADDR").await;
    assert!(!json.to_string().contains("ConfigMap"), "{json}");
    let json = refused(vault().without_file(ROOT), "needs VAULT_ADDR").await;
    assert_eq!(find(&json, "roots")["kind"], "RootMissing", "{json}");
}

#[tokio::test]
async fn doctor_knows_every_port_and_which_two_are_one() {
    let mock = MockIstiod::start().await;
    let ports = well(&mock).ports();
    let both = well(&mock).env("ENVOY_STATUS_PORT", ports.status.to_string());
    let both = both.proxy_config("statusPort", ports.status).proxy_config("proxyAdminPort", ports.admin);
    let scene = both.scene();
    let (said, start) = tokio::join!(scene.run(&["doctor"]), scene.run(&["proxy", "--dry-run"]));
    let line =
        format!("(statusPort) and Envoy's readiness port (ENVOY_STATUS_PORT) are both {}", ports.status);
    ends(&said, 1, "ConfigInvalid");
    assert!(said.stdout.contains(&line) && start.stderr.contains(&line), "{}{}", said.stdout, start.stderr);
    // Whoever starts it all the same is not sent to look for a process: it is the agent itself.
    let mut agent = well(&mock)
        .proxy_config("proxyAdminPort", ports.status)
        .proxy_config("statusPort", ports.status)
        .start();
    assert_eq!(agent.wait_exit().await.code(), Some(1));
    let log = agent.log().text();
    let last = log.lines().last().unwrap_or_default();
    assert!(
        last.contains("two settings name the same port") && last.contains("verdict: ConfigInvalid"),
        "{log}"
    );
    assert!(!log.contains("is held by"), "{log}");
    // The DNS server's port for datagrams.
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    let dns = format!("localhost:{}", datagrams.local_addr().unwrap().port());
    let taken = || well(&mock).env("ISTIO_META_DNS_CAPTURE", "true").env("DNS_PROXY_ADDR", &dns);
    ends(&taken().scene().run(&["doctor"]).await, 1, "PortTaken");
    let mut agent = taken().start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    let held_by = format!("held by pid {}", std::process::id());
    crate::support::eventually("whose it is", async || agent.log().contains(&held_by).then_some(())).await;
    // Held by others.
    let held = free_port();
    servers::hold(held);
    let other = free_port().to_string();
    for name in ["ENVOY_SECURE_METRICS_PORT", "ENVOY_SECURE_MERGED_METRICS_PORT"] {
        let said = well(&mock).env(name, held.to_string()).scene().run(&["doctor"]).await;
        ends(&said, 1, "PortTaken");
        let free = well(&mock).env(name, &other).scene().run(&["doctor"]).await;
        assert!(free.stdout.contains(&other), "{}", free.stdout);
    }
    let flag = format!("--stsPort={other}");
    let said = well(&mock).scene().run(&["doctor", "sidecar", &flag]).await;
    assert!(said.stdout.lines().any(|l| l.contains("ports") && l.contains(&other)), "{}", said.stdout);
}

/// Its Envoy serves on, and nobody should end it.
#[tokio::test]
async fn doctor_has_nobody_end_an_agent_that_stands_still() {
    let mock = MockIstiod::start().await;
    let mut agent = well(&mock).start();
    agent.wait_ready().await;
    agent.signal(Signal::STOP);
    let said = agent.run(&["doctor"]).await;
    agent.signal(Signal::CONT);
    assert!(said.stdout.contains("of a running agent that gives no answer"), "{}", said.stdout);
    assert!(!said.stdout.contains("stop that process"), "{}", said.stdout);
    agent.stop().await;
}

#[tokio::test]
async fn doctor_asks_nobody_on_port_0() {
    let mock = MockIstiod::start().await;
    let annotation = "status.sidecar.istio.io/port=\"abc\"\n";
    let scene = well(&mock).file("etc/istio/pod/annotations", annotation).scene();
    let said = scene.run(&["doctor"]).await;
    assert!(!said.stdout.contains("localhost:0") && !said.stdout.contains(" 0, "), "{}", said.stdout);
}

#[tokio::test]
async fn an_envoy_that_a_script_starts_is_the_agents_own() {
    let mock = MockIstiod::start().await;
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_envoy.py");
    let script = format!("#!/bin/sh\n'{fake}' \"$@\" &\ntrap 'kill $!' TERM\nwait\nwait\n");
    let mut agent =
        well(&mock).file_mode("wrapper", script, 0o755).proxy_config("binaryPath", "./wrapper").start();
    agent.wait_ready().await;
    let scene: &TestAgent = &agent;
    let said = scene.run(&["doctor", "--json"]).await;
    assert_eq!(state(&said.json(), "ports"), "ok", "{}", said.stdout);
}

impl Scene {
    /// Runs a command with the directory's `resolv.conf` as the machine's.
    async fn run_with_resolver(&self, words: &[&str]) -> Said {
        let script = "mount --bind resolv.conf /etc/resolv.conf && exec \"$@\"";
        self.run_by(&["unshare", "--mount", "sh", "-c", script, "sh"], words).await
    }
}

/// Half of a file that was copied, as it were.
#[tokio::test]
async fn doctor_calls_no_envoy_well_that_crashes() {
    let mock = MockIstiod::start().await;
    let builder = well(&mock).file_mode("envoy", "#!/bin/sh\nkill -SEGV $$\n", 0o755);
    let builder = builder.proxy_config("binaryPath", "./envoy");
    let said = builder.clone().scene().run(&["doctor"]).await;
    ends(&said, 1, "EnvoyCrashed");
    assert!(said.stdout.contains("is the file whole"), "{}", said.stdout);
    assert_eq!(builder.start().wait_exit().await.code(), Some(139));
}
