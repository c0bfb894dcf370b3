//! Requests for a resource: who provides it, and which requests wait.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Command, Manager};
use crate::base::disk::Looks;
use crate::secrets::files::{Reply, Source, half, hold_back};
use crate::secrets::name::SYSTEM;
use crate::secrets::{Error, ResourceName};

/// A certificate that is due, but good, is held back this long in favour of the new one.
const SOFT_WAIT: Duration = Duration::from_secs(2);

/// How long a look whether files are there is waited for: a mount that hangs is waited for once, and a node under load is
/// no reason to turn to the CA.
const LOOK: Duration = Duration::from_secs(1);

/// How long a look is good for: streams that are opened in one go do not start a thread each. Far less than a request to
/// the CA takes, and whoever asks next looks again.
const FRESH: Duration = Duration::from_millis(10);

/// What is known of the files of `default` or `ROOTCA` while nothing of them is read. Looked at beside the runtime: a
/// mount may hang.
#[derive(Debug)]
pub(super) struct Mount {
    looks: Looks<Found>,
    /// Whether they are there, by the last look that has ended.
    there: Option<bool>,
    /// When that was.
    at: Option<Instant>,
}

/// What a look finds: of which name the files are there to be used, and why a pair that is half there is not.
type Found = ([Option<bool>; 2], Option<String>);

impl Default for Mount {
    fn default() -> Self {
        Self { looks: Looks::patient(LOOK), there: None, at: None }
    }
}

/// Somebody whose answer is held back.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) name: ResourceName,
    pub(super) reply: Reply,
    /// For those who can be given the old certificate: when.
    pub(super) until: Option<Instant>,
}

/// Who provides `default` or `ROOTCA` at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    Files(Source),
    Ca,
    Nobody,
}

impl Manager {
    pub(super) fn provider(&self, name: &ResourceName) -> Origin {
        // Files that are gone for a moment are not given up: what was read of them is still good. Where the CA's is
        // served, files take its place once they have been read: until then it has to be renewed.
        let files =
            self.files.loaded(name).is_some() || (self.board.value(name).is_none() && self.there(name));
        if files && !self.written_by_us() {
            Origin::Files(self.mounted(name))
        } else if self.ca.is_some() {
            Origin::Ca
        } else {
            Origin::Nobody
        }
    }

    fn written_by_us(&self) -> bool {
        self.output.as_ref().is_some_and(|o| o.config().holds(&self.config.mounted.cert))
    }

    pub(super) fn mounted(&self, name: &ResourceName) -> Source {
        let mounted = &self.config.mounted;
        match name {
            ResourceName::Default => Source::Pair { cert: mounted.cert.clone(), key: mounted.key.clone() },
            _ => Source::Roots(mounted.root.clone()),
        }
    }

    // Files that nothing can be said of are waited for where there is nobody else.
    fn there(&self, name: &ResourceName) -> bool {
        let mount = if *name == ResourceName::Default { &self.mounts[0] } else { &self.mounts[1] };
        mount.there.unwrap_or(self.ca.is_none())
    }

    /// Looks whether the files are there. Those of the other name, too, where they lie beside them: both are nearly always
    /// asked for together, and a look is a thread.
    async fn look(&mut self, name: &ResourceName) {
        let asked = usize::from(*name != ResourceName::Default);
        if self.mounts[asked].at.is_some_and(|at| at.elapsed() < FRESH) {
            return;
        }
        let mounted = &self.config.mounted;
        let together = mounted.cert.parent() == mounted.root.parent();
        let sources = [ResourceName::Default, ResourceName::RootCa].map(|name| self.mounted(&name));
        let (cert, key) = (mounted.cert.clone(), mounted.key.clone());
        // Later somebody may be writing them.
        let first = !std::mem::replace(&mut self.looked, true) && self.ca.is_some();
        let look = move || {
            let usable = [0, 1].map(|i| (i == asked || together).then(|| sources[i].usable()));
            (usable, if first && usable[0] == Some(false) { half(&cert, &key) } else { None })
        };
        let found = self.mounts[asked].looks.run(look).await;
        let (found, half) = found.unzip();
        if let Some(why) = half.flatten() {
            tracing::warn!(target: "cache", "the mounted certificate is not used, and the CA is asked: {why}");
        }
        if found.is_none() && self.ca.is_none() {
            self.mounts[asked].there = None;
            self.mounts[asked].at = None;
        }
        for (mount, there) in self.mounts.iter_mut().zip(found.into_iter().flatten()) {
            if there.is_some() {
                mount.there = there;
                mount.at = Some(Instant::now());
            }
        }
    }

    /// Makes a configured file resource known before anybody asks for it, or once its files have come (back).
    pub(super) async fn begin(&mut self, name: ResourceName) {
        if self.files.holds(&name) {
            return;
        }
        if self.ca.is_some() {
            if self.written_by_us() {
                return;
            }
            self.look(&name).await;
            if !self.there(&name) {
                return;
            }
        }
        if self.files.follow(&name, self.mounted(&name)).is_ok() {
            let events = self.files.look_at(&[name]).await;
            self.file_events(events).await;
        }
    }

    /// Looks whether files have come that are served in place of what the CA issued, or will issue.
    pub(super) async fn come_back(&mut self, name: ResourceName) {
        if self.ca.is_some() && self.board.value(&name).is_some() {
            self.begin(name).await;
        } else if self.files.loaded(&name).is_none() && !self.written_by_us() {
            self.look(&name).await;
            // The CA is not asked any more, so those who wait for its answer are given the files.
            if self.there(&name) && self.waiting.iter().any(|waiter| waiter.name == name) {
                self.begin(name).await;
            }
        }
    }

    /// Answers all of them, or notes who waits. Those that lie in files are read together.
    pub(super) async fn fetch(&mut self, commands: Vec<Command>) {
        let mut asked = Vec::new();
        let names: BTreeSet<_> = commands.iter().map(|command| &command.name).collect();
        let configured =
            [ResourceName::Default, ResourceName::RootCa].into_iter().filter(|n| names.contains(n));
        for name in configured.collect::<Vec<_>>() {
            self.come_back(name).await;
        }
        for command in commands {
            let Some((Command { name, reply }, source)) = self.in_file(command) else { continue };
            self.asked |= name == ResourceName::Default;
            match self.files.follow(&name, source) {
                Ok(()) => asked.push((name, reply)),
                Err(error) => drop(reply.send(Err(Arc::new(error)))),
            }
        }
        if asked.is_empty() {
            return;
        }
        let names: BTreeSet<ResourceName> = asked.iter().map(|(name, _)| name.clone()).collect();
        let events = self.files.look_at(&names.into_iter().collect::<Vec<_>>()).await;
        self.file_events(events).await;
        if asked.iter().any(|(name, _)| matches!(name, ResourceName::Default | ResourceName::RootCa)) {
            self.look_at_output();
        }
        for (name, reply) in asked {
            match self.files.loaded(&name).and_then(|_| self.board.fetched(&name)) {
                Some(fetched) => drop(reply.send(Ok(fetched))),
                None => self.files.wait(&name, reply),
            }
        }
    }

    // Where it lies, if it does; what does not is answered, or waits.
    fn in_file(&mut self, Command { name, reply }: Command) -> Option<(Command, Source)> {
        let source = match &name {
            ResourceName::FileCert { cert, key } => Source::Pair { cert: cert.into(), key: key.into() },
            ResourceName::FileRoot(path) if path == SYSTEM => match &self.config.system_bundle {
                Some(bundle) => Source::Roots(bundle.clone()),
                None => {
                    let reason = "no bundle of the operating system was found at start".to_owned();
                    let _ = reply.send(Err(Arc::new(Error::File { name: name.to_string(), reason })));
                    return None;
                }
            },
            ResourceName::FileRoot(path) => Source::Roots(path.into()),
            // Served by another source.
            ResourceName::Gateway(text) => {
                let error = crate::secrets::name::Error::Unknown(text.clone());
                let _ = reply.send(Err(Arc::new(Error::Name(error))));
                return None;
            }
            ResourceName::Default | ResourceName::RootCa => match self.provider(&name) {
                Origin::Files(source) => source,
                Origin::Ca => {
                    self.fetch_from_ca(name, reply);
                    return None;
                }
                Origin::Nobody => {
                    let error = Arc::new(Error::NoCa(self.config.mounted.clone()));
                    let text = crate::base::error::chain(error.as_ref());
                    self.troubles.file_bad(&self.config.trouble, &name, &text, &error);
                    let _ = reply.send(Err(error));
                    return None;
                }
            },
        };
        Some((Command { name, reply }, source))
    }

    pub(super) fn fetch_from_ca(&mut self, name: ResourceName, reply: Reply) {
        let (now, mono) = (self.clock.now(), Instant::now());
        let root = name == ResourceName::RootCa;
        self.asked |= !root;
        // Of roots, too, the next who asks is given those of now, where nobody's certificate brings them.
        self.roots_due |= root && self.workload.due(now, mono);
        let until = if root && self.workload.current.is_some() {
            Some(mono)
        } else if self.workload.valid(now).is_none() {
            self.workload.hurry(mono);
            None
        } else if self.workload.due(now, mono)
            && mono >= self.workload.not_before()
            && self.workload.failures() == 0
            && !self.workload.restored
        {
            // Nobody had asked, so it was not renewed: the new one is a moment away.
            Some(mono + SOFT_WAIT)
        } else {
            Some(mono)
        };
        if until == Some(mono) {
            self.answer(&name, reply);
        } else {
            let waiter = Waiter { name, reply, until };
            hold_back(&mut self.waiting, waiter, |waiter| waiter.reply.is_closed());
        }
    }

    pub(super) fn answer(&mut self, name: &ResourceName, reply: Reply) {
        // A resource that came from files until now may not have been published from the CA's answer.
        if self.board.value(name).is_none() {
            self.publish_workload(name);
        }
        // The Go agent's file follows what it served last.
        if *name == ResourceName::RootCa && std::mem::take(&mut self.output_raw_root) {
            self.write_output();
        } else {
            self.look_at_output();
        }
        let answer = self.board.fetched(name).ok_or_else(|| Arc::new(Error::Stopped));
        let _ = reply.send(answer);
    }

    /// Answers those whose patience is over, forgets those who are gone.
    pub(super) fn answer_due(&mut self, mono: Instant) {
        for waiter in std::mem::take(&mut self.waiting) {
            if waiter.until.is_some_and(|until| until <= mono) {
                self.answer(&waiter.name, waiter.reply);
            } else if !waiter.reply.is_closed() {
                self.waiting.push(waiter);
            }
        }
    }
}
