//! Runs the programs; behind a trait so that tests record instead.

use std::io;
use std::path::Path;
use std::thread;

use super::exec::{Ending, execute};
use super::model::Family;
pub(crate) use super::program::{Output, Program};
use crate::base::netlink::Netlink;

/// Runs programs.
pub(crate) trait Runner {
    /// Runs one to its end.
    ///
    /// # Errors
    /// When it cannot be started.
    fn run(&mut self, program: &Program) -> io::Result<Output>;

    /// Whether we were asked to end.
    fn ending(&self) -> bool {
        false
    }

    /// Whether a program of that name can be found.
    fn exists(&self, name: &str) -> bool;

    /// Whether the kernel says that this network namespace has no legacy table of the family; `false`
    /// when it does not say.
    fn no_legacy_tables(&self, family: Family) -> bool;

    /// The names of the `inet` tables in this network namespace.
    ///
    /// # Errors
    /// The kernel's, for instance when it has no `nf_tables`.
    fn inet_tables(&self) -> io::Result<Vec<String>>;
}

/// The real thing.
#[derive(Debug)]
pub(crate) struct Real {
    /// The `PATH` on which programs are looked for; empty: our own.
    pub path: String,
    /// CNI mode: run in a mount namespace of its own; the path stands in for the host's lock.
    pub sandbox: Option<Sandbox>,
    /// Whether we were asked to end.
    pub ending: Ending,
}

/// What a program of the host's file system must not see.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    /// The pod's network namespace, as a lock file that no other pod waits for; may be empty.
    pub lock: String,
}

impl Sandbox {
    // For the calling thread and its children. Name services of the host must not be asked from within
    // a pod's network namespace.
    fn enter(&self, old_lock: bool) -> io::Result<()> {
        use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
        #[expect(deprecated, reason = "its unsafe successor exists for flags we do not use")]
        rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS)?;
        let everything = MountPropagationFlags::REC;
        mount_change("/", MountPropagationFlags::PRIVATE | everything)
            .or_else(|_| mount_change("/", MountPropagationFlags::DOWNSTREAM | everything))?;
        mount_bind("/dev/null", "/etc/nsswitch.conf")?;
        if old_lock && !self.lock.is_empty() {
            mount_bind(self.lock.as_str(), "/run/xtables.lock")?;
        }
        Ok(())
    }
}

impl Runner for Real {
    fn run(&mut self, program: &Program) -> io::Result<Output> {
        tracing::debug!("running {} {}", program.name, program.args.join(" "));
        let (path, ending) = (self.path.as_str(), &mut self.ending);
        match &self.sandbox {
            None => execute(program, path, None, ending),
            // A mount namespace belongs to a thread here, so the program gets a thread to itself.
            Some(sandbox) => thread::scope(|scope| {
                let inside = scope.spawn(|| {
                    if let Err(e) = sandbox.enter(program.old_lock) {
                        tracing::warn!("{} runs without a mount namespace of its own: {e}", program.name);
                    }
                    let lock = Some(sandbox.lock.as_str()).filter(|l| !l.is_empty());
                    execute(program, path, lock, ending)
                });
                inside.join().unwrap_or_else(|_| Err(io::Error::other("the program's thread panicked")))
            }),
        }
    }

    fn ending(&self) -> bool {
        self.ending.asked()
    }

    fn exists(&self, name: &str) -> bool {
        self.path.split(':').any(|dir| Path::new(dir).join(name).exists())
    }

    fn no_legacy_tables(&self, family: Family) -> bool {
        let net = Path::new("/proc/thread-self/net");
        let names = if family == Family::V4 { "ip_tables_names" } else { "ip6_tables_names" };
        match std::fs::read_to_string(net.join(names)) {
            Ok(text) => text.trim().is_empty(),
            // Without the module there is no such file; without /proc nothing is known.
            Err(e) => e.kind() == io::ErrorKind::NotFound && net.join("dev").exists(),
        }
    }

    fn inet_tables(&self) -> io::Result<Vec<String>> {
        Netlink::netfilter()?.inet_tables()
    }
}
