//! The certificate from the CA: when to ask for it, and what its answers mean for everybody.

use std::sync::Arc;

use tokio::time::Instant;

use super::asking::Origin;
use super::{Manager, Running};
use crate::base::error::chain;
use crate::secrets::request::{Attempt, BadAnswer, Failure, Issued};
use crate::secrets::rotation::is_ahead;
use crate::secrets::{Error, ResourceName, Roots, Secret, bundle, rotation};
use crate::trouble::What;

impl Manager {
    /// Whether a certificate is worth a request now.
    pub(super) fn wanted(&self) -> bool {
        let certificate = self.provider(&ResourceName::Default) == Origin::Ca;
        if self.workload.current.is_none() {
            return certificate || self.roots_wanted();
        }
        (certificate && (self.asked || self.output.is_some()))
            || (self.roots_due && self.provider(&ResourceName::RootCa) == Origin::Ca)
    }

    // Of a certificate that nobody serves. Before anybody asks for them the Go agent goes on to the roots only when it has
    // read the pair that lies in files.
    fn roots_wanted(&self) -> bool {
        let waited_for = || self.waiting.iter().any(|waiter| waiter.name == ResourceName::RootCa);
        self.provider(&ResourceName::RootCa) == Origin::Ca
            && (self.files.loaded(&ResourceName::Default).is_some() || waited_for())
    }

    pub(super) fn attempt(&mut self) -> Option<Running> {
        let ca = self.ca.clone()?;
        let mono = Instant::now();
        if mono < self.workload.not_before() || !self.wanted() {
            return None;
        }
        self.asked_early = !self.workload.due(self.clock.now(), mono);
        if self.asked_early && !self.early(mono) {
            return None;
        }
        let attempt = Attempt {
            ca,
            key: self.config.key.clone(),
            first_key: self.config.first_key.take(),
            unused: self.unused_key.take(),
            identity: self.config.identity.clone(),
            ttl: self.config.ttl,
            bound: self.config.call_bound,
            clock: Arc::clone(&self.clock),
            metrics: self.metrics.clone(),
        };
        Some(Box::pin(attempt.run()))
    }

    pub(super) fn finished(&mut self, outcome: Result<Issued, Failure>) {
        let mono = Instant::now();
        let early = std::mem::take(&mut self.asked_early);
        let outcome = outcome.and_then(|issued| self.begun(issued));
        if early {
            self.metrics.early(if outcome.is_ok() { "issued" } else { "failed" });
        }
        match outcome {
            Ok(issued) if self.is_no_better(&issued) => self.kept(mono),
            Ok(issued) => self.renewed(issued, mono),
            Err(Failure { error, unused }) => {
                self.unused_key = unused;
                if early {
                    return self.early_failed(&error, mono);
                }
                self.refused(Arc::new(error), mono);
            }
        }
    }

    /// One that begins later, which peers refuse, takes the place of none that is good until long after that. Whichever
    /// clock is wrong: by the CA's it is then that time by now.
    fn begun(&self, issued: Issued) -> Result<Issued, Failure> {
        let now = self.clock.now();
        let begins = issued.leaf.not_before;
        let outlasts = |current: &Issued| {
            let spare = current.life(now).0 / 8;
            !is_ahead(current.leaf.not_before, now) && current.leaf.not_after > begins + spare
        };
        if is_ahead(begins, now) && self.workload.valid(now).is_some_and(|c| outlasts(&c.issued)) {
            return Err(Error::Refused(BadAnswer::NotYet { begins, now }).into());
        }
        Ok(issued)
    }

    /// Whether it begins later, and the one in use, which does so as well, is valid sooner and for long after that.
    fn is_no_better(&self, issued: &Issued) -> bool {
        let now = self.clock.now();
        let begins = issued.leaf.not_before;
        let is_sooner = |current: &Issued| {
            let leaf = &current.leaf;
            let life = leaf.not_after.duration_since(leaf.not_before).unwrap_or_default();
            is_ahead(leaf.not_before, now) && leaf.not_before <= begins && leaf.not_after > begins + life / 8
        };
        is_ahead(begins, now) && self.workload.valid(now).is_some_and(|c| is_sooner(&c.issued))
    }

    fn kept(&mut self, mono: Instant) {
        self.config.trouble.end();
        self.workload.kept(mono);
        for waiter in std::mem::take(&mut self.waiting) {
            self.answer(&waiter.name, waiter.reply);
        }
    }

    pub(super) fn renewed(&mut self, issued: Issued, mono: Instant) {
        let now = self.clock.now();
        let leaf = &issued.leaf;
        let left = rotation::span(leaf.not_after.duration_since(now).unwrap_or_default());
        let names = leaf.names().join(", ");
        // The Go agent's words and labels; durations in nanoseconds, which the log shows as it does.
        tracing::info!(target: "cache",
            resourceName = "default",
            latency = nanoseconds(issued.took),
            ttl = nanoseconds(leaf.not_after.duration_since(now).unwrap_or_default()),
            serial = %leaf.serial,
            identity = %names,
            "generated new workload certificate");
        self.config.trouble.note(What::Certificate, format!("issued, valid for {left}, identity {names}"));
        if !leaf.uris.contains(&self.config.identity) {
            let names = if names.is_empty() { "a certificate without one" } else { &names };
            tracing::warn!(target: "cache",
                "asked for identity {}, the CA issued {names}, which is what peers see; if that is not intended, check TRUST_DOMAIN, POD_NAMESPACE and SERVICE_ACCOUNT",
                self.config.identity);
        }
        self.metrics.issued(now, leaf.not_after);
        self.config.trouble.end();
        let first = self.workload.current.is_none();
        self.roots_due = false;
        self.workload.succeeded(issued, mono);
        self.troubles.chain_changed();
        // The root goes first: a peer's new certificate must not arrive before its anchor.
        let mut new_root = false;
        if self.provider(&ResourceName::RootCa) == Origin::Ca {
            new_root = self.publish_workload(&ResourceName::RootCa) && !first;
        }
        if self.provider(&ResourceName::Default) == Origin::Ca {
            self.publish_workload(&ResourceName::Default);
        }
        if new_root {
            tracing::info!(target: "cache", "root cert has changed");
        }
        // The Go agent's file follows what it served last: the merged set after ROOTCA was generated, the
        // CA's own text after default alone.
        let root_followed = self.board.followers(&ResourceName::RootCa) > 0;
        let merged = first || self.config.proxyless || (new_root && root_followed);
        self.output_raw_root = !merged && self.bundle.is_empty();
        self.write_output();
        self.write_persistent();
        for waiter in std::mem::take(&mut self.waiting) {
            self.answer(&waiter.name, waiter.reply);
        }
    }

    pub(super) fn refused(&mut self, error: Arc<Error>, mono: Instant) {
        self.metrics.renewal_failed(label(&error));
        let now = self.clock.now();
        let failed = self.workload.failed(&error, mono);
        let left = self
            .workload
            .valid(now)
            .map(|c| rotation::span(c.issued.leaf.not_after.duration_since(now).unwrap_or_default()));
        self.tell_refused(&error);
        // One that lies in files is not what the CA refuses.
        let served = self.provider(&ResourceName::Default) == Origin::Ca;
        if failed.first
            && served
            && let Some(left) = &left
        {
            tracing::info!(target: "cache",
                "the current certificate stays in use, it is valid for another {left}; the CA is asked again until it answers");
        }
        tracing::debug!(target: "cache", "{}; next attempt in {:.1?} (failure {})",
            chain(error.as_ref()), failed.next, self.workload.failures());
        if failed.first && served && self.workload.current.is_some() {
            // Followers hear of it once, as with the Go agent: their streams end, Envoy keeps what it has,
            // comes back and is given the certificate that is still good.
            self.board.fail(&ResourceName::Default, &error);
        }
        for waiter in std::mem::take(&mut self.waiting) {
            if left.is_some() {
                self.answer(&waiter.name, waiter.reply);
            } else {
                let _ = waiter.reply.send(Err(Arc::clone(&error)));
            }
        }
    }

    /// Publishes one of the two resources from the CA's answer if it differs; gives whether it did.
    pub(super) fn publish_workload(&mut self, name: &ResourceName) -> bool {
        let Some(current) = &self.workload.current else { return false };
        match name {
            ResourceName::Default => {
                let identity = Arc::clone(&current.issued.identity);
                self.board.publish(name, Secret::Identity(identity))
            }
            _ => {
                let merged = self.merged(&current.issued.root);
                self.board.publish(name, Secret::Roots(Arc::new(Roots { pem: merged.into_bytes() })))
            }
        }
    }

    pub(super) fn merged(&self, root: &str) -> String {
        bundle::merge(std::iter::once(root).chain(self.bundle.iter().map(String::as_str)))
    }

    /// Says so when the certificate has expired; once.
    pub(super) fn tell_expiry(&mut self) {
        if self.workload.expired_now(self.clock.now()) {
            let error = self.workload.last_error.as_ref();
            let why = error.map_or_else(|| "it was not renewed".to_owned(), |e| chain(e.as_ref()));
            tracing::debug!(target: "cache", "the workload certificate has expired: {why}");
        }
    }
}

fn nanoseconds(span: std::time::Duration) -> i64 {
    i64::try_from(span.as_nanos()).unwrap_or(i64::MAX)
}

fn label(error: &Error) -> &'static str {
    match error {
        Error::Ca(error) => error.label(),
        Error::Refused(_) => "answer",
        Error::Hung(_) => "deadline",
        _ => "key",
    }
}
