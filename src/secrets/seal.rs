//! A private key that lies on a disk sealed (`IDENTITY_PERSIST_KEY`): AES-256-GCM under a key that is derived from the
//! content of a file, for this workload's name alone.
//!
//! The file is what one likes: of a folder on another disk, or of one that a TPM opens (`systemd-creds`,
//! `LoadCredentialEncrypted=`), which so needs no code here. It is read at each use; without it nothing is written and
//! nothing is used. Each sealing draws a salt of its own, so no key is used twice and the nonce can be fixed.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::{hkdf, rand};
use zeroize::Zeroizing;

use super::files::{Unreadable, bytes};

const MAGIC: &[u8] = b"pilot-agent sealed key 1\n";
const SALT: usize = 32;
/// Bits of a key's mode that are somebody else's.
pub(super) const OTHERS: u32 = 0o077;
/// Less than this can be guessed.
const LEAST: usize = 32;

/// Why a key is not sealed, or not opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{} (IDENTITY_PERSIST_KEY): {why}", file.display())]
    File {
        file: PathBuf,
        #[source]
        why: Unusable,
    },
    #[error("the key cannot be sealed")]
    Unsealed,
    #[error("it is no sealed key")]
    Foreign,
    #[error("it was not sealed by this file for this workload, or has changed")]
    Changed,
}

/// Why the file with the secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    #[error(transparent)]
    Unseen(#[from] std::io::Error),
    #[error(transparent)]
    Unread(#[from] Unreadable),
    #[error("others than its owner may use it")]
    Shared,
    #[error("it has {0} bytes, and {LEAST} are the least")]
    Short(usize),
    #[error("no key can be derived from it")]
    Derivation,
}

/// What seals and opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seal {
    /// The file with the secret.
    pub file: PathBuf,
    /// The workload's name: what is sealed for another one does not open.
    pub about: String,
}

impl Seal {
    /// Whether the file is of use.
    ///
    /// # Errors
    /// Why it is not.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.key(&[0; SALT]).map(drop)
    }

    fn key(&self, salt: &[u8]) -> Result<LessSafeKey, Error> {
        let said = |why: Unusable| Error::File { file: self.file.clone(), why };
        let meta = std::fs::metadata(&self.file).map_err(|e| said(e.into()))?;
        if meta.permissions().mode() & OTHERS != 0 {
            return Err(said(Unusable::Shared));
        }
        let secret = Zeroizing::new(bytes(&self.file).map_err(|e| said(e.into()))?);
        if secret.len() < LEAST {
            return Err(said(Unusable::Short(secret.len())));
        }
        let derived = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&secret);
        let out = derived.expand(&[MAGIC], &AES_256_GCM).map_err(|_| said(Unusable::Derivation))?;
        Ok(LessSafeKey::new(UnboundKey::from(out)))
    }

    /// The sealed form of `key`.
    ///
    /// # Errors
    /// When the file is of no use.
    pub(super) fn seal(&self, key: &[u8]) -> Result<Vec<u8>, Error> {
        let failed = |_| Error::Unsealed;
        let mut salt = [0; SALT];
        rand::fill(&mut salt).map_err(failed)?;
        let mut body = Zeroizing::new(key.to_vec());
        let nonce = Nonce::assume_unique_for_key([0; NONCE_LEN]);
        let aad = Aad::from(self.about.as_bytes());
        let tag = self.key(&salt)?.seal_in_place_separate_tag(nonce, aad, &mut body).map_err(failed)?;
        Ok([MAGIC, &salt, &body, tag.as_ref()].concat())
    }

    /// The key in `sealed`.
    ///
    /// # Errors
    /// When the file is of no use, or it was sealed by another one, for another workload, or has changed.
    pub(super) fn open(&self, sealed: &[u8]) -> Result<Zeroizing<Vec<u8>>, Error> {
        let rest = sealed.strip_prefix(MAGIC).and_then(|rest| rest.split_at_checked(SALT));
        let (salt, body) = rest.ok_or(Error::Foreign)?;
        let mut body = Zeroizing::new(body.to_vec());
        let nonce = Nonce::assume_unique_for_key([0; NONCE_LEN]);
        let opened = self.key(salt)?.open_in_place(nonce, Aad::from(self.about.as_bytes()), &mut body);
        let length = opened.map_err(|_| Error::Changed)?.len();
        body.truncate(length);
        Ok(body)
    }

    /// What is to lie at `path`: what is there, if that is this key already.
    pub(super) fn again(&self, path: &Path, key: &[u8]) -> Result<Vec<u8>, Error> {
        let there = bytes(path).ok().filter(|there| self.open(there).is_ok_and(|old| *old == key));
        there.map_or_else(|| self.seal(key), Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_file_opens_and_only_for_the_same_workload() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, content: &[u8], mode: u32| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let of = |file: PathBuf, about: &str| Seal { file, about: about.to_owned() };
        let seal = of(put("secret", &[7; 32], 0o400), "me");
        let sealed = seal.seal(b"hush").unwrap();
        assert_eq!(*seal.open(&sealed).unwrap(), b"hush");
        assert!(!sealed.windows(4).any(|part| part == b"hush"));
        assert_ne!(seal.seal(b"hush").unwrap(), sealed, "no two are the same");
        let path = put("sealed", &sealed, 0o600);
        assert_eq!(seal.again(&path, b"hush").unwrap(), sealed);
        assert_ne!(seal.again(&path, b"another").unwrap(), sealed);
        for at in 0..sealed.len() {
            let mut other = sealed.clone();
            other[at] ^= 1;
            assert!(seal.open(&other).is_err() && seal.open(&sealed[..at]).is_err(), "{at}");
        }
        for (other, why) in [
            (of(put("other", &[8; 32], 0o400), "me"), "not sealed by this file"),
            (of(seal.file.clone(), "you"), "not sealed by this file"),
            (of(put("short", &[7; 31], 0o400), "me"), "31 bytes"),
            (of(put("open", &[7; 32], 0o444), "me"), "others than its owner"),
            (of(dir.path().join("missing"), "me"), "No such file"),
        ] {
            let said = other.open(&sealed).unwrap_err();
            assert!(said.to_string().contains(why), "{said}");
        }
    }
}
