//! Keys and tokens stay where they belong: in no log line at any level, no metric, no page, and no file that others
//! may read.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::agent::TOKEN;
use crate::support::client::{Pem, secret_request, secrets};
use crate::support::{Code, Fault, MockIstiod, TestAgent, root_for};

/// The middle of a PEM text: what would show in whatever way it is printed.
fn inner(pem: &str) -> String {
    let lines: Vec<_> = pem.lines().filter(|line| !line.starts_with("-----")).collect();
    lines[lines.len() / 2].to_owned()
}

fn files(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => files(&path, into),
            kind if kind.is_file() => into.push(path),
            _ => {}
        }
    }
}

#[tokio::test]
async fn keys_and_tokens_are_shown_nowhere() {
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(Duration::from_secs(6)));
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("out")).unwrap();
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .arg("--log_output_level=all:debug")
        .env("OUTPUT_CERTS", "out")
        .env("METRICS_DETAILS", "true")
        // It has no effect here, and is shown all the same.
        .env("STS_UPSTREAM_URL", "http://u:hunter2sts@p:1")
        .proxy_config(
            "proxyMetadata",
            serde_json::json!({
                "XDS_HEADER_X-Auth": "hunter2xds", "CA_HEADER_COOKIE": "hunter2ca", "HTTPS_PROXY": "http://u:hunter2px@p:1",
                "ISTIO_KUBE_APP_PROBERS": "{\"/app-health/a/livez\": \"hunter2probe\"}",
            }),
        )
        .start_in(dir);
    let token = std::fs::read_to_string(agent.path(TOKEN)).unwrap();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    let mut keys = Vec::new();
    // The first, a renewal, and one after failures of two kinds.
    for fault in [None, Some(Fault::refuse(Code::Internal)), Some(Fault::WrongKey)] {
        fault.into_iter().for_each(|f| mock.ca().next(f));
        let response = loop {
            match stream.next().await {
                Ok(response) => break response,
                Err(_) => {
                    stream = client.stream_secrets();
                    stream.send(&secret_request("default"));
                }
            }
        };
        let [(_, Pem::Identity { key, .. })] = &secrets(&response)[..] else { panic!("no key") };
        keys.push(key.clone());
    }
    let mut needles: Vec<String> = keys.iter().map(|key| inner(key)).collect();
    needles.extend(token.trim().split('.').skip(1).map(ToOwned::to_owned));

    let mut shown = vec![("the log".to_owned(), agent.log().text())];
    for page in ["/debug/agentz", "/stats/prometheus", "/debug/pprof/heap", "/healthz/ready?verbose"] {
        shown.push((page.to_owned(), agent.get(page).await.map(|reply| reply.text()).unwrap_or_default()));
    }
    assert!(shown[0].1.len() > 1000, "the log has lines to look at");
    // Envoy's bootstrap tells istiod of all of them, as the Go agent's does.
    for (place, text) in &shown {
        let at = text.find("hunter2").map(|at| text[at..].chars().take(20).collect::<String>());
        assert_eq!(at, None, "{place} shows a header, a proxy's password or a probe");
    }
    let mut paths = Vec::new();
    files(&agent.path(""), &mut paths);
    for path in paths {
        let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap_or_default()).into_owned();
        let name = path.strip_prefix(agent.path("")).unwrap().to_string_lossy().into_owned();
        if name == "out/key.pem" || name == TOKEN {
            let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o600, "{name}");
        } else {
            shown.push((name, text));
        }
    }
    for (place, text) in shown {
        for needle in &needles {
            assert!(!text.contains(needle), "{place} shows a secret");
        }
    }
}

/// As another user than root, from a place that user can reach.
const AS_NOBODY: &str = "touch agent && mount --bind \"$1\" agent && shift && \
    exec setpriv --reuid=65534 --regid=65534 --clear-groups ./agent \"$@\"";

/// The kernel shows who may look: what may not be dumped belongs to root in `/proc`.
#[tokio::test]
async fn memory_is_closed_where_that_is_asked_for() {
    if !root_for("another user than root") {
        return;
    }
    use std::os::unix::fs::MetadataExt;
    for (closed, owner) in [("false", 65534), ("true", 0)] {
        let mock = MockIstiod::start().await;
        let mut agent = TestAgent::with()
            .istiod(&mock)
            .before(&["unshare", "--mount", "sh", "-c", AS_NOBODY, "sh"].map(ToOwned::to_owned))
            .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
            .owner(65534)
            .env("DISABLE_ENVOY", "true")
            .env("NO_CORE_DUMPS", closed)
            .start();
        agent.wait_log("generated new workload certificate").await;
        let memory = format!("/proc/{}/mem", agent.pid().as_raw_pid());
        assert_eq!(std::fs::metadata(memory).unwrap().uid(), owner, "NO_CORE_DUMPS={closed}");
    }
}
