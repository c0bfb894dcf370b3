//! What a connection trusts, and how far each root reaches.
//!
//! The library takes a root as it stands in the file and looks at nothing in it but its name, key and name constraints.
//! Go's verifier holds a root to what it says of itself, and so does Envoy: to its dates, to what it may be used for, and
//! to how many certificates may stand between it and a server's.

use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use rustls::RootCertStore;
use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use x509_parser::prelude::{FromDer, X509Certificate, X509Version};

/// What a connection trusts.
pub struct Anchors {
    /// Those that may sign others.
    pub(super) signers: Vec<TrustAnchor<'static>>,
    /// How far each of them reaches; shorter where nothing is known of the last ones.
    reaches: Vec<Reach>,
    /// SHA-256 of every certificate of the file: in bytes a fraction of the certificates.
    pinned: Vec<[u8; 32]>,
}

/// How far a root reaches.
#[derive(Debug, Clone, Copy)]
struct Reach {
    /// Seconds of UNIX time.
    from: i64,
    to: i64,
    /// Certificates between it and a server's.
    between: Option<u32>,
}

/// Why what is above a server's certificate does not vouch for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unvouched {
    #[error("the root that signed it has expired at {}, and this machine's clock says {}", date(*ended), date(*now))]
    Expired { ended: i64, now: i64 },
    #[error("the root that signed it is not valid yet: it is from {} on, and this machine's clock says {}", date(*begins), date(*now))]
    Early { begins: i64, now: i64 },
    #[error(
        "the root that signed it allows {allowed} certificates between itself and a server's, and there are {there}"
    )]
    Deep { allowed: u32, there: usize },
    #[error("a certificate between it and its root is not one that may sign others (key usage)")]
    NoSigner,
    #[error("a certificate between it and its root cannot be read")]
    Unreadable,
}

/// As people read it.
pub(crate) fn date(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds).map_or_else(|_| format!("{seconds} (UNIX)"), |at| at.to_string())
}

impl fmt::Debug for Anchors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Anchors")
            .field("signers", &self.signers.len())
            .field("pinned", &self.pinned.len())
            .finish()
    }
}

/// Nothing of it is pinned, and of no root more is known than that it signs.
impl From<RootCertStore> for Anchors {
    fn from(signers: RootCertStore) -> Self {
        Self { signers: signers.roots, reaches: Vec::new(), pinned: Vec::new() }
    }
}

impl Anchors {
    /// Of the certificates of a file; what cannot be read is passed over.
    #[must_use]
    pub fn of<'a>(certificates: impl Iterator<Item = CertificateDer<'a>>) -> Self {
        let mut all = Self { signers: Vec::new(), reaches: Vec::new(), pinned: Vec::new() };
        for der in certificates {
            let Ok((_, parsed)) = X509Certificate::from_der(&der) else { continue };
            if !signs(&parsed) {
                all.pinned.push(hash(&der));
            } else if let Ok(anchor) = webpki::anchor_from_trusted_cert(&der) {
                all.signers.push(anchor.to_owned());
                all.reaches.push(Reach::of(&parsed));
                all.pinned.push(hash(&der));
            }
        }
        all
    }

    /// Whether nobody is trusted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.signers.is_empty() && self.pinned.is_empty()
    }

    /// Whether this very certificate stands in the file.
    pub(super) fn pins(&self, der: &[u8]) -> bool {
        self.pinned.contains(&hash(der))
    }

    /// Whether one of the signers vouches, now, for a server's certificate with these others in between.
    pub(super) fn vouches<'a>(
        &self,
        signer: &TrustAnchor<'_>,
        between: impl Iterator<Item = CertificateDer<'a>>,
        now: UnixTime,
    ) -> Result<(), Unvouched> {
        let mut count = 0;
        for der in between {
            let parsed = X509Certificate::from_der(&der).map_err(|_| Unvouched::Unreadable)?.1;
            if !may_sign(&parsed) {
                return Err(Unvouched::NoSigner);
            }
            count += 1;
        }
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let at = self.signers.iter().position(|one| std::ptr::eq(one, signer));
        at.and_then(|at| self.reaches.get(at)).map_or(Ok(()), |reach| reach.holds(count, now))
    }
}

impl Reach {
    fn of(parsed: &X509Certificate<'_>) -> Self {
        let constraints = parsed.basic_constraints().ok().flatten();
        Self {
            from: parsed.validity().not_before.timestamp(),
            to: parsed.validity().not_after.timestamp(),
            between: constraints.and_then(|c| c.value.path_len_constraint),
        }
    }

    fn holds(self, between: usize, now: i64) -> Result<(), Unvouched> {
        if now > self.to {
            return Err(Unvouched::Expired { ended: self.to, now });
        }
        if now < self.from {
            return Err(Unvouched::Early { begins: self.from, now });
        }
        match self.between {
            Some(allowed) if u32::try_from(between).is_ok_and(|there| there <= allowed) => Ok(()),
            Some(allowed) => Err(Unvouched::Deep { allowed, there: between }),
            None => Ok(()),
        }
    }
}

/// As in Go: only the first version of certificates has no way of saying whether it signs, and for whom.
fn signs(parsed: &X509Certificate<'_>) -> bool {
    if parsed.version() == X509Version::V1 {
        return true;
    }
    let purposes = parsed.extended_key_usage().ok().flatten();
    parsed.is_ca() && may_sign(parsed) && purposes.is_none_or(|p| p.value.any || p.value.server_auth)
}

fn may_sign(parsed: &X509Certificate<'_>) -> bool {
    parsed.key_usage().ok().flatten().is_none_or(|usage| usage.value.key_cert_sign())
}

fn hash(der: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest(&SHA256, der).as_ref());
    out
}
