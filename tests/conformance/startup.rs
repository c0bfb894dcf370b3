//! Coming up: sockets, first certificate, readiness, and what stands in the way.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::dns::Nameserver;
use crate::support::agent::{Builder, Envoy, ROOT, SDS, TOKEN, XDS};
use crate::support::client::{Pem, ack, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent, eventually};

/// A resolver of the test's own.
const WITH_RESOLVER: &str = "mount --bind resolv.conf /etc/resolv.conf && exec \"$@\"";

#[tokio::test]
async fn the_first_certificate_is_what_istiod_signed() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    let client = agent.sds().await;

    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    let response = stream.next().await.unwrap();
    let [(name, Pem::Identity { chain, key })] = &secrets(&response)[..] else { panic!("{response:?}") };
    assert_eq!(name, "default");
    assert!(key.starts_with("-----BEGIN RSA PRIVATE KEY-----"), "the default key is RSA in PKCS#1");
    stream.send(&ack(&response, &["default"]));

    let signed = mock.record().signed();
    let call = signed.last().expect("istiod has signed");
    assert_eq!(chain.trim_end(), call.chain.concat().trim_end(), "all that istiod sent, in its order");
    assert_eq!(call.identity.as_deref(), Some("spiffe://cluster.local/ns/ns/sa/sa"));
    assert_eq!(call.validity_seconds, 24 * 3600);
    assert_eq!(call.metadata, serde_json::json!({"CertSigner": ""}));

    let mut roots = client.stream_secrets();
    roots.send(&secret_request("ROOTCA"));
    let response = roots.next().await.unwrap();
    let [(name, Pem::Roots(bundle))] = &secrets(&response)[..] else { panic!("{response:?}") };
    assert_eq!((name.as_str(), bundle.trim_end()), ("ROOTCA", mock.root_pem().trim_end()));
    drop((stream, roots, client));
    agent.stop().await;
}

/// What the main thread's stack has, and what of it is in memory, in kB.
fn stack(agent: &TestAgent) -> (u64, u64) {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", agent.pid().as_raw_pid())).unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.ends_with("[stack]")).skip(1);
    let mut next = |name: &str| -> u64 {
        let line = lines.find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (next("Size:"), next("Rss:"))
}

#[tokio::test]
async fn what_the_start_has_left_below_the_stack_does_not_stay() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    drop(agent.sds().await);
    eventually("most of the stack is given back", || async {
        let (size, resident) = stack(&agent);
        (resident <= size / 2).then_some(())
    })
    .await;
    agent.stop().await;
}

#[tokio::test]
async fn what_envoy_will_refuse_is_told_before_it_is_started() {
    let mock = MockIstiod::start().await;
    let level = TestAgent::with().istiod(&mock).arg("--proxyLogLevel=banana,http:debug");
    let file = TestAgent::with().istiod(&mock).proxy_config("customConfigFile", "own.yaml");
    for (builder, words) in [
        (
            level,
            ["--proxyLogLevel=banana: ", "write one of trace, debug, info, warning, error, critical, off"],
        ),
        (file, ["customConfigFile of the proxy config: own.yaml: No such file", "write the file"]),
    ] {
        let mut agent = builder.envoy(Envoy::Real).start();
        // As Envoy ends.
        assert_eq!(agent.wait_exit().await.code(), Some(1));
        let log = agent.log().text();
        let told = log.lines().position(|line| words.iter().all(|word| line.contains(word)));
        let started = log.lines().position(|line| line.contains("Envoy command: ["));
        assert!(told.expect(&log) < started.expect(&log), "{log}");
    }
}

#[tokio::test]
async fn numbers_that_mean_their_defaults_are_told_with_what_they_mean() {
    let mock = MockIstiod::start().await;
    for (builder, words) in [
        (TestAgent::with().env("SECRET_TTL", "-5m"), ["SECRET_TTL=-5m asks", "leave it out"]),
        (TestAgent::with().env("SECRET_TTL", "300ms"), ["SECRET_TTL=300ms asks", "leave it out"]),
        (
            TestAgent::with().proxy_config("concurrency", -2),
            ["concurrency=-2 of the proxy config", "counts as 0"],
        ),
        (TestAgent::with().arg("--concurrency=-3"), ["concurrency=-3", "leave it out"]),
    ] {
        let mut agent = builder.istiod(&mock).start();
        agent.wait_log("generated new workload certificate").await;
        let log = agent.log().text();
        let told = |line: &str| line.contains("\twarn\t") && words.iter().all(|word| line.contains(word));
        assert_eq!(log.lines().filter(|line| told(line)).count(), 1, "{words:?}: {log}");
        agent.stop().await;
    }
}

#[tokio::test]
async fn what_is_left_at_the_sockets_places_is_replaced() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    for path in [XDS, SDS] {
        std::fs::create_dir_all(dir.path().join(path).parent().unwrap()).unwrap();
    }
    // A socket that nobody listens on any more, and a plain file.
    drop(std::os::unix::net::UnixListener::bind(dir.path().join(SDS)).unwrap());
    std::fs::write(dir.path().join(XDS), "left over").unwrap();
    let mut agent = TestAgent::with().istiod(&mock).start_in(dir);
    drop(agent.xds().await);
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    drop((stream, client));
    agent.stop().await;
}

#[tokio::test]
async fn a_start_that_waits_for_others_ends_on_a_signal() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("WORKLOAD_SOCKET_WAIT", "10m").start();
    agent.wait_log("for another SDS server").await;
    let log = agent.stop().await;
    assert!(log.contains("received signal: terminated: the start is given up"), "{log}");
}

/// The kernel passes a signal over that the first process of a container does not handle.
#[tokio::test]
async fn the_first_process_of_a_container_ends_on_a_signal_before_it_has_read_its_configuration() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mock = MockIstiod::start().await;
    let words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", WITH_RESOLVER, "sh"];
    let resolv = format!("nameserver {}\noptions timeout:30 attempts:5\n", nameserver.ip);
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .before(&words.map(ToOwned::to_owned))
        .file("resolv.conf", resolv)
        .proxy_config("statsdUdpAddress", "statsd.test.:8125")
        .start();
    nameserver.asked_by(1).await;
    let pid = agent.pid().as_raw_pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let first = children.split_whitespace().next().and_then(|child| Pid::from_raw(child.parse().ok()?));
    kill_process(first.expect("it runs"), Signal::TERM).unwrap();
    assert_eq!(agent.wait_exit().await.code(), Some(2), "as the Go agent");
    agent.assert_clean().await;
}

#[tokio::test]
async fn an_agent_killed_is_followed_by_one_in_the_same_place() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    drop(agent.sds().await);
    agent.signal(rustix::process::Signal::KILL);
    agent.wait_exit().await;
    eventually("its Envoy is gone", || async { agent.processes().is_empty().then_some(()) }).await;
    let mut next = TestAgent::with().istiod(&mock).start_in(agent.take_dir());
    next.wait_ready().await;
    next.stop().await;
}

#[tokio::test]
async fn a_taken_status_port_is_named() {
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with().istiod(&mock);
    let port = builder.ports().status;
    let _taken = std::net::TcpListener::bind(("0.0.0.0", port)).unwrap();
    let mut agent = builder.start();
    agent.wait_log(&port.to_string()).await;
    // Whether an agent goes on without its probes is its own affair (Istio's does, ours does not start); if it does, the
    // identity must not hang on that port, and if not, nothing may be left.
    let ended = tokio::time::timeout(Duration::from_secs(2), agent.wait_exit()).await;
    match ended {
        Ok(status) => {
            assert!(!status.success());
            assert!(!agent.path(XDS).exists() && !agent.path(SDS).exists(), "nothing is bound");
        }
        Err(_) => {
            let client = agent.sds().await;
            let mut stream = client.stream_secrets();
            stream.send(&secret_request("default"));
            stream.next().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_missing_root_ends_the_start_and_is_named() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).without_file(ROOT).start();
    let status = agent.wait_exit().await;
    assert_eq!(status.code(), Some(255));
    agent.wait_log(ROOT).await;
    agent.assert_clean().await;
    assert!(mock.record().is_empty(), "istiod is not dialled without a root");
}

/// The file is not missing, its name is.
#[tokio::test]
async fn a_root_that_no_setting_names_is_asked_for_by_the_settings_name() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("FILE_MOUNTED_CERTS", "true").start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    agent.wait_log("ISTIO_META_TLS_CLIENT_ROOT_CERT names no root").await;
}

#[tokio::test]
async fn a_token_that_cannot_be_read_is_named_and_read_later() {
    let mock = MockIstiod::start().await;
    // A directory cannot be read as a file by anybody, whoever runs the test.
    let mut agent =
        TestAgent::with().istiod(&mock).without_file(TOKEN).file(&format!("{TOKEN}/x"), "").start();
    let client = agent.sds().await;
    agent.wait_log("istio-token").await;
    std::fs::remove_dir_all(agent.path(TOKEN)).unwrap();
    agent.put(TOKEN, mock.mint("ns", "sa"));
    eventually("a certificate", || async {
        let mut stream = client.stream_secrets();
        stream.send(&secret_request("default"));
        stream.next().await.ok()
    })
    .await;
    drop(client);
    agent.stop().await;
}

#[tokio::test]
async fn a_bad_proxy_config_ends_the_start_and_says_why() {
    for text in ["{discoveryAddress: [", "{\"statusPort\": \"soon\"}", "{\"drainDuration\": \"long\"}", "- 1"]
    {
        let mut agent = TestAgent::with().env("PROXY_CONFIG", text).start();
        let status = agent.wait_exit().await;
        assert_eq!(status.code(), Some(255), "{text}: {}", agent.log().text());
        // The line names the variable, or shows what stands in it.
        agent.wait_log("failed to get proxy config").await;
        assert!(
            agent.log().contains("PROXY_CONFIG") || agent.log().contains(text),
            "{text}: {}",
            agent.log().text()
        );
        assert!(!agent.path(XDS).exists() && !agent.path(SDS).exists(), "{text}: nothing is bound");
    }
}

#[tokio::test]
async fn everything_that_is_wrong_is_told_at_once_and_nothing_is_bound() {
    let wrong = [
        ("PROXY_CONFIG", "{\"drainDuration\": \"long\"}", "drainDuration"),
        ("COMPLIANCE_POLICY", "fips-1999", "fips-1999"),
        ("ISTIO_KUBE_APP_PROBERS", "{", "prober"),
        ("CREDENTIAL_FETCHER_TYPE", "Carrier", "invalid credential fetcher type Carrier"),
        ("CA_PROVIDER", "Nobody", "CA provider \"Nobody\" not registered"),
    ];
    let agent = TestAgent::with();
    let mut agent = wrong.iter().fold(agent, |agent, (name, value, _)| agent.env(name, *value)).start();
    let status = agent.wait_exit().await;
    assert_eq!(status.code(), Some(255), "{}", agent.log().text());
    // No root was given either; the CA does not get as far as asking for its own.
    for told in wrong.iter().map(|(.., told)| *told).chain(["root CA file for XDS"]) {
        agent.wait_log(told).await;
    }
    // The last of them is what doctor calls the cause.
    let log = agent.log().text();
    let last = log.lines().rfind(|line| line.contains("verdict: ")).unwrap_or_default();
    assert!(last.contains("verdict: ConfigInvalid"), "{log}");
    assert!(!agent.path(XDS).exists() && !agent.path(SDS).exists(), "nothing is bound");
    agent.assert_clean().await;
}

/// What is in the place of a file: a pipe into which nobody writes, and a device without an end.
const PIPE: &str = "mkfifo";
const DEVICE: &str = "ln -s /dev/zero";

/// `file`: what settings name, made of that before the agent starts; `said` is what it says then.
async fn odd_file(mock: &MockIstiod, file: &str, made: &str, ends: bool, said: &str) {
    let (folder, _) = file.rsplit_once('/').unwrap();
    // What fills the memory does not fill this machine's.
    let script = format!("mkdir -p {folder}; {made} {file}; ulimit -v 8000000; exec \"$@\"");
    let named = |b: Builder| match file {
        "o/override" => b.env("ISTIO_BOOTSTRAP_OVERRIDE", file),
        "o/template" => b.arg("--templateFile=o/template"),
        "o/mesh" => b.arg("--meshConfig=o/mesh"),
        _ => b,
    };
    let mut agent = named(TestAgent::with().istiod(mock)).within(&["sh", "-c", &script, "sh"]).start();
    agent.wait_log(said).await;
    if ends {
        assert_eq!(agent.wait_exit().await.code(), Some(255), "{file} {made}");
    } else {
        agent.wait_ready().await;
        agent.stop().await;
    }
}

#[tokio::test]
async fn a_pipe_or_a_device_in_a_files_place_neither_holds_up_the_start_nor_fills_the_memory() {
    let mock = MockIstiod::start().await;
    let unwritten = "it is a pipe, into which nobody has written";
    tokio::join!(
        odd_file(&mock, "etc/istio/pod/labels", PIPE, false, "etc/istio/pod/labels is ignored"),
        odd_file(&mock, "etc/istio/pod/annotations", DEVICE, false, "etc/istio/pod/annotations is ignored"),
        odd_file(&mock, "o/override", DEVICE, false, "Envoy starts without it"),
        odd_file(&mock, "o/template", PIPE, true, unwritten),
        odd_file(&mock, "o/mesh", PIPE, true, unwritten),
    );
}

#[tokio::test]
async fn a_device_in_the_place_of_a_written_certificate_is_replaced() {
    let mock = MockIstiod::start().await;
    let script = "mkdir out; ln -s /dev/zero out/cert-chain.pem; ulimit -v 8000000; exec \"$@\"";
    let agent = TestAgent::with().istiod(&mock).env("OUTPUT_CERTS", "out");
    let agent = agent.within(&["sh", "-c", script, "sh"]).start();
    let path = agent.path("out/cert-chain.pem");
    eventually("the chain is written", || async {
        let there = std::fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file());
        (there && std::fs::read_to_string(&path).is_ok_and(|text| text.contains("CERTIFICATE"))).then_some(())
    })
    .await;
    agent.stop().await;
}

#[tokio::test]
async fn a_locality_label_that_is_empty_hides_the_old_one() {
    let mock = MockIstiod::start().await;
    let labels = "istio-locality=\"eu.west\"\ntopology.istio.io/locality=\"\"\n";
    let mut agent = TestAgent::with().istiod(&mock).file("etc/istio/pod/labels", labels).start();
    agent.wait_ready().await;
    let text = std::fs::read_to_string(agent.path("etc/istio/proxy/envoy-rev.json")).unwrap();
    let bootstrap: serde_json::Value = serde_json::from_str(&text).unwrap();
    let node = &bootstrap["node"];
    // Nothing is known of the machine, and nothing is tidied.
    assert_eq!(
        (&node["locality"], &node["metadata"]["LABELS"]["istio-locality"]),
        (&serde_json::json!({}), &"eu.west".into())
    );
    agent.stop().await;
}
