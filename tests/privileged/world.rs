//! A network namespace with an address, a PATH that holds one back end or both, and the agent's command.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

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
    env: RefCell<BTreeMap<String, String>>,
}

const SBIN: &str = "/usr/sbin:/sbin:/usr/bin:/bin";

static NEXT: AtomicU32 = AtomicU32::new(0);

fn tool(name: &str) -> Option<PathBuf> {
    SBIN.split(':').map(|dir| Path::new(dir).join(name)).find(|path| path.exists())
}

// Why the tests cannot run here, if they cannot.
fn obstacle() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root".to_owned());
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
            #[expect(clippy::disallowed_methods, reason = "a switch of the test run, not of the product")]
            let required = std::env::var_os("PRIVILEGED").is_some_and(|v| v == "required");
            assert!(!required, "the privileged tests cannot run: {reason}");
            eprintln!("\n*** THE PRIVILEGED TESTS DID NOT RUN: {reason} ***\n");
            return None;
        }
        let name = format!("pa-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::tempdir().expect("a scratch directory");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("its mode");
        let world = Self { name, dir, env: RefCell::default() };
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
        let resolv = "nameserver 10.96.0.10\n";
        std::fs::write(world.dir.path().join("resolv.conf"), resolv).expect("a scratch file");
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
        self.env.borrow_mut().insert(name.to_owned(), value.to_owned());
    }

    // Mounts are private to the command: it reads our resolv.conf.
    fn command(&self, uid: Option<u32>) -> Command {
        let mut command = Command::new(tool("ip").expect("looked for above"));
        let setup =
            format!("mount --bind {}/resolv.conf /etc/resolv.conf && exec \"$@\"", self.dir.path().display());
        command.args(["netns", "exec", &self.name, "/usr/bin/unshare", "-m", "/bin/sh", "-c", &setup, "sh"]);
        if let Some(uid) = uid {
            let (uid, gid) = (format!("--reuid={uid}"), format!("--regid={uid}"));
            command.args(["/usr/bin/setpriv", &uid, &gid, "--clear-groups"]);
        }
        let path = format!("PATH={}", self.dir.path().join("bin").display());
        command.args(["/usr/bin/env", "-i", &path]);
        command.args(self.env.borrow().iter().map(|(name, value)| format!("{name}={value}")));
        #[expect(clippy::disallowed_methods, reason = "which binary is judged is a setting of the test run")]
        let agent = std::env::var_os("AGENT_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_pilot-agent").into());
        command.arg(agent).arg("istio-iptables");
        command.stdin(Stdio::null());
        command
    }

    /// Runs the command with options split at blanks and expects an exit status.
    pub fn apply(&self, options: &str, status: i32) {
        self.apply_words(&options.split_whitespace().map(str::to_owned).collect::<Vec<_>>(), status);
    }

    /// The same with words as they are.
    pub fn apply_words(&self, words: &[String], status: i32) {
        let out = self.command(None).args(words).output().expect("the agent runs");
        assert_eq!(
            out.status.code(),
            Some(status),
            "{words:?}\n{}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
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
            let lines: Vec<&str> = text.lines().filter(keep).collect();
            let mut lines = lines.into_iter().peekable();
            while let Some(line) = lines.next() {
                let empty = line.starts_with('*') && lines.peek().is_none_or(|next| next.starts_with('*'));
                if !empty {
                    let line = line.split(" [").next().unwrap_or(line);
                    out.push_str(&format!("{program} {line}\n"));
                }
            }
        }
        out + &self.inside("nft -s list ruleset | sed -n '/^table inet/,/^}/p'")
    }

    /// Rules, policy rules, routes of other tables and addresses.
    pub fn everything(&self) -> String {
        let net =
            "ip rule; ip -6 rule; ip route show table 133; ip -6 route show table 133; ip -o addr show lo";
        let net =
            self.inside(&format!("{{ {net}; }} 2>/dev/null | sed 's/valid_lft.*//; s/^[0-9]*:[ \t]*//'"));
        format!("{}{net}", self.all_rules())
    }

    /// Listens in the namespace and answers each connection with its original destination.
    pub fn listen(&self, port: u16) -> Listener {
        let script = format!(
            "import socket, struct\n\
             s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
             s.bind(('0.0.0.0', {port})); s.listen(); print('up', flush=True)\n\
             while True:\n\
             \x20   c, _ = s.accept()\n\
             \x20   d = c.getsockopt(socket.IPPROTO_IP, 80, 16)\n\
             \x20   p, = struct.unpack('!2xH12x', d); a = socket.inet_ntoa(d[4:8])\n\
             \x20   c.sendall(f'{{a}}:{{p}}'.encode()); c.close()\n"
        );
        let mut child = self.python(1337, &script).stdout(Stdio::piped()).spawn().expect("python runs");
        let mut line = String::new();
        let out = child.stdout.as_mut().expect("it is piped");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("a line");
        assert_eq!(line, "up\n");
        Listener(child)
    }

    /// Connects as a user; what the listener said, or that the connection did not get there.
    pub fn connect(&self, uid: u32, address: &str, port: u16) -> String {
        let script = format!(
            "import socket\n\
             s = socket.socket(); s.settimeout(2)\n\
             try:\n\
             \x20   s.connect(('{address}', {port})); print(s.recv(64).decode(), end='')\n\
             except OSError: print('not captured', end='')\n"
        );
        let out = self.python(uid, &script).output().expect("python runs");
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    fn python(&self, uid: u32, script: &str) -> Command {
        let mut command = Command::new(tool("ip").expect("looked for above"));
        command.args(["netns", "exec", &self.name, "/usr/bin/setpriv"]);
        command.args([&format!("--reuid={uid}"), &format!("--regid={uid}"), "--clear-groups"]);
        // Some installations keep Python where other users cannot read it; the system's own comes first.
        let python = tool("python3").unwrap_or_else(|| "python3".into());
        command.arg(python).args(["-c", script]).stdin(Stdio::null());
        command
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(ip) = tool("ip") {
            let _ = Command::new(ip).args(["netns", "del", &self.name]).output();
        }
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
