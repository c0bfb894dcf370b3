//! Envoy's life as it is seen from outside: exit status, drains, quits, orphans, leftovers.

use std::os::unix::fs::PermissionsExt;

use mock_istiod::MockIstiod;
use rustix::process::Signal;

use crate::support::builder::Builder;
use crate::support::{Envoy, TestAgent, agent, eventually, root_for};

const BOOTSTRAP: &str = "etc/istio/proxy/envoy-rev.json";
const DRAIN: &str = "POST /drain_listeners?inboundonly&graceful";
const DRAIN_NOW: &str = "POST /drain_listeners?inboundonly&graceful&skip_exit";

/// Requests that the fake Envoy noted, without those of readiness.
fn asked(agent: &TestAgent) -> Vec<String> {
    let requests = agent.fake_notes().into_iter().filter_map(|n| n["request"].as_str().map(str::to_owned));
    requests.filter(|r| !r.contains("cluster_manager") && !r.contains("server")).collect()
}

async fn serving(agent: &TestAgent) {
    eventually("Envoy's admin port serves", || async {
        agent.fake_notes().iter().any(|n| n["serving"].is_number()).then_some(())
    })
    .await;
}

fn code(status: std::process::ExitStatus) -> i32 {
    status.code().expect("the agent ends by itself, not by a signal")
}

#[tokio::test]
async fn a_signal_drains_inbound_listeners_kills_and_cleans_up() {
    let mock = MockIstiod::start().await;
    for signal in [Signal::TERM, Signal::INT] {
        let mut agent = TestAgent::with().istiod(&mock).start();
        serving(&agent).await;
        assert!(agent.path(BOOTSTRAP).exists());
        agent.signal(signal);
        assert_eq!(code(agent.wait_exit().await), 0);
        assert_eq!(asked(&agent), [DRAIN]);
        let signals = agent.fake_notes().iter().filter(|n| n["signal"].is_string()).count();
        assert_eq!(signals, 0, "Envoy is killed, not asked");
        assert!(!agent.path(BOOTSTRAP).exists());
        agent.assert_clean().await;
    }
}

#[tokio::test]
async fn a_gateway_drains_everything() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).args(&["proxy", "router"]).start();
    serving(&agent).await;
    agent.signal(Signal::TERM);
    assert_eq!(code(agent.wait_exit().await), 0);
    assert_eq!(asked(&agent), ["POST /drain_listeners?graceful"]);
    agent.assert_clean().await;
}

#[tokio::test]
async fn hangup_and_quit_end_in_order() {
    let mock = MockIstiod::start().await;
    for signal in [Signal::HUP, Signal::QUIT] {
        // Whoever runs these tests may ignore a SIGHUP.
        let heard = ["env", "--default-signal=HUP"].map(str::to_owned);
        let mut agent = TestAgent::with().istiod(&mock).before(&heard).start();
        serving(&agent).await;
        agent.signal(signal);
        assert_eq!(code(agent.wait_exit().await), 0);
        assert_eq!(asked(&agent), [DRAIN]);
        assert!(!agent.path(BOOTSTRAP).exists());
        agent.assert_clean().await;
    }
}

/// `nohup pilot-agent ... &`: the terminal's end is not the agent's, nor its Envoy's.
#[tokio::test]
async fn a_hangup_that_is_ignored_from_the_start_ends_nothing() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).before(&["nohup".to_owned()]).start();
    agent.wait_ready().await;
    for pid in [agent.pid(), agent.envoy().expect("an Envoy")] {
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
        assert_eq!(u64::from_str_radix(mask, 16).unwrap() & 1, 1, "{pid:?} ignores SIGHUP: {status}");
    }
    agent.signal(Signal::HUP);
    agent.wait_ready().await;
    assert_eq!(asked(&agent), [""; 0]);
    agent.stop().await;
}

/// A mask of signals is inherited, as from a supervisor's thread that waits for them.
#[tokio::test]
async fn signals_that_were_blocked_at_the_start_end_agent_and_envoy_all_the_same() {
    const BLOCKED: &str = "import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
os.execvp(sys.argv[1], sys.argv[1:])";
    let mock = MockIstiod::start().await;
    let before = ["python3", "-c", BLOCKED].map(ToOwned::to_owned);
    let mut agent = TestAgent::with().istiod(&mock).before(&before).start();
    agent.wait_ready().await;
    for pid in [agent.pid(), agent.envoy().expect("an Envoy")] {
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
        let mask = u64::from_str_radix(mask, 16).unwrap();
        assert_eq!(mask >> (Signal::TERM.as_raw() - 1) & 1, 0, "{pid:?} hears SIGTERM: {status}");
    }
    agent.stop().await;
}

#[tokio::test]
async fn other_signals_do_nothing() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    serving(&agent).await;
    let rare =
        [Signal::ALARM, Signal::VTALARM, Signal::PROF, Signal::IO, Signal::POWER, Signal::XCPU, Signal::XFSZ];
    for signal in [Signal::USR1, Signal::USR2, Signal::WINCH, Signal::PIPE].into_iter().chain(rare) {
        agent.signal(signal);
    }
    agent.wait_ready().await;
    agent.assert_running();
    agent.stop().await;
}

/// `pilot-agent proxy | head`: what stands at the other end of the pipe is no reason to die and to leave Envoy behind.
#[tokio::test]
async fn a_log_whose_reader_has_gone_ends_nothing() {
    let mock = MockIstiod::start().await;
    let script = "mkfifo pipe; head -n 1 pipe >first & exec \"$@\" >pipe 2>&1";
    let words: Vec<String> = ["sh", "-c", script, "sh"].map(str::to_owned).into();
    let mut agent = TestAgent::with().istiod(&mock).before(&words).start();
    agent.wait_ready().await;
    assert!(std::fs::read_to_string(agent.path("first")).unwrap().contains("FLAG: "));
    let text = agent.post("/logging?level=debug").await.unwrap().text();
    assert!(text.contains("debug"), "{text}");
    agent.wait_ready().await;
    agent.assert_running();
    agent.stop().await;
}

/// A log in a file that may not grow any more.
#[tokio::test]
async fn a_log_at_the_size_that_a_file_may_have_ends_nothing() {
    let mock = MockIstiod::start().await;
    let script =
        "head -c 99990 /dev/zero >log; exec >>log 2>&1; exec prlimit --fsize=100000:unlimited \"$@\"";
    let words: Vec<String> = ["sh", "-c", script, "sh"].map(str::to_owned).into();
    let mut agent = TestAgent::with().istiod(&mock).before(&words).start();
    agent.wait_ready().await;
    agent.assert_running();
    assert_eq!(std::fs::metadata(agent.path("log")).unwrap().len(), 100_000);
    // Whoever looks elsewhere learns why there is no more of it, and that it is over. (The timeline keeps it.)
    let told = async || {
        agent.get("/debug/agentz").await.ok().filter(|page| page.text().contains("\"kind\": \"DiskFull\""))
    };
    let page = crate::support::eventually("the trouble", told).await.text();
    assert!(page.contains("the log cannot be written"), "{page}");
    let more = ["--fsize=unlimited", "--pid", &agent.pid().as_raw_pid().to_string()];
    assert!(std::process::Command::new("prlimit").args(more).status().unwrap().success());
    let over = async || {
        // Each is a change, and a line.
        agent.post("/logging?sds=debug").await.ok()?;
        agent.post("/logging?sds=info").await.ok()?;
        told().await.is_none().then_some(())
    };
    crate::support::eventually("its end", over).await;
    let log = std::fs::read(agent.path("log")).unwrap();
    assert_eq!(
        log[100_000],
        b'\n',
        "the line that was cut stays by itself: {}",
        log[99_990..].escape_ascii()
    );
    agent.stop().await;
}

#[tokio::test]
async fn an_admin_port_that_never_answers_does_not_hold_up_the_end() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).fake("hang", vec!["/drain_listeners"]).start();
    serving(&agent).await;
    agent.signal(Signal::TERM);
    assert_eq!(code(agent.wait_exit().await), 0);
    assert_eq!(asked(&agent), [DRAIN]);
    agent.assert_clean().await;
}

/// One that waits up to three seconds for connections to end, which this page of Envoy's counts.
fn counting(mock: &MockIstiod, stats: &str) -> Builder {
    TestAgent::with()
        .istiod(mock)
        .env("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true")
        .env("MINIMUM_DRAIN_DURATION", "0s")
        .env("MAXIMUM_DRAIN_DURATION", "3s")
        .fake("stats", stats)
}

#[tokio::test]
async fn exit_on_zero_waits_for_connections_up_to_a_cap() {
    let mock = MockIstiod::start().await;
    let mut agent = counting(&mock, "listener.0.0.0.0_8080.downstream_cx_active: 2\n").start();
    serving(&agent).await;
    agent.signal(Signal::TERM);
    assert_eq!(code(agent.wait_exit().await), 0);
    let polls = asked(&agent).iter().filter(|r| r.contains("downstream_cx_active$")).count();
    assert!(polls >= 1, "{:?}", asked(&agent));
    agent.assert_clean().await;
}

/// Each of them was a line.
#[tokio::test]
async fn a_storm_of_signals_and_senseless_stats_leave_a_few_lines() {
    let mock = MockIstiod::start().await;
    let stats = format!("listener.0.0.0.0_8080.downstream_cx_active: 2\n{}", "no stat\n".repeat(1000));
    let mut agent = counting(&mock, &stats).start();
    serving(&agent).await;
    eventually("Envoy is killed", async || {
        for _ in 0..5 {
            agent.signal(Signal::TERM);
            agent.signal(Signal::INT);
        }
        agent.log().contains("Envoy is killed").then_some(())
    })
    .await;
    assert_eq!(code(agent.wait_exit().await), 0);
    let log = agent.log().text();
    let of = |part: &str| log.lines().filter(|line| line.contains(part)).count();
    assert!((1..=10).contains(&of("nothing changes")), "{log}");
    assert!((1..=30).contains(&of("is not 'name: value'")), "{log}");
    agent.assert_clean().await;
}

#[tokio::test]
async fn what_holds_up_the_end_is_named() {
    let mock = MockIstiod::start().await;
    let stats = "listener.0.0.0.0_8080.downstream_cx_active: 2\nlistener.10.0.0.1_15006.downstream_cx_active: 7\n\
                 http.inbound_8080.downstream_rq_active: 4\nhttp.admin.downstream_rq_active: 1\n";
    let builder = TestAgent::with()
        .istiod(&mock)
        .env("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true")
        .env("MINIMUM_DRAIN_DURATION", "0s")
        .env("MAXIMUM_DRAIN_DURATION", "3s")
        .env("DRAIN_COUNT_REQUESTS", "true");
    let mut agent = builder.fake("stats", stats).start();
    serving(&agent).await;
    agent.signal(Signal::TERM);
    assert_eq!(code(agent.wait_exit().await), 0);
    let log = agent.log().text();
    let holders = "10.0.0.1_15006 (7), 0.0.0.0_8080 (2)";
    assert!(
        log.contains(&format!(
            "there are still 9 active connections, 4 requests under way, held by {holders}"
        ))
    );
    assert!(
        log.contains("report: status 0") && log.contains(&format!("cut off: 9 connections of {holders}")),
        "{log}"
    );
    agent.assert_clean().await;
}

#[tokio::test]
async fn an_envoy_that_was_drained_and_left_standing_is_ended() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("DRAINED_ENVOY_LIMIT", "300ms").start();
    serving(&agent).await;
    assert_eq!(agent.post("/drain").await.unwrap().status.as_u16(), 200);
    assert_eq!(code(agent.wait_exit().await), 0);
    assert_eq!(asked(&agent), [DRAIN_NOW]);
    assert!(agent.log().contains("DRAINED_ENVOY_LIMIT"));
    agent.assert_clean().await;
}

#[tokio::test]
async fn quit_answers_then_ends_without_a_drain() {
    let mock = MockIstiod::start().await;
    for _ in 0..5 {
        let mut agent =
            TestAgent::with().istiod(&mock).proxy_config("terminationDrainDuration", "600s").start();
        serving(&agent).await;
        let reply = agent.post("/quitquitquit").await.expect("the answer comes before the end");
        assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "OK"));
        assert_eq!(code(agent.wait_exit().await), 0);
        assert!(asked(&agent).is_empty(), "{:?}", asked(&agent));
        assert!(!agent.path(BOOTSTRAP).exists());
        agent.assert_clean().await;
    }
}

#[tokio::test]
async fn quit_works_without_envoy() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("DISABLE_ENVOY", "true").start();
    eventually("none is to be started", || async {
        agent.get("/debug/agentz").await.ok()?.text().contains("\"Disabled\"").then_some(())
    })
    .await;
    let reply = eventually("the status server", || async { agent.post("/quitquitquit").await.ok() }).await;
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "OK"));
    assert_eq!(code(agent.wait_exit().await), 0);
}

#[tokio::test]
async fn a_drain_stays_and_replaces_the_one_at_the_end() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).proxy_config("terminationDrainDuration", "600s").start();
    serving(&agent).await;
    assert_eq!(agent.post("/drain").await.unwrap().status.as_u16(), 200);
    agent.assert_running();
    agent.signal(Signal::TERM);
    assert_eq!(code(agent.wait_exit().await), 0);
    assert_eq!(asked(&agent), [DRAIN_NOW]);
    agent.assert_clean().await;
}

#[tokio::test]
async fn envoys_own_end_is_the_agents_exit_status() {
    let mock = MockIstiod::start().await;
    for status in [0, 1, 3, 139, 255] {
        let end = serde_json::json!({"after": 0, "status": status});
        let mut agent = TestAgent::with().istiod(&mock).fake("exit", end.clone()).start();
        assert_eq!(code(agent.wait_exit().await), status);
        assert!(!agent.path(BOOTSTRAP).exists());
        agent.assert_clean().await;
        let restored =
            TestAgent::with().istiod(&mock).fake("exit", end).env("ENVOY_EXIT_ALWAYS_ZERO", "true");
        assert_eq!(code(restored.start().wait_exit().await), 0);
    }
}

#[tokio::test]
async fn a_killed_envoy_is_128_and_the_signal_with_the_reason_last() {
    let mock = MockIstiod::start().await;
    for (signal, status, text) in
        [(Signal::KILL, 137, "signal: killed"), (Signal::SEGV, 139, "segmentation fault")]
    {
        let mut agent = TestAgent::with().istiod(&mock).start();
        serving(&agent).await;
        rustix::process::kill_process(agent.envoy_pid().await, signal).unwrap();
        assert_eq!(code(agent.wait_exit().await), status);
        agent.wait_log(text).await;
        agent.assert_clean().await;
    }
}

#[tokio::test]
async fn what_cannot_be_executed_is_named() {
    let mock = MockIstiod::start().await;
    for (name, text, mode) in [
        ("missing", None, 0),
        ("not-executable", Some("#!/bin/sh\nsleep 1000\n"), 0o644),
        ("no-program", Some("sleep 1000\n"), 0o755),
        ("bad-interpreter", Some("#!/no/such/interpreter\n"), 0o755),
    ] {
        let mut builder = TestAgent::with().istiod(&mock).envoy(Envoy::Binary(format!("./{name}").into()));
        if let Some(text) = text {
            builder = builder.file_mode(name, text, mode);
        }
        let mut agent = builder.start();
        assert_eq!(code(agent.wait_exit().await), 1, "{name}");
        agent.wait_log(name).await;
        assert!(!agent.path(BOOTSTRAP).exists());
        agent.assert_clean().await;
    }
}

#[tokio::test]
async fn a_killed_agent_leaves_no_envoy() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    serving(&agent).await;
    agent.signal(Signal::KILL);
    assert!(agent.wait_exit().await.code().is_none());
    eventually("Envoy is gone", || async { agent.processes().is_empty().then_some(()) }).await;
    // The next agent in the same place starts as if nothing had been.
    let dir = agent.take_dir();
    let mut agent = TestAgent::with().istiod(&mock).start_in(dir);
    agent.wait_ready().await;
    agent.stop().await;
}

/// An Envoy that sleeps, whatever its arguments: a shell that becomes its command, the configuration file (other shells
/// would start it as a child, and then it is no plain Envoy).
fn sleeper(dir: &std::path::Path, name: &str, mode: u32) -> std::path::PathBuf {
    let path = dir.join(name);
    // Bash becomes the one command it is given, as Envoy is one process; other shells fork.
    std::fs::copy("/bin/bash", &path).unwrap();
    // Another owner and group than the agent's: only then does a set-id bit change anything.
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(1337), Some(1337)).expect("we are root");
    }
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

#[tokio::test]
async fn a_killed_agent_leaves_no_envoy_of_any_form() {
    let mock = MockIstiod::start().await;
    for (form, mode, script) in [
        ("plain", 0o755, None),
        ("setgid", 0o2755, None),
        ("setuid", 0o4755, None),
        ("wrapper", 0o755, Some("#!/bin/sh\n./sleeper \"$@\"\nexit 3\n")),
        ("wrapper of a setgid Envoy", 0o2755, Some("#!/bin/sh\n./sleeper \"$@\" &\nwait\n")),
    ] {
        if mode & 0o6000 != 0 && !root_for("an Envoy of another user's") {
            continue;
        }
        let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
        let binary = sleeper(dir.path(), "sleeper", mode);
        let mut builder = TestAgent::with()
            .istiod(&mock)
            .envoy(Envoy::Binary(binary))
            .file_mode("hang.sh", "#!/bin/sh\necho $$ >pid.new; mv pid.new pid; exec sleep 1000\n", 0o755)
            .proxy_config("customConfigFile", "./hang.sh");
        if let Some(script) = script {
            builder = builder
                .file_mode("wrapper.sh", script, 0o755)
                .envoy(Envoy::Binary(dir.path().join("wrapper.sh")));
        }
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(dir.path(), Some(1337), Some(1337)).expect("we are root");
        }
        let mut agent = builder.start_in(dir);
        eventually(&format!("{form}: Envoy starts"), || async {
            std::fs::read_to_string(agent.path("pid")).ok()
        })
        .await;
        agent.signal(Signal::KILL);
        assert!(agent.wait_exit().await.code().is_none());
        eventually(&format!("{form}: Envoy is gone"), || async {
            agent.processes().is_empty().then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn an_envoy_that_an_earlier_agent_left_is_ended_at_the_start() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    serving(&agent).await;
    let left = agent.envoy_pid().await;
    // Everything that could end it dies first.
    for (pid, name) in agent.processes() {
        if name.starts_with("pilot-agent") && pid != agent.pid() {
            rustix::process::kill_process(pid, Signal::KILL).unwrap();
        }
    }
    agent.signal(Signal::KILL);
    assert!(agent.wait_exit().await.code().is_none());
    rustix::process::test_kill_process(left).expect("it was left behind");
    let dir = agent.take_dir();
    let mut agent = TestAgent::with().istiod(&mock).start_in(dir);
    agent.wait_ready().await;
    agent.wait_log("an earlier agent left Envoy running").await;
    eventually("it is gone", || async { rustix::process::test_kill_process(left).is_err().then_some(()) })
        .await;
    // Its file of notes belongs to two by now; the new one is in order.
    agent.stop().await;
}

#[tokio::test]
async fn an_envoy_that_ignores_everything_is_killed() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).fake("ignore_term", true).start();
    serving(&agent).await;
    agent.signal(Signal::TERM);
    agent.signal(Signal::TERM);
    agent.signal(Signal::INT);
    assert_eq!(code(agent.wait_exit().await), 0);
    agent.assert_clean().await;
}

#[tokio::test]
async fn a_custom_configuration_is_the_users() {
    let mock = MockIstiod::start().await;
    let script = "#!/bin/sh\necho \"$@\" > args.new; mv args.new args; exec sleep 1000\n";
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .envoy(Envoy::Binary("./envoy.sh".into()))
        .file_mode("envoy.sh", script, 0o755)
        .file("my.json", "{}")
        .proxy_config("customConfigFile", "my.json")
        .start();
    let args =
        eventually("Envoy starts", || async { std::fs::read_to_string(agent.path("args")).ok() }).await;
    assert!(args.starts_with("-c my.json "), "{args}");
    assert!(!agent.path(BOOTSTRAP).exists());
    agent.signal(Signal::TERM);
    assert_eq!(code(agent.wait_exit().await), 0);
    assert!(agent.path("my.json").exists());
}

#[tokio::test]
async fn recovery_starts_envoy_again_and_it_becomes_ready() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("ENVOY_RECOVERY", "true").start();
    serving(&agent).await;
    agent.wait_ready().await;
    let first = agent.envoy_pid().await;
    rustix::process::kill_process(first, Signal::SEGV).unwrap();
    eventually("another Envoy", || async { agent.envoy().filter(|pid| *pid != first) }).await;
    agent.wait_ready().await;
    agent.assert_running();
    agent.stop().await;
}

#[tokio::test]
async fn the_modes_of_what_is_written() {
    let mock = MockIstiod::start().await;
    let agent = TestAgent::with().istiod(&mock).start();
    serving(&agent).await;
    let mode = std::fs::metadata(agent.path(BOOTSTRAP)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o644);
    let beside = std::fs::read_dir(agent.path("etc/istio/proxy")).unwrap().flatten();
    let beside: Vec<_> = beside.filter(|e| e.file_name().to_string_lossy().contains("envoy-rev")).collect();
    assert_eq!(beside.len(), 1, "nothing half-written is left");
    assert!(agent.path(agent::XDS).exists());
    agent.stop().await;
}

// Who shares the folder with the agent plants a link where its next file would be.
#[tokio::test]
async fn planted_links_lead_nowhere() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let victim = dir.path().join("victim");
    std::fs::write(&victim, "kept").unwrap();
    for place in
        [BOOTSTRAP, "etc/istio/proxy/grpc.json", "out/key.pem", "out/cert-chain.pem", "out/root-cert.pem"]
    {
        let path = dir.path().join(place);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        for ending in ["", ".new", ".tmp", "~"] {
            let mut name = path.clone().into_os_string();
            name.push(ending);
            std::os::unix::fs::symlink(&victim, name).unwrap();
        }
    }
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .env("GRPC_XDS_BOOTSTRAP", "etc/istio/proxy/grpc.json")
        .env("OUTPUT_CERTS", "out")
        .start_in(dir);
    agent.wait_ready().await;
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&crate::support::client::secret_request("default"));
    stream.next().await.unwrap();
    eventually("the key is written", || async {
        std::fs::read_to_string(agent.path("out/key.pem"))
            .is_ok_and(|t| t.contains("PRIVATE KEY"))
            .then_some(())
    })
    .await;
    assert_eq!(std::fs::read_to_string(agent.path("victim")).unwrap(), "kept");
    assert!(std::fs::read_to_string(agent.path(BOOTSTRAP)).unwrap().contains("static_resources"));
    agent.stop().await;
}

#[tokio::test]
async fn an_envoy_of_somebody_else_is_served_and_left_alone() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("ENVOY_EXTERNAL", "true").start();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&crate::support::client::secret_request("default"));
    stream.next().await.unwrap();
    let ready = eventually("the status server", || async { agent.get("/healthz/ready").await.ok() }).await;
    assert_eq!(ready.status.as_u16(), 503, "its admin port does not answer yet");
    assert!(agent.fake_notes().is_empty(), "the agent starts none");
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_envoy.py");
    let mut envoy = tokio::process::Command::new(fake)
        .args(["-c", BOOTSTRAP])
        .env("FAKE_ENVOY", "{}")
        .current_dir(agent.path(""))
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    agent.wait_ready().await;
    agent.signal(Signal::TERM);
    assert_eq!(code(agent.wait_exit().await), 0);
    assert!(asked(&agent).is_empty(), "{:?}", asked(&agent));
    assert!(envoy.try_wait().unwrap().is_none(), "it is not the agent's to end");
    assert!(!agent.path(BOOTSTRAP).exists());
    envoy.kill().await.unwrap();
}

#[tokio::test]
async fn no_envoy_and_somebody_elses_exclude_each_other() {
    let mut agent = TestAgent::with().env("ENVOY_EXTERNAL", "true").env("DISABLE_ENVOY", "true").start();
    assert_eq!(code(agent.wait_exit().await), 255);
    agent.wait_log("ENVOY_EXTERNAL").await;
}
