//! Whether a chain leads from its first certificate to a root, in the eyes of those whom it is shown to.
//!
//! Told is only what Envoy refuses: a signature that nobody in sight has made, dates, a signer that is no CA, and
//! extensions that are critical and that nobody knows. The order does not count, and where there are two ways to a root
//! one that is good is enough. A signature by an algorithm or a size of key that this build does not know is taken for
//! good.

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use x509_parser::asn1_rs::Any;
use x509_parser::prelude::{FromDer, X509Certificate, X509Name, X509Version};
use x509_parser::public_key::PublicKey;

use super::cert::Cert;
use super::provider::{Compliance, provider};
use crate::base::clock::rfc3339;
use crate::base::quote::cut;

/// Why peers refuse a chain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Flaw {
    #[error("it has a gap: neither a certificate in it nor a root has signed {0}")]
    Gap(String),
    #[error("{0} expired at {at}", at = rfc3339(*.1))]
    Expired(String, SystemTime),
    #[error("{0} is valid only from {at} on", at = rfc3339(*.1))]
    Early(String, SystemTime),
    #[error("{0} is not a CA's, and has signed the one before it")]
    NoSigner(String),
    #[error("{0} has the critical extension {1}, which peers do not know")]
    Critical(String, String),
}

/// Bits of RSA keys that the library of TLS judges; Envoy takes smaller ones, too.
const SIZES: RangeInclusive<usize> = 2048..=8192;
/// So many signatures are looked at; what is not found by then is not spoken of.
const LOOKS: usize = 64;
/// Bytes of a certificate's name that are told.
const LONGEST: usize = 200;
/// By so much clocks may differ.
const CLOCKS: Duration = Duration::from_secs(5);

/// What Envoy's library (`X509_supported_extension`) and Go know: key usage, alternative names, basic constraints, name
/// constraints, policies, their mappings and constraints, extended key usage, `inhibitAnyPolicy`, Netscape's type.
const KNOWN: [&str; 10] = [
    "2.5.29.15",
    "2.5.29.17",
    "2.5.29.19",
    "2.5.29.30",
    "2.5.29.32",
    "2.5.29.33",
    "2.5.29.36",
    "2.5.29.37",
    "2.5.29.54",
    "2.16.840.1.113730.1.1",
];

/// The first thing that is wrong with every way from the first certificate to one of the roots. The first one's own dates
/// are another question: before and after them it is judged as of then.
#[must_use]
pub(crate) fn flaw(chain: &[Cert], roots: &[Cert], now: SystemTime) -> Option<Flaw> {
    let chain: Vec<_> = chain.iter().filter_map(Link::of).collect();
    let roots: Vec<_> = roots.iter().filter_map(Link::of).collect();
    let leaf = chain.first()?;
    let now = now.min(leaf.cert.not_after).max(leaf.cert.not_before);
    let mut search =
        Search { seen: vec![false; chain.len()], chain: &chain, roots: &roots, now, looks: LOOKS };
    if let Some(unknown) = leaf.unknown() {
        return Some(Flaw::Critical(leaf.name(), unknown));
    }
    search.up(leaf).err()
}

/// Those of `roots` that may have signed one of `chain`, by their names: of thousands hardly any is to be looked at.
pub(crate) fn concerned(roots: Vec<Cert>, chain: &[Cert]) -> impl Iterator<Item = Cert> {
    let plain = |name: &[u8]| X509Name::from_der(name).ok().map(|(_, name)| plain(&name));
    let issuers: Vec<_> = chain.iter().filter_map(|cert| plain(&cert.issuer)).collect();
    roots.into_iter().filter(move |root| plain(&root.subject).is_some_and(|name| issuers.contains(&name)))
}

/// A name as Envoy's library compares it: neither the kind of its texts counts, nor ASCII case, nor how many blanks there
/// are. The signature decides.
fn plain(name: &X509Name<'_>) -> String {
    let words: Vec<_> = name.to_string().split_whitespace().map(str::to_ascii_lowercase).collect();
    words.join(" ")
}

struct Link<'a> {
    cert: &'a Cert,
    parsed: X509Certificate<'a>,
    subject: String,
    issuer: String,
}

impl<'a> Link<'a> {
    fn of(cert: &'a Cert) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(&cert.der).ok()?;
        let (subject, issuer) = (plain(parsed.subject()), plain(parsed.issuer()));
        Some(Self { cert, parsed, subject, issuer })
    }

    /// For people. A workload has no name of this kind.
    fn name(&self) -> String {
        let subject = self.parsed.subject().to_string();
        if subject.is_empty() {
            return "the workload's certificate".to_owned();
        }
        format!("the certificate {:?}", cut(&subject, LONGEST))
    }

    fn unknown(&self) -> Option<String> {
        let critical = self.parsed.extensions().iter().filter(|e| e.critical);
        critical.map(|e| e.oid.to_id_string()).find(|oid| !KNOWN.contains(&oid.as_str()))
    }

    /// What is wrong with it above another.
    fn flaw(&self, now: SystemTime) -> Option<Flaw> {
        if self.cert.not_after < now {
            Some(Flaw::Expired(self.name(), self.cert.not_after))
        } else if self.cert.not_before > now + CLOCKS {
            Some(Flaw::Early(self.name(), self.cert.not_before))
        } else if !self.cert.is_ca && self.parsed.version() == X509Version::V3 {
            Some(Flaw::NoSigner(self.name()))
        } else {
            self.unknown().map(|oid| Flaw::Critical(self.name(), oid))
        }
    }

    /// Whether the other one's key has signed this one; nothing where that cannot be judged.
    fn is_signed_by(&self, other: &Self) -> Option<bool> {
        if let Ok(PublicKey::RSA(key)) = other.parsed.public_key().parsed()
            && !SIZES.contains(&key.key_size())
        {
            return None;
        }
        let body: &[u8] = self.parsed.tbs_certificate.as_ref();
        // SEQUENCE { body, SEQUENCE algorithm, BIT STRING signature }, and SEQUENCE { SEQUENCE algorithm, BIT STRING key }.
        let (_, whole) = Any::from_der(&self.cert.der).ok()?;
        let algorithm = Any::from_der(whole.data.get(body.len()..)?).ok()?.1.data;
        let (_, key) = Any::from_der(&other.cert.spki).ok()?;
        let kind = Any::from_der(key.data).ok()?.1.data;
        let key: &[u8] = &other.parsed.public_key().subject_public_key.data;
        let signature: &[u8] = &self.parsed.signature_value.data;
        let algorithms = provider(Compliance::None).0.signature_verification_algorithms.all;
        let mut known = (false, false);
        for one in algorithms {
            let fits =
                (one.signature_alg_id().as_ref() == algorithm, one.public_key_alg_id().as_ref() == kind);
            if fits == (true, true) && one.verify_signature(key, body, signature).is_ok() {
                return Some(true);
            }
            known = (known.0 || fits.0, known.1 || fits.1);
        }
        (known == (true, true)).then_some(false)
    }
}

struct Search<'a> {
    chain: &'a [Link<'a>],
    roots: &'a [Link<'a>],
    seen: Vec<bool>,
    now: SystemTime,
    looks: usize,
}

impl<'a> Search<'a> {
    /// Whether there is a good way from here to a root.
    fn up(&mut self, from: &Link<'_>) -> Result<(), Flaw> {
        let mut first = None;
        let (roots, chain) = (self.roots, self.chain);
        for (at, above) in roots.iter().map(|root| (None, root)).chain(chain.iter().enumerate().map(some)) {
            if above.subject != from.issuer || at.is_some_and(|at| self.seen[at]) {
                continue;
            }
            if self.looks == 0 {
                return Ok(());
            }
            self.looks -= 1;
            if from.is_signed_by(above) == Some(false) {
                continue;
            }
            if let Some(at) = at {
                self.seen[at] = true;
            }
            let said = match above.flaw(self.now) {
                Some(flaw) => Err(flaw),
                None if at.is_none() => Ok(()),
                None => self.up(above),
            };
            match said {
                Ok(()) => return Ok(()),
                Err(flaw) => first = first.or(Some(flaw)),
            }
        }
        Err(first.unwrap_or_else(|| Flaw::Gap(from.name())))
    }
}

fn some<'a>((at, link): (usize, &'a Link<'a>)) -> (Option<usize>, &'a Link<'a>) {
    (Some(at), link)
}

#[cfg(test)]
mod tests;
