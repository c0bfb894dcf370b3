//! Files that never answer: a FIFO in the place of a file is read without end until somebody writes.

use std::io::Read;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use tokio::net::unix::pipe::{OpenOptions, Sender};

use crate::support::agent::{ROOT, TOKEN};
use crate::support::client::{Pem, secret_request, secrets};
use crate::support::{Envoy, LIMIT, MockIstiod, TestAgent, eventually};

const WATCHED: &str = "watched.pem";

/// An agent whose Envoy is restarted when a file changes, and the file does not answer.
async fn stuck(mock: &MockIstiod) -> (TestAgent, Sender) {
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let watched = dir.path().join(WATCHED);
    std::fs::write(&watched, "one").unwrap();
    let mut agent = TestAgent::with()
        .istiod(mock)
        .env("ENVOY_HOT_RESTART", "true")
        .env("ENVOY_RECOVERY", "true")
        .env("ENVOY_RESTART_ON_FILES", watched.to_str().unwrap())
        .start_in(dir);
    agent.wait_ready().await;
    let fifo = agent.path("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::fs::rename(&fifo, &watched).unwrap();
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    // There is no such end before somebody reads.
    let end = || async { OpenOptions::new().open_sender(&watched).ok() };
    let sender = eventually("the file is read", end).await;
    (agent, sender)
}

/// A file that whoever opens it waits for, as on a mount that hangs: another process holds a lease on it, and the kernel
/// asks for that back (for 45 s, `/proc/sys/fs/lease-break-time`).
struct Leased(Child);

impl Leased {
    const HOLD: &str = "import fcntl, os, signal, sys
signal.signal(signal.SIGIO, lambda *_: print('asked', flush=True))
fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print('held', flush=True)
sys.stdin.read()
";

    fn hold(file: &Path) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", Self::HOLD])
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        assert_eq!(said(&mut child), "held");
        Self(child)
    }

    /// Waits until somebody opens it.
    fn asked(&mut self) {
        let mut child = self.0.stdout.take().expect("it is piped");
        let (told, heard) = std::sync::mpsc::channel();
        std::thread::spawn(move || told.send(line(&mut child)));
        assert_eq!(heard.recv_timeout(LIMIT).as_deref(), Ok("asked"));
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn said(child: &mut Child) -> String {
    line(child.stdout.as_mut().expect("it is piped"))
}

fn line(from: &mut ChildStdout) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while from.read_exact(&mut byte).is_ok() && byte != *b"\n" {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_certificates_that_cannot_be_opened_hold_up_nobody() {
    let mock = MockIstiod::start().await;
    let pair = mock.issue(&mock.identity("ns", "sa"), Duration::from_secs(3600));
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let certs = dir.path().join("etc/certs");
    std::fs::create_dir_all(&certs).unwrap();
    for (file, text) in [("cert-chain.pem", &pair.chain), ("key.pem", &pair.key)] {
        std::fs::write(certs.join(file), text).unwrap();
    }
    let mut leased = Leased::hold(&certs.join("cert-chain.pem"));
    let mut agent = TestAgent::with().istiod(&mock).start_in(dir);
    leased.asked();
    // What the CA issues is served, by an agent that answers all the time.
    agent.wait_ready().await;
    serves(&mut agent).await;
    assert_eq!(mock.record().signed().len(), 1);
    // Once they can be opened they are served in its place.
    drop(leased);
    let client = agent.sds().await;
    eventually("the files' certificate is served", || async {
        let mut stream = client.stream_secrets();
        stream.send(&secret_request("default"));
        let secret = stream.next().await.expect("a certificate");
        let [(_, Pem::Identity { chain, .. })] = &secrets(&secret)[..] else { panic!("{secret:?}") };
        (*chain == pair.chain).then_some(())
    })
    .await;
    agent.stop().await;
}

/// A pipe in the place of a file, as `mv` puts it there.
fn pipe(agent: &TestAgent, path: &str) {
    let fresh = agent.path("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fresh).status().unwrap().success());
    std::fs::rename(&fresh, agent.path(path)).unwrap();
}

#[tokio::test]
async fn files_that_take_the_places_of_pipes_are_read() {
    let mock = MockIstiod::start().await;
    mock.down().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.wait_log("Connection refused").await;
    // More than there are threads to read them: none may stay with a pipe that has gone.
    let mut ends = Vec::new();
    for _ in 0..4 {
        for path in [TOKEN, ROOT] {
            pipe(&agent, path);
        }
        // From now on tokens are read, too.
        mock.up().await.unwrap();
        for path in [TOKEN, ROOT] {
            let end = || async { OpenOptions::new().open_sender(agent.path(path)).ok() };
            ends.push(eventually("the pipe is read", end).await);
        }
    }
    // What comes in their places is needed: istiod trusts no other token, and has another root.
    mock.down().await;
    mock.rotate_root(false);
    agent.put(ROOT, mock.root_pem());
    agent.put(TOKEN, mock.mint("ns", "sa"));
    mock.up().await.unwrap();
    let client = agent.sds().await;
    eventually("a certificate", || async {
        let mut stream = client.stream_secrets();
        stream.send(&secret_request("default"));
        stream.next().await.ok().map(drop)
    })
    .await;
    agent.stop().await;
}

async fn serves(agent: &mut TestAgent) {
    for _ in 0..20 {
        assert_eq!(agent.get("/healthz/ready").await.expect("an answer").status, 200);
    }
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.expect("a certificate");
}

#[tokio::test]
async fn a_watched_file_that_does_not_answer_delays_the_restart_only() {
    let mock = MockIstiod::start().await;
    let (mut agent, sender) = stuck(&mock).await;
    serves(&mut agent).await;
    assert!(!agent.log().contains("takes over"));
    std::fs::remove_file(agent.path(WATCHED)).unwrap();
    drop(sender);
    agent.wait_log("epoch 1 takes over").await;
    agent.stop().await;
}

#[tokio::test]
async fn an_envoy_that_dies_meanwhile_is_started_with_what_is_known() {
    let mock = MockIstiod::start().await;
    let (mut agent, sender) = stuck(&mock).await;
    let first = agent.envoy_pid().await;
    kill_process(first, Signal::SEGV).unwrap();
    eventually("another Envoy", || async { agent.envoy().filter(|pid| *pid != first) }).await;
    agent.wait_log("Envoy is started with its last configuration").await;
    agent.wait_ready().await;
    serves(&mut agent).await;
    agent.stop().await;
    drop(sender);
}

/// An agent whose Envoy cannot be read from its disk, and another name of the binary.
fn unread(mock: &MockIstiod) -> (TestAgent, std::path::PathBuf) {
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let (binary, other) = (dir.path().join("envoy"), dir.path().join("fifo"));
    assert!(
        std::process::Command::new("mkfifo").args(["-m", "755"]).arg(&binary).status().unwrap().success()
    );
    std::fs::hard_link(&binary, &other).unwrap();
    let agent = TestAgent::with().istiod(mock).envoy(Envoy::Binary(binary)).start_in(dir);
    (agent, other)
}

/// Everything but Envoy is there.
async fn serves_without_envoy(agent: &mut TestAgent) {
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.expect("a certificate");
    for _ in 0..20 {
        assert_eq!(agent.get("/healthz/ready").await.expect("an answer").status, 503);
    }
}

#[tokio::test]
async fn an_envoy_that_cannot_be_read_holds_up_itself_only() {
    let mock = MockIstiod::start().await;
    let (mut agent, fifo) = unread(&mock);
    serves_without_envoy(&mut agent).await;
    let binary = agent.path("envoy");
    agent.wait_log(&format!("{} is not read from its disk", binary.display())).await;
    serves_without_envoy(&mut agent).await;
    // The disk is back.
    let fresh = agent.path("fresh");
    std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_envoy.py"), &fresh).unwrap();
    std::fs::rename(&fresh, &binary).unwrap();
    drop(eventually("somebody waits for it", || async { OpenOptions::new().open_sender(&fifo).ok() }).await);
    agent.wait_log("has answered: Envoy runs").await;
    agent.wait_ready().await;
    agent.stop().await;
}

#[tokio::test]
async fn an_agent_ends_while_its_envoy_cannot_be_read() {
    let mock = MockIstiod::start().await;
    let (mut agent, _) = unread(&mock);
    serves_without_envoy(&mut agent).await;
    agent.stop().await;
}

#[tokio::test]
async fn a_killed_agent_leaves_nothing_that_waits_for_envoys_binary() {
    let mock = MockIstiod::start().await;
    let (mut agent, _) = unread(&mock);
    agent.wait_log("is not read from its disk").await;
    agent.signal(Signal::KILL);
    agent.wait_exit().await;
    eventually("no process is left", || async { agent.processes().is_empty().then_some(()) }).await;
}
