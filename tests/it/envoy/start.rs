//! How Envoy is started, and what is said when it cannot be.

use pilot_agent::testing::envoy::{Exit, Reason};

use super::fake::{LONG, Scene, eventually, file, write_executable};

#[tokio::test]
async fn envoy_gets_what_the_agent_has_and_nothing_else() {
    // The shell itself reads its signals: while it starts a program it blocks them all for a moment.
    let mut scene = Scene::new(
        "ls /proc/self/fd > $D/fds; fds=$(cat $D/fds | tr '\\n' ' ')\n\
         { echo args=$*; echo ppid=$PPID; readlink /proc/$$/fd/0; echo $fds; \
         while read -r l; do case $l in Sig[BI][lg]*) echo \"$l\";; esac; done < /proc/$$/status; cut -d' ' -f5 /proc/$$/stat; env | grep -c '^EXTRA=x'; pwd; } > $D/facts.new\n\
         mv $D/facts.new $D/facts; exec sleep 1000",
    );
    scene.config.extra_env = vec![("EXTRA".into(), "x".into())];
    let (supervisor, handle) = scene.supervisor();
    let look = async {
        let facts = file(scene.path("facts")).await;
        handle.quit();
        facts
    };
    let (outcome, facts) =
        tokio::time::timeout(LONG, async { tokio::join!(supervisor.run(), look) }).await.unwrap();
    assert_eq!(outcome.exit_code, 0);
    let lines: Vec<&str> = facts.lines().collect();
    let config = scene.path("conf/envoy-rev.json");
    assert!(lines[0].starts_with(&format!("args=-c {} --drain-time-s 45 ", config.display())), "{facts}");
    assert_eq!(lines[1], format!("ppid={}", std::process::id()), "the launcher leaves no process between");
    assert_eq!(lines[2], "/dev/null");
    // Whoever started this test may have left descriptors open; one is `ls` looking at the folder.
    let inherited = |fd: &str| {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
        let flags = info.lines().find_map(|l| l.strip_prefix("flags:\t")).unwrap_or("02000000");
        i64::from_str_radix(flags, 8).unwrap() & 0o2_000_000 == 0
    };
    let extra: Vec<_> = lines[3].split(' ').filter(|fd| !inherited(fd)).collect();
    assert!(extra.len() <= 1, "descriptors: {extra:?}");
    assert_eq!(lines[4].trim_start_matches("SigBlk:\t").trim_start_matches('0'), "");
    // What this test itself ignores, but for SIGPIPE, which Rust programs ignore for themselves alone.
    // Signals from 32 on are the C library's own.
    let ignored =
        |text: &str| u64::from_str_radix(text.trim_start_matches("SigIgn:\t"), 16).unwrap() & 0x7fff_ffff;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let own = ignored(status.lines().find(|l| l.starts_with("SigIgn:")).unwrap());
    assert_eq!(ignored(lines[5]), own & !(1 << 12));
    let group = std::fs::read_to_string("/proc/self/stat").unwrap();
    let group = group.rsplit(") ").next().unwrap().split(' ').nth(2).unwrap().to_owned();
    assert_eq!(lines[6], group, "the agent's process group");
    assert_eq!(lines[7], "1");
    assert_eq!(lines[8], std::env::current_dir().unwrap().to_str().unwrap());
    scene.assert_clean();
}

#[tokio::test]
async fn what_cannot_be_executed_is_named_and_is_status_1() {
    let scene = |name: &str, text: Option<&str>, executable: bool| {
        let mut scene = Scene::new("");
        let path = scene.path(name);
        match text {
            Some(text) if executable => write_executable(&path, text),
            Some(text) => std::fs::write(&path, text).unwrap(),
            None => {}
        }
        scene.config.binary = path.to_str().unwrap().to_owned();
        scene
    };
    let cases = [
        (scene("missing", None, false), "no such file or directory"),
        (scene("plain", Some("#!/bin/sh\n"), false), "permission denied"),
        (scene("text", Some("echo this is no program, whatever its mode\n"), true), "exec format error"),
        (scene("empty", Some(""), true), "exec format error"),
        (scene("script", Some("#!/no/such/shell\n"), true), "no such file or directory"),
        (scene(".", None, false), "directory"),
    ];
    for (scene, why) in cases {
        let outcome = scene.run().await;
        assert_eq!(outcome.exit_code, 1, "{outcome:?}");
        assert!(matches!(&outcome.exit, Some(Exit::NotStarted(text)) if text.contains(why)), "{outcome:?}");
        assert!(outcome.reason.contains(&scene.config.binary), "{outcome:?}");
        scene.assert_clean();
    }
    let mut scene = Scene::new("");
    scene.config.binary = "no-such-program-on-the-path".into();
    assert!(scene.run().await.reason.contains("$PATH"));
}

#[tokio::test]
async fn a_launcher_that_is_gone_is_named() {
    let mut scene = Scene::new("exit 0");
    scene.config.launcher = "/no/such/launcher".into();
    let outcome = scene.run().await;
    assert_eq!(outcome.exit_code, 1);
    assert!(outcome.reason.contains("/no/such/launcher"), "{outcome:?}");
    scene.assert_clean();
}

#[tokio::test]
async fn another_user_needs_root_and_gets_no_groups() {
    if !crate::support::root_for("changing the user") {
        return;
    }
    let mut scene = Scene::new(
        "{ id -u; id -g; id -G; } > $D/open/id.new; mv $D/open/id.new $D/open/id; exec sleep 1000",
    );
    use std::os::unix::fs::PermissionsExt;
    let all = |path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    all(scene.path(""), 0o755);
    std::fs::create_dir(scene.path("open")).unwrap();
    all(scene.path("open"), 0o777);
    scene.config.user = Some((1337, 1337));
    let (supervisor, handle) = scene.supervisor();
    let look = async {
        let id = file(scene.path("open/id")).await;
        handle.quit();
        id
    };
    let (_, id) = tokio::join!(supervisor.run(), look);
    assert_eq!(id, "1337\n1337\n1337\n");
}

#[tokio::test]
async fn a_stop_before_the_start_starts_nothing() {
    let scene = Scene::new("touch $D/started; exec sleep 1000");
    let (supervisor, handle) = scene.supervisor();
    assert!(scene.path("conf/envoy-rev.json").exists(), "written before anything runs");
    handle.stop(Reason::Signal("terminated"));
    let outcome = supervisor.run().await;
    assert_eq!((outcome.exit_code, outcome.reason.as_str()), (0, "received signal: terminated"));
    assert!(!scene.path("started").exists());
    scene.assert_clean();
}

#[tokio::test]
async fn without_envoy_it_waits_for_the_stop() {
    let (supervisor, handle) =
        pilot_agent::testing::envoy::Supervisor::idle(&pilot_agent::testing::base::metrics::Metrics::new());
    handle.drain_now().await;
    handle.reload(true);
    let asked = async { handle.quit() };
    let (outcome, ()) = tokio::join!(supervisor.run(), asked);
    assert_eq!((outcome.exit_code, outcome.reason.as_str()), (0, "/quitquitquit called"));
}

#[tokio::test]
async fn a_dropped_supervisor_leaves_neither_process_nor_file() {
    let scene = Scene::new("echo $$ > $D/pid.new; mv $D/pid.new $D/pid; exec sleep 1000");
    let (supervisor, _handle) = scene.supervisor();
    let pid = {
        let run = supervisor.run();
        tokio::pin!(run);
        tokio::select! {
            outcome = &mut run => panic!("{outcome:?}"),
            pid = file(scene.path("pid")) => pid,
        }
    };
    eventually("Envoy is gone", || (!super::fake::runs(&pid)).then_some(())).await;
    scene.assert_clean();
}

#[tokio::test]
async fn a_killed_agent_takes_envoy_with_it() {
    let scene = Scene::new("");
    // A shell in the agent's place: it starts the launcher as its child and is then killed.
    let agent = scene.path("agent");
    let launcher = super::fake::LAUNCHER;
    let text = format!(
        "#!/bin/sh\n{launcher} __exec-envoy $$ - signal - sleep 1000 &\necho $! > {0}/pid.new; mv {0}/pid.new {0}/pid; wait\n",
        scene.path("").display()
    );
    write_executable(&agent, &text);
    let mut agent = std::process::Command::new(&agent).spawn().unwrap();
    let pid = file(scene.path("pid")).await;
    let comm = format!("/proc/{}/comm", pid.trim());
    eventually("exec", || (std::fs::read_to_string(&comm).ok()? == "sleep\n").then_some(())).await;
    agent.kill().unwrap();
    agent.wait().unwrap();
    eventually("Envoy is gone", || (!super::fake::runs(&pid)).then_some(())).await;
}

#[test]
fn a_launcher_whose_agent_is_gone_starts_nothing() {
    let scene = Scene::new("touch $D/started");
    let status = std::process::Command::new(super::fake::LAUNCHER)
        .args([pilot_agent::testing::envoy::launch::ARGUMENT, "1", "-", &scene.config.binary])
        .stdin(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(127));
    assert!(!scene.path("started").exists());
}
