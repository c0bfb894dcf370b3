//! The command's surface: exit statuses, dry run, locks and namespaces, the validation.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::SIDECAR;
use crate::world::{Backend, World};

const V4: &[&str] = &["10.77.5.2/24"];

#[test]
fn exit_statuses() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    let before = world.everything();
    for (options, status, says) in [
        ("--nonsense", 255, "unknown flag: --nonsense"),
        ("--iptables-probe-port=70000", 255, "iptables-probe-port"),
        ("--dry-run=perhaps", 255, "dry-run"),
        ("--probe-timeout=5", 255, "probe-timeout"),
        ("-x *", 1, "OUTBOUND_IP_RANGES_EXCLUDE"),
        ("-i 10.0.0.1", 1, "no '/'"),
        ("--force-iptables-binary other", 1, "FORCE_IPTABLES_BINARY"),
        ("--force-iptables-binary legacy", 1, "iptables-legacy-save is not installed"),
        ("--skip-rule-apply", 0, ""),
        ("--skip-rule-apply --run-validation --probe-timeout 100ms", 126, "validation timeout"),
        ("--skip-rule-apply --run-validation -p x -z 70000", 126, "no listener available"),
    ] {
        let said = world.apply(options, status);
        assert!(said.contains(says), "{options}: {said}");
        assert_eq!(world.everything(), before, "{options}");
    }
}

#[test]
fn a_program_that_hangs_holds_up_no_end_and_leaves_nothing() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    let pids = world.path("pids");
    let before = world.everything();
    world.shim(
        "iptables-nft-save",
        &format!("/bin/sleep 1000 & echo $! $$ >{0}.new; /bin/mv {0}.new {0}; wait", pids.display()),
    );
    let mut agent = world.spawn(SIDECAR);
    while !pids.exists() {
        assert!(agent.try_wait().expect("our child").is_none(), "it ended before its program hung");
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_raw(i32::try_from(agent.id()).expect("an ID")).expect("an ID");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("not waited for yet");
    assert_eq!(agent.wait().expect("our child").code(), Some(1));
    for pid in std::fs::read_to_string(&pids).expect("it is there").split_whitespace() {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(stat.is_empty() || stat.contains(") Z "), "{stat}");
    }
    world.unshim("iptables-nft-save");
    assert_eq!(world.everything(), before);
}

/// `nohup pilot-agent istio-iptables ...`: the terminal's end cuts no run short.
#[test]
fn a_hangup_that_is_ignored_from_the_start_ends_no_run() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    let begun = world.path("begun");
    world.shim("iptables-nft-save", &format!(": >{}; /bin/sleep 0.5; exec @REAL@ \"$@\"", begun.display()));
    let words: Vec<&str> = ["istio-iptables"].into_iter().chain(SIDECAR.split_whitespace()).collect();
    let agent = world.command_of(&words);
    let mut nohup = std::process::Command::new("/usr/bin/nohup");
    nohup.arg(agent.get_program()).args(agent.get_args());
    let mut agent = nohup
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("nohup runs");
    world.wait_for("the first look", || begun.exists());
    let pid = rustix::process::Pid::from_raw(i32::try_from(agent.id()).expect("an ID")).expect("an ID");
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).expect("not waited for yet");
    assert_eq!(agent.wait().expect("our child").code(), Some(0));
}

#[test]
fn without_an_address_nothing_is_done() {
    let Some(world) = World::new(Backend::Nft, &["169.254.7.2/16"]) else { return };
    for options in [SIDECAR.to_owned(), format!("{SIDECAR} --dry-run")] {
        let said = world.apply(&options, 1);
        assert!(said.contains("no valid local IP address found"), "{said}");
    }
}

#[test]
fn a_dry_run_writes_its_file_and_starts_nothing() {
    for options in ["", "--cleanup-only", "--native-nftables", "-m TPROXY --redirect-dns"] {
        let Some(world) = World::new(Backend::Nft, &["fd00:77:5::2/64"]) else { return };
        let (before, log, file) = (world.everything(), world.path("programs"), world.path("rules.txt"));
        for name in ["iptables-nft-save", "iptables-nft-restore", "iptables-save", "nft"] {
            world.shim(name, &format!("echo {name} >>{}", log.display()));
        }
        world.set("DRY_RUN_FILE_PATH", &file.display().to_string());
        std::fs::write(&file, "of an earlier run\n".repeat(5000)).expect("our file");
        let said = world.apply(&format!("{SIDECAR} {options} --dry-run"), 0);
        assert_eq!(world.everything(), before, "{options}");
        assert!(!log.exists(), "{options}: {:?}", std::fs::read_to_string(&log));
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        match options {
            "--native-nftables" => assert!(said.contains("add table inet istio-proxy-nat"), "{said}"),
            _ if written.contains("earlier run") => panic!("its end stays: {written:.200}"),
            "--cleanup-only" => assert!(written.contains("iptables -t nat -X ISTIO_OUTPUT\n"), "{written}"),
            _ => {
                assert!(written.starts_with("iptables-save\nip6tables-save\n* "), "{written}");
                assert!(written.ends_with("COMMIT\niptables-save\nip6tables-save\n"), "{written}");
            }
        }
    }
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    world.set("DRY_RUN_FILE_PATH", "/nowhere/rules.txt");
    world.apply(&format!("{SIDECAR} --dry-run"), 0);
    let file = world.path("rules.txt");
    world.set("DRY_RUN_FILE_PATH", &file.display().to_string());
    world.apply(&format!("{SIDECAR} -x 10/8 --dry-run"), 1);
    assert!(!file.exists());
}

/// What VM scripts and init containers of 0.8 to 1.8 call, by the names they had, with the arguments of 0.8.
#[test]
fn programs_of_older_releases_run_by_their_names() {
    for backend in [Backend::Nft, Backend::Legacy] {
        let (Some(today), Some(then)) = (World::new(backend, V4), World::new(backend, V4)) else { return };
        let empty = then.everything();
        let options = "-p 15001 -u 1337 -g 1337 -m REDIRECT -i * -b * -d 15020";
        today.apply(options, 0);
        then.called("istio-iptables.sh", &format!("{options} -k vif0"), 0);
        // Rules of a VM's interface are known to be ours only by its name and by what they capture.
        then.called("istio-clean-iptables", "-k vif0 -i *", 0);
        assert_eq!(then.everything(), empty, "all of it is gone");
        then.called("istio-iptables.sh", options, 0);
        assert_eq!(then.everything(), today.everything());
        then.called("istio-iptables.sh", "clean", 0);
        assert_eq!(then.everything(), empty);
        for form in ["--restore-format", "--restore-format=false", "-f=false"] {
            then.called("istio-iptables", &format!("{options} {form}"), 0);
            assert_eq!(then.everything(), today.everything(), "{form}");
        }
    }
}

/// Holds a lock while `apply` runs in another thread: it waits for the lock, or ends while that is held.
fn holding(world: &World, lock: &str, waits: bool, apply: impl FnOnce() + Send) {
    let file = File::options().write(true).create(true).truncate(false).open(world.path(lock));
    let file = file.expect("a scratch file");
    flock(&file, FlockOperation::LockExclusive).expect("nobody else holds it");
    // A run that waits is given time to go wrong; one that does not wait, as much as a busy machine takes
    // (less than the 30 s after which a run that waits would give up).
    let limit = Duration::from_secs(if waits { 1 } else { 25 });
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            apply();
            ended.store(true, Ordering::SeqCst);
        });
        let begun = Instant::now();
        while begun.elapsed() < limit && !thread.is_finished() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let before = ended.load(Ordering::SeqCst);
        drop(file);
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
        assert_eq!(before, !waits, "{lock}");
    });
}

#[test]
fn legacy_waits_for_the_lock_and_nft_does_not() {
    for (backend, waits) in [(Backend::Legacy, true), (Backend::Nft, false)] {
        let Some(world) = World::new(backend, V4) else { return };
        let words: Vec<String> = SIDECAR.split(' ').map(str::to_owned).collect();
        holding(&world, "run/xtables.lock", waits, || drop(world.apply_words(&words, 0)));
        assert!(world.all_rules().contains("ISTIO_REDIRECT"), "{backend:?}");
    }
}

#[test]
fn cni_mode_locks_the_pods_namespace_in_place_of_the_host() {
    let Some(world) = World::new(Backend::Legacy, V4) else { return };
    std::fs::write(world.path("pod-lock"), "").expect("a scratch file");
    let place = world.path("pod-lock").display().to_string();
    let words: Vec<String> =
        SIDECAR.split(' ').chain(["--cni-mode", "--network-namespace", &place]).map(str::to_owned).collect();
    // Not the host's lock, but the pod's; none where the rules are in place and nothing is written.
    holding(&world, "run/xtables.lock", false, || drop(world.apply_words(&words, 0)));
    holding(&world, "pod-lock", false, || drop(world.apply_words(&words, 0)));
    let cleanup: Vec<String> = words.iter().cloned().chain(["--cleanup-only".to_owned()]).collect();
    holding(&world, "pod-lock", true, || drop(world.apply_words(&cleanup, 0)));
}

#[test]
fn a_network_namespace_alone_changes_nothing() {
    for backend in [Backend::Nft, Backend::Legacy] {
        let Some(world) = World::new(backend, V4) else { return };
        world.apply(&format!("{SIDECAR} --network-namespace /nowhere"), 0);
        assert!(world.all_rules().contains("ISTIO_REDIRECT"));
    }
}

#[test]
fn the_validation_tells_whether_rules_are_there() {
    for addresses in [V4, &["fd00:77:5::2/64"]] {
        for mode in ["", "-m TPROXY", "--native-nftables"] {
            let Some(world) = World::new(Backend::Nft, addresses) else { return };
            let check = "--skip-rule-apply --run-validation --probe-timeout 60s";
            assert_eq!(world.as_user(1337, &format!("{check} --probe-timeout 300ms")), 126, "no rules yet");
            let before = world.everything();
            world.apply(&format!("{SIDECAR} {mode}"), 0);
            let once = world.everything();
            assert_ne!(once, before);
            assert_eq!(world.as_user(1337, check), 0, "{mode}");
            for none in ["0s", "-1s"] {
                let check = format!("{check} --probe-timeout {none}");
                assert_eq!(world.as_user(1337, &check), 126, "{mode}: no time is too little");
            }
            assert_eq!(world.as_user(1337, &format!("{check} --iptables-probe-port 17000")), 0, "{mode}");
            // The tunnel's port is never redirected, nor is another user's connection.
            let short = "--skip-rule-apply --run-validation --probe-timeout 1500ms";
            assert_eq!(world.as_user(1337, &format!("{short} --iptables-probe-port 15008")), 126, "{mode}");
            assert_eq!(world.as_user(2000, short), 126, "{mode}");
            assert_eq!(world.everything(), once, "{mode}: the validation changed something");
        }
    }
}

#[test]
fn a_validation_can_be_ended() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    let mut agent = world.spawn("--skip-rule-apply --run-validation --probe-timeout 1h");
    world.wait_listening(15001);
    // Nothing has redirected this one: it is told nothing.
    assert_eq!(world.inside("exec bash -c 'exec 3<>/dev/tcp/127.0.0.1/15001; cat <&3'"), "");
    let pid = rustix::process::Pid::from_raw(i32::try_from(agent.id()).expect("a process ID"));
    rustix::process::kill_process(pid.expect("a process ID"), rustix::process::Signal::TERM)
        .expect("it runs");
    assert_eq!(agent.wait().expect("our child").code(), Some(1));
}
