//! What the manager tells of troubles: the certificate and each file.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Manager;
use super::asking::Origin;
use crate::base::clock::{self, rfc3339};
use crate::base::error::chain;
use crate::ca::csr;
use crate::secrets::files::{Loaded, Source};
use crate::secrets::request::BadAnswer;
use crate::secrets::rotation::is_ahead;
use crate::secrets::{Error, ResourceName};
use crate::tls::cert::{each_cert, parse_der};
use crate::tls::chain::{concerned, flaw};
use crate::tls::keys;
use crate::trouble::{Kind, Report, Reporter};

/// What has no end is looked at again after this.
const NEVER: Duration = Duration::from_secs(86_400);

/// One reporter for each thing that can be wrong on its own.
#[derive(Debug)]
pub(super) struct Troubles {
    /// There is none, or it has expired: what follows from the cause that the CA client reports.
    certificate: Reporter,
    /// It begins later.
    not_yet: Reporter,
    /// From when on the one is valid that this was told of.
    begins: Option<SystemTime>,
    /// Its chain does not lead to a root.
    chain: Reporter,
    /// In which time nothing of what was found of the chain changes.
    judged: Option<Range<SystemTime>>,
    /// The mounted one is over, which nobody here can change.
    over: Reporter,
    /// When the mounted one ends.
    pub(super) mounted_ends: Option<SystemTime>,
    /// What was told of.
    told_over: Option<SystemTime>,
    /// It ends soon, and that is our own fault.
    pub(super) near_expiry: Reporter,
    /// Only files that were in trouble; the store bounds how many there can be.
    files: HashMap<ResourceName, Reporter>,
}

impl Troubles {
    pub(super) fn new(of: &Reporter) -> Self {
        Self {
            certificate: of.sibling(),
            not_yet: of.sibling(),
            begins: None,
            chain: of.sibling(),
            judged: None,
            over: of.sibling(),
            mounted_ends: None,
            told_over: None,
            near_expiry: of.sibling(),
            files: HashMap::new(),
        }
    }

    /// Another certificate, or other roots: the chain has to be looked at.
    pub(super) fn chain_changed(&mut self) {
        self.judged = None;
    }

    pub(super) fn file_good(&mut self, name: &ResourceName) {
        if let Some(reporter) = self.files.remove(name) {
            reporter.end();
        }
    }

    /// Of a file that nobody asks for any more nothing is wrong.
    pub(super) fn files_left(&mut self, held: impl Fn(&ResourceName) -> bool) {
        for (_, reporter) in self.files.extract_if(|name, _| !held(name)) {
            reporter.end();
        }
    }

    pub(super) fn file_bad(&mut self, of: &Reporter, name: &ResourceName, text: &str, cause: &Error) {
        let kind = Kind::of_chain(cause).unwrap_or(Kind::CertificateFiles);
        let reporter = self.files.entry(name.clone()).or_insert_with(|| of.sibling());
        reporter.report(Report::new(kind, text).about(name.to_string()));
    }
}

/// What an error of ours is, not of the CA's client.
fn kind_of(error: &Error) -> Kind {
    match error {
        Error::Hung(_) => Kind::CertificateNotAnswered,
        Error::Request(csr::Error::Key(keys::Error::NoThread)) => Kind::Processes,
        _ => Kind::CertificateUnusable,
    }
}

/// What to do about it, where the kind's own hint is about something else.
fn hint_of(error: &Error) -> &'static str {
    match error {
        Error::Refused(BadAnswer::Expired(_) | BadAnswer::NotYet { .. }) => {
            "compare the CA's clock with this machine's and set the one that is wrong"
        }
        Error::Request(csr::Error::Key(
            keys::Error::TooSmall(_) | keys::Error::TooLarge(_) | keys::Error::Unsupported(_),
        )) => {
            "no CA was asked: set WORKLOAD_RSA_KEY_SIZE to 2048, 3072 or 4096, or ECC_SIGNATURE_ALGORITHM to ECDSA, and start the agent anew"
        }
        _ => "",
    }
}

impl Manager {
    /// Somebody uses the certificate of the CA, so it is renewed.
    pub(super) fn used(&self) -> bool {
        (self.asked || self.output.is_some())
            && self.ca.is_some()
            && self.provider(&ResourceName::Default) == Origin::Ca
    }

    /// Tells of an attempt that failed other than by the CA client's own fault, which has told already.
    pub(super) fn tell_refused(&self, error: &Arc<Error>) {
        let kind = match **error {
            Error::Ca(ref error) => {
                // Not every client tells.
                if self.config.trouble.kind().is_none() {
                    self.config.trouble.report(error.report());
                }
                return;
            }
            ref error => kind_of(error),
        };
        self.config.trouble.report(Report::new(kind, chain(error.as_ref())).hint(hint_of(error)));
    }

    /// A certificate that is used and begins later: it is served, as by the Go agent, and peers refuse it.
    pub(super) fn too_soon(&mut self) {
        let begins = self.workload.current.as_ref().map(|current| current.issued.leaf.not_before);
        let now = self.clock.now();
        let Some(begins) = begins.filter(|begins| is_ahead(*begins, now)).filter(|_| self.used()) else {
            self.troubles.not_yet.end();
            self.troubles.begins = None;
            return;
        };
        // Told once of each certificate: a renewal may bring another that begins at another time.
        if self.troubles.begins.replace(begins) != Some(begins) {
            // Where it cannot be that early, there is no doubt whose clock is wrong.
            let behind = clock::is_behind(self.clock.now());
            let kind = if behind { Kind::ClockWrong } else { Kind::CertificateNotYetValid };
            let (begins, now) = (rfc3339(begins), rfc3339(self.clock.now()));
            let text = format!(
                "the CA issued a certificate that is valid only from {begins} on, and by this machine's clock it is {now}"
            );
            self.troubles.not_yet.report(Report::new(kind, text));
        }
    }

    /// A chain that peers refuse: it is served, as by the Go agent.
    pub(super) fn chain_refused(&mut self) {
        let now = self.clock.now();
        let Some(issued) = self.workload.current.as_ref().map(|c| &c.issued).filter(|_| self.used()) else {
            self.troubles.chain.end();
            self.troubles.judged = None;
            return;
        };
        if self.troubles.judged.as_ref().is_some_and(|time| time.contains(&now)) {
            return;
        }
        let read =
            |text: &[u8]| each_cert(text).filter_map(|der| parse_der(&der.ok()?).ok()).collect::<Vec<_>>();
        let (certs, mut roots) = (read(&issued.identity.chain), read(issued.root.as_bytes()));
        let mut found = flaw(&certs, &roots, now);
        // The bundle may be large, and is hardly ever what matters. What is mounted is served as well.
        if found.is_some() {
            let mut more: Vec<_> = self.bundle.iter().flat_map(|entry| read(entry.as_bytes())).collect();
            if let Some(Loaded::Roots(mounted)) = self.files.loaded(&ResourceName::RootCa) {
                more.extend(read(&mounted.pem));
            }
            roots.extend(concerned(more, &certs));
            found = flaw(&certs, &roots, now);
        }
        let dates = certs.iter().chain(&roots).flat_map(|cert| [cert.not_before, cert.not_after]);
        let (gone, to_come): (Vec<_>, Vec<_>) = dates.partition(|date| *date <= now);
        let from = gone.into_iter().max().unwrap_or(SystemTime::UNIX_EPOCH);
        let to = to_come.into_iter().min().unwrap_or(now + NEVER);
        self.troubles.judged = Some(from..to);
        match found {
            Some(flaw) => {
                let text = format!("peers refuse the chain of the certificate that the CA issued: {flaw}");
                self.troubles.chain.report(Report::new(Kind::CertificateChain, text));
            }
            None => self.troubles.chain.end(),
        }
    }

    /// A mounted certificate that is over: it is served, as by the Go agent, and peers refuse it.
    pub(super) fn mounted_over(&mut self) {
        let mounted = self.files.loaded(&ResourceName::Default).is_some();
        let ends = self.troubles.mounted_ends.filter(|ends| mounted && *ends <= self.clock.now());
        if self.troubles.told_over == ends {
            return;
        }
        self.troubles.told_over = ends;
        let Some(ends) = ends else {
            self.troubles.over.end();
            return;
        };
        let place = match self.provider(&ResourceName::Default) {
            Origin::Files(Source::Pair { cert, .. }) => format!(" {}", cert.display()),
            _ => String::new(),
        };
        let text =
            format!("the mounted certificate{place} expired at {}, and peers refuse it", rfc3339(ends));
        self.troubles.over.report(Report::new(Kind::CertificateFiles, text));
    }

    /// A certificate that is used and not there, or over.
    pub(super) fn missed(&mut self) {
        if let Some(ca) = self.ca.as_ref().filter(|_| !self.wanted()) {
            // Nobody asks the CA: what was wrong with it, or with the token for it, counts no more.
            self.config.trouble.end();
            ca.left();
        }
        let good = self.workload.valid(self.clock.now()).is_some();
        if good || self.workload.failures() == 0 || !self.used() {
            self.troubles.certificate.end();
            return;
        }
        // Why stands above it in the list.
        let report = match &self.workload.current {
            Some(_) => Report::new(
                Kind::CertificateExpired,
                "the workload certificate has expired and was not renewed",
            ),
            None => Report::new(
                Kind::CertificateMissing,
                "Envoy asks for a workload certificate and there is none yet",
            ),
        };
        if self.troubles.certificate.kind() != Some(report.kind) {
            self.troubles.certificate.report(report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_the_past_sends_people_to_the_clocks() {
        let expired = Error::Refused(BadAnswer::Expired(std::time::Duration::from_secs(60)));
        let report = Report::new(kind_of(&expired), "").hint(hint_of(&expired));
        assert!(report.hint_text().contains("clock"), "{report:?}");
        let other = Error::Refused(BadAnswer::OtherKey);
        let report = Report::new(kind_of(&other), "").hint(hint_of(&other));
        assert_eq!(report.hint_text(), Kind::CertificateUnusable.hint());
    }

    #[test]
    fn a_key_that_no_thread_makes_is_not_the_cas_fault() {
        let of = |error| kind_of(&Error::Request(csr::Error::Key(error)));
        assert_eq!(of(keys::Error::NoThread), Kind::Processes);
        assert_eq!(of(keys::Error::Crypto("RSA")), Kind::CertificateUnusable);
        let hint = hint_of(&Error::Request(csr::Error::Key(keys::Error::TooSmall(512))));
        assert!(hint.contains("WORKLOAD_RSA_KEY_SIZE"), "nor is it one for what a CA answers: {hint}");
    }
}
