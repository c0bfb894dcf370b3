//! The guard of an Envoy that the kernel does not end with its agent.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// An agent may be killed before its guard, which has just been started, has read which Envoy is its own.
#[test]
fn an_envoy_of_which_the_guard_learns_after_the_agents_death_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let line = dir.path().join("line");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &line,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    // The shell is the agent; what it starts are its guard and its Envoy.
    let script = r#""$1" __guard-envoy "$2/envoy-rev.json" <"$2/line" 2>"$2/said" & echo $!
        sleep 600 >/dev/null 2>&1 & echo $!; read -r end"#;
    let mut agent = Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_pilot-agent")])
        .arg(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(agent.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let (guard, envoy) = (told.next().unwrap(), told.next().unwrap());
    let status = |pid: &str, name: &str| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
    };
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < until, "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let mut words = std::fs::File::options().write(true).open(&line).unwrap();
    // It waits for a line, and knows its parent by then.
    wait("the guard stands by", &|| {
        status(&guard, "Name:").as_deref() == Some("pilot-agent")
            && status(&guard, "State:").is_some_and(|state| state.starts_with('S'))
    });
    let before = status(&guard, "PPid:");
    agent.kill().unwrap();
    agent.wait().unwrap();
    wait("the guard has another parent", &|| status(&guard, "PPid:") != before);
    words.write_all(format!("+{envoy}\n").as_bytes()).unwrap();
    drop(words);
    let gone = |pid: &str| status(pid, "State:").is_none_or(|state| state.starts_with('Z'));
    wait("the Envoy is ended", &|| gone(&envoy));
    wait("the guard ends", &|| gone(&guard));
}
