//! A network namespace with an address, a PATH that holds one back end or both, and the agent's command.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Which programs the command finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// nf_tables.
    Nft,
    /// The older kernel interface.
    Legacy,
    /// Both, as most images have them.
    Both,
}

/// A namespace; removed when dropped.
pub struct World {
    name: String,
    dir: tempfile::TempDir,
    env: Mutex<BTreeMap<String, String>>,
}

const SBIN: &str = "/usr/sbin:/sbin:/usr/bin:/bin";

static NEXT: AtomicU32 = AtomicU32::new(0);

fn tool(name: &str) -> Option<PathBuf> {
    SBIN.split(':').map(|dir| Path::new(dir).join(name)).find(|path| path.exists())
}

// Why the tests cannot run here, if they cannot.
fn obstacle() -> Option<String> {
    if let Some(reason) = crate::support::root::obstacle() {
        return Some(reason.to_owned());
    }
    ["ip", "nft", "setpriv", "iptables-nft", "iptables-legacy", "ip6tables-nft"]
        .into_iter()
        .find(|name| tool(name).is_none())
        .map(|name| format!("{name} is not installed (scripts/get-netfilter installs it)"))
}

impl World {
    /// Makes one, or says loudly why that is impossible.
    pub fn new(backend: Backend, addresses: &[&str]) -> Option<Self> {
        if let Some(reason) = obstacle() {
            crate::support::root::say(&reason);
            return None;
        }
        let name = format!("pa-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::tempdir().expect("a scratch directory");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("its mode");
        let world = Self { name, dir, env: Mutex::default() };
        world.programs(backend);
        world.ip(&["netns", "add", &world.name]);
        let mut lines =
            vec!["link set lo up".to_owned(), "link add eth0 type veth peer name peer0".to_owned()];
        lines.push("link set eth0 up".to_owned());
        lines.push("link set peer0 up".to_owned());
        for address in addresses {
            let nodad = if address.contains(':') { " nodad" } else { "" };
            lines.push(format!("addr add {address} dev eth0{nodad}"));
        }
        if !addresses[0].contains(':') {
            lines.push("route add default dev eth0".to_owned());
        }
        for line in lines {
            world.inside(&format!("ip {line}"));
        }
        std::fs::create_dir(world.path("run")).expect("a scratch directory");
        std::fs::write(world.path("run/xtables.lock"), "").expect("a scratch file");
        world.resolvers(&["10.96.0.10"]);
        Some(world)
    }

    fn programs(&self, backend: Backend) {
        let bin = self.dir.path().join("bin");
        std::fs::create_dir(&bin).expect("a scratch directory");
        let kinds: &[&str] = match backend {
            Backend::Nft => &["nft"],
            Backend::Legacy => &["legacy"],
            Backend::Both => &["legacy", "nft"],
        };
        let link = |name: &str, to: &str| {
            let target = tool(to).unwrap_or_else(|| panic!("{to} is not installed"));
            let _ = std::fs::remove_file(bin.join(name));
            symlink(std::fs::canonicalize(target).expect("it exists"), bin.join(name)).expect("a link");
        };
        for family in ["iptables", "ip6tables"] {
            for part in ["", "-save", "-restore"] {
                for kind in kinds {
                    link(&format!("{family}-{kind}{part}"), &format!("{family}-{kind}{part}"));
                    link(&format!("{family}{part}"), &format!("{family}-{kind}{part}"));
                }
            }
        }
        link("nft", "nft");
    }

    /// A file of this world's scratch directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The network namespace, to be entered.
    pub fn namespace(&self) -> PathBuf {
        Path::new("/var/run/netns").join(&self.name)
    }

    /// What `/etc/resolv.conf` names in later runs.
    pub fn resolvers(&self, addresses: &[&str]) {
        let lines: String = addresses.iter().map(|a| format!("nameserver {a}\n")).collect();
        std::fs::write(self.path("resolv.conf"), lines).expect("a scratch file");
    }

    /// Puts a shell script in the place of a program; `@REAL@` in it is the program.
    pub fn shim(&self, name: &str, script: &str) {
        let (place, real) = (self.path("bin").join(name), self.path("real"));
        std::fs::create_dir_all(&real).expect("a scratch directory");
        let real = real.join(name);
        std::fs::rename(&place, &real).expect("the program is there");
        let text = format!("#!/bin/sh\n{}\n", script.replace("@REAL@", &real.display().to_string()));
        std::fs::write(&place, text).expect("a scratch file");
        std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    }

    /// Puts the program back.
    pub fn unshim(&self, name: &str) {
        std::fs::rename(self.path("real").join(name), self.path("bin").join(name)).expect("a shim was there");
    }

    fn ip(&self, args: &[&str]) -> Output {
        let out = Command::new(tool("ip").expect("looked for above")).args(args).output().expect("ip runs");
        assert!(out.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&out.stderr));
        out
    }

    /// Its name, as `ip netns` knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A shell line in the namespace with the machine's own programs.
    pub fn inside(&self, line: &str) -> String {
        let ip = tool("ip").expect("looked for above");
        let out = Command::new(ip)
            .args(["netns", "exec", &self.name, "/bin/sh", "-c", line])
            .env("PATH", SBIN)
            .output()
            .expect("a shell runs");
        assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// A variable of later runs.
    pub fn set(&self, name: &str, value: &str) {
        self.env.lock().expect("no panic holds this lock").insert(name.to_owned(), value.to_owned());
    }

    fn command(&self, uid: Option<u32>) -> Command {
        let mut command = self.agent(uid);
        command.arg("istio-iptables");
        command
    }

    /// Any command of the agent, as root.
    pub fn command_of(&self, words: &[&str]) -> Command {
        let mut command = self.agent(None);
        command.args(words);
        command
    }

    /// Waits until something is so.
    pub fn wait_for(&self, what: &str, so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !so() {
            assert!(Instant::now() < deadline, "never came true: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    // Mounts are private to the command: it reads our resolv.conf, has a lock of its own, and users if we have any.
    fn agent(&self, uid: Option<u32>) -> Command {
        #[expect(clippy::disallowed_methods, reason = "which binary is judged is a setting of the test run")]
        let agent = std::env::var_os("AGENT_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_pilot-agent").into());
        self.program(uid, Path::new(&agent))
    }

    fn program(&self, uid: Option<u32>, agent: &Path) -> Command {
        let mut command = Command::new(tool("ip").expect("looked for above"));
        let setup = format!(
            "mount --bind {dir}/resolv.conf /etc/resolv.conf && mount --bind {dir}/run /run && \
             for f in passwd group; do [ ! -e {dir}/$f ] || mount --bind {dir}/$f /etc/$f || exit 1; done && exec \"$@\"",
            dir = self.dir.path().display()
        );
        command.args(["netns", "exec", &self.name, "/usr/bin/unshare", "-m", "/bin/sh", "-c", &setup, "sh"]);
        // Another user runs it from a place that is not below somebody's home.
        let agent = if uid.is_some() { self.reachable(agent, "agent") } else { agent.to_owned() };
        if let Some(uid) = uid {
            let (uid, gid) = (format!("--reuid={uid}"), format!("--regid={uid}"));
            command.args(["/usr/bin/setpriv", &uid, &gid, "--clear-groups"]);
        }
        let path = format!("PATH={}", self.dir.path().join("bin").display());
        command.args(["/usr/bin/env", "-i", &path]);
        let env = self.env.lock().expect("no panic holds this lock");
        command.args(env.iter().map(|(name, value)| format!("{name}={value}")));
        command.arg(agent);
        command.stdin(Stdio::null());
        command
    }

    /// A program's copy in the scratch directory, for users who cannot read the checkout.
    pub fn reachable(&self, program: &Path, name: &str) -> PathBuf {
        let place = self.path(name);
        if !place.exists() {
            // Written by another process: what this one starts meanwhile does not hold it open for writing.
            let made = Command::new("install").args(["-m", "755"]).arg(program).arg(&place).status();
            assert!(made.is_ok_and(|status| status.success()), "{} is copied", program.display());
        }
        place
    }

    /// Runs the command with options split at blanks and expects an exit status; gives what it printed.
    pub fn apply(&self, options: &str, status: i32) -> String {
        self.apply_words(&options.split_whitespace().map(str::to_owned).collect::<Vec<_>>(), status)
    }

    /// The same with words as they are; gives what was printed, both streams.
    pub fn apply_words(&self, words: &[String], status: i32) -> String {
        let out = self.command(None).args(words).output().expect("the agent runs");
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let said = text(&out.stdout) + &text(&out.stderr);
        assert_eq!(out.status.code(), Some(status), "{words:?}\n{said}");
        said
    }

    /// Runs the agent's binary by another name.
    pub fn called(&self, name: &str, options: &str, status: i32) {
        let place = self.path(name);
        if !place.exists() {
            #[expect(
                clippy::disallowed_methods,
                reason = "which binary is judged is a setting of the test run"
            )]
            let agent =
                std::env::var_os("AGENT_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_pilot-agent").into());
            let agent = std::fs::canonicalize(agent).expect("the agent is there");
            std::os::unix::fs::symlink(agent, &place).expect("a scratch directory");
        }
        let out =
            self.program(None, &place).args(options.split_whitespace()).output().expect("the agent runs");
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(status), "{name} {options}\n{said}");
    }

    /// Waits until somebody listens on a TCP port.
    pub fn wait_listening(&self, port: u16) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.inside(&format!("ss -Htln sport = :{port}")).is_empty() {
            assert!(Instant::now() < deadline, "nobody listens on port {port}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Runs it; the exit status, if it was not ended by a signal.
    pub fn status(&self, options: &str) -> Option<i32> {
        self.spawn(options).wait().expect("our child").code()
    }

    /// Starts it; the process is the agent itself.
    pub fn spawn(&self, options: &str) -> Child {
        let mut command = self.command(None);
        command.args(options.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("the agent runs")
    }

    /// Waits until no process is left in the namespace.
    pub fn wait_quiet(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.ip(&["netns", "pids", &self.name]).stdout.is_empty() {
            assert!(Instant::now() < deadline, "processes are left in {}", self.name);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Runs it as another user; the exit status.
    pub fn as_user(&self, uid: u32, options: &str) -> i32 {
        let out = self.command(Some(uid)).args(options.split_whitespace()).output().expect("the agent runs");
        out.status.code().unwrap_or(-1)
    }

    /// The listing of one table.
    pub fn rules(&self, program: &str, table: &str) -> String {
        self.inside(&format!("{program} -t {table} -S"))
    }

    /// The rules of all back ends and families: no counters, no empty tables, no policies of untouched ones.
    pub fn all_rules(&self) -> String {
        let mut out = String::new();
        for program in ["iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"] {
            let text = self.inside(&format!("{program}-save 2>/dev/null || true"));
            let keep =
                |line: &&str| line.starts_with("-A") || line.starts_with(":ISTIO") || line.starts_with('*');
            // Legacy lists tables in the order in which they were first looked at.
            let mut tables: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            let mut table = "";
            for line in text.lines().filter(keep) {
                if line.starts_with('*') {
                    table = line;
                } else {
                    tables.entry(table).or_default().push(line.split(" [").next().unwrap_or(line));
                }
            }
            for (table, lines) in tables {
                for line in [table].into_iter().chain(lines) {
                    out.push_str(&format!("{program} {line}\n"));
                }
            }
        }
        out + &self.inside("nft -s list ruleset | sed -n '/^table inet/,/^}/p'")
    }

    /// Rules, policy rules, routes of other tables and addresses.
    pub fn everything(&self) -> String {
        let net = "ip rule; ip -6 rule; for v in -4 -6; do ip $v route show table all | grep '^local default'; done; \
                   ip -o addr show lo";
        let net = self.inside(&format!(
            "{{ {net}; }} 2>/dev/null | sed 's/valid_lft.*//; s/ tentative//; s/^[0-9]*:[ \t]*//'"
        ));
        format!("{}{net}", self.all_rules())
    }

    /// Says `hello` as a user; the answer, or that there was none.
    pub fn say(&self, uid: u32, address: &str, port: u16) -> String {
        say(&self.name, uid, address, port)
    }

    /// `serve.py` in the namespace as a user.
    pub fn serve(&self, uid: u32, what: &[&str]) -> Listener {
        serve(&self.name, uid, what)
    }

    /// The other end of `eth0`, in a namespace of its own, with addresses.
    pub fn outside(&self, addresses: &[&str]) -> Outside {
        let name = format!("{}-out", self.name);
        self.ip(&["netns", "add", &name]);
        let outside = Outside { name };
        self.ip(&["-n", &self.name, "link", "set", "peer0", "netns", &outside.name]);
        let mut lines = vec!["link set lo up".to_owned(), "link set peer0 up".to_owned()];
        for address in addresses {
            let nodad = if address.contains(':') { " nodad" } else { "" };
            lines.push(format!("addr add {address} dev peer0{nodad}"));
        }
        for line in lines {
            let words = ["-n", &outside.name].into_iter().chain(line.split(' ')).collect::<Vec<_>>();
            self.ip(&words);
        }
        outside
    }
}

/// What a pod is connected to.
pub struct Outside {
    name: String,
}

impl Outside {
    /// As [`World::say`].
    pub fn say(&self, address: &str, port: u16) -> String {
        say(&self.name, 0, address, port)
    }

    /// As [`World::serve`].
    pub fn serve(&self, what: &[&str]) -> Listener {
        serve(&self.name, 0, what)
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        delete(&self.name);
    }
}

fn python(namespace: &str, uid: u32, script: &str) -> Command {
    let mut command = Command::new(tool("ip").expect("looked for above"));
    command.args(["netns", "exec", namespace, "/usr/bin/setpriv"]);
    command.args([&format!("--reuid={uid}"), &format!("--regid={uid}"), "--clear-groups"]);
    // Some installations keep Python where other users cannot read it; the system's own comes first.
    let python = tool("python3").unwrap_or_else(|| "python3".into());
    command.arg(python).args(["-c", script]).stdin(Stdio::null());
    command
}

fn serve(namespace: &str, uid: u32, what: &[&str]) -> Listener {
    let mut command = python(namespace, uid, include_str!("serve.py"));
    // Ports below 1024 are open to everybody inside.
    let open = "echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start";
    let words = ["netns", "exec", namespace, "/bin/sh", "-c", open];
    let opened = Command::new(tool("ip").expect("looked for above")).args(words).env("PATH", SBIN).output();
    assert!(opened.is_ok_and(|out| out.status.success()), "a setting of {namespace}");
    let mut child = command.args(what).stdout(Stdio::piped()).spawn().expect("python runs");
    let mut line = String::new();
    let out = child.stdout.as_mut().expect("it is piped");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("a line");
    assert_eq!(line, "up\n");
    Listener(child)
}

fn say(namespace: &str, uid: u32, address: &str, port: u16) -> String {
    let script = format!(
        "import socket\n\
         s = socket.create_connection(('{address}', {port}), 30); s.sendall(b'hello\\n')\n\
         print(s.makefile().readline().strip(), end='')"
    );
    let out = python(namespace, uid, &script).output().expect("python runs");
    if !out.status.success() {
        return format!("no answer: {}", String::from_utf8_lossy(&out.stderr));
    }
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn delete(namespace: &str) {
    if let Some(ip) = tool("ip") {
        let _ = Command::new(ip).args(["netns", "del", namespace]).output();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        delete(&self.name);
    }
}

/// A listening process; ended when dropped.
pub struct Listener(Child);

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
