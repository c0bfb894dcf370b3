//! The certificate over a restart of the machine (`IDENTITY_PERSIST`): key, chain and root in a folder of their own,
//! for a start at which the CA cannot be reached.
//!
//! What lies there is used as it is when it fits: key and certificate belong together, the certificate is this
//! workload's and still valid, and nobody but the owner may read the key. It counts as due at once, so that the CA is
//! asked for another one as soon as it answers.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use zeroize::Zeroizing;

use super::files::bytes;
use super::request::Issued;
use super::{Identity, output};
use crate::tls::cert;

/// Bits of a key's mode that are somebody else's.
const OTHERS: u32 = 0o077;

/// What lies in the folder; `Ok(None)`: nothing.
///
/// # Errors
/// Why it is not used.
pub(super) fn load(folder: &Path, identity: &str, now: SystemTime) -> Result<Option<Issued>, String> {
    let at = |name: &str| folder.join(name);
    let key_path = at("key.pem");
    let Ok(meta) = std::fs::symlink_metadata(&key_path) else { return Ok(None) };
    if meta.permissions().mode() & OTHERS != 0 {
        return Err(format!("{}: others than its owner may use it", key_path.display()));
    }
    let key = Zeroizing::new(bytes(&key_path)?);
    let chain = bytes(&at("cert-chain.pem"))?;
    cert::check_pair(&chain, &key).map_err(|e| e.to_string())?;
    let leaf = cert::parse_chain(&chain).map_err(|e| e.to_string())?.swap_remove(0);
    if !leaf.uris.iter().any(|uri| uri == identity) {
        return Err(format!(
            "its certificate is for {}, and this workload is {identity}",
            leaf.uris.join(", ")
        ));
    }
    if leaf.not_after <= now || leaf.not_before > now {
        return Err("its certificate is not valid now".to_owned());
    }
    let root =
        String::from_utf8(bytes(&at("root-cert.pem"))?).map_err(|_| "its root is no text".to_owned())?;
    cert::parse_chain(root.as_bytes()).map_err(|e| format!("its root: {e}"))?;
    let created = leaf.not_before;
    let identity = Arc::new(Identity { chain, key });
    Ok(Some(Issued { identity, root, created, leaf, took: Duration::ZERO }))
}

/// Where it is written, in the way of `OUTPUT_CERTS`.
pub(super) fn output(folder: &Path) -> output::Config {
    output::Config { dir: folder.to_owned(), mode: 0o600 }
}
