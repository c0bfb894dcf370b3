//! `examples/`: each runs as it stands, with a real Envoy.

#![allow(unreachable_pub, reason = "a test's modules are nobody's interface")]

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "support/built.rs"]
mod built;
#[path = "support/mod.rs"]
mod support;

use built::mock_istiod;
use support::{MockIstiod, TestAgent, agent_bin, envoy_bin, free_port};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const LIMIT: Duration = Duration::from_secs(120);

// Ends a process and what it started; a script's trap does the latter.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

#[test]
fn your_own_envoy_answers_with_the_workloads_certificate() {
    let mut command = Command::new(format!("{ROOT}/examples/own-envoy/run"));
    command.env("AGENT", agent_bin()).env("MOCK_ISTIOD", mock_istiod()).env("ENVOY_BIN", envoy_bin());
    for name in ["PORT", "ADMIN_PORT", "STATUS_PORT", "READY_PORT", "METRICS_PORT"] {
        command.env(name, free_port().to_string());
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("spiffe://cluster.local/ns/demo/sa/web\nhello from your own Envoy"), "{said}");
}

#[test]
fn mock_istiod_writes_what_an_agent_mounts() {
    let dir = tempfile::tempdir().unwrap();
    let control = free_port();
    let child = Command::new(format!("{ROOT}/examples/mock-istiod/run"))
        .arg(dir.path())
        .env("MOCK_ISTIOD", mock_istiod())
        .env("LISTEN", "127.0.0.1:0")
        .env("CONTROL", format!("127.0.0.1:{control}"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut child = Ended(child);
    let deadline = Instant::now() + LIMIT;
    let files = ["root-cert.pem", "istio-token"].map(|name| dir.path().join(name));
    while !files.iter().all(|file| std::fs::read(file).is_ok_and(|text| !text.is_empty())) {
        if child.0.try_wait().unwrap().is_some() {
            let mut said = String::new();
            child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("it ended: {said}");
        }
        assert!(Instant::now() < deadline, "token and root were not written");
        std::thread::sleep(Duration::from_millis(20));
    }
}

// The compose file's own command, with folders and ports of this machine in the place of a container's.
#[test]
fn the_compose_file_starts_a_mock_istiod() {
    let text = std::fs::read_to_string(format!("{ROOT}/examples/mock-istiod/compose.yaml")).unwrap();
    let file: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
    let service = &file["services"]["istiod"];
    assert_eq!(service["entrypoint"][0].as_str(), Some("/usr/local/bin/mock-istiod"));
    assert_eq!(service["user"].as_str(), Some("0:0"), "another cannot write to a fresh volume");
    let dir = tempfile::tempdir().unwrap();
    let files = dir.path().display().to_string();
    let words = service["command"].as_sequence().unwrap().iter().map(|word| word.as_str().unwrap());
    let words = words.map(|word| {
        let word = word.replace("=/resources", &format!("={ROOT}/examples/mock-istiod/resources"));
        word.replace("=/files", &format!("={files}"))
            .replace("0.0.0.0:15012", "127.0.0.1:0")
            .replace("0.0.0.0:15014", "127.0.0.1:0")
    });
    let child = Command::new(mock_istiod()).args(words).stdout(Stdio::piped()).spawn().unwrap();
    let mut child = Ended(child);
    let mut said = [0; 64];
    let length = child.0.stdout.as_mut().unwrap().read(&mut said).unwrap();
    assert!(String::from_utf8_lossy(&said[..length]).starts_with("listening on 127.0.0.1:"));
    assert!(dir.path().join("istio-token").exists() && dir.path().join("root-cert.pem").exists());
}

#[tokio::test]
async fn the_python_client_takes_the_certificate() {
    let has = Command::new("python3").args(["-c", "import grpc"]).stderr(Stdio::null()).status().unwrap();
    let source = format!("{ROOT}/examples/clients/python/client.py");
    if !has.success() {
        eprintln!("\n*** THE PYTHON CLIENT WAS NOT RUN, ONLY COMPILED: python3 has no grpcio ***\n");
        let mut compiled = Command::new("python3");
        compiled.args(["-c", "import sys; compile(open(sys.argv[1]).read(), sys.argv[1], 'exec')", &source]);
        assert!(compiled.status().unwrap().success());
        return;
    }
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.sds().await;
    let socket = agent.path("var/run/secrets/workload-spiffe-uds/socket");
    let mut command = tokio::process::Command::new("python3");
    let output = command.arg(&source).arg(&socket).output().await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        said.matches("BEGIN CERTIFICATE").count() >= 2 && said.contains(mock.root_pem().trim()),
        "{said}"
    );
    agent.stop().await;
}
