//! `run` and `sleep`: what Jobs and lifecycle hooks use in images without a shell.

use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::header::{AUTHORIZATION, LOCATION, REFERER};
use http_body_util::Full;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;

use crate::support::web::Web;
use crate::support::{LIMIT, MockIstiod, TestAgent, agent_bin, eventually, free_port, root_for};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(agent_bin());
    command.args(args).env_clear().env("PATH", "/usr/bin:/bin");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

async fn done(command: &mut Command) -> Output {
    let output = tokio::time::timeout(LIMIT, command.output()).await.expect("it ends");
    output.expect("the agent can be run")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test]
async fn run_waits_passes_the_status_on_and_ends_the_proxy() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    let port = agent.ports().status.to_string();
    let run = ["run", "--port", &port, "--"];
    let output = done(&mut command(&[&run[..], &["sh", "-c", "echo out; exit 3"]].concat())).await;
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "out\n", "nothing of ours on standard output");
    agent.assert_running();
    // A command's own flags are its own; the status port is found as the agent finds it.
    let config = format!(r#"{{"statusPort": {port}}}"#);
    let mut quits = command(&["run", "--quit", "--", "echo", "--quit", "-h"]);
    let output = done(quits.env("PROXY_CONFIG", config)).await;
    assert_eq!(text(&output.stdout), "--quit -h\n", "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(0));
    assert!(agent.wait_exit().await.success());
}

#[tokio::test]
async fn run_does_not_start_the_command_before_the_proxy_is_ready() {
    let port = free_port().to_string();
    let dir = tempfile::tempdir().unwrap();
    let begun = dir.path().join("begun");
    let words =
        ["run", "--port", &port, "--wait-timeout=1s", "--quit", "--", "touch", begun.to_str().unwrap()];
    let output = done(&mut command(&words)).await;
    assert_eq!(output.status.code(), Some(255));
    let said = text(&output.stderr);
    assert!(
        said.contains("touch was not started")
            && said.contains(": connection refused; does something listen there?"),
        "{said}"
    );
    assert!(!begun.exists());
}

/// Others, whose parent the first process of a container becomes; here because they were there before.
#[tokio::test]
async fn run_looks_after_those_whom_it_has_not_started() {
    let web = Web::start(|_, _| async { Response::new(Full::default()) }).await;
    let script = r#"sleep 0.1 & sleep 0.3 & exec "$0" run --port "$1" -- sh -c '
        sleep 1; for p in $(cat /proc/$PPID/task/*/children); do
        grep State /proc/$p/status; done; exit 7'"#;
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(script).arg(agent_bin()).arg(web.port.to_string());
    let output = done(shell.stdin(Stdio::null())).await;
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
    assert!(said.lines().count() == 1 && !said.contains("zombie"), "{said}");
}

/// Whoever attaches to a container sets its terminal's size, mostly before the proxy is ready.
#[tokio::test]
async fn a_window_that_changes_its_size_ends_no_run_that_waits() {
    let ready = Arc::new(AtomicBool::new(false));
    let says = ready.clone();
    let web = Web::start(move |_, _| {
        let status = if says.load(Ordering::Relaxed) { 200 } else { 503 };
        async move { Response::builder().status(status).body(Full::default()).unwrap() }
    });
    let web = web.await;
    let port = web.port.to_string();
    let mut child = command(&["run", "--port", &port, "--", "true"]).spawn().unwrap();
    let pid = child.id().unwrap();
    let caught = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
        let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
        (mask & 1 << (Signal::WINCH.as_raw() - 1) != 0).then_some(())
    };
    eventually("it listens for signals", || async { caught() }).await;
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::WINCH).unwrap();
    ready.store(true, Ordering::Relaxed);
    let ended = tokio::time::timeout(LIMIT, child.wait()).await.expect("it ends").unwrap();
    assert_eq!(ended.code(), Some(0));
}

#[tokio::test]
async fn run_hands_signals_on_and_shows_a_death_by_signal() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.wait_ready().await;
    let port = agent.ports().status.to_string();
    let dir = tempfile::tempdir().unwrap();
    let begun = dir.path().join("begun");
    for (script, signal, status) in [
        ("trap 'exit 7' USR1; touch $0; while :; do sleep 0.01; done", Signal::USR1, 7),
        ("touch $0; while :; do sleep 0.01; done", Signal::TERM, 143),
    ] {
        let words = ["run", "--port", &port, "--", "sh", "-c", script, begun.to_str().unwrap()];
        let mut child = command(&words).spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
        eventually("the command runs", || async { begun.exists().then_some(()) }).await;
        kill_process(pid, signal).unwrap();
        let ended = tokio::time::timeout(LIMIT, child.wait()).await.expect("it ends").unwrap();
        assert_eq!(ended.code(), Some(status), "{script}");
        std::fs::remove_file(&begun).unwrap();
    }
    // What `nohup` has us ignore, the command ignores.
    let mut nohup = Command::new("nohup");
    nohup.arg(agent_bin()).args(["run", "--port", &port, "--", "grep", "SigIgn", "/proc/self/status"]);
    let output = done(nohup.env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null())).await;
    assert!(text(&output.stdout).trim().ends_with('1'), "{output:?}");
    for (program, status) in [("/no/such/program", 127), ("/etc/passwd", 126)] {
        let output = done(&mut command(&["run", "--port", &port, "--", program])).await;
        assert_eq!(output.status.code(), Some(status), "{program}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("cannot be started"));
    }
}

// Where the agent is stands in files: no name of another machine need be looked up for that.
#[tokio::test]
async fn commands_beside_the_agent_ask_no_nameserver() {
    if !root_for("a resolv.conf of its own") {
        return;
    }
    let nameserver = std::net::UdpSocket::bind("127.0.0.79:53").unwrap();
    nameserver.set_nonblocking(true).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("resolv.conf"), "nameserver 127.0.0.79\n").unwrap();
    let port = free_port().to_string();
    let config = format!(r#"{{"statsdUdpAddress": "statsd.istio-system:9125", "statusPort": {port}}}"#);
    for words in [
        &["wait", "--timeoutSeconds=0"][..],
        &["status"],
        &["upgrade"],
        &["run", "--wait-timeout=0s", "--", "true"],
    ] {
        let mut inside = Command::new("unshare");
        inside.args([
            "--mount",
            "sh",
            "-c",
            "mount --bind resolv.conf /etc/resolv.conf && exec \"$@\"",
            "sh",
        ]);
        inside.arg(agent_bin()).args(words).current_dir(dir.path()).env_clear();
        inside.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("PROXY_CONFIG", &config).kill_on_drop(true);
        let output = done(&mut inside).await;
        assert_ne!(output.status.code(), Some(0), "{words:?}: nobody answers here");
        let mut query = [0; 512];
        while let Ok(n) = nameserver.recv(&mut query) {
            let asked = String::from_utf8_lossy(&query[..n]).into_owned();
            assert!(!asked.contains("statsd"), "{words:?} asks a nameserver: {asked:?}");
        }
    }
}

#[tokio::test]
async fn sleep_sleeps_and_refuses_what_is_no_time() {
    let started = std::time::Instant::now();
    assert!(done(&mut command(&["sleep", "300ms"])).await.status.success());
    assert!(started.elapsed() >= Duration::from_millis(300));
    for words in [&["sleep"][..], &["sleep", "soon"], &["sleep", "-1s"], &["sleep", "1s", "2s"]] {
        assert_eq!(done(&mut command(words)).await.status.code(), Some(255), "{words:?}");
    }
}

#[tokio::test]
async fn slips_in_flags_variables_and_fields_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut dry = command(&["proxy", "sidecar", "--dry-run", "--dry-rnu", "--proxyLogLevl=info"]);
    dry.current_dir(dir.path());
    dry.env("ISTIO_META_DNS_CAPTRUE", "secret-value")
        .env("PROXY_CONFIG", r#"{"concurency": 2, "future": 1}"#);
    let said = text(&done(&mut dry).await.stderr);
    for line in [
        "unknown flag --dry-rnu is tolerated and has no effect: was --dry-run meant?",
        "unknown flag --proxyLogLevl is tolerated and has no effect: was --proxyLogLevel meant?",
        "the variable ISTIO_META_DNS_CAPTRUE is unknown and has no effect: was ISTIO_META_DNS_CAPTURE meant?",
        "the field of PROXY_CONFIG concurency is unknown and has no effect: was concurrency meant?",
    ] {
        assert!(said.contains(line), "{line} in {said}");
    }
    assert!(!said.contains("secret-value") && !said.contains("future is unknown"), "{said}");
}

/// As Go's client does: credentials of the URL go along, a redirect tells where it came from, and neither is told of a failure.
#[tokio::test]
async fn a_user_in_the_url_of_wait_is_sent_and_shown_nowhere() {
    let web = Web::start(|head, _| async move {
        let of =
            |name| head.headers.get(name).map(|value: &http::HeaderValue| value.to_str().unwrap().to_owned());
        // us@er:pw
        let known = of(AUTHORIZATION).as_deref() == Some("Basic dXNAZXI6cHc=");
        let from =
            of(REFERER).is_some_and(|from| from.starts_with("http://localhost:") && from.ends_with("/first"));
        let answer = Response::builder();
        let answer = match head.uri.path() {
            "/first" if known => answer.status(302).header(LOCATION, "/second"),
            "/second" if known && from => answer.status(200),
            _ => answer.status(401),
        };
        answer.body(Full::new(Bytes::new())).unwrap()
    })
    .await;
    for (user, code) in [("us%40er:pw", 0), ("other:secret", 255)] {
        let url = format!("--url=http://{user}@localhost:{}/first", web.port);
        let output = done(&mut command(&["wait", &url, "--timeoutSeconds=2", "--periodMillis=50"])).await;
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(!said.contains("pw") && !said.contains("secret"), "{said}");
    }
}
