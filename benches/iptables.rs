//! What it costs to capture a pod's traffic: programs started and time, in a network namespace of its own.
//!
//! Programs are counted in a run of its own, with scripts in their places that note each start; times are
//! taken without them. As root only.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::table::{Row, Value};

/// What the injector asks for.
const RULES: &str = "-p 15001 -z 15006 -u 1337 -m REDIRECT -i * -b * -d 15090,15021,15020";
const STEPS: [(&str, &str, &str); 3] =
    [("first apply", "", "≤ 5"), ("second apply", "", "≤ 5"), ("clean-up", "--cleanup-only", "≤ 6")];
const SBIN: &str = "/usr/sbin:/sbin:/usr/bin:/bin";

/// The rows, or why there are none.
pub(crate) fn rows(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("needs root and a network namespace".to_owned());
    }
    let mut rows = Vec::new();
    for (installed, kinds) in [("nft", &["nft"][..]), ("nft and legacy", &["legacy", "nft"])] {
        let programs = Programs::link(kinds)?;
        let mut measured = binaries.iter().map(|binary| measure(binary, &programs, runs));
        let ours = measured.next().transpose()?;
        let peer = measured.next().transpose()?;
        for (step, (name, _, target)) in STEPS.iter().enumerate() {
            let row = |unit: &str, target, of: fn(&Measured) -> &[Vec<f64>; 3]| Row {
                what: format!("{name}, {installed} installed ({unit})"),
                ours: ours.as_ref().and_then(|m| Value::of(of(m)[step].clone())),
                peer: peer.as_ref().and_then(|m| Value::of(of(m)[step].clone())),
                wire: None,
                direct: None,
                target,
            };
            rows.push(row("programs", target, |m| &m.programs));
            rows.push(row("ms", "≤ half the peer", |m| &m.times));
        }
    }
    Ok(rows)
}

/// By step.
#[derive(Default)]
struct Measured {
    programs: [Vec<f64>; 3],
    times: [Vec<f64>; 3],
}

fn measure(binary: &Path, programs: &Programs, runs: usize) -> Result<Measured, String> {
    let mut measured = Measured::default();
    for run in 0..=runs {
        let namespace = Namespace::new()?;
        for (step, (_, more, _)) in STEPS.iter().enumerate() {
            let counted = run == 0;
            let _ = std::fs::remove_file(programs.log());
            let took = namespace.run(binary, more, &programs.path(counted))?;
            if counted {
                let started = std::fs::read_to_string(programs.log()).unwrap_or_default().lines().count();
                measured.programs[step].push(f64::from(u32::try_from(started).unwrap_or(u32::MAX)));
            } else {
                measured.times[step].push(took);
            }
        }
    }
    Ok(measured)
}

/// A PATH that holds the programs of some back ends, and another where each start is noted.
struct Programs(tempfile::TempDir);

impl Programs {
    fn link(kinds: &[&str]) -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let programs = Self(dir);
        for folder in [false, true] {
            std::fs::create_dir(programs.path(folder)).map_err(|e| e.to_string())?;
        }
        for kind in kinds {
            let name = format!("xtables-{kind}-multi");
            let found = SBIN.split(':').map(|dir| Path::new(dir).join(&name)).find(|path| path.exists());
            let real = found.ok_or_else(|| format!("{name} is not installed (scripts/get-netfilter)"))?;
            for family in ["iptables", "ip6tables"] {
                for part in ["", "-save", "-restore"] {
                    programs.place(&format!("{family}-{kind}{part}"), &real)?;
                    programs.place(&format!("{family}{part}"), &real)?;
                }
            }
        }
        Ok(programs)
    }

    fn place(&self, name: &str, real: &Path) -> Result<(), String> {
        let place = || -> std::io::Result<()> {
            let (plain, noted) = (self.path(false).join(name), self.path(true).join(name));
            let _ = std::fs::remove_file(&plain);
            symlink(real, &plain)?;
            let log = self.log();
            let script =
                format!("#!/bin/sh\necho {name} >>{}\nexec {} \"$@\"\n", log.display(), plain.display());
            std::fs::write(&noted, script)?;
            std::fs::set_permissions(&noted, std::fs::Permissions::from_mode(0o755))
        };
        place().map_err(|e| format!("{name}: {e}"))
    }

    fn path(&self, noted: bool) -> PathBuf {
        self.0.path().join(if noted { "noted" } else { "plain" })
    }

    fn log(&self) -> PathBuf {
        self.0.path().join("log")
    }
}

/// A network namespace with an address; removed when dropped.
struct Namespace(String);

impl Namespace {
    fn new() -> Result<Self, String> {
        let name = format!("pa-bench-{}", std::process::id());
        ip(&format!("netns add {name}"))?;
        let namespace = Self(name);
        for line in [
            "link set lo up",
            "link add eth0 type veth peer name peer0",
            "link set eth0 up",
            "link set peer0 up",
            "addr add 10.77.30.2/24 dev eth0",
        ] {
            ip(&format!("-n {} {line}", namespace.0))?;
        }
        Ok(namespace)
    }

    // Milliseconds from start to end. A thread enters the namespace, so that no other program is measured.
    fn run(&self, binary: &Path, more: &str, path: &Path) -> Result<f64, String> {
        let inside = || -> Result<f64, String> {
            let namespace = std::fs::File::open(Path::new("/var/run/netns").join(&self.0));
            let namespace = namespace.map_err(|e| e.to_string())?;
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), kind)
                .map_err(|e| e.to_string())?;
            let mut command = Command::new(binary);
            command.arg("istio-iptables").args(RULES.split(' ')).args(more.split_whitespace());
            command.env_clear().env("PATH", path).stdin(Stdio::null()).stdout(Stdio::null());
            let start = Instant::now();
            let status = command.stderr(Stdio::null()).status().map_err(|e| e.to_string())?;
            let took = start.elapsed().as_secs_f64() * 1e3;
            if status.success() { Ok(took) } else { Err(format!("{} {more}: {status}", binary.display())) }
        };
        std::thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|_| Err("the measuring thread panicked".to_owned()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = ip(&format!("netns del {}", self.0));
    }
}

fn ip(line: &str) -> Result<(), String> {
    let out = Command::new("ip").args(line.split(' ')).env("PATH", SBIN).output();
    let out = out.map_err(|e| format!("ip: {e}"))?;
    let complaint = String::from_utf8_lossy(&out.stderr);
    if out.status.success() { Ok(()) } else { Err(format!("ip {line}: {}", complaint.trim())) }
}
