//! `examples/`: each runs as it stands, with a real Envoy.

#![allow(unreachable_pub, reason = "a test's modules are nobody's interface")]

use std::io::{BufRead, BufReader, Read};
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

/// The example with ports of its own.
fn own_envoy() -> Command {
    let mut command = Command::new(format!("{ROOT}/examples/own-envoy/run"));
    for name in ["PORT", "ADMIN_PORT", "STATUS_PORT", "READY_PORT", "METRICS_PORT"] {
        command.env(name, free_port().to_string());
    }
    command.env("AGENT", agent_bin()).env("MOCK_ISTIOD", mock_istiod()).env("ENVOY_BIN", envoy_bin());
    command
}

#[test]
fn your_own_envoy_answers_with_the_workloads_certificate() {
    // Named from where it is called, as people do.
    let dir = tempfile::tempdir().unwrap();
    for (name, binary) in [("agent", agent_bin()), ("mock", mock_istiod())] {
        std::os::unix::fs::symlink(binary, dir.path().join(name)).unwrap();
    }
    let mut command = own_envoy();
    command.current_dir(dir.path()).env("AGENT", "./agent").env("MOCK_ISTIOD", "./mock");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("spiffe://cluster.local/ns/demo/sa/web\nhello from your own Envoy"), "{said}");
}

#[test]
fn an_example_of_which_a_part_has_ended_says_so_at_once() {
    for (name, what) in [("MOCK_ISTIOD", "mock-istiod listens"), ("AGENT", "the agent's sockets")] {
        let output = own_envoy().env(name, "/bin/false").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        // Without it, the wait for something that cannot come would be reported, after a minute.
        let line = format!("own-envoy: never came true: {what} (one of the programs has ended)\n");
        assert!(said.contains(&line), "{said}");
    }
    for name in ["AGENT", "MOCK_ISTIOD"] {
        let output = own_envoy().env(name, "/etc").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(said, "own-envoy: /etc is not there: make demo builds it\n");
    }
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

    // What `up --wait` waits for, in an image that has no mock-istiod of its own.
    let control = String::from_utf8_lossy(&said[..length]).into_owned();
    let mut rest = String::new();
    let mut out = BufReader::new(child.0.stdout.take().unwrap());
    while !control.contains("control on") && !rest.contains("control on") {
        assert!(out.read_line(&mut rest).unwrap() > 0, "it ended: {control}{rest}");
    }
    let said = control + &rest;
    let port = said.split("control on 127.0.0.1:").nth(1).unwrap().trim().to_owned();
    let test: Vec<&str> =
        service["healthcheck"]["test"].as_sequence().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
    assert_eq!(test[..3], ["CMD", "bash", "-c"]);
    let healthy = |files: &str, port: &str| {
        let script = test[3].replace("/files", files).replace("15014", port);
        Command::new("bash").args(["-c", &script]).stderr(Stdio::null()).status().unwrap().success()
    };
    assert!(healthy(&files, &port));
    assert!(!healthy(&files, &free_port().to_string()), "a token of an earlier run is none of this one");
    assert!(!healthy("/nonexistent", &port));
    let mounted = &service["volumes"][0];
    assert_eq!(mounted["target"], "/usr/local/bin/mock-istiod");
    assert_eq!(mounted["source"], "${MOCK_ISTIOD:-../../target/release/mock-istiod}");
    assert_eq!(mounted["bind"]["create_host_path"], false, "a missing binary is no folder");
    assert_eq!(service["image"], "${MOCK_ISTIOD_IMAGE:-docker.io/library/debian:trixie-slim}");
}

/// Gives the client an agent's socket; it must print the chain and the roots.
async fn takes_the_certificate(client: &mut tokio::process::Command) {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.sds().await;
    let socket = agent.path("var/run/secrets/workload-spiffe-uds/socket");
    let output = client.arg(&socket).output().await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        said.matches("BEGIN CERTIFICATE").count() >= 2 && said.contains(mock.root_pem().trim()),
        "{said}"
    );
    agent.stop().await;
}

/// What a client needs is fetched; where that cannot be, it says so loudly and the client is not run.
fn fetched(client: &str, command: &mut Command) -> Option<String> {
    let why = match command.output() {
        Ok(output) if output.status.success() => {
            return Some(String::from_utf8(output.stdout).unwrap().trim().to_owned());
        }
        Ok(output) => {
            String::from_utf8_lossy(&output.stderr).trim().lines().last().unwrap_or_default().to_owned()
        }
        Err(e) => e.to_string(),
    };
    eprintln!("\n*** THE {client} CLIENT WAS NOT RUN: {why} ***\n");
    None
}

#[tokio::test]
async fn the_python_client_takes_the_certificate() {
    let source = format!("{ROOT}/examples/clients/python/client.py");
    // The suite of recordings has grpcio.
    let Some(python) = fetched("PYTHON", &mut Command::new(format!("{ROOT}/conformance/python"))) else {
        let mut compiled = Command::new("python3");
        compiled.args(["-c", "import sys; compile(open(sys.argv[1]).read(), sys.argv[1], 'exec')", &source]);
        assert!(compiled.status().unwrap().success());
        return;
    };
    takes_the_certificate(tokio::process::Command::new(python).arg(&source)).await;
}

#[tokio::test]
async fn the_go_client_takes_the_certificate() {
    // Bounded: without a network some of its tries wait long.
    let go = |words: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["300", "go"]).args(words).current_dir(format!("{ROOT}/examples/clients/go"));
        command.env("GOFLAGS", "-mod=readonly -modcacherw").env("GOTOOLCHAIN", "local");
        command
    };
    if fetched("GO", &mut go(&["mod", "download"])).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let client = dir.path().join("client");
    let built = go(&["build", "-o", client.to_str().unwrap(), "."]).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    takes_the_certificate(&mut tokio::process::Command::new(client)).await;
}
