//! The certificate over a restart of the machine (`IDENTITY_PERSIST`): key, chain and root in a folder of their own,
//! for a start at which the CA cannot be reached.
//!
//! What lies there is used as it is when it fits: key and certificate belong together, the certificate is this
//! workload's and not over, and nobody but the owner may read the key. It counts as due at once, so that the CA is
//! asked for another one as soon as it answers. With `IDENTITY_PERSIST_KEY` the key lies there sealed ([`super::seal`]),
//! and one that is not is neither used nor left.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use zeroize::Zeroizing;

use super::files::{Unreadable, bytes};
use super::request::Issued;
use super::seal::{OTHERS, Seal};
use super::{Identity, output};
use crate::tls::cert;

/// Where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// The folder.
    pub folder: PathBuf,
    /// What the key is sealed with.
    pub seal: Option<Seal>,
}

/// Why what lies there is not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfit {
    #[error(transparent)]
    Folder(io::Error),
    #[error("{}: others than its owner may use it", .0.display())]
    Open(PathBuf),
    #[error("{}: {why}", path.display())]
    Sealed {
        path: PathBuf,
        #[source]
        why: Box<super::seal::Error>,
    },
    #[error(transparent)]
    File(#[from] Unreadable),
    #[error(transparent)]
    Certificate(#[from] cert::Error),
    #[error("its certificate is for {found}, and this workload is {wanted}")]
    Identity { found: String, wanted: String },
    #[error("it has expired")]
    Expired,
    #[error("its root is no text")]
    RootText(#[from] std::string::FromUtf8Error),
    #[error("its root: {0}")]
    Root(#[source] cert::Error),
}

/// What lies in the folder; `Ok(None)`: nothing.
///
/// # Errors
/// Why it is not used.
pub(super) fn load(config: &Config, identity: &str, now: SystemTime) -> Result<Option<Issued>, Unfit> {
    let at = |name: &str| config.folder.join(name);
    let key_path = at(output::key_name(config.seal.as_ref()));
    let meta = match std::fs::symlink_metadata(&key_path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // What cannot be looked at may be there.
        meta => meta.map_err(|source| Unreadable::Io { path: key_path.clone(), source })?,
    };
    if meta.permissions().mode() & OTHERS != 0 {
        return Err(Unfit::Open(key_path));
    }
    let key = Zeroizing::new(bytes(&key_path)?);
    let key = match &config.seal {
        Some(seal) => seal.open(&key).map_err(|why| Unfit::Sealed { path: key_path, why: why.into() })?,
        None => key,
    };
    let chain = bytes(&at("cert-chain.pem"))?;
    cert::check_pair(&chain, &key)?;
    let leaf = cert::parse_chain(&chain)?.swap_remove(0);
    if !leaf.uris.iter().any(|uri| uri == identity) {
        return Err(Unfit::Identity { found: leaf.names().join(", "), wanted: identity.to_owned() });
    }
    // One that is not valid yet was valid when it was written: a machine without a battery boots with its clock behind,
    // and peers judge by theirs.
    if leaf.not_after <= now {
        return Err(Unfit::Expired);
    }
    let root = String::from_utf8(bytes(&at("root-cert.pem"))?)?;
    cert::parse_chain(root.as_bytes()).map_err(Unfit::Root)?;
    let created = leaf.not_before;
    let identity = Arc::new(Identity { chain, key });
    Ok(Some(Issued { identity, root, created, leaf, took: Duration::ZERO }))
}

/// What asks for it.
pub(super) const SETTING: &str = "IDENTITY_PERSIST";

/// Where it is written, in the way of `OUTPUT_CERTS`.
pub(super) fn output(config: &Config) -> output::Config {
    output::Config { dir: config.folder.clone(), mode: 0o600, seal: config.seal.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mock_istiod::pki::{Authority, Leaf};
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn only_what_is_not_there_is_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let of = |folder: PathBuf| load(&Config { folder, seal: None }, "me", SystemTime::now());
        assert!(of(dir.path().to_owned()).unwrap().is_none());
        std::fs::write(dir.path().join("file"), "").unwrap();
        let why = of(dir.path().join("file")).unwrap_err().to_string();
        assert!(why.contains("file/key.pem: Not a directory"), "{why}");
    }

    #[test]
    fn a_clock_that_is_behind_takes_no_certificate_away() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new("cluster.local", 0);
        let day = Duration::from_secs(86_400);
        let pair = authority.pair(&Leaf::workload("me", day));
        for (name, text) in [
            ("key.pem", &*pair.key),
            ("cert-chain.pem", &pair.chain),
            ("root-cert.pem", authority.root_pem()),
        ] {
            let mut file = std::fs::OpenOptions::new();
            let mut file = file.write(true).create_new(true).mode(0o600).open(dir.path().join(name)).unwrap();
            io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        }
        let config = Config { folder: dir.path().to_owned(), seal: None };
        let of = |now| load(&config, "me", now);
        let leaf = cert::parse_chain(pair.chain.as_bytes()).unwrap().swap_remove(0);
        for now in [SystemTime::UNIX_EPOCH, leaf.not_before - day, leaf.not_after - day / 2] {
            assert!(of(now).unwrap().is_some());
        }
        for now in [leaf.not_after, leaf.not_after + day] {
            assert!(matches!(of(now).unwrap_err(), Unfit::Expired));
        }
    }
}
