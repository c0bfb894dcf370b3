//! What changes beside the CA: mounted files, the trust bundle, and the files we write.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::Manager;
use super::asking::Origin;
use crate::base::error::chain;
use crate::base::handover;
use crate::base::lane::Lane;
use crate::base::quote::shown;
use crate::base::seldom::Seldom;
use crate::secrets::files::{Event, Loaded};
use crate::secrets::output::Content;
use crate::secrets::persist::Unfit;
use crate::secrets::request::Issued;
use crate::secrets::{Error, Kept, ResourceName, Roots, Secret, bundle, persist, rotation};
use crate::tls::cert;

/// What an earlier agent has left, as it is read.
pub(super) type Restoring = BoxFuture<'static, io::Result<Result<Option<Issued>, Unfit>>>;

/// Any client can ask for files, and have them change.
static READ: Seldom = Seldom::new(60);

/// Istiod can send bundles as fast as it likes.
static BUNDLES: Seldom = Seldom::new(60);
static JUNK: Seldom = Seldom::new(30);

/// The folder of the certificate that outlives the agent is read once, at the start.
pub(super) static FOLDERS: Lane = Lane::new("identity folder", 1);

/// How long what an earlier agent has left is waited for, before it is asked for beside everything else.
const RESTORE: Duration = Duration::from_secs(1);

impl Manager {
    pub(super) async fn file_events(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            match event {
                Event::Loaded(name, loaded) => self.file_loaded(&name, loaded),
                Event::Mended(name) => self.troubles.file_good(&name),
                Event::Suspect { name, error } => {
                    self.file_bad(&name, &error);
                }
                Event::Troubled { name, error, gone } => self.file_troubled(&name, error, gone).await,
            }
        }
        self.metrics.watches_failed(self.files.new_watch_failures());
    }

    pub(super) fn file_loaded(&mut self, name: &ResourceName, loaded: Loaded) {
        self.troubles.file_good(name);
        self.troubles.chain_changed();
        let secret = match loaded {
            Loaded::Pair(identity) => {
                if *name == ResourceName::Default {
                    let chain = cert::parse_chain(&identity.chain).unwrap_or_default();
                    self.troubles.mounted_ends = chain.first().map(|leaf| leaf.not_after);
                }
                Secret::Identity(identity)
            }
            Loaded::Roots(roots) if *name == ResourceName::RootCa => {
                let pem = self.merged(&String::from_utf8_lossy(&roots.pem));
                Secret::Roots(Arc::new(Roots { pem: pem.into_bytes() }))
            }
            Loaded::Roots(roots) => Secret::Roots(roots),
        };
        if self.board.publish(name, secret) {
            let configured = matches!(name, ResourceName::Default | ResourceName::RootCa);
            let more = if configured { Some(String::new()) } else { READ.may() };
            if let Some(more) = more {
                tracing::info!(target: "cache", "read {} from file{more}", shown(&name.to_string()));
            }
        }
        if matches!(name, ResourceName::Default | ResourceName::RootCa) {
            self.output_raw_root = false;
            self.write_output();
        }
        for reply in self.files.take_waiting(name) {
            if let Some(fetched) = self.board.fetched(name) {
                let _ = reply.send(Ok(fetched));
            }
        }
        // Those who wait for the CA have it now.
        for waiter in self.waiting.extract_if(.., |waiter| waiter.name == *name) {
            if let Some(fetched) = self.board.fetched(name) {
                let _ = waiter.reply.send(Ok(fetched));
            }
        }
    }

    pub(super) async fn file_troubled(&mut self, name: &ResourceName, error: Arc<Error>, gone: bool) {
        let text = chain(error.as_ref());
        let had = self.files.loaded(name).is_some();
        for reply in self.files.take_waiting(name) {
            self.metrics.file_failed();
            let _ = reply.send(Err(Arc::clone(&error)));
        }
        if gone && self.ca.is_some() {
            tracing::warn!(target: "cache", "{text}; the CA takes over");
            self.troubles.file_good(name);
            self.files.forget(name).await;
            self.taken_over(name);
            return;
        }
        // Nor do those who wait for the CA, which is not asked while there are files.
        if self.provider(name) != Origin::Ca {
            for waiter in self.waiting.extract_if(.., |waiter| waiter.name == *name) {
                let _ = waiter.reply.send(Err(Arc::clone(&error)));
            }
        }
        self.file_bad(name, &error);
        if had && self.board.followers(name) > 0 {
            self.metrics.file_failed();
            self.board.fail(name, &error);
        }
    }

    fn file_bad(&mut self, name: &ResourceName, error: &Error) {
        let mut text = chain(error);
        if self.files.loaded(name).is_some() {
            text.push_str("; the last good content stays in use, the file is read again when it changes");
        }
        self.troubles.file_bad(&self.config.trouble, name, &text, error);
    }

    // What the CA has issued, in the place of files. It is not renewed while they are served, so it may be over: then
    // theirs stays until the CA has answered.
    fn taken_over(&mut self, name: &ResourceName) {
        self.troubles.chain_changed();
        let usable = match name {
            ResourceName::Default => self.workload.valid(self.clock.now()).is_some(),
            _ => self.workload.current.is_some(),
        };
        if usable {
            self.publish_workload(name);
            self.output_raw_root = false;
            self.write_output();
        }
    }

    pub(super) fn bundle_changed(&mut self) {
        let given = self.bundle_news.borrow_and_update().clone();
        let (good, dropped) = bundle::readable(given);
        if dropped > 0
            && let Some(more) = JUNK.may()
        {
            tracing::warn!(target: "cache",
                "{dropped} entries of the trust bundle are no certificates and are left out{more}");
        }
        if good == self.bundle {
            return;
        }
        if let Some(more) = BUNDLES.may() {
            tracing::info!(target: "cache", "trust bundle updated: {} entries{more}", good.len());
        }
        self.bundle = good;
        self.troubles.chain_changed();
        let announced = self.board.changes(&ResourceName::RootCa);
        if let Some(roots @ Loaded::Roots(_)) = self.files.loaded(&ResourceName::RootCa).cloned() {
            self.file_loaded(&ResourceName::RootCa, roots);
            // As the Go agent: with mounted files both names are announced.
            if self.files.loaded(&ResourceName::Default).is_some() {
                self.board.announce_again(&ResourceName::Default);
            }
        } else if self.workload.current.is_some() {
            self.publish_workload(&ResourceName::RootCa);
            self.output_raw_root = false;
            self.write_output();
        }
        // As the Go agent: a changed bundle is announced, also where the anchors come to the same.
        if self.board.changes(&ResourceName::RootCa) == announced {
            self.board.announce_again(&ResourceName::RootCa);
        }
    }

    /// What an earlier agent has left, if it is of use and nothing else has to be waited for; gives what is still read.
    pub(super) async fn restore(&mut self) -> Option<Restoring> {
        if self.take_over() {
            return None;
        }
        let config = self.config.persist.clone().filter(|_| self.ca.is_some())?;
        let (identity, now) = (self.config.identity.clone(), self.clock.now());
        let shown = config.folder.display().to_string();
        let mut read: Restoring = Box::pin(FOLDERS.run(move || {
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&config.folder);
            made.map_err(Unfit::Folder)?;
            persist::load(&config, &identity, now)
        }));
        match tokio::time::timeout(RESTORE, &mut read).await {
            Ok(read) => {
                self.restored(read);
                None
            }
            // A disk that stands still holds up nothing else.
            Err(_) => {
                tracing::warn!(target: "cache",
                    "{shown} was not read within {RESTORE:?}; what is there is used when it was, if the CA has issued \
                     nothing until then");
                Some(read)
            }
        }
    }

    /// It was read, in time or late.
    pub(super) fn restored(&mut self, read: io::Result<Result<Option<Issued>, Unfit>>) {
        if self.workload.current.is_some() {
            return;
        }
        let now = self.clock.now();
        // A slow disk may have taken longer than it is good for.
        let read = read.map(|read| match read {
            Ok(Some(issued)) if issued.leaf.not_after <= now => Err(Unfit::Expired),
            read => read,
        });
        let folder = self.config.persist.as_ref().map(|config| config.folder.display().to_string());
        let shown = folder.unwrap_or_default();
        match read {
            Ok(Ok(Some(issued))) => {
                let left = rotation::span(issued.leaf.not_after.duration_since(now).unwrap_or_default());
                tracing::info!(target: "cache",
                    "the certificate in {shown} is used until the CA has issued another; it is valid for {left}");
                self.metrics.issued(now, issued.leaf.not_after);
                // Due at once.
                self.workload.restored(issued, now, now, Instant::now());
                for waiter in std::mem::take(&mut self.waiting) {
                    self.answer(&waiter.name, waiter.reply);
                }
            }
            Ok(Ok(None)) => {}
            Ok(Err(why)) => {
                tracing::warn!(target: "cache", "the certificate in {shown} is not used: {why}")
            }
            Err(error) => tracing::warn!(target: "cache", "{shown} was not read: {error}"),
        }
    }

    /// Who reads files has them before the CA has answered, too.
    pub(super) fn output_restored(&mut self) {
        if self.output.is_none() || !self.workload.restored {
            return;
        }
        for name in [ResourceName::RootCa, ResourceName::Default] {
            if self.provider(&name) == Origin::Ca {
                self.publish_workload(&name);
            }
        }
        self.write_output();
    }

    // What the program before us in this process went on with.
    fn take_over(&mut self) -> bool {
        let (Some(kept), true) = (self.config.kept.take(), self.ca.is_some()) else { return false };
        let now = self.clock.now();
        match kept.issued(now) {
            Ok(issued) => {
                let left = rotation::span(issued.leaf.not_after.duration_since(now).unwrap_or_default());
                tracing::info!(target: "cache", "the certificate stays in use; it is valid for another {left}");
                self.metrics.issued(now, issued.leaf.not_after);
                self.workload.restored(issued, kept.renewal, now, Instant::now());
                self.asked |= kept.asked;
                true
            }
            Err(why) => {
                tracing::warn!(target: "cache", "the certificate of the previous program is not used: {why}");
                false
            }
        }
    }

    /// Puts down what a successor needs, where one may come.
    pub(super) fn keep(&self) {
        if !handover::is_on() {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(current) = &self.workload.current else { return };
        let issued = &current.issued;
        if kept
            .as_ref()
            .is_some_and(|kept| Arc::ptr_eq(&kept.identity, &issued.identity) && kept.asked == self.asked)
        {
            return;
        }
        *kept = Some(Kept {
            identity: issued.identity.clone(),
            root: issued.root.clone(),
            created: issued.created,
            renewal: current.renewal,
            asked: self.asked,
        });
    }

    /// What the CA issued, for the next agent.
    pub(super) fn write_persistent(&mut self) {
        let (Some(persist), Some(current)) = (&mut self.persist, &self.workload.current) else { return };
        let roots = Roots { pem: current.issued.root.clone().into_bytes() };
        persist.write(Content {
            identity: Some(Arc::clone(&current.issued.identity)),
            roots: Some(Arc::new(roots)),
        });
    }

    /// Brings `OUTPUT_CERTS` to what is published.
    pub(super) fn write_output(&mut self) {
        let content = self.output_content();
        if let Some(output) = &mut self.output {
            output.write(content);
        }
    }

    /// Brings back what somebody has taken away of it, beside the answer that is given now.
    pub(super) fn look_at_output(&mut self) {
        if self.output.is_none() {
            return;
        }
        let content = self.output_content();
        if let Some(output) = &mut self.output {
            output.look(content);
        }
    }

    fn output_content(&self) -> Content {
        let identity = match self.board.value(&ResourceName::Default) {
            Some(Secret::Identity(identity)) => Some(identity),
            _ => None,
        };
        let merged = match self.board.value(&ResourceName::RootCa) {
            Some(Secret::Roots(roots)) => Some(roots),
            _ => None,
        };
        let current = self.workload.current.as_ref().filter(|_| self.output_raw_root);
        let raw = current.map(|c| Arc::new(Roots { pem: c.issued.root.clone().into_bytes() }));
        Content { identity, roots: raw.or(merged) }
    }
}
